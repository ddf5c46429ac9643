//! Fields of a body: fixed integers, short byte strings, options. Reading past the end is an error, never a panic.

use super::PeerError;
use crate::lm::LmMeta;

pub(super) struct Writer<'a>(pub(super) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(super) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// A byte string behind a 16-bit length; what does not fit is cut, which no caller does (keys have 4 KiB at most).
    pub(super) fn bytes(&mut self, value: &[u8]) {
        let value = &value[..value.len().min(usize::from(u16::MAX))];
        self.u16(value.len() as u16);
        self.0.extend_from_slice(value);
    }

    pub(super) fn option(&mut self, value: Option<u64>) {
        self.u8(u8::from(value.is_some()));
        self.u64(value.unwrap_or(0));
    }

    pub(super) fn meta(&mut self, meta: Option<LmMeta>) {
        self.u8(u8::from(meta.is_some()));
        if let Some(meta) = meta {
            self.0.extend_from_slice(&meta.to_bytes());
        }
    }
}

pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], PeerError> {
        let (array, rest) = self.0.split_first_chunk().ok_or(PeerError::Short)?;
        self.0 = rest;
        Ok(*array)
    }

    pub(super) fn u8(&mut self) -> Result<u8, PeerError> {
        self.array::<1>().map(|[value]| value)
    }

    pub(super) fn u16(&mut self) -> Result<u16, PeerError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, PeerError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, PeerError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn flag(&mut self, name: &'static str) -> Result<bool, PeerError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(PeerError::Value(name)),
        }
    }

    pub(super) fn bytes(&mut self, max: usize) -> Result<&'a [u8], PeerError> {
        let len = usize::from(self.u16()?);
        if len > max {
            return Err(PeerError::TooLong {
                len: len as u64,
                max: max as u64,
            });
        }
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(PeerError::Short)?;
        self.0 = rest;
        Ok(bytes)
    }

    pub(super) fn text(&mut self, max: usize) -> Result<&'a str, PeerError> {
        std::str::from_utf8(self.bytes(max)?).map_err(|_| PeerError::Value("text"))
    }

    pub(super) fn option(&mut self) -> Result<Option<u64>, PeerError> {
        let there = self.flag("option")?;
        let value = self.u64()?;
        Ok(there.then_some(value))
    }

    pub(super) fn meta(&mut self) -> Result<Option<LmMeta>, PeerError> {
        if !self.flag("meta")? {
            return Ok(None);
        }
        self.array().map(|bytes| Some(LmMeta::from_bytes(&bytes)))
    }
}
