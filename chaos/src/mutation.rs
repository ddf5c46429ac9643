//! What can be broken on purpose. Each is a bug that the checks must notice; `tests/mutations.rs` runs them all.
//!
//! Nothing here touches the product: the disk, the network, the seam of the state machine, the watch's stream and the
//! simulated shells are wrapped or replaced.

use kvpool_raft::MemberId;
use kvpool_state::command::{Command, ShardDown, SlotsInSync, decode};
use kvpool_state::records::{ShardState, SlotRange};
use kvpool_state::{SLOTS, State};
use prost::Message;

macro_rules! mutations {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// One seeded bug.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Mutation {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Mutation {
            /// All of them.
            pub const ALL: &[Mutation] = &[$(Mutation::$name,)+];

            /// The bug in words.
            pub fn words(self) -> &'static str {
                match self {
                    $(Mutation::$name => concat!($($doc),+).trim_ascii(),)+
                }
            }
        }
    };
}

mutations! {
    /// Disks acknowledge syncs they do not do: a write is acknowledged before it is durable.
    LyingDisks,
    /// Every pre-vote is granted.
    GrantPreVotes,
    /// Votes are gone after a restart.
    ForgetVotes,
    /// The tail of the log is lost in a restart, silently.
    LoseTheTail,
    /// A member that lost its disk comes back under its old id.
    ReuseAnId,
    /// Reads are served by any member without asking a quorum.
    ReadsAnywhere,
    /// A client retries with a new request id.
    NewIdForARetry,
    /// A member skips an entry.
    SkipAnEntry,
    /// A member applies an entry twice.
    ApplyTwice,
    /// A member installs the snapshot before the one it was sent.
    StaleSnapshot,
    /// A member applies with its own clock.
    OwnClock,
    /// Request ids are not remembered.
    ForgetRequestIds,
    /// Request ids are not part of snapshots.
    SnapshotWithoutRequestIds,
    /// Plans made from another epoch are obeyed.
    SkipTheEpoch,
    /// A verdict about another incarnation is obeyed.
    SkipTheIncarnation,
    /// A report of another incarnation, or from before a plan, is obeyed.
    SkipTheReportsFence,
    /// A plan makes a filling copy in-sync.
    PromoteAFillingCopy,
    /// A plan drops the last in-sync copy.
    DropTheLastCopy,
    /// An epoch goes back.
    EpochGoesBack,
    /// Log time goes back.
    LogTimeGoesBack,
    /// A registration gets an incarnation that was used before.
    ReuseAnIncarnation,
    /// A new leader declares Down who has not spoken yet.
    HastyLeader,
    /// A shard reports copies that it has not filled.
    ReportUnfilled,
    /// A shard keeps what it held of a slot that went and came back unseen.
    KeepLeftovers,
    /// A watch drops an event.
    DropAnEvent,
    /// A watch sends a batch twice, to a client that does not check.
    DoubleABatch,
    /// A watch sends events in the wrong order.
    SwapEvents,
    /// A watch resumes at the newest revision instead of the client's.
    ResumeAtNewest,
    /// A relist leaves a record out.
    ShortRelist,
}

/// The frames of a snapshot as far as mutations change them. Unknown to the product; tags are those of `kvpool-state`.
#[derive(Clone, PartialEq, prost::Message)]
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

#[derive(Clone, PartialEq, prost::Message)]
struct PoolItem {
    #[prost(bytes = "vec", tag = "1")]
    record: Vec<u8>,
    #[prost(uint64, tag = "2")]
    epoch: u64,
    #[prost(bytes = "vec", repeated, tag = "3")]
    ranges: Vec<Vec<u8>>,
    #[prost(bytes = "vec", repeated, tag = "4")]
    dropped_at: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Item {
    #[prost(message, optional, tag = "1")]
    header: Option<Header>,
    #[prost(message, optional, tag = "4")]
    shard: Option<kvpool_state::records::ShardRecord>,
    #[prost(message, optional, tag = "5")]
    pool: Option<PoolItem>,
    #[prost(bytes = "vec", optional, tag = "6")]
    request: Option<Vec<u8>>,
    #[prost(uint64, optional, tag = "8")]
    end: Option<u64>,
}

impl Mutation {
    /// The mutations whose bug is in the log's life; the others are in the state's.
    pub fn is_of_the_log(self) -> bool {
        use Mutation::{ForgetVotes, GrantPreVotes, LoseTheTail, LyingDisks, ReuseAnId};
        matches!(self, LyingDisks | GrantPreVotes | ForgetVotes | LoseTheTail | ReuseAnId)
    }

    /// The entry that a member applies instead of `entry`.
    pub fn rewrite(self, entry: &[u8], state: &State, member: MemberId) -> Option<Vec<u8>> {
        let (mut command, envelope) = decode(entry).ok()?;
        let mut request = envelope.request.clone();
        let mut clock = envelope.proposed_at_ms;
        match (self, &mut command) {
            (Mutation::ForgetRequestIds, _) => request = None,
            (Mutation::OwnClock, _) => clock += member * 1_000,
            (Mutation::SkipTheEpoch, Command::PlanSlots(c)) => c.base_epoch = state.slot_table(&c.pool)?.0,
            (Mutation::SkipTheIncarnation, Command::ShardDown(c)) => c.incarnation = state.shard(&c.id)?.incarnation,
            (Mutation::SkipTheReportsFence, Command::SlotsInSync(c)) => {
                c.incarnation = state.shard(&c.shard)?.incarnation;
                c.epoch = u64::MAX;
            }
            _ => return None,
        }
        Some(command.to_entry(request, clock))
    }

    /// An entry that a member applies besides `entry`.
    pub fn append(self, entry: &[u8], state: &State) -> Option<Vec<u8>> {
        let (Command::PlanSlots(plan), _) = decode(entry).ok()? else {
            return None;
        };
        let mut up = state.shards().filter(|s| s.state() == ShardState::Up);
        let command = match self {
            Mutation::PromoteAFillingCopy => {
                let (_, table) = state.slot_table(&plan.pool)?;
                let filling = table
                    .iter()
                    .find_map(|(_, list)| list.iter().find(|c| !c.in_sync).copied())?;
                let shard = up.find(|s| s.number == filling.shard)?;
                Command::SlotsInSync(SlotsInSync {
                    pool: plan.pool,
                    shard: shard.id.clone(),
                    incarnation: shard.incarnation,
                    ranges: vec![SlotRange {
                        first: 0,
                        last: u32::from(SLOTS) - 1,
                        copies: Vec::new(),
                    }],
                    epoch: u64::MAX,
                })
            }
            Mutation::DropTheLastCopy => {
                let (_, table) = state.slot_table(&plan.pool)?;
                let alone = table.iter().find_map(|(_, list)| {
                    let mut in_sync = list.iter().filter(|c| c.in_sync);
                    in_sync.next().filter(|_| in_sync.next().is_none()).copied()
                })?;
                let shard = up.find(|s| s.number == alone.shard)?;
                Command::ShardDown(ShardDown {
                    id: shard.id.clone(),
                    incarnation: shard.incarnation,
                    reason: "a seeded bug".to_owned(),
                })
            }
            _ => return None,
        };
        Some(command.to_entry(None, 0))
    }

    /// The state that a member has after entry `index` instead of `state`.
    pub fn tamper(self, index: u64, state: &State) -> Option<State> {
        use Mutation::{EpochGoesBack, LogTimeGoesBack, ReuseAnIncarnation};
        if !matches!(self, EpochGoesBack | LogTimeGoesBack | ReuseAnIncarnation) || !index.is_multiple_of(37) {
            return None;
        }
        change_items(state, |item| match self {
            EpochGoesBack => item.pool.as_mut().is_some_and(|pool| {
                pool.epoch = pool.epoch.saturating_sub(1);
                true
            }),
            LogTimeGoesBack => item.header.as_mut().is_some_and(|header| {
                header.log_time_ms -= 1;
                true
            }),
            _ => item.shard.as_mut().is_some_and(|shard| {
                shard.incarnation = shard.incarnation.saturating_sub(1);
                true
            }),
        })
    }

    /// The state that a snapshot is written from instead of `state`.
    pub fn snapshot(self, state: &State) -> Option<State> {
        if self != Mutation::SnapshotWithoutRequestIds {
            return None;
        }
        let mut items: Vec<Vec<u8>> = state.snapshot_items().collect();
        items.pop();
        items.retain(|bytes| Item::decode(bytes.as_slice()).is_ok_and(|item| item.request.is_none()));
        let end = Item {
            end: Some(items.len() as u64),
            ..Item::default()
        };
        items.push(end.encode_to_vec());
        State::from_snapshot_items(items).ok()
    }
}

/// A state with the first item changed that `change` takes.
fn change_items(state: &State, mut change: impl FnMut(&mut Item) -> bool) -> Option<State> {
    let mut items: Vec<Vec<u8>> = state.snapshot_items().collect();
    for bytes in &mut items {
        let mut item = Item::decode(bytes.as_slice()).ok()?;
        if change(&mut item) {
            *bytes = item.encode_to_vec();
            break;
        }
    }
    State::from_snapshot_items(items).ok()
}
