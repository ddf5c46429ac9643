//! Connections to members. A connection that failed is dropped and made anew (fault O12).

use kvpool_net::Trust;
use kvpool_proto::{JoinToken, Timing};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};

/// Most connections kept; leader hints may name members that were not configured.
const MAX_CHANNELS: usize = 16;

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
    trust: Trust,
    timing: Timing,
    open: Mutex<BTreeMap<String, Channel>>,
}

impl Channels {
    pub(crate) fn new(token: JoinToken, trust: Trust, timing: Timing) -> Self {
        Channels {
            token,
            trust,
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
                let channel = self.trust.endpoint(address, self.timing)?.connect_lazy();
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
