//! gRPC types of kvpool, generated from `proto/`, and what both ends of a call must agree on: [`meta`] (metadata keys and
//! reasons of refusals), [`limits`], [`Timing`] and [`JoinToken`].
//!
//! Invariant: one set of record types. Records are kvpool-state's own messages, mapped by `build.rs`; there is nothing to
//! convert.

pub mod limits;
pub mod meta;
mod timing;
mod token;

pub use timing::Timing;
pub use token::{JoinToken, TokenError};

/// The generated messages and services.
#[allow(clippy::large_enum_variant, clippy::doc_markdown)]
pub mod v1 {
    tonic::include_proto!("kvpool.v1");
}

/// `records.proto` without the mapping: only compared with the mapped types.
#[cfg(test)]
mod unmapped {
    include!(concat!(env!("OUT_DIR"), "/unmapped/kvpool.v1.rs"));
}

#[cfg(test)]
mod tests;
