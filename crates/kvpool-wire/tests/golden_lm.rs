//! The bytes of `lm://`, written down from LMCache's own `struct` formats (`iiiiiiiii150s` and `iiiiiiiii`). LMCache 0.3.3,
//! 0.3.7, 0.3.9, 0.3.12, 0.3.15, 0.4.1, 0.4.4, 0.4.7, 0.5.0, 0.5.3 and 0.5.6 all write these.

#![allow(clippy::unwrap_used)]

use kvpool_wire::lm::{LmCommand, LmError, LmMeta, LmReply, LmRequest, REPLY_BYTES, REQUEST_BYTES};

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

fn request_bytes(numbers: &str, key: &[u8]) -> [u8; REQUEST_BYTES] {
    let mut bytes = unhex(numbers);
    bytes.extend_from_slice(key);
    bytes.resize(REQUEST_BYTES, b' ');
    bytes.try_into().unwrap()
}

const META: LmMeta = LmMeta {
    fmt: 2,
    dtype: 3,
    shape: [2, 4, 256, 1024],
};

#[test]
fn requests() {
    for (numbers, key, command, length, meta) in [
        (
            "010000000000400002000000030000000000000002000000040000000001000000040000",
            "m@1@0@7b@bfloat16",
            LmCommand::Put,
            4_194_304,
            META,
        ),
        (
            "020000000000000001000000020000000000000000000000000000000000000000000000",
            "vllm@m@1@0@7b",
            LmCommand::Get,
            0,
            LmReply::FAIL.meta,
        ),
        (
            "050000000000000000000000000000000000000000000000000000000000000000000000",
            "",
            LmCommand::Health,
            0,
            LmMeta::default(),
        ),
    ] {
        let bytes = request_bytes(numbers, key.as_bytes());
        let request = LmRequest {
            command,
            length,
            meta,
            key: key.as_bytes(),
        };
        assert_eq!(LmRequest::decode(&bytes), Ok(request));
        assert_eq!(request.encode(), bytes);
    }
}

#[test]
fn replies() {
    for (text, reply) in [
        (
            "c80000000000400002000000030000000200000004000000000100000004000000000000",
            LmReply {
                ok: true,
                length: 4_194_304,
                meta: META,
            },
        ),
        (
            "900100000000000001000000020000000000000000000000000000000000000000000000",
            LmReply::FAIL,
        ),
        (
            "c80000000000000001000000020000000000000000000000000000000000000000000000",
            LmReply::OK,
        ),
    ] {
        let bytes: [u8; REPLY_BYTES] = unhex(text).try_into().unwrap();
        assert_eq!(reply.encode(), bytes);
        assert_eq!(LmReply::decode(&bytes), Some(reply));
    }
}

#[test]
fn stored_metadata() {
    let bytes = META.to_bytes();
    assert_eq!(
        bytes.to_vec(),
        unhex("020000000300000002000000040000000001000000040000")
    );
    assert_eq!(LmMeta::from_bytes(&bytes), META);
}

#[test]
fn o23_headers_that_must_not_be_believed() {
    let with = |command: i32, length: i32| {
        let mut bytes = request_bytes(&"00".repeat(36), b"k");
        bytes[0..4].copy_from_slice(&command.to_le_bytes());
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes
    };
    assert_eq!(LmRequest::decode(&with(1, -1)), Err(LmError::NegativeLength(-1)));
    assert_eq!(
        LmRequest::decode(&with(2, i32::MIN)),
        Err(LmError::NegativeLength(i32::MIN))
    );
    assert_eq!(LmRequest::decode(&with(1, i32::MAX)), Err(LmError::TooLong(i32::MAX)));
    assert_eq!(LmRequest::decode(&with(99, 0)), Err(LmError::UnknownCommand(99)));
    assert!(LmRequest::decode(&with(1, 512 << 20)).is_ok());
    assert!(LmRequest::decode(&with(1, (512 << 20) + 1)).is_err());
    for (fmt, dtype, dim, known) in [
        (0, 0, 0, true),
        (8, 8, i32::MAX, true),
        (9, 0, 0, false),
        (0, 9, 0, false),
        (-1, 0, 0, false),
        (0, -1, 0, false),
        (1, 1, -1, false),
    ] {
        let meta = LmMeta {
            fmt,
            dtype,
            shape: [dim, 0, 0, 0],
        };
        assert_eq!(meta.is_known(), known, "{meta:?}");
    }
}

#[test]
fn a_key_of_150_bytes_and_one_that_is_not_utf8() {
    let numbers = format!("02000000{}", "00".repeat(32));
    let full = [b'k'; 150];
    let bytes = request_bytes(&numbers, &full);
    assert_eq!(LmRequest::decode(&bytes).unwrap().key, full);
    let bytes = request_bytes(&numbers, b"a b\xff\xfe");
    assert_eq!(LmRequest::decode(&bytes).unwrap().key, b"a b\xff\xfe");
}
