//! Recognising, from its first bytes, a client that speaks another protocol than the port it reached.
//!
//! A mis-wired probe or engine must get an answer it understands, a close, and a log line that names the mistake
//! (faults O13 and O24), rather than silence. The guess only ever decides on that answer: it changes no state.

/// What a stream that is not ours looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Foreign {
    /// An HTTP/1 request line.
    Http,
    /// The HTTP/2 preface, which is also how gRPC begins.
    Http2,
    /// A TLS record with a ClientHello.
    Tls,
    /// A RESP request, on the `lm://` port.
    Resp,
    /// An `lm://` header, on the RESP port.
    Lm,
    /// Nothing we know.
    Unknown,
}

const HTTP_METHODS: [&[u8]; 8] = [
    b"GET /",
    b"POST /",
    b"PUT /",
    b"HEAD /",
    b"DELETE /",
    b"OPTIONS ",
    b"PATCH /",
    b"CONNECT ",
];

impl Foreign {
    /// How many kinds there are; `self as usize` is below it.
    pub const KINDS: usize = 6;

    /// Classifies the first bytes of a stream (a few are enough; at most 16 are looked at).
    pub fn of(first: &[u8]) -> Self {
        if first.starts_with(&[0x16, 0x03]) {
            return Foreign::Tls;
        }
        if first.starts_with(b"PRI * HTTP/2") {
            return Foreign::Http2;
        }
        if HTTP_METHODS.iter().any(|method| first.starts_with(method)) {
            return Foreign::Http;
        }
        match first {
            [b'*', b'0'..=b'9', ..] => Foreign::Resp,
            [1..=5, 0, ..] => Foreign::Lm,
            _ => Foreign::Unknown,
        }
    }

    /// A short answer in the client's own protocol, to be sent before the close. May be empty.
    pub fn reply(self) -> &'static [u8] {
        match self {
            Foreign::Http => {
                b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 49\r\n\
                  Connection: close\r\n\r\nthis is a kvpool data port; it does not do HTTP.\n"
            }
            // An empty SETTINGS frame, then GOAWAY with PROTOCOL_ERROR (RFC 9113, sections 6.5 and 6.8).
            Foreign::Http2 => b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\x01",
            // A fatal protocol_version alert (RFC 8446, section 6).
            Foreign::Tls => &[0x15, 0x03, 0x03, 0x00, 0x02, 0x02, 0x46],
            Foreign::Resp => b"-ERR this is a kvpool lm:// port, use the RESP port\r\n",
            Foreign::Lm | Foreign::Unknown => b"",
        }
    }

    /// The likely mistake, for the log line.
    pub fn hint(self) -> &'static str {
        match self {
            Foreign::Http => {
                "an HTTP client or probe; health checks belong on the shard's http address (/livez, /readyz)"
            }
            Foreign::Http2 => "an HTTP/2 or gRPC client; coordinators speak gRPC, data ports do not",
            Foreign::Tls => "a TLS client; this listener is plain",
            Foreign::Resp => "a redis:// or resp:// URL that names the lm:// port",
            Foreign::Lm => "an lm:// URL that names the RESP port",
            Foreign::Unknown => "an unknown protocol",
        }
    }

    /// The word used in metric labels.
    pub fn label(self) -> &'static str {
        match self {
            Foreign::Http => "http",
            Foreign::Http2 => "http2",
            Foreign::Tls => "tls",
            Foreign::Resp => "resp",
            Foreign::Lm => "lm",
            Foreign::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Foreign;

    #[test]
    fn names_the_usual_mistakes() {
        assert_eq!(Foreign::of(b"GET / HTTP/1.1\r\n"), Foreign::Http);
        assert_eq!(Foreign::of(b"PRI * HTTP/2.0\r\n\r\n"), Foreign::Http2);
        assert_eq!(Foreign::of(&[0x16, 3, 1, 2, 0, 1]), Foreign::Tls);
        assert_eq!(Foreign::of(b"*1\r\n$4\r\nPING\r\n"), Foreign::Resp);
        assert_eq!(Foreign::of(&[5, 0, 0, 0, 0]), Foreign::Lm);
        assert_eq!(Foreign::of(b""), Foreign::Unknown);
        assert_eq!(Foreign::of(b"GET key\r\n"), Foreign::Unknown);
    }

    #[test]
    fn the_http_answer_announces_its_own_length() {
        let text = std::str::from_utf8(Foreign::Http.reply()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
    }
}
