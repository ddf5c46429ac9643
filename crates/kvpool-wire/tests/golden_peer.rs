//! Golden bytes of the shard-to-shard protocol, version 1. A change here is a change of the protocol: it needs a new
//! version, because proxies live for months.

#![allow(clippy::unwrap_used)]

use kvpool_wire::lm::LmMeta;
use kvpool_wire::peer::hello::{HELLO_PREFIX_BYTES, prefix};
use kvpool_wire::peer::{
    Condition, DropCode, ENVELOPE_BYTES, FrameHead, Hello, HelloReply, HelloStatus, Info, Known, MissCode, PeerError,
    PutEnd, RefusalCode, Reply, ReplyHead, Request, RequestHead, Role, SlotEntry, Usual, VERSIONS, Versions, envelope,
    verify,
};

const KNOWN: Known = Known {
    cluster_generation: 1,
    epoch: 0x0203,
    generation: 4,
};
/// `KNOWN` as it is sent.
const KNOWN_HEX: &str = "010000000000000003020000000000000400000000000000";
const META: LmMeta = LmMeta {
    fmt: 2,
    dtype: 3,
    shape: [4, 5, 0, 0],
};
const META_HEX: &str = "020000000300000004000000050000000000000000000000";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The body of the one envelope in `bytes`, checked.
fn body(bytes: &[u8]) -> &[u8] {
    let (front, body) = bytes.split_first_chunk::<ENVELOPE_BYTES>().unwrap();
    let (len, crc) = envelope(front).unwrap();
    assert_eq!(len, body.len());
    verify(body, crc).unwrap();
    body
}

#[test]
fn the_envelope_is_length_and_crc32c() {
    let mut out = Vec::new();
    RequestHead {
        request_id: 0,
        deadline_ms: 0,
        known: Known::default(),
        request: Request::Ping,
    }
    .encode(&mut out);
    assert_eq!(hex(&out[..4]), "25000000");
    assert_eq!(hex(&out[8..]), "00".repeat(37));
    assert_eq!(out[4..8], crc32c_of(&out[8..]).to_le_bytes());
}

/// CRC32C bit by bit, so that the test does not lean on the library it tests.
fn crc32c_of(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0x82F6_3B78
            } else {
                crc >> 1
            };
        }
    }
    !crc
}

#[test]
fn hello_and_its_reply() {
    let hello = Hello {
        versions: Versions { min: 1, max: 2 },
        cluster_id: "c",
        join_token: "t0",
        sender: "s",
        sender_incarnation: 7,
        target_incarnation: 8,
        known: KNOWN,
    };
    let mut out = Vec::new();
    hello.encode(&mut out);
    let (front, rest) = out.split_first_chunk::<HELLO_PREFIX_BYTES>().unwrap();
    assert_eq!(hex(front), "4b56500101000200");
    let expected = format!(
        "010063{}{}{}{}{KNOWN_HEX}",
        "02007430", "010073", "0700000000000000", "0800000000000000"
    );
    assert_eq!(hex(body(rest)), expected);
    assert_eq!(Hello::decode(prefix(front).unwrap(), body(rest)).unwrap(), hello);
    assert_eq!(hello.common_version(), Some(1));

    let status = HelloStatus::Incarnation;
    let reply = HelloReply {
        version: 0,
        status,
        cluster_id: "c",
        id: "s",
        incarnation: 9,
        known: KNOWN,
    };
    let mut out = Vec::new();
    reply.encode(&mut out);
    let (front, rest) = out.split_first_chunk::<HELLO_PREFIX_BYTES>().unwrap();
    assert_eq!(hex(front), "4b56500100000400");
    assert_eq!(hex(body(rest)), format!("0100630100730900000000000000{KNOWN_HEX}"));
    assert_eq!(HelloReply::decode(prefix(front).unwrap(), body(rest)).unwrap(), reply);
}

#[test]
fn versions_meet_in_the_highest_common_one() {
    let range = |min, max| Versions { min, max };
    assert_eq!(range(1, 3).common(range(2, 5)), Some(3));
    assert_eq!(range(2, 5).common(range(1, 3)), Some(3));
    assert_eq!(range(1, 1).common(range(2, 5)), None);
    assert_eq!(VERSIONS, range(1, 1));
}

#[test]
fn every_request() {
    let head_hex = |code: &str| format!("{code}0d0c0b0a00000000fa000000{KNOWN_HEX}");
    let key = &b"key"[..];
    let k = "03006b6579";
    for (request, code, fields) in [
        (Request::Ping, "00", String::new()),
        (
            Request::Get {
                key,
                offset: 0x40000,
                write_id: 5,
                peek: true,
            },
            "01",
            format!("{k}0000040000000000050000000000000001"),
        ),
        (Request::Exists { key, lease_ms: 30_000 }, "02", format!("{k}30750000")),
        (
            Request::Lease {
                keys: vec![key, b""],
                lease_ms: 1,
            },
            "03",
            format!("0100000002{k}0000"),
        ),
        (
            Request::Put {
                key,
                role: Role::Replica,
                len: 300,
                meta: Some(META),
                write_id: 6,
                ttl_ms: Some(1000),
                condition: Condition::IfPresent,
            },
            "04",
            format!("{k}012c0100000000000001{META_HEX}060000000000000001e80300000000000002"),
        ),
        (
            Request::Put {
                key,
                role: Role::Primary,
                len: 0,
                meta: None,
                write_id: 0,
                ttl_ms: None,
                condition: Condition::Always,
            },
            "04",
            format!("{k}00{}00{}00{}00", "00".repeat(8), "00".repeat(8), "00".repeat(8)),
        ),
        (
            Request::Del {
                key,
                role: Role::Primary,
                write_id: 1,
            },
            "05",
            format!("{k}000100000000000000"),
        ),
        (Request::Ttl { key }, "06", k.to_owned()),
        (
            Request::Expire {
                key,
                role: Role::Replica,
                ttl_ms: 2,
            },
            "07",
            format!("{k}010200000000000000"),
        ),
        (Request::MapFetch, "08", String::new()),
        (
            Request::SlotList {
                first: 1,
                last: 0x3fff,
                after: Some(key),
                max: 512,
            },
            "09",
            format!("0100ff3f01{k}0002"),
        ),
        (
            Request::SlotList {
                first: 0,
                last: 0,
                after: None,
                max: 1,
            },
            "09",
            "000000000000000100".to_owned(),
        ),
    ] {
        let head = RequestHead {
            request_id: 0x0a0b_0c0d,
            deadline_ms: 250,
            known: KNOWN,
            request,
        };
        let mut out = Vec::new();
        head.encode(&mut out);
        assert_eq!(hex(body(&out)), head_hex(code) + &fields, "{}", head.request.word());
        assert_eq!(RequestHead::decode(body(&out)).unwrap(), head);
    }
}

#[test]
fn every_reply() {
    let info = Info {
        len: 300,
        write_id: 6,
        copies: 2,
        meta: Some(META),
        ttl_ms: None,
    };
    let info_hex = format!("2c0100000000000006000000000000000201{META_HEX}000000000000000000");
    let entries = vec![SlotEntry {
        slot: 7,
        key: b"a",
        write_id: 8,
        len: 9,
    }];
    let entry = "07000100610800000000000000".to_owned() + "0900000000000000";
    let size = "012c01000000000000";
    let none = "000000000000000000";
    for (reply, code, fields) in [
        (
            Reply::Hit {
                info,
                usual: Usual::Size(300),
            },
            "00",
            format!("{info_hex}{size}"),
        ),
        (
            Reply::Miss {
                reason: MissCode::Evicted,
                usual: Usual::Mixed,
            },
            "01",
            "01020000000000000000".to_owned(),
        ),
        (Reply::Ready, "02", String::new()),
        (
            Reply::Stored {
                copies: 2,
                usual: Usual::Unknown,
            },
            "03",
            format!("02{none}"),
        ),
        (
            Reply::Dropped {
                reason: DropCode::NotOwner,
            },
            "04",
            "03".to_owned(),
        ),
        (Reply::ConditionFailed, "05", String::new()),
        (Reply::Done { yes: true }, "06", "01".to_owned()),
        (Reply::Ttl { left: None }, "07", format!("00{none}")),
        (Reply::Ttl { left: Some(None) }, "07", format!("01{none}")),
        (
            Reply::Ttl { left: Some(Some(5)) },
            "07",
            "01010500000000000000".to_owned(),
        ),
        (Reply::Map { len: 1000 }, "08", "e8030000".to_owned()),
        (
            Reply::Slots {
                entries: entries.clone(),
                next: Some((7, b"a")),
            },
            "09",
            format!("0100{entry}01070001{}", "0061"),
        ),
        (
            Reply::Slots {
                entries: vec![],
                next: None,
            },
            "09",
            "00000000000000".to_owned(),
        ),
        (
            Reply::Refused {
                code: RefusalCode::Incarnation,
            },
            "0a",
            "01".to_owned(),
        ),
    ] {
        let head = ReplyHead { known: KNOWN, reply };
        let mut out = Vec::new();
        head.encode(&mut out);
        assert_eq!(
            hex(body(&out)),
            format!("{code}{KNOWN_HEX}{fields}"),
            "{}",
            head.reply.word()
        );
        assert_eq!(ReplyHead::decode(body(&out)).unwrap(), head);
    }
}

#[test]
fn frames_and_the_end_of_an_upload() {
    let head = FrameHead::Data {
        len: 0x40000,
        crc: 0x0102_0304,
    };
    assert_eq!(hex(&head.encode()), "0000040004030201");
    assert_eq!(FrameHead::decode(&head.encode()).unwrap(), head);
    let end = PutEnd {
        commit: true,
        condition: Condition::IfAbsent,
        ttl_ms: Some(10_000),
    };
    let bytes = end.encode();
    assert_eq!(hex(&bytes[..4]), "0c000080");
    assert_eq!(hex(&bytes[8..]), "010101001027000000000000");
    let (front, content) = bytes.split_first_chunk::<8>().unwrap();
    let FrameHead::End { crc } = FrameHead::decode(front).unwrap() else {
        panic!("an end")
    };
    assert_eq!(PutEnd::decode(content.try_into().unwrap(), crc).unwrap(), end);
}

#[test]
fn lengths_are_checked_before_anything_is_read() {
    assert!(matches!(envelope(&[0xff; 8]), Err(PeerError::TooLong { .. })));
    assert!(matches!(
        FrameHead::decode(&[1, 0, 4, 0, 0, 0, 0, 0]),
        Err(PeerError::TooLong { .. })
    ));
    assert!(FrameHead::decode(&[0; 8]).is_err());
    assert!(FrameHead::decode(&[13, 0, 0, 0x80, 0, 0, 0, 0]).is_err());
    assert_eq!(prefix(b"GET / HT"), Err(PeerError::Foreign));
}
