//! The shard-to-shard protocol: what proxies and shards say to each other (our own; version 1).
//!
//! A connection begins with a hello each way ([`hello`]), then carries one request at a time ([`request`]), each with its
//! reply ([`reply`]). Integers are little-endian. Everything but bulk is an *envelope*:
//!
//! | bytes | field |
//! | --- | --- |
//! | 4 | length of the body, at most [`MAX_BODY_BYTES`] |
//! | 4 | CRC32C of the body |
//! | … | the body |
//!
//! Bulk (block values, slot maps) follows its envelope in frames ([`frame`]) of at most 256 KiB, each with its CRC32C, so
//! that every byte is verified before it is passed on (R5).
//!
//! Within a version fields are only appended; a decoder skips bytes after the last field it knows. Lengths are checked
//! before anything is allocated, and no input panics.

mod fields;
pub mod frame;
pub mod hello;
pub mod reply;
pub mod request;

pub use frame::{Condition, FRAME_BYTES, FRAME_HEAD_BYTES, FrameHead, PUT_END_BYTES, PutEnd};
pub use hello::{HELLO_PREFIX_BYTES, Hello, HelloReply, HelloStatus, Versions};
pub use reply::{DropCode, Info, MissCode, RefusalCode, Reply, ReplyHead, SlotEntry, Usual};
pub use request::{Request, RequestHead, Role};

use thiserror::Error;

/// The versions this build speaks, lowest and highest.
pub const VERSIONS: Versions = Versions { min: 1, max: 1 };
/// Bytes in front of an envelope's body.
pub const ENVELOPE_BYTES: usize = 8;
/// Longest body of an envelope, in bytes.
pub const MAX_BODY_BYTES: usize = 64 * 1024;
/// Longest slot map in bytes: 16384 lists and 10,000 shards are about 2 MiB.
pub const MAX_MAP_BYTES: u32 = 16 * 1024 * 1024;

/// The heights that the sender has heard of. The older side fetches the newer map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    pub cluster_generation: u64,
    pub epoch: u64,
    /// In a request: the generation that was current when the operation began.
    pub generation: u64,
}

/// Why bytes of a peer cannot be obeyed. The connection ends after any of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PeerError {
    #[error("failed to read a peer message: not this protocol")]
    Foreign,
    #[error("failed to read a peer message: {len} bytes, at most {max} are allowed")]
    TooLong { len: u64, max: u64 },
    #[error("failed to read a peer message: checksum differs")]
    Checksum,
    #[error("failed to read a peer message: it ends in the middle of a field")]
    Short,
    #[error("failed to read a peer message: {0} has an unknown or forbidden value")]
    Value(&'static str),
}

impl PeerError {
    /// The word for metric labels.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            PeerError::Foreign => "foreign",
            PeerError::TooLong { .. } => "too_long",
            PeerError::Checksum => "checksum",
            PeerError::Short => "short",
            PeerError::Value(_) => "value",
        }
    }
}

/// Reads the front of an envelope: length of the body in bytes, and its CRC32C.
///
/// # Errors
/// [`PeerError::TooLong`].
pub fn envelope(front: &[u8; ENVELOPE_BYTES]) -> Result<(usize, u32), PeerError> {
    let [a, b, c, d, rest @ ..] = *front;
    let len = u32::from_le_bytes([a, b, c, d]) as usize;
    if len > MAX_BODY_BYTES {
        return Err(PeerError::TooLong {
            len: len as u64,
            max: MAX_BODY_BYTES as u64,
        });
    }
    Ok((len, u32::from_le_bytes(rest)))
}

/// Checks a body against the CRC of its envelope.
///
/// # Errors
/// [`PeerError::Checksum`].
pub fn verify(body: &[u8], crc: u32) -> Result<(), PeerError> {
    if crc32c::crc32c(body) == crc {
        Ok(())
    } else {
        Err(PeerError::Checksum)
    }
}

/// Appends an envelope around what `write` appends.
fn seal(out: &mut Vec<u8>, write: impl FnOnce(&mut fields::Writer<'_>)) {
    let start = out.len();
    out.extend_from_slice(&[0; ENVELOPE_BYTES]);
    write(&mut fields::Writer(out));
    let body = start + ENVELOPE_BYTES;
    let len = (out.len() - body) as u32;
    let crc = crc32c::crc32c(&out[body..]);
    out[start..start + 4].copy_from_slice(&len.to_le_bytes());
    out[start + 4..body].copy_from_slice(&crc.to_le_bytes());
}
