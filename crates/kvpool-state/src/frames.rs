//! A snapshot's items as one stream: each behind its length (u32, little endian). Reader and writer are the caller's.
//!
//! Keeps: every length is checked before memory is taken for it; a stream cut anywhere is refused.

use crate::state::State;
use std::io::{self, Read, Write};

/// Largest item of a snapshot in bytes; a pool with 16384 ranges has about 1.2 MiB.
const MAX_ITEM_BYTES: usize = 8 << 20;

impl State {
    /// Writes the state as a snapshot. A caller that must not hold the state clones it first (cheap: records are shared).
    ///
    /// # Errors
    /// Whatever the writer says.
    pub fn write_snapshot(&self, out: &mut dyn Write) -> io::Result<()> {
        for item in self.snapshot_items() {
            let len = u32::try_from(item.len()).map_err(|_| invalid("an item is too large"))?;
            out.write_all(&len.to_le_bytes())?;
            out.write_all(&item)?;
        }
        Ok(())
    }

    /// Reads a snapshot back.
    ///
    /// # Errors
    /// Whatever the reader says; `InvalidData` when the stream is cut, damaged or from a newer build.
    pub fn read_snapshot(from: &mut dyn Read) -> io::Result<State> {
        let mut failed = None;
        let items = std::iter::from_fn(|| match read_item(from) {
            Ok(item) => item,
            Err(e) => {
                failed = Some(e);
                None
            }
        });
        let state = State::from_snapshot_items(items);
        match failed {
            Some(e) => Err(e),
            None => state.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e)),
        }
    }
}

fn read_item(from: &mut dyn Read) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0; 4];
    match from.read(&mut len[..1])? {
        0 => return Ok(None),
        _ => from.read_exact(&mut len[1..])?,
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_ITEM_BYTES {
        return Err(invalid("an item is too large"));
    }
    let mut item = vec![0; len];
    from.read_exact(&mut item)?;
    Ok(Some(item))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("failed to read or write a snapshot: {what}"),
    )
}
