//! Any bytes, cut in any way: no panic, bounded memory, and the same parse however the stream is fragmented.
//! Proptest prints the failing case and its seed; replay with `PROPTEST_RNG_SEED`.

#![allow(clippy::unwrap_used)]

use kvpool_wire::MAX_KEY_BYTES;
use kvpool_wire::key::{is_native_form, prefix_of};
use kvpool_wire::lm::{LmMeta, LmReply, LmRequest};
use kvpool_wire::resp::{MAX_ARGS, MAX_COMMAND_BYTES, ProtocolError, RequestParser, Step};
use proptest::collection::vec;
use proptest::prelude::*;

/// What a shell would have seen of a stream.
#[derive(Debug, PartialEq, Clone)]
enum Seen {
    Command(Vec<Vec<u8>>),
    Value(Vec<u8>, bool),
    Skip(usize, bool),
    Error(ProtocolError),
}

/// Drives the parser over `pieces` as a connection would, moving announced bytes itself.
fn drive<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<Seen> {
    let mut parser = RequestParser::new();
    let mut seen = Vec::new();
    let mut missing = 0u64;
    for mut input in pieces {
        loop {
            if missing > 0 {
                let now = (missing).min(input.len() as u64) as usize;
                let (body, rest) = input.split_at(now);
                match seen.last_mut() {
                    Some(Seen::Value(bytes, done)) => {
                        bytes.extend_from_slice(body);
                        *done = now as u64 == missing;
                    }
                    Some(Seen::Skip(count, done)) => {
                        *count += now;
                        *done = now as u64 == missing;
                    }
                    other => panic!("bytes left over for {other:?}"),
                }
                missing -= now as u64;
                input = rest;
                if missing > 0 {
                    break;
                }
            }
            match parser.step(&mut input) {
                Ok(Step::More) => {
                    assert!(input.is_empty());
                    break;
                }
                Ok(Step::Command) => {
                    let args: Vec<_> = parser.args().iter_from(0).map(<[u8]>::to_vec).collect();
                    assert!(args.len() <= MAX_ARGS);
                    assert!(args.iter().map(Vec::len).sum::<usize>() <= MAX_COMMAND_BYTES);
                    assert!(args.iter().all(|arg| arg.len() <= MAX_KEY_BYTES));
                    seen.push(Seen::Command(args));
                }
                Ok(Step::Value { len }) => {
                    seen.push(Seen::Value(Vec::new(), len == 0));
                    missing = len;
                }
                Ok(Step::Skip { len }) => {
                    seen.push(Seen::Skip(0, len == 0));
                    missing = len;
                }
                Err(error) => {
                    seen.push(Seen::Error(error));
                    return seen;
                }
            }
        }
    }
    seen
}

fn cut<'a>(bytes: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut rest = bytes;
    let mut pieces = Vec::new();
    for cut in cuts {
        let (piece, next) = rest.split_at((*cut).min(rest.len()));
        pieces.push(piece);
        rest = next;
    }
    pieces.push(rest);
    pieces
}

fn encode(command: &[Vec<u8>]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", command.len()).into_bytes();
    for arg in command {
        out.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
        out.extend_from_slice(arg);
        out.extend_from_slice(b"\r\n");
    }
    out
}

fn command() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let name = prop_oneof![
        Just(b"SET".to_vec()),
        Just(b"get".to_vec()),
        Just(b"DEL".to_vec()),
        vec(any::<u8>(), 0..8)
    ];
    (name, vec(vec(any::<u8>(), 0..80), 0..6)).prop_map(|(name, rest)| [vec![name], rest].concat())
}

/// Valid commands, then a few bytes overwritten, inserted or cut off.
fn mutated_stream() -> impl Strategy<Value = Vec<u8>> {
    (vec(command(), 1..5), vec((any::<u16>(), any::<u8>(), 0u8..3), 0..6)).prop_map(|(commands, edits)| {
        let mut bytes: Vec<u8> = commands.iter().flat_map(|command| encode(command)).collect();
        for (at, byte, kind) in edits {
            let at = at as usize % (bytes.len() + 1);
            match kind {
                0 if at < bytes.len() => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => bytes.truncate(bytes.len().saturating_sub(usize::from(byte) % 4)),
            }
        }
        bytes
    })
}

proptest! {
    #[test]
    fn resp_valid_commands_come_back(commands in vec(command(), 1..5), cuts in vec(0usize..40, 0..30)) {
        let bytes: Vec<u8> = commands.iter().flat_map(|command| encode(command)).collect();
        let seen = drive(cut(&bytes, &cuts).into_iter());
        let mut expected = Vec::new();
        for mut command in commands {
            if command.len() > 2 && command[0].eq_ignore_ascii_case(b"SET") {
                expected.push(Seen::Value(std::mem::take(&mut command[2]), true));
            }
            expected.push(Seen::Command(command));
        }
        prop_assert_eq!(seen, expected);
    }

    #[test]
    fn resp_parse_does_not_depend_on_fragmentation(bytes in mutated_stream(), cuts in vec(0usize..40, 0..30)) {
        let whole = drive(std::iter::once(&bytes[..]));
        prop_assert_eq!(&drive(cut(&bytes, &cuts).into_iter()), &whole);
        prop_assert_eq!(&drive(bytes.chunks(1)), &whole);
    }

    #[test]
    fn resp_any_bytes(bytes in vec(any::<u8>(), 0..400), cuts in vec(0usize..40, 0..30)) {
        let whole = drive(std::iter::once(&bytes[..]));
        prop_assert_eq!(&drive(cut(&bytes, &cuts).into_iter()), &whole);
        prop_assert_eq!(&drive(bytes.chunks(1)), &whole);
    }

    #[test]
    fn lm_any_header(bytes in proptest::array::uniform32(any::<u8>()), key in vec(any::<u8>(), 0..150), command in -2i32..8) {
        let mut header = [b' '; 186];
        header[..32].copy_from_slice(&bytes);
        header[..4].copy_from_slice(&command.to_le_bytes());
        header[36..36 + key.len()].copy_from_slice(&key);
        if let Ok(request) = LmRequest::decode(&header) {
            prop_assert!(u64::from(request.length) <= kvpool_wire::MAX_VALUE_BYTES);
            prop_assert!(key.starts_with(request.key));
            prop_assert!(key[request.key.len()..].iter().all(|&byte| byte == b' '));
            let again = request.encode();
            prop_assert_eq!(LmRequest::decode(&again), Ok(request));
        }
    }

    #[test]
    fn lm_replies_and_metadata_round_trip(ok: bool, length in 0u32..=512 << 20, fmt: i32, dtype: i32, shape: [i32; 4]) {
        let meta = LmMeta { fmt, dtype, shape };
        let reply = LmReply { ok, length, meta };
        prop_assert_eq!(LmReply::decode(&reply.encode()), Some(reply));
        prop_assert_eq!(LmMeta::from_bytes(&meta.to_bytes()), meta);
    }

    #[test]
    fn keys_any_bytes(key in vec(prop_oneof![Just(b'@'), Just(b'0'), Just(b'%'), any::<u8>()], 0..200)) {
        let native = is_native_form(&key);
        match prefix_of(&key) {
            Some(prefix) => {
                prop_assert!(key.starts_with(prefix.head) && key.ends_with(prefix.tail));
                prop_assert!(prefix.head.len() + prefix.tail.len() < key.len());
                prop_assert_eq!(native, !key.ends_with(b"metadata") && !key.ends_with(b"kv_bytes"));
            }
            None => prop_assert!(!native),
        }
    }

    #[test]
    fn keys_of_one_prefix_differ_only_in_the_hash(model in "[a-zA-Z/.@-]{1,20}", world in 0u8..9, hash: u64, other: u64, tail in "(@[0-9]{1,2})?(@[a-z]{1,4}%[a-z]{1,4})?") {
        let key = |hash: u64| format!("{model}@{world}@0@{hash:x}@bfloat16{tail}");
        let (one, two) = (key(hash), key(other));
        let prefix = prefix_of(one.as_bytes());
        prop_assert!(prefix.is_some());
        prop_assert_eq!(prefix, prefix_of(two.as_bytes()));
        let expected = format!("{}@{}@0@@bfloat16{}", model, world, tail);
        prop_assert_eq!(prefix.map(|prefix| prefix.to_vec()), Some(expected.into_bytes()));
    }
}
