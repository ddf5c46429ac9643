//! Requests. One at a time per connection; none of them is ever forwarded again by its receiver.

use super::fields::{Reader, Writer};
use super::frame::Condition;
use super::hello::{get_known, put_known};
use super::{Known, PeerError, seal};
use crate::lm::LmMeta;
use crate::{MAX_KEY_BYTES, MAX_VALUE_BYTES};

/// Most keys in one lease request.
pub const MAX_LEASE_KEYS: usize = 7;
/// Most entries asked for in a page of a slot list.
pub const MAX_PAGE: u16 = 512;

/// A request with its circumstances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHead<'a> {
    /// Names the client operation in logs of every process.
    pub request_id: u64,
    /// Milliseconds until the sender stops waiting.
    pub deadline_ms: u32,
    pub known: Known,
    pub request: Request<'a>,
}

/// Whose part in a write the receiver plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// Gives the write its id, brings it to the other copies.
    Primary = 0,
    /// Keeps it under the id given, tells nobody.
    Replica = 1,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Is anybody there? `Done`.
    Ping,
    /// `Hit` and the bytes from `offset` on in frames, or `Miss`.
    Get {
        key: &'a [u8],
        /// Where to begin, a multiple of 256 KiB.
        offset: u64,
        /// Only this write; 0 for any.
        write_id: u64,
        /// Do not count it as use (slot transfer).
        peek: bool,
    },
    /// `Hit` or `Miss`; a hit takes or renews the read lease.
    Exists { key: &'a [u8], lease_ms: u32 },
    /// Takes leases on blocks; `Done`.
    Lease { keys: Vec<&'a [u8]>, lease_ms: u32 },
    /// `Ready` or `Dropped`; frames and a [`super::PutEnd`]; then `Stored`, `Dropped` or `Condition`.
    Put {
        key: &'a [u8],
        role: Role,
        len: u64,
        meta: Option<LmMeta>,
        /// Given by the primary; 0 when the receiver is to be it.
        write_id: u64,
        ttl_ms: Option<u64>,
        condition: Condition,
    },
    /// `Done`: it was there.
    Del { key: &'a [u8], role: Role, write_id: u64 },
    /// `Ttl`.
    Ttl { key: &'a [u8] },
    /// `Done`: it is there.
    Expire { key: &'a [u8], role: Role, ttl_ms: u64 },
    /// `Map` and the encoded map in frames.
    MapFetch,
    /// `Slots`: the blocks of slots `first..=last`, after `after` (a key of slot `first`).
    SlotList {
        first: u16,
        last: u16,
        after: Option<&'a [u8]>,
        max: u16,
    },
}

impl Request<'_> {
    /// The word for logs and metric labels.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Request::Ping => "ping",
            Request::Get { .. } => "get",
            Request::Exists { .. } => "exists",
            Request::Lease { .. } => "lease",
            Request::Put { .. } => "put",
            Request::Del { .. } => "del",
            Request::Ttl { .. } => "ttl",
            Request::Expire { .. } => "expire",
            Request::MapFetch => "map_fetch",
            Request::SlotList { .. } => "slot_list",
        }
    }

    fn code(&self) -> u8 {
        match self {
            Request::Ping => 0,
            Request::Get { .. } => 1,
            Request::Exists { .. } => 2,
            Request::Lease { .. } => 3,
            Request::Put { .. } => 4,
            Request::Del { .. } => 5,
            Request::Ttl { .. } => 6,
            Request::Expire { .. } => 7,
            Request::MapFetch => 8,
            Request::SlotList { .. } => 9,
        }
    }
}

impl<'a> RequestHead<'a> {
    /// Appends the envelope.
    pub fn encode(&self, out: &mut Vec<u8>) {
        seal(out, |w| {
            w.u8(self.request.code());
            w.u64(self.request_id);
            w.u32(self.deadline_ms);
            put_known(w, self.known);
            put_request(w, &self.request);
        });
    }

    /// Reads a verified body.
    ///
    /// # Errors
    /// See [`PeerError`].
    pub fn decode(body: &'a [u8]) -> Result<Self, PeerError> {
        let r = &mut Reader(body);
        let code = r.u8()?;
        let (request_id, deadline_ms, known) = (r.u64()?, r.u32()?, get_known(r)?);
        let request = decode_request(code, r)?;
        Ok(RequestHead {
            request_id,
            deadline_ms,
            known,
            request,
        })
    }
}

fn put_request(w: &mut Writer<'_>, request: &Request<'_>) {
    match request {
        Request::Ping | Request::MapFetch => {}
        Request::Get {
            key,
            offset,
            write_id,
            peek,
        } => {
            w.bytes(key);
            w.u64(*offset);
            w.u64(*write_id);
            w.u8(u8::from(*peek));
        }
        Request::Exists { key, lease_ms } => {
            w.bytes(key);
            w.u32(*lease_ms);
        }
        Request::Lease { keys, lease_ms } => {
            let keys = &keys[..keys.len().min(MAX_LEASE_KEYS)];
            w.u32(*lease_ms);
            w.u8(keys.len() as u8);
            keys.iter().for_each(|key| w.bytes(key));
        }
        Request::Put {
            key,
            role,
            len,
            meta,
            write_id,
            ttl_ms,
            condition,
        } => {
            w.bytes(key);
            w.u8(*role as u8);
            w.u64(*len);
            w.meta(*meta);
            w.u64(*write_id);
            w.option(*ttl_ms);
            w.u8(*condition as u8);
        }
        Request::Del { key, role, write_id } => {
            w.bytes(key);
            w.u8(*role as u8);
            w.u64(*write_id);
        }
        Request::Ttl { key } => w.bytes(key),
        Request::Expire { key, role, ttl_ms } => {
            w.bytes(key);
            w.u8(*role as u8);
            w.u64(*ttl_ms);
        }
        Request::SlotList {
            first,
            last,
            after,
            max,
        } => {
            w.u16(*first);
            w.u16(*last);
            w.u8(u8::from(after.is_some()));
            w.bytes(after.unwrap_or_default());
            w.u16(*max);
        }
    }
}

fn decode_request<'a>(code: u8, r: &mut Reader<'a>) -> Result<Request<'a>, PeerError> {
    Ok(match code {
        0 => Request::Ping,
        1 => Request::Get {
            key: key(r)?,
            offset: r.u64()?,
            write_id: r.u64()?,
            peek: r.flag("peek")?,
        },
        2 => Request::Exists {
            key: key(r)?,
            lease_ms: r.u32()?,
        },
        3 => {
            let lease_ms = r.u32()?;
            let count = usize::from(r.u8()?);
            if count > MAX_LEASE_KEYS {
                return Err(PeerError::TooLong {
                    len: count as u64,
                    max: MAX_LEASE_KEYS as u64,
                });
            }
            let keys = (0..count).map(|_| key(r)).collect::<Result<_, _>>()?;
            Request::Lease { keys, lease_ms }
        }
        4 => Request::Put {
            key: key(r)?,
            role: role(r)?,
            len: value_len(r.u64()?)?,
            meta: r.meta()?,
            write_id: r.u64()?,
            ttl_ms: r.option()?,
            condition: Condition::of(r.u8()?)?,
        },
        5 => Request::Del {
            key: key(r)?,
            role: role(r)?,
            write_id: r.u64()?,
        },
        6 => Request::Ttl { key: key(r)? },
        7 => Request::Expire {
            key: key(r)?,
            role: role(r)?,
            ttl_ms: r.u64()?,
        },
        8 => Request::MapFetch,
        9 => {
            let (first, last) = (r.u16()?, r.u16()?);
            let there = r.flag("cursor")?;
            let after = key(r)?;
            Request::SlotList {
                first,
                last,
                after: there.then_some(after),
                max: r.u16()?.min(MAX_PAGE),
            }
        }
        _ => return Err(PeerError::Value("request")),
    })
}

fn key<'a>(r: &mut Reader<'a>) -> Result<&'a [u8], PeerError> {
    r.bytes(MAX_KEY_BYTES)
}

fn role(r: &mut Reader<'_>) -> Result<Role, PeerError> {
    Ok(if r.flag("role")? { Role::Replica } else { Role::Primary })
}

/// A length within what any client may store.
pub(super) fn value_len(len: u64) -> Result<u64, PeerError> {
    if len > MAX_VALUE_BYTES {
        return Err(PeerError::TooLong {
            len,
            max: MAX_VALUE_BYTES,
        });
    }
    Ok(len)
}
