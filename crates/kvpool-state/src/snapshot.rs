//! The state as a sequence of small items, so that a snapshot streams to and from a file without one huge message. The shell
//! frames each item by its length; the last item counts the others, so that a cut sequence is noticed.

use crate::command::{DecodeError, Response};
use crate::records::{
    ClusterRecord, Decision, MemberRecord, NodeRecord, PoolRecord, RequestId, ShardRecord, SlotRange,
};
use crate::state::{Pool, State};
use crate::table::SlotTable;
use prost::Message;
use std::sync::Arc;

/// Format of the items that this build writes and reads.
const FORMAT: u32 = 1;

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct Header {
    #[prost(uint32, tag = "1")]
    format: u32,
    #[prost(uint64, tag = "2")]
    revision: u64,
    #[prost(uint64, tag = "3")]
    log_time_ms: u64,
    #[prost(uint32, tag = "4")]
    next_shard_number: u32,
    #[prost(uint64, tag = "5")]
    request_floor_ms: u64,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct PoolItem {
    #[prost(message, optional, tag = "1")]
    record: Option<PoolRecord>,
    #[prost(uint64, tag = "2")]
    epoch: u64,
    #[prost(message, repeated, tag = "3")]
    ranges: Vec<SlotRange>,
    #[prost(btree_map = "uint32, uint64", tag = "4")]
    dropped_at: std::collections::BTreeMap<u32, u64>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct RequestItem {
    #[prost(message, optional, tag = "1")]
    id: Option<RequestId>,
    #[prost(message, optional, tag = "2")]
    response: Option<Response>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct Item {
    #[prost(oneof = "Body", tags = "1, 2, 3, 4, 5, 6, 7, 8, 110")]
    body: Option<Body>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof)]
enum Body {
    #[prost(message, tag = "1")]
    Header(Header),
    #[prost(message, tag = "2")]
    Cluster(ClusterRecord),
    #[prost(message, tag = "3")]
    Node(NodeRecord),
    #[prost(message, tag = "4")]
    Shard(ShardRecord),
    #[prost(message, tag = "5")]
    Pool(PoolItem),
    #[prost(message, tag = "6")]
    Request(RequestItem),
    #[prost(message, tag = "7")]
    Decision(Decision),
    /// Number of items before this one.
    #[prost(uint64, tag = "8")]
    End(u64),
    #[prost(message, tag = "110")]
    Member(MemberRecord),
}

fn encode(body: Body) -> Vec<u8> {
    Item { body: Some(body) }.encode_to_vec()
}

fn malformed(what: &str) -> DecodeError {
    DecodeError::Malformed(format!("snapshot: {what}"))
}

impl State {
    /// The items of a snapshot, in order. The state is not copied; a caller that must not hold it clones it first (cheap).
    pub fn snapshot_items(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        let header = Body::Header(Header {
            format: FORMAT,
            revision: self.revision,
            log_time_ms: self.log_time_ms,
            next_shard_number: self.next_shard_number,
            request_floor_ms: self.request_floor_ms,
        });
        let cluster = self.cluster.iter().map(|c| Body::Cluster(c.as_ref().clone()));
        let nodes = self.nodes.values().map(|n| Body::Node(n.as_ref().clone()));
        let shards = self.shards.values().map(|s| Body::Shard(s.as_ref().clone()));
        let pools = self.pools.values().map(|p| {
            Body::Pool(PoolItem {
                record: Some(p.record.clone()),
                epoch: p.epoch,
                ranges: p.table.to_ranges(),
                dropped_at: p.dropped_at.clone(),
            })
        });
        let requests = self.requests.iter().map(|(id, r)| {
            Body::Request(RequestItem {
                id: Some(id.clone()),
                response: Some(r.clone()),
            })
        });
        let decisions = self.decisions.iter().map(|d| Body::Decision(d.as_ref().clone()));
        let members = self.members.values().map(|m| Body::Member(m.as_ref().clone()));
        let count = 1
            + self.cluster.iter().len()
            + self.nodes.len()
            + self.shards.len()
            + self.pools.len()
            + self.requests.len()
            + self.decisions.len()
            + self.members.len();
        std::iter::once(header)
            .chain(cluster)
            .chain(nodes)
            .chain(shards)
            .chain(pools)
            .chain(requests)
            .chain(decisions)
            .chain(members)
            .chain(std::iter::once(Body::End(count as u64)))
            .map(encode)
    }

    /// Builds a state from the items of a snapshot.
    ///
    /// # Errors
    /// [`DecodeError`] when an item is damaged, missing, out of place or from a newer build.
    pub fn from_snapshot_items<B: AsRef<[u8]>>(items: impl IntoIterator<Item = B>) -> Result<State, DecodeError> {
        let mut state = State::default();
        let mut complete = false;
        for (seen, item) in (0u64..).zip(items) {
            if complete {
                return Err(malformed("an item after the end"));
            }
            let item = Item::decode(item.as_ref()).map_err(|e| malformed(&e.to_string()))?;
            match item.body.ok_or_else(|| malformed("an unknown item"))? {
                Body::Header(h) if seen == 0 => state.take_header(&h)?,
                Body::End(count) if count == seen && seen > 0 => complete = true,
                Body::Header(_) | Body::End(_) => {
                    return Err(malformed("header or end out of place"));
                }
                _ if seen == 0 => return Err(malformed("no header")),
                body => state.take_item(body)?,
            }
        }
        if complete {
            Ok(state)
        } else {
            Err(malformed("it ends early"))
        }
    }

    fn take_header(&mut self, h: &Header) -> Result<(), DecodeError> {
        if h.format > FORMAT {
            return Err(DecodeError::TooNew { needed: h.format });
        }
        self.revision = h.revision;
        self.log_time_ms = h.log_time_ms;
        self.next_shard_number = h.next_shard_number;
        self.request_floor_ms = h.request_floor_ms;
        Ok(())
    }

    fn take_item(&mut self, body: Body) -> Result<(), DecodeError> {
        match body {
            Body::Cluster(c) => self.cluster = Some(Arc::new(c)),
            Body::Node(n) => {
                self.nodes.insert(n.id.clone(), Arc::new(n));
            }
            Body::Shard(s) => {
                self.shards.insert(s.id.clone(), Arc::new(s));
            }
            Body::Pool(p) => {
                let record = p.record.ok_or_else(|| malformed("a pool without its record"))?;
                let table = SlotTable::from_ranges(&p.ranges).map_err(|e| malformed(&e))?;
                let pool = Pool {
                    record,
                    epoch: p.epoch,
                    table,
                    dropped_at: p.dropped_at,
                };
                self.pools.insert(pool.record.name.clone(), Arc::new(pool));
            }
            Body::Request(r) => match (r.id, r.response) {
                (Some(id), Some(response)) => {
                    self.requests.insert(id, response);
                }
                _ => return Err(malformed("a request without its answer")),
            },
            Body::Member(m) => {
                self.members.insert(m.name, Arc::new(m));
            }
            Body::Decision(d) => self.decisions.push_back(Arc::new(d)),
            Body::Header(_) | Body::End(_) => return Err(malformed("header or end out of place")),
        }
        Ok(())
    }
}
