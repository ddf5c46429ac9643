//! Trust at the door: the one place that says how gRPC listeners and clients are secured, and who is on the other side.
//!
//! Invariants:
//! - There are two ways: plain (loopback, or a network that somebody vouched for) and mutual TLS 1.3/1.2 with a private CA. There is
//!   no way in between: a listener with TLS refuses a caller without a certificate of its CA.
//! - Identity is never an address. A certificate names a role and a name in it (`shard-1.shard.kvpool`); a client checks that it
//!   reached a *member*, whatever the address was, and a member checks who called.
//! - Keys and the join token are never written to a log: [`Trust`] shows neither.

mod names;
mod trust;

pub use names::{Caller, Role, names_for};
pub use trust::{TlsFiles, Trust, TrustError};

#[cfg(test)]
mod tests;
