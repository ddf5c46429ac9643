//! The shard-to-shard codec under any bytes: what is written is read again, and spoiled bytes are refused or read as
//! something within bounds, without a panic.

#![allow(clippy::unwrap_used)]

use kvpool_wire::lm::LmMeta;
use kvpool_wire::peer::{
    Condition, ENVELOPE_BYTES, FrameHead, Hello, HelloReply, Info, Known, MAX_BODY_BYTES, MissCode, PutEnd, Reply,
    ReplyHead, Request, RequestHead, Role, SlotEntry, Usual, envelope, verify,
};
use kvpool_wire::{MAX_KEY_BYTES, MAX_VALUE_BYTES};
use proptest::prelude::*;

fn known() -> impl Strategy<Value = Known> {
    any::<[u64; 3]>().prop_map(|[cluster_generation, epoch, generation]| Known {
        cluster_generation,
        epoch,
        generation,
    })
}

fn meta() -> impl Strategy<Value = Option<LmMeta>> {
    proptest::option::of(any::<[u8; 24]>().prop_map(|bytes| LmMeta::from_bytes(&bytes)))
}

fn usual() -> impl Strategy<Value = Usual> {
    prop_oneof![
        Just(Usual::Unknown),
        Just(Usual::Mixed),
        (0..=MAX_VALUE_BYTES).prop_map(Usual::Size)
    ]
}

fn condition() -> impl Strategy<Value = Condition> {
    prop_oneof![
        Just(Condition::Always),
        Just(Condition::IfAbsent),
        Just(Condition::IfPresent)
    ]
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Primary), Just(Role::Replica)]
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        9 => proptest::collection::vec(any::<u8>(), 0..200),
        1 => proptest::collection::vec(any::<u8>(), MAX_KEY_BYTES..=MAX_KEY_BYTES),
    ]
}

/// Encodes some request with these parts.
fn encode_request(
    which: u8,
    head: (u64, u32, Known),
    key: &[u8],
    parts: (u64, u32, bool, Role, Condition, Option<LmMeta>),
) -> Vec<u8> {
    let (number, small, flag, role, condition, meta) = parts;
    let request = match which % 10 {
        0 => Request::Ping,
        1 => Request::Get {
            key,
            offset: number,
            write_id: number,
            peek: flag,
        },
        2 => Request::Exists { key, lease_ms: small },
        3 => Request::Lease {
            keys: vec![key; usize::from(flag) * 3],
            lease_ms: small,
        },
        4 => Request::Put {
            key,
            role,
            len: number % (MAX_VALUE_BYTES + 1),
            meta,
            write_id: number,
            ttl_ms: flag.then_some(number),
            condition,
        },
        5 => Request::Del {
            key,
            role,
            write_id: number,
        },
        6 => Request::Ttl { key },
        7 => Request::Expire {
            key,
            role,
            ttl_ms: number,
        },
        8 => Request::MapFetch,
        _ => Request::SlotList {
            first: small as u16,
            last: number as u16,
            after: flag.then_some(key),
            max: 512,
        },
    };
    let head = RequestHead {
        request_id: head.0,
        deadline_ms: head.1,
        known: head.2,
        request,
    };
    let mut out = Vec::new();
    head.encode(&mut out);
    let body = &out[ENVELOPE_BYTES..];
    assert_eq!(RequestHead::decode(body).unwrap(), head);
    out
}

proptest! {
    #[test]
    fn requests_come_back_and_spoiled_ones_are_refused(
        which: u8,
        head in (any::<u64>(), any::<u32>(), known()),
        key in key(),
        parts in (any::<u64>(), any::<u32>(), any::<bool>(), role(), condition(), meta()),
        at: prop::sample::Index,
        flip in 1..=255u8,
    ) {
        let mut out = encode_request(which, head, &key, parts);
        let (front, body) = out.split_first_chunk::<ENVELOPE_BYTES>().unwrap();
        let (len, crc) = envelope(front).unwrap();
        prop_assert_eq!(len, body.len());
        verify(body, crc).unwrap();
        // Any one byte changed is noticed, before the content is looked at.
        let at = at.index(out.len());
        out[at] ^= flip;
        let (front, body) = out.split_first_chunk::<ENVELOPE_BYTES>().unwrap();
        let noticed = match envelope(front) {
            Err(_) => true,
            Ok((len, crc)) => len != body.len() || verify(body, crc).is_err(),
        };
        prop_assert!(noticed);
        // And if the sum had been made to fit, there is no panic.
        let _ = RequestHead::decode(body);
    }

    #[test]
    fn replies_come_back(
        which in 0..11u8,
        known in known(),
        key in key(),
        numbers: [u64; 2],
        flag: bool,
        usual in usual(),
        meta in meta(),
    ) {
        let [number, other] = numbers;
        let info = Info {
            len: number % (MAX_VALUE_BYTES + 1),
            write_id: other,
            copies: other as u8,
            meta,
            ttl_ms: flag.then_some(number),
        };
        let entry = SlotEntry { slot: 1, key: &key, write_id: number, len: info.len };
        let reply = match which {
            0 => Reply::Hit { info, usual },
            1 => Reply::Miss { reason: MissCode::OtherWrite, usual },
            2 => Reply::Ready,
            3 => Reply::Stored { copies: other as u8, usual },
            4 => Reply::Dropped { reason: kvpool_wire::peer::DropCode::Shed },
            5 => Reply::ConditionFailed,
            6 => Reply::Done { yes: flag },
            7 => Reply::Ttl { left: flag.then_some(Some(number)) },
            8 => Reply::Map { len: number as u32 % (16 << 20) },
            9 => Reply::Slots { entries: vec![entry; 4], next: flag.then_some((2, &key)) },
            _ => Reply::Refused { code: kvpool_wire::peer::RefusalCode::NotServing },
        };
        let head = ReplyHead { known, reply };
        let mut out = Vec::new();
        head.encode(&mut out);
        prop_assert!(out.len() <= ENVELOPE_BYTES + MAX_BODY_BYTES);
        prop_assert_eq!(ReplyHead::decode(&out[ENVELOPE_BYTES..]).unwrap(), head);
    }

    #[test]
    fn any_bytes_are_decoded_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), front: [u8; 8], end: [u8; 12]) {
        let _ = RequestHead::decode(&bytes);
        let _ = ReplyHead::decode(&bytes);
        let _ = Hello::decode((1, 1), &bytes);
        let _ = HelloReply::decode((1, 0), &bytes);
        let _ = PutEnd::decode(&end, crc32c::crc32c(&end));
        if let Ok((len, _)) = envelope(&front) {
            prop_assert!(len <= MAX_BODY_BYTES);
        }
        if let Ok(head) = FrameHead::decode(&front) {
            prop_assert_eq!(head.encode(), front);
        }
    }

    /// Cut anywhere, a body is short, never misread as a shorter message of the same fields.
    #[test]
    fn a_cut_body_is_refused(which in 1..10u8, head in (any::<u64>(), any::<u32>(), known()), key in key(), cut: prop::sample::Index) {
        prop_assume!(which != 8);
        let out = encode_request(which, head, &key, (5, 6, true, Role::Replica, Condition::Always, None));
        let body = &out[ENVELOPE_BYTES..];
        prop_assert!(RequestHead::decode(&body[..cut.index(body.len())]).is_err());
    }
}
