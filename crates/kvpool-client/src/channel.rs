//! Connections to members. A connection that failed is dropped and made anew (fault O12).

use kvpool_proto::{JoinToken, Timing, limits};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

/// Most connections kept; leader hints may name members that were not configured.
const MAX_CHANNELS: usize = 16;

/// Settings of every connection to a member: keepalive also when idle, bounded connecting.
///
/// # Errors
/// A sentence when the address is not `host:port`.
pub fn endpoint(address: &str, timing: Timing) -> Result<Endpoint, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| format!("failed to read the address {address:?}: {e}"))?;
    Ok(endpoint
        .connect_timeout(timing.attempt() / 2)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(limits::KEEPALIVE_INTERVAL)
        .keep_alive_timeout(limits::KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true))
}

/// Puts the join token into every call.
#[derive(Clone)]
pub(crate) struct AttachToken(JoinToken);

impl Interceptor for AttachToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        self.0.attach(request.metadata_mut());
        Ok(request)
    }
}

pub(crate) type Authenticated = InterceptedService<Channel, AttachToken>;

/// One connection per member.
pub(crate) struct Channels {
    token: JoinToken,
    timing: Timing,
    open: Mutex<BTreeMap<String, Channel>>,
}

impl Channels {
    pub(crate) fn new(token: JoinToken, timing: Timing) -> Self {
        Channels {
            token,
            timing,
            open: Mutex::new(BTreeMap::new()),
        }
    }

    /// The connection to a member; it is made by the first call.
    pub(crate) fn get(&self, address: &str) -> Result<Authenticated, String> {
        let mut open = self.open.lock();
        let channel = match open.get(address) {
            Some(channel) => channel.clone(),
            None => {
                let channel = endpoint(address, self.timing)?.connect_lazy();
                if open.len() >= MAX_CHANNELS {
                    open.pop_first();
                }
                open.insert(address.to_owned(), channel.clone());
                channel
            }
        };
        Ok(InterceptedService::new(channel, AttachToken(self.token.clone())))
    }

    /// The next call makes a new connection.
    pub(crate) fn forget(&self, address: &str) {
        self.open.lock().remove(address);
    }
}
