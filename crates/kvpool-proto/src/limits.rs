//! Bounds that both ends of a connection set.

use std::time::Duration;

/// Largest message in bytes, both ways. The largest one is a relist; a slot map with 16384 ranges of 8 copies has about
/// 1.2 MiB.
pub const MAX_MESSAGE_BYTES: usize = 32 << 20;
/// Largest message of a shard session in bytes. The largest one is a report of 16384 ranges.
pub const MAX_SESSION_BYTES: usize = 1 << 20;
/// Largest message between members in bytes: kvpool-raft's own limit and room for the frame.
pub const MAX_MEMBER_BYTES: usize = (4 << 20) + (64 << 10);
/// Longest address, name or id in bytes.
pub const MAX_NAME_BYTES: usize = 253;

/// HTTP/2 pings go out this often on a connection, also on an idle one (fault O12).
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// A ping that is not answered within this closes the connection.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(4);
/// A watch says at least this often that it is alive.
pub const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
