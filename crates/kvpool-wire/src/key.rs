//! LMCache's key forms: where the chunk hash is, and what remains without it.
//!
//! A key stays opaque bytes everywhere; this module only *recognises* the forms LMCache 0.3 to 0.5.7 writes, to find
//! the **prefix** (the key without its hash) under which blocks have one usual length, and to tell whether a key is one
//! that the native client would ask for. Fields are split at `@`:
//!
//! | form | fields |
//! | --- | --- |
//! | MP | `[key_prefix@]model@kv_rank(8 hex)@group(hex)@hash[@cache_salt]` |
//! | in-process from 0.3.12 | `model@world@worker@hash@dtype[@layer][@tag%value…]` |
//! | in-process to 0.3.9 | `vllm@model@world@worker@hash[@layer][@tag%value…]` |
//!
//! Parsing is lenient: a model name may itself contain `@` (then the rightmost reading wins), an in-process hash may be
//! negative or, in the oldest versions, decimal. `redis://` appends `metadata` or `kv_bytes` to any of these.

use std::ops::Range;

/// Fields looked at; a key with more is not LMCache's.
const MAX_FIELDS: usize = 32;
/// The shortest hash of the MP form, in hex digits (Python's built-in hash has 16; leading zeros may be cut).
const MIN_MP_HASH: usize = 8;

/// The suffixes of the in-process `redis://` connector, which stores two keys for each chunk.
const REDIS_SUFFIXES: [&[u8]; 2] = [b"metadata", b"kv_bytes"];

/// A key without its hash: the bytes before and after it.
///
/// Two keys have equal prefixes exactly when head and tail are equal, so that the `metadata` (28 bytes) and `kv_bytes`
/// keys of one chunk never share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Prefix<'a> {
    pub head: &'a [u8],
    pub tail: &'a [u8],
}

impl Prefix<'_> {
    /// Head and tail joined; the `@` on both sides of the removed hash stay, so the joint is unambiguous.
    pub fn to_vec(&self) -> Vec<u8> {
        [self.head, self.tail].concat()
    }
}

/// The prefix of a key, or `None` when the key has none of LMCache's forms.
pub fn prefix_of(key: &[u8]) -> Option<Prefix<'_>> {
    let hash = hash_range(key)?;
    Some(Prefix {
        head: &key[..hash.start],
        tail: &key[hash.end..],
    })
}

/// Whether LMCache's native RESP client could have written this key: one of LMCache's forms, and not one of the two
/// keys of `redis://`.
pub fn is_native_form(key: &[u8]) -> bool {
    strip_suffix(key).len() == key.len() && hash_range(key).is_some()
}

fn strip_suffix(key: &[u8]) -> &[u8] {
    REDIS_SUFFIXES
        .iter()
        .find_map(|suffix| key.strip_suffix(*suffix))
        .unwrap_or(key)
}

/// Where the hash is in the key.
fn hash_range(key: &[u8]) -> Option<Range<usize>> {
    let stem = strip_suffix(key);
    let mut ranges = [const { 0..0 }; MAX_FIELDS];
    let mut count = 0;
    let mut start = 0;
    for part in stem.split(|&byte| byte == b'@') {
        *ranges.get_mut(count)? = start..start + part.len();
        start += part.len() + 1;
        count += 1;
    }
    let ranges = &ranges[..count];
    let field = |index: usize| ranges.get(index).map_or(&b""[..], |range| &stem[range.clone()]);
    // At least a model in front of the two numbers and the hash.
    let readings = || (1..count.saturating_sub(2)).rev();
    let index = readings()
        .find(|&at| is_mp(field(at), field(at + 1), field(at + 2)))
        .or_else(|| {
            readings().find(|&at| is_in_process(field(at), field(at + 1), field(at + 2)) && is_dtype(field(at + 3)))
        })
        .or_else(|| {
            readings()
                .find(|&at| at >= 2 && field(0) == b"vllm" && is_in_process(field(at), field(at + 1), field(at + 2)))
        })?;
    Some(ranges[index + 2].clone())
}

fn is_mp(kv_rank: &[u8], group: &[u8], hash: &[u8]) -> bool {
    kv_rank.len() == 8
        && is_hex(kv_rank)
        && group.len() <= 8
        && is_hex(group)
        && hash.len() >= MIN_MP_HASH
        && is_hex(hash)
}

fn is_in_process(world: &[u8], worker: &[u8], hash: &[u8]) -> bool {
    let digits = hash.strip_prefix(b"-").unwrap_or(hash);
    is_decimal(world) && is_decimal(worker) && is_hex(digits)
}

fn is_dtype(field: &[u8]) -> bool {
    field.first().is_some_and(u8::is_ascii_lowercase)
        && field
            .iter()
            .all(|&byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'.')
}

fn is_hex(field: &[u8]) -> bool {
    !field.is_empty() && field.iter().all(u8::is_ascii_hexdigit)
}

fn is_decimal(field: &[u8]) -> bool {
    !field.is_empty() && field.len() <= 10 && field.iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use super::{is_native_form, prefix_of};

    const HASH: &str = "d318ccc56b8721905753f5c73c070bb21c3aafbd9b474b1e231f41368b71123c";

    fn prefix(key: &str) -> Option<String> {
        prefix_of(key.as_bytes()).map(|prefix| String::from_utf8(prefix.to_vec()).unwrap())
    }

    #[test]
    fn mp_keys() {
        let model = "meta-llama/Llama-3.1-8B-Instruct";
        let key = format!("{model}@01000100@0@{HASH}");
        assert_eq!(prefix(&key).unwrap(), format!("{model}@01000100@0@"));
        assert_eq!(
            prefix(&format!("{key}@salt")).unwrap(),
            format!("{model}@01000100@0@@salt")
        );
        assert_eq!(
            prefix(&format!("pre@{key}")).unwrap(),
            format!("pre@{model}@01000100@0@")
        );
        assert_eq!(prefix("m@01000100@a@98efc76eafb06cfe").unwrap(), "m@01000100@a@");
        assert!(is_native_form(key.as_bytes()));
    }

    #[test]
    fn in_process_keys_of_every_version() {
        for (key, expected) in [
            ("m@1@0@7b@bfloat16", "m@1@0@@bfloat16"),
            ("m@1@0@-7b@bfloat16", "m@1@0@@bfloat16"),
            ("m@2@1@77@fp8_e4m3fn@3", "m@2@1@@fp8_e4m3fn@3"),
            ("m@1@0@7b@half@3@tenant%a", "m@1@0@@half@3@tenant%a"),
            ("org@x/m@1@0@7b@bfloat16", "org@x/m@1@0@@bfloat16"),
            ("vllm@m@1@0@123456", "vllm@m@1@0@"),
            ("vllm@m@1@0@ff3a@17", "vllm@m@1@0@@17"),
            ("vllm@m@1@0@ff3a@tag%v", "vllm@m@1@0@@tag%v"),
        ] {
            assert_eq!(prefix(key).as_deref(), Some(expected), "{key}");
            assert!(is_native_form(key.as_bytes()), "{key}");
        }
    }

    #[test]
    fn the_two_keys_of_the_redis_connector_are_lmcaches_but_not_native() {
        for suffix in ["metadata", "kv_bytes"] {
            let key = format!("m@1@0@7b@bfloat16{suffix}");
            assert_eq!(prefix(&key).unwrap(), format!("m@1@0@@bfloat16{suffix}"));
            assert!(!is_native_form(key.as_bytes()));
            let old = format!("vllm@m@1@0@ff3a{suffix}");
            assert_eq!(prefix(&old).unwrap(), format!("vllm@m@1@0@{suffix}"));
        }
    }

    #[test]
    fn other_keys_have_no_prefix() {
        let many = "@".repeat(100);
        for key in [
            "",
            "foo",
            "user:1",
            "a@b",
            "a@b@c@d",
            "m@1@0@7b",
            "@@@@",
            "m@1@0@xyz@bfloat16",
            &many,
            "m@0100010@0@98efc76eafb06cfe",
            "m@1@0@@bfloat16",
        ] {
            assert_eq!(prefix(key), None, "{key}");
            assert!(!is_native_form(key.as_bytes()), "{key}");
        }
    }

    #[test]
    fn o01_o02_dtype_and_parallel_layout_stay_in_the_prefix() {
        let keys = [
            "m@1@0@7b@bfloat16",
            "m@1@0@7b@fp8_e4m3fn",
            "m@2@0@7b@bfloat16",
            "m@2@1@7b@bfloat16",
        ];
        for (index, key) in keys.iter().enumerate() {
            for other in &keys[index + 1..] {
                assert_ne!(prefix(key), prefix(other));
            }
        }
    }
}
