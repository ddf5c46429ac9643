//! The first message each way: who speaks, in which cluster, to which incarnation.
//!
//! The prefix never changes, so that any two versions can tell each other that they have none in common:
//! magic `KVP` 0x01, then for a hello the lowest and highest version spoken (two `u16`), for its reply the version
//! chosen and the [`HelloStatus`] (two `u16`). An envelope follows.

use super::fields::{Reader, Writer};
use super::{Known, PeerError, VERSIONS, seal};

/// First bytes of both messages.
pub const MAGIC: [u8; 4] = *b"KVP\x01";
/// Bytes in front of the envelope.
pub const HELLO_PREFIX_BYTES: usize = 8;
/// Longest id or token, in bytes.
const MAX_TEXT: usize = 1024;

/// A range of protocol versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    pub min: u16,
    pub max: u16,
}

impl Versions {
    /// The highest version in both ranges.
    #[must_use]
    pub fn common(self, other: Versions) -> Option<u16> {
        let highest = self.max.min(other.max);
        (highest >= self.min.max(other.min)).then_some(highest)
    }
}

/// What the side that connects says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello<'a> {
    pub versions: Versions,
    /// Empty: any cluster (a proxy that has no map yet).
    pub cluster_id: &'a str,
    pub join_token: &'a str,
    /// Id of the process that speaks: a shard id, or a proxy's own.
    pub sender: &'a str,
    /// Its incarnation; 0 for a proxy.
    pub sender_incarnation: u64,
    /// The incarnation it wants to speak to; 0 for any (only MapFetch is answered then).
    pub target_incarnation: u64,
    pub known: Known,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloReply<'a> {
    /// The version both will speak; 0 when refused.
    pub version: u16,
    pub status: HelloStatus,
    pub cluster_id: &'a str,
    /// Id of the process that answers.
    pub id: &'a str,
    /// Its incarnation; 0 when it has none yet.
    pub incarnation: u64,
    pub known: Known,
}

/// Whether the connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum HelloStatus {
    Welcome = 0,
    /// No protocol version in common.
    Version = 1,
    /// Wrong join token.
    Token = 2,
    /// Another cluster.
    Cluster = 3,
    /// Not the incarnation that was asked for.
    Incarnation = 4,
    /// Too many connections.
    Full = 5,
}

impl HelloStatus {
    fn of(code: u16) -> Result<Self, PeerError> {
        Ok(match code {
            0 => HelloStatus::Welcome,
            1 => HelloStatus::Version,
            2 => HelloStatus::Token,
            3 => HelloStatus::Cluster,
            4 => HelloStatus::Incarnation,
            5 => HelloStatus::Full,
            _ => return Err(PeerError::Value("hello status")),
        })
    }

    /// The word for logs and metric labels.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            HelloStatus::Welcome => "welcome",
            HelloStatus::Version => "version",
            HelloStatus::Token => "token",
            HelloStatus::Cluster => "cluster",
            HelloStatus::Incarnation => "incarnation",
            HelloStatus::Full => "full",
        }
    }
}

/// The two numbers of a prefix.
///
/// # Errors
/// [`PeerError::Foreign`] when it is another protocol's.
pub fn prefix(bytes: &[u8; HELLO_PREFIX_BYTES]) -> Result<(u16, u16), PeerError> {
    let [m0, m1, m2, m3, a0, a1, b0, b1] = *bytes;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(PeerError::Foreign);
    }
    Ok((u16::from_le_bytes([a0, a1]), u16::from_le_bytes([b0, b1])))
}

fn put_prefix(out: &mut Vec<u8>, first: u16, second: u16) {
    out.extend_from_slice(&MAGIC);
    let mut writer = Writer(out);
    writer.u16(first);
    writer.u16(second);
}

pub(super) fn put_known(writer: &mut Writer<'_>, known: Known) {
    writer.u64(known.cluster_generation);
    writer.u64(known.epoch);
    writer.u64(known.generation);
}

pub(super) fn get_known(reader: &mut Reader<'_>) -> Result<Known, PeerError> {
    Ok(Known {
        cluster_generation: reader.u64()?,
        epoch: reader.u64()?,
        generation: reader.u64()?,
    })
}

impl<'a> Hello<'a> {
    /// Appends prefix and envelope.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_prefix(out, self.versions.min, self.versions.max);
        seal(out, |writer| {
            writer.bytes(self.cluster_id.as_bytes());
            writer.bytes(self.join_token.as_bytes());
            writer.bytes(self.sender.as_bytes());
            writer.u64(self.sender_incarnation);
            writer.u64(self.target_incarnation);
            put_known(writer, self.known);
        });
    }

    /// Reads a verified body. `versions` are those of the prefix.
    ///
    /// # Errors
    /// See [`PeerError`].
    pub fn decode(versions: (u16, u16), body: &'a [u8]) -> Result<Self, PeerError> {
        let reader = &mut Reader(body);
        Ok(Hello {
            versions: Versions {
                min: versions.0,
                max: versions.1,
            },
            cluster_id: reader.text(MAX_TEXT)?,
            join_token: reader.text(MAX_TEXT)?,
            sender: reader.text(MAX_TEXT)?,
            sender_incarnation: reader.u64()?,
            target_incarnation: reader.u64()?,
            known: get_known(reader)?,
        })
    }

    /// The version to speak with this sender.
    #[must_use]
    pub fn common_version(&self) -> Option<u16> {
        VERSIONS.common(self.versions)
    }
}

impl<'a> HelloReply<'a> {
    /// Appends prefix and envelope.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_prefix(out, self.version, self.status as u16);
        seal(out, |writer| {
            writer.bytes(self.cluster_id.as_bytes());
            writer.bytes(self.id.as_bytes());
            writer.u64(self.incarnation);
            put_known(writer, self.known);
        });
    }

    /// Reads a verified body. `prefix` are the numbers of the prefix.
    ///
    /// # Errors
    /// See [`PeerError`].
    pub fn decode(prefix: (u16, u16), body: &'a [u8]) -> Result<Self, PeerError> {
        let reader = &mut Reader(body);
        Ok(HelloReply {
            version: prefix.0,
            status: HelloStatus::of(prefix.1)?,
            cluster_id: reader.text(MAX_TEXT)?,
            id: reader.text(MAX_TEXT)?,
            incarnation: reader.u64()?,
            known: get_known(reader)?,
        })
    }
}
