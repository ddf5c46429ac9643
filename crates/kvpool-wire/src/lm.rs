//! LMCache's `lm://` framing (LMCache 0.3.3 to 0.5.6, the same bytes in all of them).
//!
//! A request is a header of 186 bytes (nine little-endian `i32`, then the key padded with spaces to 150 bytes), for PUT
//! followed by `length` bytes. A reply is a header of 36 bytes (nine `i32`, in another order), after a GET hit followed
//! by `length` bytes; PUT has no reply at all. There is no handshake and no version field. Source: LMCache's
//! `lmcache/v1/protocol.py` as of 0.5.6.
//!
//! The fields `fmt`, `dtype` and `shape` describe the tensor to the reading client. The pool keeps them as they came
//! ([`LmMeta`]) and hands them back unchanged; codes that no LMCache version defines are refused ([`LmMeta::is_known`]).

use crate::MAX_VALUE_BYTES;
use thiserror::Error;

/// Size of a request header in bytes.
pub const REQUEST_BYTES: usize = 186;
/// Size of a reply header in bytes.
pub const REPLY_BYTES: usize = 36;
/// Size of the padded key field in bytes.
pub const KEY_BYTES: usize = 150;
/// Size of [`LmMeta`] as stored, in bytes.
pub const META_BYTES: usize = 24;

/// The largest known `MemoryFormat` code (HS_TD).
const MAX_FMT: i32 = 8;
/// The largest known dtype code (fp8_e5m2).
const MAX_DTYPE: i32 = 8;

const CODE_OK: i32 = 200;
const CODE_FAIL: i32 = 400;

/// Why a request header cannot be obeyed. After any of these the stream has lost its framing: the connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LmError {
    /// The command code is none of LMCache's.
    #[error("failed to read an lm:// header: unknown command {0}")]
    UnknownCommand(i32),
    /// The length field is negative.
    #[error("failed to read an lm:// header: negative length {0}")]
    NegativeLength(i32),
    /// The announced value is larger than [`MAX_VALUE_BYTES`].
    #[error("failed to read an lm:// header: length {0} is above the maximum")]
    TooLong(i32),
}

/// The commands of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LmCommand {
    Put = 1,
    Get = 2,
    Exist = 3,
    List = 4,
    Health = 5,
}

impl LmCommand {
    /// The command with this code.
    ///
    /// # Errors
    /// [`LmError::UnknownCommand`].
    pub fn from_code(code: i32) -> Result<Self, LmError> {
        match code {
            1 => Ok(LmCommand::Put),
            2 => Ok(LmCommand::Get),
            3 => Ok(LmCommand::Exist),
            4 => Ok(LmCommand::List),
            5 => Ok(LmCommand::Health),
            other => Err(LmError::UnknownCommand(other)),
        }
    }
}

/// What an `lm://` PUT says about its tensor; returned unchanged by GET.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LmMeta {
    /// LMCache's `MemoryFormat` code.
    pub fmt: i32,
    /// LMCache's dtype code.
    pub dtype: i32,
    /// The tensor's dimensions; trailing zeros are padding.
    pub shape: [i32; 4],
}

impl LmMeta {
    /// The fields a miss carries: KV_2LTD and float16, as LMCache's own server answers.
    const OF_A_MISS: LmMeta = LmMeta {
        fmt: 1,
        dtype: 2,
        shape: [0; 4],
    };

    /// Whether some LMCache version defines these codes and the shape has no negative dimension.
    pub fn is_known(&self) -> bool {
        (0..=MAX_FMT).contains(&self.fmt)
            && (0..=MAX_DTYPE).contains(&self.dtype)
            && self.shape.iter().all(|&dim| dim >= 0)
    }

    /// The stored form: six little-endian `i32`.
    pub fn to_bytes(self) -> [u8; META_BYTES] {
        let mut out = [0; META_BYTES];
        put_ints(
            &mut out,
            &[
                self.fmt,
                self.dtype,
                self.shape[0],
                self.shape[1],
                self.shape[2],
                self.shape[3],
            ],
        );
        out
    }

    /// Reads the stored form back.
    pub fn from_bytes(bytes: &[u8; META_BYTES]) -> Self {
        LmMeta {
            fmt: int_at(bytes, 0),
            dtype: int_at(bytes, 1),
            shape: [2, 3, 4, 5].map(|index| int_at(bytes, index)),
        }
    }
}

/// One request header. The key is opaque bytes, without its padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LmRequest<'a> {
    pub command: LmCommand,
    /// Bytes that follow the header; 0 for anything but PUT, whatever the field says.
    pub length: u32,
    pub meta: LmMeta,
    pub key: &'a [u8],
}

impl<'a> LmRequest<'a> {
    /// Decodes a request header.
    ///
    /// # Errors
    /// [`LmError`] when the stream cannot be followed any further.
    pub fn decode(header: &'a [u8; REQUEST_BYTES]) -> Result<Self, LmError> {
        let command = LmCommand::from_code(int_at(header, 0))?;
        let length = int_at(header, 1);
        let unsigned = u32::try_from(length).map_err(|_| LmError::NegativeLength(length))?;
        if u64::from(unsigned) > MAX_VALUE_BYTES {
            return Err(LmError::TooLong(length));
        }
        let padded = &header[REQUEST_BYTES - KEY_BYTES..];
        let key_len = padded.iter().rposition(|&byte| byte != b' ').map_or(0, |last| last + 1);
        Ok(LmRequest {
            command,
            length: if command == LmCommand::Put { unsigned } else { 0 },
            meta: LmMeta {
                fmt: int_at(header, 2),
                dtype: int_at(header, 3),
                // Index 4 is the storage location, which LMCache always sends as 0 and nobody reads.
                shape: [5, 6, 7, 8].map(|index| int_at(header, index)),
            },
            key: &padded[..key_len],
        })
    }

    /// Encodes a request header as LMCache's connector does. A key above [`KEY_BYTES`] is cut.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = [b' '; REQUEST_BYTES];
        let meta = &self.meta;
        let [s0, s1, s2, s3] = meta.shape;
        let length = i32::try_from(self.length).unwrap_or(i32::MAX);
        put_ints(
            &mut out,
            &[self.command as i32, length, meta.fmt, meta.dtype, 0, s0, s1, s2, s3],
        );
        let key = &self.key[..self.key.len().min(KEY_BYTES)];
        out[REQUEST_BYTES - KEY_BYTES..][..key.len()].copy_from_slice(key);
        out
    }
}

/// One reply header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LmReply {
    pub ok: bool,
    /// Bytes that follow the header (a GET hit only).
    pub length: u32,
    pub meta: LmMeta,
}

impl LmReply {
    /// A miss, and the refusal of a request (code 400).
    pub const FAIL: LmReply = LmReply {
        ok: false,
        length: 0,
        meta: LmMeta::OF_A_MISS,
    };

    /// The positive answer to EXIST and HEALTH (code 200, nothing follows).
    pub const OK: LmReply = LmReply {
        ok: true,
        length: 0,
        meta: LmMeta::OF_A_MISS,
    };

    /// Encodes the header.
    pub fn encode(&self) -> [u8; REPLY_BYTES] {
        let mut out = [0; REPLY_BYTES];
        let [s0, s1, s2, s3] = self.meta.shape;
        let code = if self.ok { CODE_OK } else { CODE_FAIL };
        let length = i32::try_from(self.length).unwrap_or(i32::MAX);
        put_ints(
            &mut out,
            &[code, length, self.meta.fmt, self.meta.dtype, s0, s1, s2, s3, 0],
        );
        out
    }

    /// Decodes a header; `None` when its code or length is none a server sends. For clients: tests and the bench.
    pub fn decode(header: &[u8; REPLY_BYTES]) -> Option<Self> {
        let ok = match int_at(header, 0) {
            CODE_OK => true,
            CODE_FAIL => false,
            _ => return None,
        };
        Some(LmReply {
            ok,
            length: u32::try_from(int_at(header, 1)).ok()?,
            meta: LmMeta {
                fmt: int_at(header, 2),
                dtype: int_at(header, 3),
                shape: [4, 5, 6, 7].map(|index| int_at(header, index)),
            },
        })
    }
}

/// The `index`-th little-endian `i32`; 0 past the end, which no caller asks for.
fn int_at(bytes: &[u8], index: usize) -> i32 {
    bytes
        .get(index * 4..)
        .and_then(|rest| rest.first_chunk::<4>())
        .map_or(0, |four| i32::from_le_bytes(*four))
}

fn put_ints(out: &mut [u8], values: &[i32]) {
    for (four, value) in out.chunks_exact_mut(4).zip(values) {
        four.copy_from_slice(&value.to_le_bytes());
    }
}
