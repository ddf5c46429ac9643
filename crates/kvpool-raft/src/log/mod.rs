//! The durable log (in the making).

/// Sizes of the log, in bytes. The defaults are for production; tests and the simulator use smaller ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogOptions {
    /// Bytes of a segment file, preallocated.
    pub segment_bytes: u64,
    /// Bytes of records written with one sync.
    pub batch_bytes: usize,
    /// Bytes of entries kept in memory for replication and apply.
    pub cache_bytes: usize,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions { segment_bytes: 8 << 20, batch_bytes: 2 << 20, cache_bytes: 16 << 20 }
    }
}

impl LogOptions {
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        Ok(())
    }
}
