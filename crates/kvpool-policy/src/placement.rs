//! Slot placement: which shards hold which slots, and the next step towards it.
//!
//! [`plan`] looks at the shards and at the present slot table and gives the lists that change now. Called again after each
//! applied step it converges: at the end `settled` is true and the plan empty. Invariants:
//!
//! - Quotas by largest remainder over capacity; then the least moves from the present table. Primaries end within one slot of
//!   their quota, replicas within 1 % where node and zone rules allow; what they don't allow is in `shortfall`.
//! - Two copies are never put on one node, nor in one zone while a zone without a copy of the slot is there.
//! - The one transfer primitive: a new copy enters at the end of a list as filling; lists are reordered among in-sync copies;
//!   a surplus in-sync copy leaves only when `min(present, factor)` in-sync copies stay.
//! - A slot without any in-sync copy gets its whole list at once (there is nothing to copy from).
//! - A shard that leaves or is suspected gets nothing new; what leaves goes only when its successor is in-sync.
//! - A shard that joins or returns never has more than its share of lists: that share bounds its part of new writes (fault O34),
//!   and it is primary of a slot only once its copy is in-sync.
//! - Equal input gives an equal plan.
//!
//! The work is bounded: some passes over the slots with logarithmic choices, and a capped search for the rest.

mod chooser;
mod copies;
mod fleet;
mod flow;
mod primaries;
mod quota;
mod step;

use fleet::Fleet;
use kvpool_state::records::SlotRange;
use kvpool_state::{MAX_FACTOR, SLOTS, SlotTable};

pub use quota::largest_remainder;

/// A shard as placement sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceShard {
    /// The number that slot lists use.
    pub number: u32,
    pub node: String,
    /// Zone of the node; equal for all when zones are not used.
    pub zone: String,
    /// Weight of the shard: its quotas are proportional to it.
    pub capacity_bytes: u64,
    pub part: Part,
}

/// The part that a shard takes in placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// It gets and keeps copies.
    In,
    /// Suspected: it keeps what it has and gets nothing new.
    Held,
    /// As held, and in lists it stands behind copies that others can reach.
    Demoted,
    /// It is to end without copies. It keeps each until another one is in-sync in its place, and hands its primaries over first.
    Leaving,
    /// Down: no list names it.
    Gone,
}

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Copies aimed for; clamped to `1..=MAX_FACTOR`.
    pub factor: u32,
    /// All shards of the pool. Of two with one number the first counts.
    pub shards: &'a [PlaceShard],
    pub table: &'a SlotTable,
    /// Most slots that one shard may be filling at a time (bounds the transfer load on it). 0 stops all filling.
    pub max_filling_per_shard: u32,
    /// Most slots that one plan may change. Slots without an in-sync copy are changed beyond it: they have nothing to lose.
    pub max_changes: u32,
}

/// The next step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// New lists of the slots that change, in slot order, neighbours with equal lists joined.
    pub ranges: Vec<SlotRange>,
    /// Slots that have, in the present table, fewer in-sync copies on shards that are up than the factor.
    pub under_replicated: u32,
    /// Of these the ones that have none: all their keys are misses.
    pub unserved: u32,
    /// What the rules or the shards don't allow. Empty when the target meets every bound.
    pub shortfall: Vec<Shortfall>,
    /// The present table is the target and every copy in-sync.
    pub settled: bool,
}

/// A bound that the target can't meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    pub rule: Rule,
    /// How many slots it concerns.
    pub slots: u32,
}

/// Why a bound is not met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Fewer nodes with a shard that is up than copies aimed for: these slots have a copy on each of them, no more.
    TooFewNodes,
    /// A node has more capacity than one copy of every slot takes: it holds this many slots less than its share.
    NodeShare,
    /// The same for a zone, or a zone too small for its share that must hold a copy of every slot all the same.
    ZoneShare,
    /// Copies beyond 1 % of quota for which no move was found.
    Unmoved,
    /// Primaries beyond one slot of quota for which no reordering was found.
    PrimaryUnmoved,
}

impl Rule {
    /// The words of status output and logs.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Rule::TooFewNodes => "fewer nodes are up than copies are aimed for",
            Rule::NodeShare => "a node has more capacity than one copy of every slot takes",
            Rule::ZoneShare => "a zone's capacity doesn't fit one copy of every slot per zone",
            Rule::Unmoved => "no allowed move brings copies to quota",
            Rule::PrimaryUnmoved => "no allowed order brings primaries to quota",
        }
    }
}

/// The copies aimed for in one slot: indices into the [`Fleet`], each once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Copies {
    len: usize,
    shards: [u32; MAX_FACTOR as usize],
}

impl Copies {
    fn as_slice(&self) -> &[u32] {
        &self.shards[..self.len]
    }

    fn contains(&self, shard: u32) -> bool {
        self.as_slice().contains(&shard)
    }

    /// Adds a shard at the end; ignored when full (sets are never longer than the factor).
    fn push(&mut self, shard: u32) {
        if let Some(place) = self.shards.get_mut(self.len) {
            *place = shard;
            self.len += 1;
        }
    }

    fn without(&self, shard: u32) -> Copies {
        let mut out = Copies::default();
        self.as_slice()
            .iter()
            .filter(|s| **s != shard)
            .for_each(|s| out.push(*s));
        out
    }

    fn replace(&mut self, from: u32, to: u32) {
        self.shards[..self.len]
            .iter_mut()
            .filter(|s| **s == from)
            .for_each(|s| *s = to);
    }
}

/// The target: for each slot its copies, primary first.
struct Target {
    copies: Vec<Copies>,
    shortfall: Vec<Shortfall>,
}

fn target(input: &Input<'_>, fleet: &Fleet, factor: u32) -> Target {
    let quotas = quota::Quotas::new(fleet, factor);
    let mut shortfall = Vec::new();
    if quotas.per_slot < factor {
        shortfall.push(Shortfall {
            rule: Rule::TooFewNodes,
            slots: u32::from(SLOTS),
        });
    }
    shortfall.extend(quotas.shortfall(fleet));
    let mut copies = copies::choose(input.table, fleet, &quotas);
    shortfall.extend(copies::unmoved(fleet, &quotas, &copies));
    primaries::choose(input.table, fleet, &quotas, &mut copies);
    shortfall.extend(primaries::unmoved(fleet, &quotas, &copies));
    Target { copies, shortfall }
}

/// The next step from the present table towards the target of these shards. Never panics; without a shard that is up the plan
/// only drops copies that are gone.
#[must_use]
pub fn plan(input: &Input<'_>) -> Plan {
    let factor = input.factor.clamp(1, MAX_FACTOR);
    let takes_part = |p: Part| matches!(p, Part::In | Part::Held | Part::Demoted);
    let fleet = Fleet::new(input.shards, takes_part);
    let target = target(input, &fleet, factor);
    let present = Fleet::new(input.shards, |p| p != Part::Gone);
    let mut plan = step::next(input, &present, factor, &step::goals(&target.copies, &fleet, &present));
    plan.shortfall = target.shortfall;
    plan
}
