//! Calls from outside to a member, and streams from a member to the outside, over the simulated network.
//!
//! Invariant: what runs at the member runs at its place, so it dies and freezes with it; a caller never learns more than
//! what came back in time.

use std::future::Future;
use std::time::Duration;

use futures::channel::{mpsc, oneshot};
use futures::{SinkExt, StreamExt};
use kvpool_raft::{AsyncRuntime, MemberId};

use crate::cluster::Cluster;
use crate::machine::Model;
use crate::net::{Net, Node};
use crate::runtime::Sim;
use crate::world::{self, Place};

/// Places of callers begin here; members are below.
pub const CALLERS: Place = 100;

/// Batches on their way in a stream.
const IN_FLIGHT: usize = 4;

/// Lets `work` run at a member and brings its answer back; `None` when nothing came back in time, for whatever reason.
pub async fn call<M, T, F>(
    cluster: &Cluster<M>,
    from: Place,
    to: MemberId,
    patience: Duration,
    work: impl FnOnce(Node, M::View) -> F + Send + 'static,
) -> Option<T>
where
    M: Model,
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let (tx, rx) = oneshot::channel();
    if let Some(delay) = cluster.net.trip(from, to) {
        let cluster = cluster.clone();
        world::spawn_at(world::OUTSIDE, async move {
            world::sleep(delay).await;
            let Some((node, view, _)) = cluster.member(to) else {
                return;
            };
            world::spawn_at(to, async move {
                let out = work(node, view).await;
                reply(&cluster.net, to, from, tx, out);
            });
        });
    }
    let until = world::local_now().saturating_add(patience.as_nanos() as u64);
    match Sim::timeout(patience, rx).await {
        Ok(Ok(out)) => Some(out),
        // Lost on the way, or the member died: nothing comes back until the time is up.
        Ok(Err(_)) => {
            world::sleep_until(until).await;
            None
        }
        Err(_) => None,
    }
}

fn reply<T: Send + 'static>(net: &Net, from: Place, to: Place, tx: oneshot::Sender<T>, out: T) {
    let Some(delay) = net.trip(from, to) else { return };
    world::spawn_at(world::OUTSIDE, async move {
        world::sleep(delay).await;
        let _ = tx.send(out);
    });
}

/// The member's end of a stream, and the reader's. In order, as over one connection; it breaks now and then.
pub fn stream<T: Send + 'static>() -> (mpsc::Sender<T>, mpsc::Receiver<T>) {
    let (near, mut taken) = mpsc::channel::<T>(IN_FLIGHT);
    let (mut given, far) = mpsc::channel::<T>(IN_FLIGHT);
    world::spawn_at(world::OUTSIDE, async move {
        while let Some(batch) = taken.next().await {
            let millis = if world::chance(20) { 300 } else { 3 };
            world::sleep(Duration::from_micros(50 + world::random(millis * 1_000))).await;
            if world::chance(5) || given.send(batch).await.is_err() {
                return;
            }
        }
    });
    (near, far)
}
