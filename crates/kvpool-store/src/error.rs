//! Why the store could not be made or did not take a write.

/// Failure to create a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The limit has no room for the fixed tables and a few blocks.
    #[error("failed to create a store of {limit} bytes: at least {min} are needed")]
    LimitTooSmall {
        /// The limit asked for, in bytes.
        limit: u64,
        /// The least limit, in bytes.
        min: u64,
    },
    /// The kernel gave no address space.
    #[error("failed to map {limit} bytes for the arena")]
    Map {
        /// The limit asked for, in bytes.
        limit: u64,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
}

/// Why a write was not taken. Everything but `Incomplete` is known before a body byte is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The value is longer than the store takes at all.
    #[error("failed to admit a block of {len} bytes: at most {max} are taken")]
    Size {
        /// Bytes of the value.
        len: u64,
        /// The most, in bytes.
        max: u64,
    },
    /// The key is longer than [`crate::MAX_KEY_BYTES`].
    #[error("failed to admit a key of {len} bytes")]
    KeyTooLong {
        /// Bytes of the key.
        len: usize,
    },
    /// The metadata is longer than [`crate::MAX_META_BYTES`].
    #[error("failed to admit {len} bytes of block metadata")]
    MetaTooLong {
        /// Bytes of the metadata.
        len: usize,
    },
    /// No room now: unfinished writes, leases or readers hold it. Metric word `shed`.
    #[error("failed to admit a block: no room can be made now")]
    Shed,
    /// Condition `IfAbsent`, and the key is there.
    #[error("failed to write: the key exists")]
    Exists,
    /// Condition `IfPresent`, and the key is not there.
    #[error("failed to write: the key does not exist")]
    NotFound,
    /// `commit` before the last byte.
    #[error("failed to commit: {missing} bytes are missing")]
    Incomplete {
        /// Bytes not filled yet.
        missing: u64,
    },
}

impl Refused {
    /// The word for logs and metric labels.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Size { .. } => "size",
            Self::KeyTooLong { .. } => "key",
            Self::MetaTooLong { .. } => "meta",
            Self::Shed => "shed",
            Self::Exists => "exists",
            Self::NotFound => "not_found",
            Self::Incomplete { .. } => "incomplete",
        }
    }
}
