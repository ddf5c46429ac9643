//! The bytes of a hit: all there (local), or coming piece by piece.

use bytes::Bytes;
use kvpool_store::{BlockPiece, BlockRef};

/// Every copy failed in mid-body; the reply cannot be finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("failed to finish a block: every copy of it stopped")]
pub struct BodyLost;

/// Body of a hit, in order.
#[derive(Debug)]
pub struct Body {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Local { block: BlockRef, next: usize },
}

/// Some bytes of a body, verified (R5).
#[derive(Clone)]
pub enum Piece {
    /// In the local store's memory.
    Block(BlockPiece),
    /// Bytes of their own.
    Owned(Bytes),
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        match self {
            Piece::Block(piece) => piece.as_ref(),
            Piece::Owned(bytes) => bytes,
        }
    }
}

impl Body {
    pub(crate) fn local(block: BlockRef) -> Self {
        Body { kind: Kind::Local { block, next: 0 } }
    }

    /// Bytes of the whole value.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // length zero is a value like any other here
    pub fn len(&self) -> u64 {
        match &self.kind {
            Kind::Local { block, .. } => block.len(),
        }
    }

    /// The block itself when all of it is in the local store.
    #[must_use]
    pub fn as_local(&self) -> Option<&BlockRef> {
        match &self.kind {
            Kind::Local { block, .. } => Some(block),
        }
    }

    /// The next bytes, `None` after the last.
    ///
    /// # Errors
    /// [`BodyLost`] when no copy can go on.
    pub async fn next(&mut self) -> Result<Option<Piece>, BodyLost> {
        match &mut self.kind {
            Kind::Local { block, next } => {
                let piece = block.piece(*next);
                *next += 1;
                Ok(piece.map(Piece::Block))
            }
        }
    }
}
