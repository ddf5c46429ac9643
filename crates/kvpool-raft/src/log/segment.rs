//! Segment files: their names, creation, and the replay that rebuilds the log from them at start.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::LogOptions;
use super::format::{self, Found, Placed, Record, SEGMENT_HEADER, SegmentHeader, read_batch};
use super::index::{Index, Misfit, Place};
use crate::disk::{Disk, DiskFile};
use crate::error::{Damage, LogError};

const SUFFIX: &str = ".seg";
pub(crate) const TMP_SUFFIX: &str = ".tmp";
/// No segment is ever larger; a longer file is not ours.
pub(crate) const MAX_SEGMENT_BYTES: u64 = 256 << 20;

/// The file name of segment `number`.
pub(crate) fn segment_name(number: u64) -> String {
    format!("{number:010}{SUFFIX}")
}

fn segment_number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SUFFIX)?;
    (digits.len() == 10).then(|| digits.parse().ok())?
}

/// The numbers of the segments among `names`, in order.
pub(crate) fn segment_numbers(names: &[String]) -> Vec<u64> {
    let mut numbers: Vec<u64> = names.iter().filter_map(|name| segment_number(name)).collect();
    numbers.sort_unstable();
    numbers
}

/// An open segment.
#[derive(Debug)]
pub(crate) struct Segment<F> {
    pub number: u64,
    pub file: Arc<F>,
    /// The greatest entry index ever written to it.
    pub max_index: Option<u64>,
}

/// Creates a segment, durable in content and name before it is used.
pub(crate) fn create_segment<D: Disk>(
    disk: &D,
    header: &SegmentHeader,
    options: &LogOptions,
) -> Result<Segment<D::File>, LogError> {
    let name = segment_name(header.number);
    let tmp = format!("{name}{TMP_SUFFIX}");
    let file = disk.create(&tmp).map_err(LogError::io(format!("create {name}")))?;
    file.preallocate(options.segment_bytes)
        .map_err(LogError::io(format!("allocate {name}")))?;
    file.write_at(&header.encode(), 0)
        .map_err(LogError::io(format!("write {name}")))?;
    file.sync().map_err(LogError::io(format!("sync {name}")))?;
    disk.rename(&tmp, &name)
        .map_err(LogError::io(format!("rename {name}")))?;
    disk.sync_dir().map_err(LogError::io("sync the data directory"))?;
    Ok(Segment {
        number: header.number,
        file: Arc::new(file),
        max_index: None,
    })
}

/// The log as its files tell it.
pub(crate) struct Replayed<F> {
    pub index: Index,
    pub segments: VecDeque<Segment<F>>,
    /// Where the next batch goes in the last segment.
    pub at: u64,
    /// Number of the next batch.
    pub seq: u64,
    /// A batch at the end that the power cut: from this offset of the last segment to that one.
    pub torn: Option<(u64, u64)>,
}

/// Reads all segments and cuts a torn batch off the end.
pub(crate) fn replay<D: Disk>(disk: &D, options: &LogOptions) -> Result<Replayed<D::File>, LogError> {
    let mut log = scan(disk, options)?;
    if let Some((from, to)) = log.torn.take()
        && let Some(last) = log.segments.back()
    {
        let name = segment_name(last.number);
        tracing::warn!(file = name, offset = from, "cut a torn batch off the log");
        erase(&*last.file, from, to).map_err(LogError::io(format!("cut {name}")))?;
    }
    Ok(log)
}

/// Reads all segments and changes nothing. A torn batch at the end is told; anything else that is wrong is an error.
pub(crate) fn scan<D: Disk>(disk: &D, options: &LogOptions) -> Result<Replayed<D::File>, LogError> {
    let names = disk.list().map_err(LogError::io("list the data directory"))?;
    let numbers = segment_numbers(&names);
    let Some(last) = numbers.last().copied() else {
        return Err(Damage::Missing("the log".to_string()).into());
    };
    let mut log = Replayed {
        index: Index::new(options.cache_bytes),
        segments: VecDeque::new(),
        at: 0,
        seq: 0,
        torn: None,
    };
    for number in &numbers {
        if let Some(previous) = log.segments.back()
            && previous.number + 1 != *number
        {
            return Err(Damage::Missing(segment_name(previous.number + 1)).into());
        }
        replay_segment(disk, options, &mut log, *number, *number == last)?;
    }
    if let Some(index) = log.index.hole() {
        return Err(Damage::Missing(format!("the segment with entry {index}")).into());
    }
    // The mark is written behind the entries it covers, so a mark beyond the end means lost entries.
    if log.index.committed.map(|id| id.index) > log.index.last.map(|id| id.index) {
        let what = "committed entries are missing at the end of the log".to_string();
        return Err(Damage::Corrupt {
            file: segment_name(last),
            offset: log.at,
            what,
        }
        .into());
    }
    Ok(log)
}

fn read_segment<D: Disk>(disk: &D, name: &str, options: &LogOptions) -> Result<(D::File, Bytes), LogError> {
    let read = || LogError::io(format!("read {name}"));
    let file = disk.open(name).map_err(read())?;
    let len = file.len().map_err(read())?;
    if len > MAX_SEGMENT_BYTES {
        let what = format!("the file has {len} bytes, no segment has more than {MAX_SEGMENT_BYTES}");
        return Err(Damage::Corrupt {
            file: name.to_string(),
            offset: 0,
            what,
        }
        .into());
    }
    // A file cut short reads as zeros, as it was before the lost bytes were written.
    let mut bytes = vec![0; len.max(options.segment_bytes) as usize];
    let got = file.read_at(&mut bytes[..len as usize], 0).map_err(read())?;
    if got as u64 != len {
        return Err(read()(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok((file, Bytes::from(bytes)))
}

fn replay_segment<D: Disk>(
    disk: &D,
    options: &LogOptions,
    log: &mut Replayed<D::File>,
    number: u64,
    is_last: bool,
) -> Result<(), LogError> {
    let name = segment_name(number);
    let corrupt = |offset: usize, what: String| Damage::Corrupt {
        file: name.clone(),
        offset: offset as u64,
        what,
    };
    let (file, bytes) = read_segment(disk, &name, options)?;
    if let Some(found) = format::newer_format(&bytes) {
        return Err(Damage::TooNew {
            file: name.clone(),
            found: found.into(),
            known: format::FORMAT.into(),
        }
        .into());
    }
    let header = SegmentHeader::decode(&bytes)
        .filter(|header| header.number == number)
        .ok_or_else(|| corrupt(0, "the header of the segment is damaged".to_string()))?;
    if log.segments.is_empty() {
        log.seq = header.first_seq;
        log.index.start_from(header.previous, header.purged, header.committed);
    } else if header.first_seq != log.seq || header.previous != log.index.last {
        return Err(corrupt(0, "the segment before it lost its end".to_string()).into());
    }
    let mut segment = Segment {
        number,
        file: Arc::new(file),
        max_index: None,
    };
    let mut at = SEGMENT_HEADER;
    loop {
        match read_batch(&bytes, at, log.seq) {
            Found::End => break,
            Found::Batch { records, next } => {
                for placed in records {
                    let offset = placed.offset;
                    let misfit = |e: Misfit| corrupt(offset, e.to_string());
                    replay_record(&mut log.index, &mut segment, placed).map_err(misfit)?;
                }
                at = next;
                log.seq += 1;
            }
            Found::Torn if is_last => {
                let end = bytes.iter().rposition(|b| *b != 0).map_or(at, |last| last + 1);
                log.torn = Some((at as u64, end as u64));
                break;
            }
            Found::Torn => return Err(corrupt(at, "a batch is torn although a segment follows".to_string()).into()),
            Found::Corrupt { offset, what } => return Err(corrupt(offset, what).into()),
        }
    }
    log.at = at as u64;
    log.segments.push_back(segment);
    Ok(())
}

fn replay_record<F>(index: &mut Index, segment: &mut Segment<F>, placed: Placed) -> Result<(), Misfit> {
    match placed.record {
        Record::Entry { id, .. } => {
            let place = Place {
                segment: segment.number,
                offset: placed.offset as u64,
                len: placed.len as u32,
            };
            index.recovered(id, place)?;
            segment.max_index = segment.max_index.max(Some(id.index));
        }
        Record::Truncate(after) => index.replay_truncate(after)?,
        Record::Committed(id) => index.committed = index.committed.max(Some(id)),
        Record::Purged(id) => index.purge(id),
    }
    Ok(())
}

/// Writes zeros to the end of what was ever written, so that the next replay sees a clean end. A crash in between
/// leaves less of the torn batch, which is torn again.
fn erase<F: DiskFile>(file: &F, from: u64, to: u64) -> io::Result<()> {
    if to > from {
        file.write_at(&vec![0; (to - from) as usize], from)?;
        file.sync()?;
    }
    Ok(())
}
