//! The gRPC services of a member. Each checks its input before it costs anything, and bounds what it keeps.

mod cluster;
mod forward;
mod members;
mod nodes;
mod watch;

pub(crate) use cluster::ClusterService;
pub(crate) use members::MembersService;
pub(crate) use nodes::NodesService;

use crate::core::refuse;
use kvpool_net::{Caller, Role};
use kvpool_proto::limits::MAX_NAME_BYTES;
use kvpool_proto::meta::{Reason, Refused};

fn check_name(what: &str, name: &str) -> Result<(), Refused> {
    if (1..=MAX_NAME_BYTES).contains(&name.len()) {
        return Ok(());
    }
    Err(Refused::new(
        Reason::Invalid,
        format!("{what} must have 1 to {MAX_NAME_BYTES} bytes"),
    ))
}

/// Changes are for people, and for members that forward them.
fn may_change<T>(request: &tonic::Request<T>) -> Result<(), tonic::Status> {
    let caller = Caller::of(request.extensions());
    if caller.is(Role::Person) || caller.is(Role::Member) {
        return Ok(());
    }
    let text = format!("{} may not change anything: that is for persons", caller.words());
    Err(refuse(Refused::new(Reason::NotAllowed, text)))
}
