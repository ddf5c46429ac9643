//! The bytes of a log segment. All integers are little-endian.
//!
//! ```text
//! segment  = header(128) batch* zeros            preallocated with zeros, never written twice
//! header   = "KVRLOG\0\1" number:8 seq:8 previous:17 purged:17 committed:17 zeros crc:4
//! batch    = crc:4 body_len:4 seq:8 records:4 zeros:11 0xA5 | record* | 0x5A
//! record   = len:4 crc:4 term:8 index:8 kind:1 zeros:3 | payload
//! ```
//!
//! The last byte of the magic is the format, and the checksum of a header keeps its place in every format.
//!
//! Invariants. A batch is written in one piece and synced before the next batch is written, so only the last
//! one can be torn. Nothing is overwritten: truncation is a record. Batch numbers have no gaps.

use bytes::Bytes;

use crate::codec::{self, Kind};
use crate::types::{LogEntry, LogId};

pub(crate) const SEGMENT_HEADER: usize = 128;
pub(crate) const BATCH_HEADER: usize = 32;
pub(crate) const BATCH_TRAILER: usize = 1;
pub(crate) const RECORD_HEADER: usize = 28;
const MAGIC: &[u8; 8] = b"KVRLOG\0\x01";
/// The last byte of the magic.
pub(crate) const FORMAT: u8 = MAGIC[7];
/// Last byte of a batch header and of a batch: not zero, so that a batch cut short anywhere shows it.
const HEAD_MARK: u8 = 0xA5;
const TAIL_MARK: u8 = 0x5A;
/// What a disk writes in one piece.
const SECTOR: usize = 512;

const TRUNCATE: u8 = 16;
const TRUNCATE_ALL: u8 = 17;
const COMMITTED: u8 = 18;
const PURGED: u8 = 19;

/// One step of the log's history.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Record {
    /// The entry that follows the last one.
    Entry { id: LogId, kind: Kind, payload: Bytes },
    /// Everything after this entry is void.
    Truncate(Option<LogId>),
    /// Entries up to this one are known to be committed.
    Committed(LogId),
    /// Entries up to this one are no longer needed.
    Purged(LogId),
}

/// What a segment's header says of the log before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SegmentHeader {
    pub number: u64,
    /// Number of the segment's first batch.
    pub first_seq: u64,
    pub previous: Option<LogId>,
    pub purged: Option<LogId>,
    pub committed: Option<LogId>,
}

fn put_id(out: &mut [u8], id: Option<LogId>) {
    if let Some(id) = id {
        out[0] = 1;
        out[1..9].copy_from_slice(&id.leader_id.term.to_le_bytes());
        out[9..17].copy_from_slice(&id.index.to_le_bytes());
    }
}

fn get_id(from: &[u8]) -> Option<LogId> {
    (from[0] == 1).then(|| LogId::new_term_index(u64_at(from, 1), u64_at(from, 9)))
}

fn u32_at(from: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&from[at..at + 4]);
    u32::from_le_bytes(bytes)
}

fn u64_at(from: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&from[at..at + 8]);
    u64::from_le_bytes(bytes)
}

impl SegmentHeader {
    pub(crate) fn encode(&self) -> [u8; SEGMENT_HEADER] {
        let mut out = [0; SEGMENT_HEADER];
        out[..8].copy_from_slice(MAGIC);
        out[8..16].copy_from_slice(&self.number.to_le_bytes());
        out[16..24].copy_from_slice(&self.first_seq.to_le_bytes());
        put_id(&mut out[24..41], self.previous);
        put_id(&mut out[41..58], self.purged);
        put_id(&mut out[58..75], self.committed);
        let crc = crc32c::crc32c(&out[..SEGMENT_HEADER - 4]);
        out[SEGMENT_HEADER - 4..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub(crate) fn decode(from: &[u8]) -> Option<SegmentHeader> {
        let from = from.get(..SEGMENT_HEADER)?;
        if &from[..8] != MAGIC || u32_at(from, SEGMENT_HEADER - 4) != crc32c::crc32c(&from[..SEGMENT_HEADER - 4]) {
            return None;
        }
        Some(SegmentHeader {
            number: u64_at(from, 8),
            first_seq: u64_at(from, 16),
            previous: get_id(&from[24..41]),
            purged: get_id(&from[41..58]),
            committed: get_id(&from[58..75]),
        })
    }
}

/// The format of a whole header that this build does not read.
pub(crate) fn newer_format(from: &[u8]) -> Option<u8> {
    let from = from.get(..SEGMENT_HEADER)?;
    let whole = u32_at(from, SEGMENT_HEADER - 4) == crc32c::crc32c(&from[..SEGMENT_HEADER - 4]);
    (whole && from[..7] == MAGIC[..7] && from[7] > FORMAT).then_some(from[7])
}

/// Bytes of a record with a payload of `len` bytes.
pub(crate) fn record_len(len: usize) -> usize {
    RECORD_HEADER + len
}

/// Builds one batch.
pub(crate) struct BatchBuilder {
    bytes: Vec<u8>,
    records: u32,
}

impl BatchBuilder {
    pub(crate) fn new() -> Self {
        BatchBuilder {
            bytes: vec![0; BATCH_HEADER],
            records: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Bytes of the batch if it were finished now.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() + BATCH_TRAILER
    }

    /// Adds an entry; returns the offset of its record in the batch and the record's length.
    pub(crate) fn entry(&mut self, entry: &LogEntry) -> (usize, usize) {
        let (kind, payload) = codec::encode_payload(entry);
        let at = self.bytes.len();
        self.push(entry.log_id, kind as u8, &payload);
        (at, record_len(payload.len()))
    }

    pub(crate) fn truncate(&mut self, after: Option<LogId>) {
        match after {
            Some(id) => self.push(id, TRUNCATE, &[]),
            None => self.push(LogId::new_term_index(0, 0), TRUNCATE_ALL, &[]),
        }
    }

    pub(crate) fn committed(&mut self, id: LogId) {
        self.push(id, COMMITTED, &[]);
    }

    pub(crate) fn purged(&mut self, id: LogId) {
        self.push(id, PURGED, &[]);
    }

    fn push(&mut self, id: LogId, kind: u8, payload: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&id.leader_id.term.to_le_bytes());
        self.bytes.extend_from_slice(&id.index.to_le_bytes());
        self.bytes.extend_from_slice(&[kind, 0, 0, 0]);
        self.bytes.extend_from_slice(payload);
        let crc = record_crc(&self.bytes[start..]);
        self.bytes[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
        self.records += 1;
    }

    /// The finished batch as it goes to disk.
    pub(crate) fn finish(mut self, seq: u64) -> Vec<u8> {
        let body = (self.bytes.len() - BATCH_HEADER) as u32;
        self.bytes[4..8].copy_from_slice(&body.to_le_bytes());
        self.bytes[8..16].copy_from_slice(&seq.to_le_bytes());
        self.bytes[16..20].copy_from_slice(&self.records.to_le_bytes());
        self.bytes[BATCH_HEADER - 1] = HEAD_MARK;
        let crc = crc32c::crc32c(&self.bytes[4..BATCH_HEADER]);
        self.bytes[..4].copy_from_slice(&crc.to_le_bytes());
        self.bytes.push(TAIL_MARK);
        self.bytes
    }
}

fn record_crc(record: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&record[..4]), &record[8..])
}

/// A record and where it lies in the segment.
#[derive(Debug)]
pub(crate) struct Placed {
    pub record: Record,
    pub offset: usize,
    pub len: usize,
}

/// What lies at an offset of a segment.
#[derive(Debug)]
pub(crate) enum Found {
    /// Zeros to the end of the segment.
    End,
    /// A whole batch; the next one starts at `next`.
    Batch { records: Vec<Placed>, next: usize },
    /// A batch that was being written when the power went: never acknowledged.
    Torn,
    /// Something that a crash cannot explain.
    Corrupt { offset: usize, what: String },
}

/// Reads the batch at `at`, which must be number `seq`. `segment` is a whole segment file.
pub(crate) fn read_batch(segment: &Bytes, at: usize, seq: u64) -> Found {
    let rest = &segment[at..];
    if rest.iter().all(|b| *b == 0) {
        return Found::End;
    }
    match parse_batch(segment, at, seq) {
        Ok((records, next)) => Found::Batch { records, next },
        Err(bad) => classify(segment, at, seq, bad),
    }
}

/// Why bytes are not the batch they should be. `extent` is known when the header could be read.
struct Bad {
    offset: usize,
    what: String,
    extent: Option<usize>,
}

fn parse_batch(segment: &Bytes, at: usize, seq: u64) -> Result<(Vec<Placed>, usize), Bad> {
    let bad = |offset: usize, what: &str, extent| Bad {
        offset,
        what: what.to_string(),
        extent,
    };
    let Some(header) = batch_header(&segment[at..]) else {
        return Err(bad(at, "the header of a batch is damaged", None));
    };
    if header.seq != seq {
        let what = format!("batch {} where batch {seq} belongs", header.seq);
        return Err(Bad {
            offset: at,
            what,
            extent: Some(BATCH_HEADER),
        });
    }
    let body_end = at + BATCH_HEADER + header.body;
    let Some(tail) = segment.get(body_end) else {
        return Err(bad(at, "a batch is longer than its segment", Some(segment.len() - at)));
    };
    let extent = Some(BATCH_HEADER + header.body + BATCH_TRAILER);
    if *tail != TAIL_MARK {
        return Err(bad(body_end, "the end of a batch is missing", extent));
    }
    let mut records = Vec::new();
    let mut offset = at + BATCH_HEADER;
    while offset < body_end {
        let placed = parse_record(segment, offset, body_end).map_err(|what| bad(offset, what, extent))?;
        offset += placed.len;
        records.push(placed);
    }
    if records.len() != header.records as usize {
        return Err(bad(at, "a batch has another number of records than it says", extent));
    }
    Ok((records, body_end + BATCH_TRAILER))
}

struct BatchHeader {
    body: usize,
    seq: u64,
    records: u32,
}

fn batch_header(from: &[u8]) -> Option<BatchHeader> {
    let from = from.get(..BATCH_HEADER)?;
    if from[BATCH_HEADER - 1] != HEAD_MARK || u32_at(from, 0) != crc32c::crc32c(&from[4..]) {
        return None;
    }
    Some(BatchHeader {
        body: u32_at(from, 4) as usize,
        seq: u64_at(from, 8),
        records: u32_at(from, 16),
    })
}

fn parse_record(segment: &Bytes, at: usize, end: usize) -> Result<Placed, &'static str> {
    if end - at < RECORD_HEADER {
        return Err("a record is cut short");
    }
    let payload_len = u32_at(segment, at) as usize;
    if payload_len > end - at - RECORD_HEADER {
        return Err("a record is longer than its batch");
    }
    let len = record_len(payload_len);
    let record = decode_record(&segment.slice(at..at + len))?;
    Ok(Placed {
        record,
        offset: at,
        len,
    })
}

/// Reads one whole record, checking everything.
pub(crate) fn decode_record(bytes: &Bytes) -> Result<Record, &'static str> {
    if bytes.len() < RECORD_HEADER || u32_at(bytes, 0) as usize != bytes.len() - RECORD_HEADER {
        return Err("a record has another length than it says");
    }
    if u32_at(bytes, 4) != record_crc(bytes) {
        return Err("the checksum of a record is wrong");
    }
    let id = LogId::new_term_index(u64_at(bytes, 8), u64_at(bytes, 16));
    Ok(match bytes[24] {
        TRUNCATE => Record::Truncate(Some(id)),
        TRUNCATE_ALL => Record::Truncate(None),
        COMMITTED => Record::Committed(id),
        PURGED => Record::Purged(id),
        kind => {
            let kind = Kind::from_u8(kind).ok_or("a record is of an unknown kind")?;
            Record::Entry {
                id,
                kind,
                payload: bytes.slice(RECORD_HEADER..),
            }
        }
    })
}

/// Tells a torn write from damage. Unwritten bytes are zero, so a torn batch misses whole sectors or its end,
/// and nothing of a later batch exists. All else is damage to bytes that may have been acknowledged.
fn classify(segment: &Bytes, at: usize, seq: u64, bad: Bad) -> Found {
    let corrupt = |bad: Bad| Found::Corrupt {
        offset: bad.offset,
        what: bad.what,
    };
    let extent = bad.extent.unwrap_or(BATCH_HEADER).min(segment.len() - at);
    // Where the batch ends is known unless its header is lost, so that what looks like a header inside its
    // payloads is not taken for one.
    let after = if bad.extent.is_some() { at + extent } else { at };
    if let Some(later) = find_later(segment, after, seq) {
        let what = format!("{}, and batch {later} follows it", bad.what);
        return Found::Corrupt {
            offset: bad.offset,
            what,
        };
    }
    let bytes = &segment[at..at + extent];
    let cut_short = bytes.last() == Some(&0);
    if cut_short || misses_sector(bytes, at) {
        return Found::Torn;
    }
    corrupt(bad)
}

/// True when some sector's part of `bytes`, which lie at `at`, is all zero.
fn misses_sector(bytes: &[u8], at: usize) -> bool {
    let first = (SECTOR - at % SECTOR).min(bytes.len());
    let (head, rest) = bytes.split_at(first);
    let zero = |part: &[u8]| !part.is_empty() && part.iter().all(|b| *b == 0);
    zero(head) || rest.chunks(SECTOR).any(zero)
}

/// Finds the header of a batch after number `seq` at or behind `at`.
fn find_later(segment: &[u8], at: usize, seq: u64) -> Option<u64> {
    let mut from = at;
    while let Some(found) = segment[from..].iter().position(|b| *b == HEAD_MARK) {
        let end = from + found + 1;
        if end >= at + BATCH_HEADER {
            let start = end - BATCH_HEADER;
            if let Some(header) = batch_header(&segment[start..])
                && header.seq > seq
            {
                return Some(header.seq);
            }
        }
        from = end;
    }
    None
}
