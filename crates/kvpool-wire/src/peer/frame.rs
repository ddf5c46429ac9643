//! Frames of bulk: `u32` length (at most 256 KiB), `u32` CRC32C, the bytes.
//!
//! Frames are cut at multiples of 256 KiB of the value, so a frame never crosses one and the sums that the store keeps per
//! piece are sent as they are. A value of `n` bytes is over when `n` bytes have come. The upload of a block is closed by
//! one frame more, marked by the top bit of its length: its terms ([`PutEnd`]), which RESP knows only after the value.

use super::PeerError;

/// Most bytes in a frame.
pub const FRAME_BYTES: usize = 256 * 1024;
/// Bytes in front of a frame's content.
pub const FRAME_HEAD_BYTES: usize = 8;
/// Content of the frame that ends an upload, in bytes.
pub const PUT_END_BYTES: usize = 12;

const END_MARK: u32 = 1 << 31;

/// The front of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameHead {
    /// So many bytes of the value follow.
    Data { len: usize, crc: u32 },
    /// A [`PutEnd`] follows.
    End { crc: u32 },
}

impl FrameHead {
    /// Reads the front of a frame.
    ///
    /// # Errors
    /// Too long, empty, or an end of another size.
    pub fn decode(head: &[u8; FRAME_HEAD_BYTES]) -> Result<Self, PeerError> {
        let [a, b, c, d, rest @ ..] = *head;
        let (word, crc) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(rest));
        if word & END_MARK != 0 {
            let end = word == END_MARK | PUT_END_BYTES as u32;
            return if end {
                Ok(FrameHead::End { crc })
            } else {
                Err(PeerError::Value("end frame"))
            };
        }
        let len = word as usize;
        match len {
            0 => Err(PeerError::Value("empty frame")),
            1..=FRAME_BYTES => Ok(FrameHead::Data { len, crc }),
            _ => Err(PeerError::TooLong {
                len: len as u64,
                max: FRAME_BYTES as u64,
            }),
        }
    }

    /// Writes the front of a frame.
    #[must_use]
    pub fn encode(self) -> [u8; FRAME_HEAD_BYTES] {
        let (word, crc) = match self {
            FrameHead::Data { len, crc } => (len as u32 & !END_MARK, crc),
            FrameHead::End { crc } => (END_MARK | PUT_END_BYTES as u32, crc),
        };
        let mut out = [0; FRAME_HEAD_BYTES];
        out[..4].copy_from_slice(&word.to_le_bytes());
        out[4..].copy_from_slice(&crc.to_le_bytes());
        out
    }
}

/// When a write may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Condition {
    #[default]
    Always = 0,
    IfAbsent = 1,
    IfPresent = 2,
}

impl Condition {
    pub(super) fn of(code: u8) -> Result<Self, PeerError> {
        Ok(match code {
            0 => Condition::Always,
            1 => Condition::IfAbsent,
            2 => Condition::IfPresent,
            _ => return Err(PeerError::Value("condition")),
        })
    }
}

/// How an upload ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutEnd {
    /// False: forget it, the connection goes on.
    pub commit: bool,
    pub condition: Condition,
    /// Time to live in milliseconds; `None` for ever.
    pub ttl_ms: Option<u64>,
}

impl PutEnd {
    /// Head and content of the frame.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_HEAD_BYTES + PUT_END_BYTES] {
        let mut out = [0; FRAME_HEAD_BYTES + PUT_END_BYTES];
        let (head, content) = out.split_at_mut(FRAME_HEAD_BYTES);
        content[0] = u8::from(self.commit);
        content[1] = self.condition as u8;
        content[2] = u8::from(self.ttl_ms.is_some());
        content[4..].copy_from_slice(&self.ttl_ms.unwrap_or(0).to_le_bytes());
        head.copy_from_slice(
            &FrameHead::End {
                crc: crc32c::crc32c(content),
            }
            .encode(),
        );
        out
    }

    /// Reads and verifies the content.
    ///
    /// # Errors
    /// See [`PeerError`].
    pub fn decode(content: &[u8; PUT_END_BYTES], crc: u32) -> Result<Self, PeerError> {
        super::verify(content, crc)?;
        let [commit, condition, there, _, ttl @ ..] = *content;
        Ok(PutEnd {
            commit: commit == 1,
            condition: Condition::of(condition)?,
            ttl_ms: (there == 1).then_some(u64::from_le_bytes(ttl)),
        })
    }
}
