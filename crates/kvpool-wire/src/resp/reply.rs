//! The reply writer: appends RESP2 or RESP3 to a buffer.

/// The protocol version a connection negotiated with HELLO.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Proto {
    #[default]
    V2,
    V3,
}

/// Appends replies to `out`.
#[derive(Debug)]
pub struct ReplyWriter<'a> {
    out: &'a mut Vec<u8>,
    proto: Proto,
}

impl<'a> ReplyWriter<'a> {
    /// A writer in the given version.
    pub fn new(out: &'a mut Vec<u8>, proto: Proto) -> Self {
        ReplyWriter { out, proto }
    }

    /// `+text`.
    pub fn simple(&mut self, text: &str) {
        self.line(b'+', text.as_bytes());
    }

    /// `-text`. The text begins with its code (`ERR …`); control characters, which could forge a reply, become spaces.
    pub fn error(&mut self, text: &str) {
        let clean: Vec<u8> = text
            .bytes()
            .map(|byte| if byte.is_ascii_control() { b' ' } else { byte })
            .collect();
        self.line(b'-', &clean);
    }

    /// `:value`.
    pub fn integer(&mut self, value: i64) {
        self.number(b':', value);
    }

    /// The header of a bulk string; the caller sends `len` bytes and CR LF after it.
    pub fn bulk_header(&mut self, len: u64) {
        self.number(b'$', i64::try_from(len).unwrap_or(i64::MAX));
    }

    /// A whole bulk string.
    pub fn bulk(&mut self, bytes: &[u8]) {
        self.bulk_header(bytes.len() as u64);
        self.out.extend_from_slice(bytes);
        self.out.extend_from_slice(b"\r\n");
    }

    /// The null of the version: `$-1` or `_`.
    pub fn null(&mut self) {
        self.out.extend_from_slice(match self.proto {
            Proto::V2 => b"$-1\r\n",
            Proto::V3 => b"_\r\n",
        });
    }

    /// The header of an array of `len` replies.
    pub fn array(&mut self, len: usize) {
        self.number(b'*', len as i64);
    }

    /// The header of a map of `len` pairs, which is a flat array in RESP2.
    pub fn map(&mut self, len: usize) {
        match self.proto {
            Proto::V2 => self.array(len * 2),
            Proto::V3 => self.number(b'%', len as i64),
        }
    }

    /// The header of a set of `len` replies, which is an array in RESP2.
    pub fn set(&mut self, len: usize) {
        match self.proto {
            Proto::V2 => self.array(len),
            Proto::V3 => self.number(b'~', len as i64),
        }
    }

    /// The miss that LMCache's native client survives: an error line exactly as long as the size header
    /// `$<usual>\r\n` it is waiting for. That client reads that many bytes whatever they are, and only then looks.
    pub fn sized_miss(&mut self, usual: u64) {
        let start = self.out.len();
        self.bulk_header(usual);
        let end = self.out.len() - 2;
        let text: &[u8] = if end - start >= b"-ERR miss".len() {
            b"-ERR miss"
        } else {
            b"-MISS"
        };
        let line = &mut self.out[start..end];
        line.fill(b' ');
        let shown = text.len().min(line.len());
        line[..shown].copy_from_slice(&text[..shown]);
    }

    fn line(&mut self, marker: u8, text: &[u8]) {
        self.out.push(marker);
        self.out.extend_from_slice(text);
        self.out.extend_from_slice(b"\r\n");
    }

    fn number(&mut self, marker: u8, value: i64) {
        let mut digits = [0; 20];
        let mut at = digits.len();
        let mut rest = value.unsigned_abs();
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.out.push(marker);
        if value < 0 {
            self.out.push(b'-');
        }
        self.out.extend_from_slice(&digits[at..]);
        self.out.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::{Proto, ReplyWriter};

    fn written(proto: Proto, write: impl FnOnce(&mut ReplyWriter<'_>)) -> String {
        let mut out = Vec::new();
        write(&mut ReplyWriter::new(&mut out, proto));
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn golden_replies_of_both_versions() {
        for (proto, null, map, set) in [
            (Proto::V2, "$-1\r\n", "*4\r\n", "*2\r\n"),
            (Proto::V3, "_\r\n", "%2\r\n", "~2\r\n"),
        ] {
            assert_eq!(written(proto, |w| w.null()), null);
            assert_eq!(written(proto, |w| w.map(2)), map);
            assert_eq!(written(proto, |w| w.set(2)), set);
            assert_eq!(written(proto, |w| w.simple("OK")), "+OK\r\n");
            assert_eq!(written(proto, |w| w.error("ERR a\r\n+OK")), "-ERR a  +OK\r\n");
            assert_eq!(written(proto, |w| w.integer(i64::MIN)), format!(":{}\r\n", i64::MIN));
            assert_eq!(written(proto, |w| w.integer(0)), ":0\r\n");
            assert_eq!(written(proto, |w| w.bulk(b"")), "$0\r\n\r\n");
            assert_eq!(written(proto, |w| w.bulk(b"a\r\nb")), "$4\r\na\r\nb\r\n");
            assert_eq!(written(proto, |w| w.bulk_header(536_870_912)), "$536870912\r\n");
            assert_eq!(written(proto, |w| w.array(0)), "*0\r\n");
        }
    }

    #[test]
    fn a_sized_miss_is_one_error_line_of_exactly_the_headers_length() {
        let sizes = (0..=9).flat_map(|power| {
            let size = 10u64.pow(power);
            [size - 1, size, size + 1]
        });
        for size in sizes.chain([1 << 20, 4 << 20, 32 << 20]) {
            let line = written(Proto::V2, |w| w.sized_miss(size));
            assert_eq!(line.len(), format!("${size}\r\n").len(), "{size}");
            assert!(line.starts_with('-') && line.ends_with("\r\n"), "{line:?}");
            assert_eq!(line.matches('\n').count(), 1);
        }
        assert_eq!(written(Proto::V2, |w| w.sized_miss(1 << 20)), "-MISS   \r\n");
        assert_eq!(written(Proto::V2, |w| w.sized_miss(32 << 20)), "-ERR miss\r\n");
        assert_eq!(written(Proto::V2, |w| w.sized_miss(512 << 20)), "-ERR miss \r\n");
    }
}
