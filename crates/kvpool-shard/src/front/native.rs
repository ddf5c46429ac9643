//! LMCache's native RESP client (`lmcache_redis.so`, 0.3.15 to 0.5.7): recognising it, and what it may be told.
//!
//! It reads a GET reply as exactly `$<expected>\r\n` and then as many bytes. A nil or an error line of another length
//! hangs it for good, a hit of another length puts it out of step for good (measured; `docs/lmcache.md`). So to such a
//! client a miss is an error line of exactly the expected header's length; a block of another length than its prefix's
//! usual one is a miss; and where no single length is known, the connection is closed, which it survives best.
//! It is recognised by what it sends: only AUTH, SET, GET, EXISTS and DEL, keys of LMCache's form.

use crate::ops::Usual;
use kvpool_wire::key::is_native_form;

/// What a connection has shown of itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tracker {
    plain: bool,
}

impl Tracker {
    pub(super) fn new() -> Self {
        Tracker { plain: true }
    }

    /// A command was received, by its upper-case name.
    pub(super) fn saw(&mut self, command: &str) {
        self.plain &= matches!(command, "AUTH" | "SET" | "GET" | "EXISTS" | "DEL");
    }

    /// Whether a request for this key must be taken for the native client's.
    pub(super) fn is_native(self, key: &[u8]) -> bool {
        self.plain && is_native_form(key)
    }
}

/// What to tell a native client that asked for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The block, as to anybody.
    Serve,
    /// The sized miss line for this usual length.
    SizedMiss(u64),
    /// Nothing safe can be said.
    Close,
}

/// The rule, for a block of length `hit` or none.
pub(super) fn verdict(hit: Option<u64>, usual: Usual) -> Verdict {
    match (hit, usual) {
        (Some(len), Usual::Size(size)) if len != size => Verdict::SizedMiss(size),
        // With no or two lengths known, the block itself is the best witness of what its reader expects.
        (Some(_), _) => Verdict::Serve,
        (None, Usual::Size(size)) => Verdict::SizedMiss(size),
        (None, Usual::Unknown | Usual::Mixed) => Verdict::Close,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_five_commands_and_lmcaches_keys_are_native() {
        let key = b"m@01000100@0@98efc76eafb06cfe";
        let mut tracker = Tracker::new();
        for command in ["AUTH", "SET", "GET", "EXISTS", "DEL"] {
            tracker.saw(command);
        }
        assert!(tracker.is_native(key));
        assert!(!tracker.is_native(b"user:1"));
        assert!(!tracker.is_native(b"m@1@0@7b@bfloat16metadata"));
        assert!(!tracker.is_native(b"m@1@0@7b@bfloat16kv_bytes"));
        for command in ["HELLO", "CLIENT", "PING", "TTL", "unknown"] {
            let mut tracker = tracker;
            tracker.saw(command);
            assert!(!tracker.is_native(key), "{command}");
        }
    }

    #[test]
    fn every_row_of_the_rule() {
        for (hit, usual, expected) in [
            (Some(10), Usual::Size(10), Verdict::Serve),
            (Some(11), Usual::Size(10), Verdict::SizedMiss(10)),
            (Some(10), Usual::Unknown, Verdict::Serve),
            (Some(10), Usual::Mixed, Verdict::Serve),
            (None, Usual::Size(10), Verdict::SizedMiss(10)),
            (None, Usual::Unknown, Verdict::Close),
            (None, Usual::Mixed, Verdict::Close),
        ] {
            assert_eq!(verdict(hit, usual), expected, "{hit:?} {usual:?}");
        }
    }
}
