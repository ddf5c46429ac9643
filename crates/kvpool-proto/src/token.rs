//! The join token: a shared secret in the metadata of every call. Never logged, never in an error.

use crate::meta;
use std::fmt;
use std::hint::black_box;
use std::str::FromStr;
use std::sync::Arc;
use tonic::metadata::{BinaryMetadataValue, MetadataMap};

const MAX_TOKEN_BYTES: usize = 256;

/// A shared secret of 0 to 256 bytes. An empty one is a secret that everybody knows (`kvpool dev`).
#[derive(Clone, Default)]
pub struct JoinToken(Arc<str>);

/// A token that can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to accept the join token: it has {0} bytes, at most {MAX_TOKEN_BYTES} are allowed")]
pub struct TokenError(usize);

impl FromStr for JoinToken {
    type Err = TokenError;

    fn from_str(s: &str) -> Result<Self, TokenError> {
        if s.len() > MAX_TOKEN_BYTES {
            Err(TokenError(s.len()))
        } else {
            Ok(JoinToken(s.into()))
        }
    }
}

impl JoinToken {
    /// Puts the token into a call's metadata, marked as sensitive.
    pub fn attach(&self, metadata: &mut MetadataMap) {
        let mut value = BinaryMetadataValue::from_bytes(self.0.as_bytes());
        value.set_sensitive(true);
        metadata.insert_bin(meta::TOKEN, value);
    }

    /// True when the metadata carries this token.
    #[must_use]
    pub fn is_in(&self, metadata: &MetadataMap) -> bool {
        let sent = metadata.get_bin(meta::TOKEN).and_then(|v| v.to_bytes().ok());
        sent.is_some_and(|sent| self.equals(&sent))
    }

    /// Compares in a time that does not depend on where the two differ.
    #[must_use]
    pub fn equals(&self, other: &[u8]) -> bool {
        let mine = self.0.as_bytes();
        let at = |bytes: &[u8], i: usize| bytes.get(i).copied().unwrap_or(0);
        let mut differs = u8::from(mine.len() != other.len());
        for i in 0..MAX_TOKEN_BYTES {
            differs = black_box(differs | (at(mine, i) ^ at(other, i)));
        }
        differs == 0
    }

    /// For the peer protocol's hello and for handing it to a child process.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinToken(***)")
    }
}
