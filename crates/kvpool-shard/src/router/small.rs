//! DEL, TTL, EXPIRE: requests without bytes. They go to the slot's primary; when it does not answer, to the next copy.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kvpool_state::slot_of;
use kvpool_wire::peer::{Reply, Request, Role};
use tokio::time::Instant;

use super::Router;
use crate::clock::to_ms;
use crate::ops::{FIRST_COPY_DEADLINE, OP_DEADLINE, Op, Ttl};
use crate::peer::gaps::Gap;
use crate::peer::{Asked, Peer};
use crate::routing::Holder;
use crate::ticks::until;

/// Time for one copy's answer, which may include its own word with the others.
const ATTEMPT: Duration = OP_DEADLINE.checked_div(2).expect("two is not zero");

impl Router {
    /// Removes a block from every copy; true if it was there.
    pub async fn del(self: &Arc<Self>, op: &Op, key: &Bytes) -> bool {
        for target in self.small_targets(op, key) {
            match target {
                Holder::Me => return self.del_here(op, key).await,
                Holder::Peer(peer) => {
                    let request = Request::Del {
                        key,
                        role: Role::Primary,
                        write_id: 0,
                    };
                    if let Some(yes) = done(&peer, self.attempt(op), request).await {
                        return yes;
                    }
                }
            }
        }
        false
    }

    /// Time left of a block.
    pub async fn ttl(self: &Arc<Self>, op: &Op, key: &Bytes) -> Ttl {
        for target in self.small_targets(op, key) {
            match target {
                Holder::Me => return self.ttl_here(key),
                Holder::Peer(peer) => {
                    let Ok(conn) = peer.call(self.attempt(op), Request::Ttl { key }).await else {
                        continue;
                    };
                    let Ok(Reply::Ttl { left }) = conn.last_reply() else {
                        continue;
                    };
                    conn.release();
                    return ttl_of(left);
                }
            }
        }
        Ttl::NoKey
    }

    /// Sets the time to live of a block at every copy; false if it is not there.
    pub async fn expire(self: &Arc<Self>, op: &Op, key: &Bytes, ttl: Duration) -> bool {
        let ttl_ms = to_ms(ttl);
        for target in self.small_targets(op, key) {
            match target {
                Holder::Me => return self.expire_here(op, key, ttl_ms).await,
                Holder::Peer(peer) => {
                    let request = Request::Expire {
                        key,
                        role: Role::Primary,
                        ttl_ms,
                    };
                    if let Some(yes) = done(&peer, self.attempt(op), request).await {
                        return yes;
                    }
                }
            }
        }
        false
    }

    fn small_targets(&self, op: &Op, key: &[u8]) -> Vec<Holder> {
        if op.generation == self.routing().map.generation {
            self.write_targets(key)
        } else {
            Vec::new()
        }
    }

    fn attempt(&self, op: &Op) -> Asked {
        self.asked(op, (Instant::now() + ATTEMPT).min(op.started + OP_DEADLINE))
    }

    /// Removes the block here and tells the other copies: the part of the primary.
    pub(crate) async fn del_here(self: &Arc<Self>, op: &Op, key: &Bytes) -> bool {
        let Some(store) = self.store() else { return false };
        let write_id = self.ids().next();
        let there = store.remove(key, Some(write_id), self.now_ms());
        let gap = Gap {
            write_id,
            removal: true,
        };
        let request = Request::Del {
            key,
            role: Role::Replica,
            write_id,
        };
        self.tell_others(op, key, &request, Some(gap)).await;
        there
    }

    /// Removes the block under the id that the primary gave the removal. The store remembers it: an older write that
    /// comes later (a transfer under way) does not bring the block back.
    pub(crate) fn del_copy(&self, key: &[u8], write_id: u64) -> bool {
        self.ids().saw(write_id);
        self.store()
            .is_some_and(|store| store.remove(key, Some(write_id), self.now_ms()))
    }

    pub(crate) fn ttl_here(&self, key: &[u8]) -> Ttl {
        ttl_of(self.store().and_then(|store| store.ttl(key, self.now_ms())))
    }

    pub(crate) async fn expire_here(self: &Arc<Self>, op: &Op, key: &Bytes, ttl_ms: u64) -> bool {
        let there = self.expire_copy(key, ttl_ms);
        if there {
            let request = Request::Expire {
                key,
                role: Role::Replica,
                ttl_ms,
            };
            self.tell_others(op, key, &request, None).await;
        }
        there
    }

    pub(crate) fn expire_copy(&self, key: &[u8], ttl_ms: u64) -> bool {
        let now = self.now_ms();
        self.store()
            .is_some_and(|store| store.expire(key, Some(now.saturating_add(ttl_ms)), now))
    }

    /// Sends a request to every other copy and waits a moment for all of them. Who does not answer has a gap.
    async fn tell_others(self: &Arc<Self>, op: &Op, key: &Bytes, request: &Request<'_>, gap: Option<Gap>) {
        let others: Vec<Arc<Peer>> = {
            let routing = self.routing();
            let peers = routing.list(slot_of(key)).iter().filter_map(|copy| match &copy.holder {
                Holder::Peer(peer) => Some(Arc::clone(peer)),
                Holder::Me => None,
            });
            peers.collect()
        };
        let asked = self.asked(op, Instant::now() + FIRST_COPY_DEADLINE);
        let mut telling: FuturesUnordered<_> = others
            .iter()
            .map(|peer| {
                if let Some(gap) = gap {
                    peer.gaps.add(key, gap);
                }
                async move {
                    if peer.state() != crate::peer::BreakerState::Open
                        && let Ok(conn) = peer.call(asked, request.clone()).await
                    {
                        conn.release();
                        if let Some(gap) = gap {
                            peer.gaps.close(key, gap.write_id);
                        }
                    }
                }
            })
            .collect();
        let all = async { while telling.next().await.is_some() {} };
        // Each of them has this deadline itself; the timeout is for a connection that waits for its turn.
        let _ = until(Instant::now() + FIRST_COPY_DEADLINE * 2, all).await;
    }
}

async fn done(peer: &Arc<Peer>, asked: Asked, request: Request<'_>) -> Option<bool> {
    let conn = peer.call(asked, request).await.ok()?;
    let Ok(Reply::Done { yes }) = conn.last_reply() else {
        return None;
    };
    conn.release();
    Some(yes)
}

fn ttl_of(left: Option<Option<u64>>) -> Ttl {
    match left {
        None => Ttl::NoKey,
        Some(None) => Ttl::NoExpiry,
        Some(Some(ms)) => Ttl::Remaining(Duration::from_millis(ms)),
    }
}
