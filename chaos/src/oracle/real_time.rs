//! Linearizability of an append-only history: the log index orders all writes, so it is enough that no call
//! takes effect before something that had returned when it began.

use super::prefix::Prefix;

/// What had happened when a call began.
#[derive(Debug, Clone, Copy)]
pub struct Mark(Option<u64>);

/// The highest index that any returned call has shown.
#[derive(Default)]
pub struct RealTime {
    shown: Option<u64>,
}

impl RealTime {
    /// A call begins.
    pub fn begin(&self) -> Mark {
        Mark(self.shown)
    }

    /// A write that returned with this index.
    pub fn wrote(&mut self, mark: Mark, index: u64) -> Result<(), String> {
        self.shown = self.shown.max(Some(index));
        match mark.0 {
            Some(before) if index <= before => {
                Err(format!("a write took effect at {index}, after {before} had been shown"))
            }
            _ => Ok(()),
        }
    }

    /// A read that returned and showed the state up to `last`, being allowed to from `index` on.
    pub fn read(&mut self, mark: Mark, index: u64, last: u64, prefix: &Prefix) -> Result<(), String> {
        self.shown = self.shown.max(prefix.last_at_or_below(last));
        match mark.0 {
            Some(before) if last < before => Err(format!(
                "a read at {index} showed the state up to {last}, after {before} had been shown"
            )),
            _ => Ok(()),
        }
    }
}
