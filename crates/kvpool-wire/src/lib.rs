//! The codecs of the data plane, sans-I/O: RESP2/RESP3 for clients, LMCache's `lm://`, LMCache's key forms.
//!
//! Nothing here opens a socket, reads a clock or spawns anything; the shells in `kvpool-shard` bring the bytes.
//! Invariants of every module: no input panics; no allocation is sized by a length that came from outside before that
//! length was checked; and a stream parses the same however it is cut into reads.

pub mod foreign;
pub mod key;
pub mod lm;
pub mod peer;
pub mod resp;

/// The largest value any client protocol accepts, in bytes (Redis' own `proto-max-bulk-len`, 512 MiB).
pub const MAX_VALUE_BYTES: u64 = 512 * 1024 * 1024;

/// The longest key the pool stores, in bytes. LMCache's keys are 60-400 bytes; a longer key is answered as absent.
pub const MAX_KEY_BYTES: usize = 8 * 1024;
