//! Replies. Every one says which epoch and generation its sender holds; hits and misses carry lengths, because a stock
//! native client can only be told of a miss in the length it expects.

use super::fields::{Reader, Writer};
use super::hello::{get_known, put_known};
use super::request::value_len;
use super::{Known, MAX_BODY_BYTES, MAX_MAP_BYTES, PeerError, seal};
use crate::MAX_KEY_BYTES;
use crate::lm::LmMeta;

/// Bytes that an entry of a slot page has besides its key.
const ENTRY_BYTES: usize = 2 + 8 + 8 + 2;
/// Room for the entries of a page, in bytes: a body less its fixed fields and the cursor.
const PAGE_BYTES: usize = MAX_BODY_BYTES - MAX_KEY_BYTES - 64;

/// A reply with its sender's heights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyHead<'a> {
    pub known: Known,
    pub reply: Reply<'a>,
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// GET (frames follow) and EXISTS.
    Hit {
        info: Info,
        usual: Usual,
    },
    Miss {
        reason: MissCode,
        usual: Usual,
    },
    /// PUT: there is room, go on.
    Ready,
    /// PUT: so many copies hold it.
    Stored {
        copies: u8,
        usual: Usual,
    },
    Dropped {
        reason: DropCode,
    },
    /// PUT: the condition did not hold.
    ConditionFailed,
    /// DEL, EXPIRE: whether the key was there. PING, LEASE: yes.
    Done {
        yes: bool,
    },
    /// TTL: `None` for no key, `Some(None)` for no expiry, else milliseconds.
    Ttl {
        left: Option<Option<u64>>,
    },
    /// MapFetch: so many bytes follow in frames; 0: there is no map.
    Map {
        len: u32,
    },
    /// SlotList: a page.
    Slots {
        entries: Vec<SlotEntry<'a>>,
        /// Where the next page begins: slot and key to go on after; `None` when this was the last.
        next: Option<(u16, &'a [u8])>,
    },
    /// Not answered at all.
    Refused {
        code: RefusalCode,
    },
}

/// About a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    pub len: u64,
    pub write_id: u64,
    /// Copies known to hold this write, the sender's included.
    pub copies: u8,
    pub meta: Option<LmMeta>,
    /// Milliseconds until it expires.
    pub ttl_ms: Option<u64>,
}

/// Usual length of the blocks under a key's prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Usual {
    #[default]
    Unknown,
    Size(u64),
    Mixed,
}

/// A block of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotEntry<'a> {
    pub slot: u16,
    pub key: &'a [u8],
    pub write_id: u64,
    pub len: u64,
}

impl SlotEntry<'_> {
    /// Bytes this entry takes of [`page_bytes`].
    #[must_use]
    pub fn bytes(&self) -> usize {
        ENTRY_BYTES + self.key.len()
    }
}

/// Bytes of entries that fit into one page.
#[must_use]
pub fn page_bytes() -> usize {
    PAGE_BYTES
}

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident, $field:literal { $($(#[$vdoc:meta])* $variant:ident = $code:literal $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $name { $($(#[$vdoc])* $variant = $code,)* }

        impl $name {
            fn of(code: u8) -> Result<Self, PeerError> {
                match code {
                    $($code => Ok($name::$variant),)*
                    _ => Err(PeerError::Value($field)),
                }
            }

            /// The word for logs and metric labels.
            #[must_use]
            pub fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)* }
            }
        }
    };
}

codes! {
    /// Why there is no block.
    MissCode, "miss reason" {
        Absent = 0 "absent",
        Evicted = 1 "evicted",
        Generation = 2 "generation",
        /// GET of one write: the key holds another.
        OtherWrite = 3 "other_write",
    }
}

codes! {
    /// Why a write was not taken.
    DropCode, "drop reason" {
        Size = 0 "size",
        Shed = 1 "shed",
        Generation = 2 "generation",
        /// The receiver is not in the slot's list.
        NotOwner = 3 "not_owner",
        Stalled = 4 "stalled",
    }
}

codes! {
    /// Why a request was not looked at.
    RefusalCode, "refusal" {
        /// The receiver has no incarnation yet, or was too long out of contact.
        NotServing = 0 "not_serving",
        /// It has another incarnation than the connection was made for.
        Incarnation = 1 "incarnation",
        /// It does not hold the slot.
        NotOwner = 2 "not_owner",
    }
}

impl Reply<'_> {
    /// The word for logs and metric labels.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Reply::Hit { .. } => "hit",
            Reply::Miss { .. } => "miss",
            Reply::Ready => "ready",
            Reply::Stored { .. } => "stored",
            Reply::Dropped { .. } => "dropped",
            Reply::ConditionFailed => "condition",
            Reply::Done { .. } => "done",
            Reply::Ttl { .. } => "ttl",
            Reply::Map { .. } => "map",
            Reply::Slots { .. } => "slots",
            Reply::Refused { .. } => "refused",
        }
    }

    fn code(&self) -> u8 {
        match self {
            Reply::Hit { .. } => 0,
            Reply::Miss { .. } => 1,
            Reply::Ready => 2,
            Reply::Stored { .. } => 3,
            Reply::Dropped { .. } => 4,
            Reply::ConditionFailed => 5,
            Reply::Done { .. } => 6,
            Reply::Ttl { .. } => 7,
            Reply::Map { .. } => 8,
            Reply::Slots { .. } => 9,
            Reply::Refused { .. } => 10,
        }
    }
}

impl<'a> ReplyHead<'a> {
    /// Appends the envelope.
    pub fn encode(&self, out: &mut Vec<u8>) {
        seal(out, |w| {
            w.u8(self.reply.code());
            put_known(w, self.known);
            match &self.reply {
                Reply::Ready | Reply::ConditionFailed => {}
                Reply::Hit { info, usual } => {
                    w.u64(info.len);
                    w.u64(info.write_id);
                    w.u8(info.copies);
                    w.meta(info.meta);
                    w.option(info.ttl_ms);
                    put_usual(w, *usual);
                }
                Reply::Miss { reason, usual } => {
                    w.u8(*reason as u8);
                    put_usual(w, *usual);
                }
                Reply::Stored { copies, usual } => {
                    w.u8(*copies);
                    put_usual(w, *usual);
                }
                Reply::Dropped { reason } => w.u8(*reason as u8),
                Reply::Done { yes } => w.u8(u8::from(*yes)),
                Reply::Ttl { left } => {
                    w.u8(u8::from(left.is_some()));
                    w.option(left.flatten());
                }
                Reply::Map { len } => w.u32(*len),
                Reply::Slots { entries, next } => put_page(w, entries, *next),
                Reply::Refused { code } => w.u8(*code as u8),
            }
        });
    }

    /// Reads a verified body.
    ///
    /// # Errors
    /// See [`PeerError`].
    pub fn decode(body: &'a [u8]) -> Result<Self, PeerError> {
        let r = &mut Reader(body);
        let code = r.u8()?;
        let known = get_known(r)?;
        let reply = match code {
            0 => {
                let info = Info {
                    len: value_len(r.u64()?)?,
                    write_id: r.u64()?,
                    copies: r.u8()?,
                    meta: r.meta()?,
                    ttl_ms: r.option()?,
                };
                Reply::Hit {
                    info,
                    usual: get_usual(r)?,
                }
            }
            1 => Reply::Miss {
                reason: MissCode::of(r.u8()?)?,
                usual: get_usual(r)?,
            },
            2 => Reply::Ready,
            3 => Reply::Stored {
                copies: r.u8()?,
                usual: get_usual(r)?,
            },
            4 => Reply::Dropped {
                reason: DropCode::of(r.u8()?)?,
            },
            5 => Reply::ConditionFailed,
            6 => Reply::Done { yes: r.flag("done")? },
            7 => {
                let there = r.flag("ttl")?;
                let left = r.option()?;
                Reply::Ttl {
                    left: there.then_some(left),
                }
            }
            8 => Reply::Map {
                len: map_len(r.u32()?)?,
            },
            9 => get_page(r)?,
            10 => Reply::Refused {
                code: RefusalCode::of(r.u8()?)?,
            },
            _ => return Err(PeerError::Value("reply")),
        };
        Ok(ReplyHead { known, reply })
    }
}

fn put_usual(w: &mut Writer<'_>, usual: Usual) {
    let (code, len) = match usual {
        Usual::Unknown => (0, 0),
        Usual::Size(len) => (1, len),
        Usual::Mixed => (2, 0),
    };
    w.u8(code);
    w.u64(len);
}

fn get_usual(r: &mut Reader<'_>) -> Result<Usual, PeerError> {
    let (code, len) = (r.u8()?, r.u64()?);
    Ok(match code {
        0 => Usual::Unknown,
        1 => Usual::Size(value_len(len)?),
        2 => Usual::Mixed,
        _ => return Err(PeerError::Value("usual length")),
    })
}

fn map_len(len: u32) -> Result<u32, PeerError> {
    if len > MAX_MAP_BYTES {
        return Err(PeerError::TooLong {
            len: u64::from(len),
            max: u64::from(MAX_MAP_BYTES),
        });
    }
    Ok(len)
}

fn put_page(w: &mut Writer<'_>, entries: &[SlotEntry<'_>], next: Option<(u16, &[u8])>) {
    w.u16(entries.len() as u16);
    for entry in entries {
        w.u16(entry.slot);
        w.bytes(entry.key);
        w.u64(entry.write_id);
        w.u64(entry.len);
    }
    w.u8(u8::from(next.is_some()));
    let (slot, key) = next.unwrap_or_default();
    w.u16(slot);
    w.bytes(key);
}

fn get_page<'a>(r: &mut Reader<'a>) -> Result<Reply<'a>, PeerError> {
    let count = usize::from(r.u16()?);
    // An entry has bytes of its own in the body, which is bounded: the count cannot make us allocate more than that.
    let mut entries = Vec::with_capacity(count.min(r.0.len() / ENTRY_BYTES));
    for _ in 0..count {
        entries.push(SlotEntry {
            slot: r.u16()?,
            key: r.bytes(MAX_KEY_BYTES)?,
            write_id: r.u64()?,
            len: value_len(r.u64()?)?,
        });
    }
    let there = r.flag("cursor")?;
    let next = (r.u16()?, r.bytes(MAX_KEY_BYTES)?);
    Ok(Reply::Slots {
        entries,
        next: there.then_some(next),
    })
}
