//! Golden requests, limits and refusals of the parser.

use super::*;

fn parse_one(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut parser = RequestParser::new();
    let mut input = bytes;
    assert_eq!(parser.step(&mut input), Ok(Step::Command));
    assert!(input.is_empty());
    parser.args().iter_from(0).map(<[u8]>::to_vec).collect()
}

fn error_of(bytes: &[u8]) -> Option<ProtocolError> {
    let mut parser = RequestParser::new();
    let mut input = bytes;
    loop {
        match parser.step(&mut input) {
            Ok(Step::More) => return None,
            Ok(_) => {}
            Err(error) => return Some(error),
        }
    }
}

#[test]
fn golden_requests() {
    assert_eq!(parse_one(b"*1\r\n$4\r\nPING\r\n"), [b"PING"]);
    assert_eq!(
        parse_one(b"*2\r\n$3\r\nGET\r\n$5\r\nm@\r\n1\r\n"),
        [&b"GET"[..], b"m@\r\n1"]
    );
    assert_eq!(parse_one(b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n"), [&b"HELLO"[..], b"3"]);
    assert_eq!(parse_one(b"*2\r\n$3\r\nGET\r\n$0\r\n\r\n"), [&b"GET"[..], b""]);
    assert_eq!(parse_one(b"*0\r\n*-1\r\n\r\n*1\r\n$4\r\nQUIT\r\n"), [b"QUIT"]);
    assert_eq!(parse_one(b"ping\r\n"), [b"ping"]);
    assert_eq!(parse_one(b"QUIT\n"), [b"QUIT"]);
}

#[test]
fn the_value_of_set_is_left_to_the_shell_and_options_follow_it() {
    let mut parser = RequestParser::new();
    let mut input = &b"*5\r\n$3\r\nset\r\n$1\r\nk\r\n$5\r\nhello\r\n$2\r\nEX\r\n$2\r\n10\r\nrest"[..];
    assert_eq!(parser.step(&mut input), Ok(Step::Value { len: 5 }));
    assert_eq!((parser.args().get(1), parser.arg_count()), (&b"k"[..], 5));
    assert_eq!(&input[..5], b"hello");
    input = &input[5..];
    assert_eq!(parser.step(&mut input), Ok(Step::Command));
    let args: Vec<_> = parser.args().iter_from(0).collect();
    assert_eq!(args, [&b"set"[..], b"k", b"", b"EX", b"10"]);
    assert_eq!(input, b"rest");
}

#[test]
fn a_value_of_512_mib_is_announced_and_one_byte_more_refused() {
    let head = |len: u64| format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${len}\r\n");
    let mut parser = RequestParser::new();
    let text = head(MAX_VALUE_BYTES);
    let mut input = text.as_bytes();
    assert_eq!(parser.step(&mut input), Ok(Step::Value { len: MAX_VALUE_BYTES }));
    assert_eq!(
        error_of(head(MAX_VALUE_BYTES + 1).as_bytes()),
        Some(ProtocolError::BulkLength)
    );
}

#[test]
fn a_long_argument_is_skipped_and_the_stream_stays_in_step() {
    let long = vec![b'x'; MAX_KEY_BYTES + 1];
    let mut bytes = format!("*3\r\n$3\r\nSET\r\n${}\r\n", long.len()).into_bytes();
    bytes.extend_from_slice(&long);
    bytes.extend_from_slice(b"\r\n$3\r\nabc\r\n*1\r\n$4\r\nPING\r\n");
    let mut parser = RequestParser::new();
    let mut input = &bytes[..];
    assert_eq!(parser.step(&mut input), Ok(Step::Skip { len: long.len() as u64 }));
    input = &input[long.len()..];
    // Without a key there is nowhere to stream to: the value is an argument like any other.
    assert_eq!(parser.step(&mut input), Ok(Step::Command));
    assert!(parser.args().was_skipped());
    assert_eq!(parser.step(&mut input), Ok(Step::Command));
    assert_eq!(parser.args().get(0), b"PING");
    assert!(!parser.args().was_skipped());
}

#[test]
fn arguments_are_bounded_in_number_and_in_sum() {
    assert_eq!(error_of(b"*1025\r\n"), Some(ProtocolError::ArgCount));
    let mut bytes = b"*1024\r\n".to_vec();
    for _ in 0..1024 {
        bytes.extend_from_slice(format!("$200\r\n{}\r\n", "k".repeat(200)).as_bytes());
    }
    let mut parser = RequestParser::new();
    let mut input = &bytes[..];
    let mut skipped = 0;
    loop {
        match parser.step(&mut input).unwrap() {
            Step::Skip { len } => {
                skipped += len;
                input = &input[len as usize..];
            }
            Step::Command => break,
            step => panic!("unexpected {step:?}"),
        }
    }
    assert_eq!(parser.args().len(), 1024);
    assert!(parser.args().bytes.len() <= MAX_COMMAND_BYTES);
    assert_eq!(parser.args().bytes.len() as u64 + skipped, 1024 * 200);
}

#[test]
fn refusals() {
    for (bytes, error) in [
        (&b"*x\r\n"[..], ProtocolError::ArgCount),
        (b"*99999999999999999999\r\n", ProtocolError::ArgCount),
        (b"*1\rx", ProtocolError::ArgCount),
        (b"*\r\n", ProtocolError::ArgCount),
        (b"*1\r\n:1\r\n", ProtocolError::ExpectedBulk),
        (b"*1\r\n$-1\r\n", ProtocolError::BulkLength),
        (b"*1\r\n$+4\r\n", ProtocolError::BulkLength),
        (b"*1\r\n$4\r\nPINGxx", ProtocolError::ExpectedCrlf),
        (b"*1\r\n$4\r\nPING\rx", ProtocolError::ExpectedCrlf),
        (b"FLUSHALL\r\n", ProtocolError::NotRequest(Foreign::Unknown)),
        (b"GET / HTTP/1.1\r\n", ProtocolError::NotRequest(Foreign::Http)),
        (&[0x16, 3, 1, 0], ProtocolError::NotRequest(Foreign::Tls)),
        (&[0x80, 1, 2, 3], ProtocolError::NotRequest(Foreign::Unknown)),
        (&[2, 0, 0, 0], ProtocolError::NotRequest(Foreign::Lm)),
    ] {
        assert_eq!(error_of(bytes), Some(error), "{bytes:?}");
    }
    assert_eq!(error_of(&[b'*'; 100]), Some(ProtocolError::ArgCount));
    assert_eq!(
        error_of(&[b'a'; 100]),
        Some(ProtocolError::NotRequest(Foreign::Unknown))
    );
}

#[test]
fn integers() {
    assert_eq!(parse_integer(b"-9223372036854775808"), Some(i64::MIN));
    assert_eq!(parse_integer(b"9223372036854775807"), Some(i64::MAX));
    for bad in [&b""[..], b"-", b"+1", b"1 ", b"9223372036854775808"] {
        assert_eq!(parse_integer(bad), None);
    }
}
