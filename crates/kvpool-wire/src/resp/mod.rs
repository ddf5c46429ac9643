//! RESP2 and RESP3 as a server speaks them: an incremental parser of requests and a writer of replies.
//!
//! Requests are arrays of bulk strings in both versions (`HELLO 3` changes replies only). Source: the Redis protocol
//! specification; limits and texts of protocol errors follow Redis 7. The value of SET is never buffered here: the parser
//! announces it with [`Step::Value`] and the shell moves the bytes.

mod reply;
mod request;

pub use reply::{Proto, ReplyWriter};
pub use request::{Args, ProtocolError, RequestParser, Step, parse_integer};

/// The most arguments a command may have.
pub const MAX_ARGS: usize = 1024;
/// The most bytes of arguments kept for one command; what exceeds it is skipped and marked ([`Args::was_skipped`]).
pub const MAX_COMMAND_BYTES: usize = 64 * 1024;
