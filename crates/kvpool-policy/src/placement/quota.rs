//! Quotas: how many slots each shard is to be primary of, and how many copies it is to hold.

use super::fleet::Fleet;
use super::{Rule, Shortfall};
use kvpool_state::SLOTS;

/// Splits `total` over weights: whole shares rounded down, the rest one each to the largest remainders (of equal ones the
/// first). The parts sum up to `total` whenever a weight is above 0.
#[must_use]
pub fn largest_remainder(total: u64, weights: &[u64]) -> Vec<u64> {
    let sum: u128 = weights.iter().map(|w| u128::from(*w)).sum();
    if sum == 0 {
        return vec![0; weights.len()];
    }
    let product = |w: &u64| u128::from(total) * u128::from(*w);
    // A quotient is at most `total`.
    let mut parts: Vec<u64> = weights.iter().map(|w| (product(w) / sum) as u64).collect();
    let rest = total.saturating_sub(parts.iter().sum::<u64>()) as usize;
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(product(&weights[*i]) % sum));
    for i in order.into_iter().take(rest) {
        parts[i] += 1;
    }
    parts
}

/// Largest remainder with a bound on each part: parts above it are set to it, and the rest is split again.
fn split_capped(total: u64, weights: &[u64], cap: u64) -> Vec<u64> {
    let mut parts = vec![cap; weights.len()];
    let mut open: Vec<usize> = (0..weights.len()).collect();
    let mut left = total;
    while !open.is_empty() {
        let share = largest_remainder(left, &open.iter().map(|i| weights[*i]).collect::<Vec<_>>());
        let before = open.len();
        open.iter().zip(&share).for_each(|(i, s)| parts[*i] = cap.min(*s));
        left = left.saturating_sub(cap * share.iter().filter(|s| **s > cap).count() as u64);
        open = open
            .into_iter()
            .zip(share)
            .filter(|(_, s)| *s <= cap)
            .map(|(i, _)| i)
            .collect();
        if open.len() == before {
            break;
        }
    }
    parts
}

pub(super) struct Quotas {
    /// Copies that a slot can have: the factor, or the number of nodes if that is lower.
    pub per_slot: u32,
    /// Slots each shard is primary of.
    pub primary: Vec<u64>,
    /// Slots each shard holds a copy of, within the node and zone rules.
    pub copies: Vec<u64>,
    /// The same by capacity alone.
    fair: Vec<u64>,
}

impl Quotas {
    pub fn new(fleet: &Fleet, factor: u32) -> Quotas {
        let slots = u64::from(SLOTS);
        let per_slot = factor.min(fleet.nodes());
        let total = u64::from(per_slot) * slots;
        let fair = largest_remainder(total, &fleet.weights);
        let rules = Rules::new(fleet, per_slot, &fair);
        let copies = if rules.fit() {
            fair.clone()
        } else {
            rules.copies(fleet, total)
        };
        Quotas {
            per_slot,
            primary: largest_remainder(slots, &fleet.weights),
            copies,
            fair,
        }
    }

    /// How far the number of copies of a shard may be from its quota: 1 % of its replicas, at least one slot.
    pub fn tolerance(&self, shard: usize) -> u64 {
        (self.copies[shard].saturating_sub(self.primary[shard]) / 100).max(1)
    }

    /// Slots that nodes or zones hold less than their share of capacity, because the rules keep them from it.
    pub fn shortfall(&self, fleet: &Fleet) -> Vec<Shortfall> {
        let rules = Rules::new(fleet, self.per_slot, &self.fair);
        let (mut by_node, mut by_zone) = (0u64, 0u64);
        for shard in 0..fleet.len() {
            let missing = self.fair[shard].saturating_sub(self.copies[shard]);
            if missing > self.tolerance(shard) {
                let zone = fleet.zone_of(shard as u32) as usize;
                let zone_bound = rules.zone[zone] > rules.zone_high[zone] || !rules.zones_fit_below();
                *(if zone_bound { &mut by_zone } else { &mut by_node }) += missing;
            }
        }
        [(Rule::NodeShare, by_node), (Rule::ZoneShare, by_zone)]
            .into_iter()
            .filter(|(_, slots)| *slots > 0)
            .map(|(rule, slots)| Shortfall {
                rule,
                slots: u32::try_from(slots).unwrap_or(u32::MAX),
            })
            .collect()
    }
}

/// Bounds that the node and zone rules put on sums of copies.
struct Rules {
    slots: u64,
    /// Copies by capacity alone, per node and per zone.
    node: Vec<u64>,
    zone: Vec<u64>,
    zone_low: Vec<u64>,
    zone_high: Vec<u64>,
}

impl Rules {
    fn new(fleet: &Fleet, per_slot: u32, fair: &[u64]) -> Rules {
        let slots = u64::from(SLOTS);
        let zones = fleet.zones as usize;
        let mut node = vec![0; fleet.nodes() as usize];
        for (shard, copies) in fair.iter().enumerate() {
            node[fleet.node[shard] as usize] += copies;
        }
        let mut zone = vec![0; zones];
        for (n, copies) in node.iter().enumerate() {
            zone[fleet.zone_of_node[n] as usize] += copies;
        }
        // With zones enough for all copies a zone holds each slot at most once; with fewer, every zone holds every slot.
        let few = fleet.zones < per_slot;
        let zone_low = vec![if few { slots } else { 0 }; zones];
        let zone_high = vec![if few { u64::MAX } else { slots }; zones];
        Rules {
            slots,
            node,
            zone,
            zone_low,
            zone_high,
        }
    }

    fn zones_fit_below(&self) -> bool {
        self.zone.iter().zip(&self.zone_low).all(|(have, low)| have >= low)
    }

    fn fit(&self) -> bool {
        self.node.iter().all(|have| *have <= self.slots)
            && self.zones_fit_below()
            && self.zone.iter().zip(&self.zone_high).all(|(have, high)| have <= high)
    }

    /// Quotas by capacity within the bounds: shares are split, what is beyond a bound is set to it, and the rest is split
    /// again. Zones come before nodes, so that a node is not given what its zone can't hold.
    fn copies(&self, fleet: &Fleet, total: u64) -> Vec<u64> {
        let mut split = Split {
            rules: self,
            fleet,
            weights: narrow(&fleet.weights),
            shards_of: groups(&fleet.node, fleet.nodes()),
            nodes_of: groups(&fleet.zone_of_node, fleet.zones),
            fixed: vec![None; fleet.len()],
            share: vec![0; fleet.len()],
        };
        while split.fixed.contains(&None) {
            split.share(total);
            if !split.fix_zones() && !split.fix_nodes() {
                break;
            }
        }
        split.share(total);
        split.share
    }
}

/// Quotas on their way: each round fixes at least one zone or node.
struct Split<'a> {
    rules: &'a Rules,
    fleet: &'a Fleet,
    weights: Vec<u64>,
    shards_of: Vec<Vec<usize>>,
    nodes_of: Vec<Vec<usize>>,
    fixed: Vec<Option<u64>>,
    share: Vec<u64>,
}

impl Split<'_> {
    /// Splits what is not fixed over the shards that are not.
    fn share(&mut self, total: u64) {
        let left = total.saturating_sub(self.fixed.iter().flatten().sum());
        let open = |i: &usize| self.fixed[*i].is_none();
        let open: Vec<usize> = (0..self.share.len()).filter(open).collect();
        let weights: Vec<u64> = open.iter().map(|i| self.weights[*i]).collect();
        for (share, fixed) in self.share.iter_mut().zip(&self.fixed) {
            *share = fixed.unwrap_or(0);
        }
        open.iter()
            .zip(largest_remainder(left, &weights))
            .for_each(|(i, part)| self.share[*i] = part);
    }

    fn sum(&self, shards: &[usize]) -> u64 {
        shards.iter().map(|s| self.share[*s]).sum()
    }

    /// Sets the zones on the side of the bounds that is further off, and their shards. `false` when all are within.
    fn fix_zones(&mut self) -> bool {
        let zones: Vec<u64> = self
            .nodes_of
            .iter()
            .map(|nodes| nodes.iter().map(|n| self.sum(&self.shards_of[*n])).sum())
            .collect();
        let rules = self.rules;
        let below = |z: usize| rules.zone_low[z].saturating_sub(zones[z]);
        let above = |z: usize| zones[z].saturating_sub(rules.zone_high[z]);
        let (low, high): (u64, u64) = ((0..zones.len()).map(below).sum(), (0..zones.len()).map(above).sum());
        let mut changed = false;
        for (z, sum) in zones.iter().enumerate() {
            let bound = if low > high { sum + below(z) } else { sum - above(z) };
            if bound != *sum {
                changed |= self.fix_zone(z, bound);
            }
        }
        changed
    }

    fn fix_zone(&mut self, zone: usize, bound: u64) -> bool {
        let nodes = self.nodes_of[zone].clone();
        let open = |shards: &[usize]| shards.iter().any(|s| self.fixed[*s].is_none());
        let (open, fixed): (Vec<usize>, Vec<usize>) = nodes.iter().partition(|n| open(&self.shards_of[**n]));
        let left = bound.saturating_sub(fixed.iter().map(|n| self.sum(&self.shards_of[*n])).sum());
        let weights: Vec<u64> = open
            .iter()
            .map(|n| self.shards_of[*n].iter().map(|s| self.weights[*s]).sum())
            .collect();
        for (node, part) in open.iter().zip(split_capped(left, &weights, self.rules.slots)) {
            self.fix_node(*node, part);
        }
        !open.is_empty()
    }

    fn fix_node(&mut self, node: usize, total: u64) {
        let shards = self.shards_of[node].clone();
        let weights: Vec<u64> = shards.iter().map(|s| self.weights[*s]).collect();
        shards
            .iter()
            .zip(largest_remainder(total, &weights))
            .for_each(|(s, part)| self.fixed[*s] = Some(part));
    }

    fn fix_nodes(&mut self) -> bool {
        let above = |n: &usize| self.sum(&self.shards_of[*n]) > self.rules.slots;
        let above: Vec<usize> = (0..self.fleet.nodes() as usize).filter(above).collect();
        above.iter().for_each(|n| self.fix_node(*n, self.rules.slots));
        !above.is_empty()
    }
}

/// Weights halved until their sum fits `u64`; proportions stay within one part in 2^32 for any fleet that can be registered.
fn narrow(weights: &[u64]) -> Vec<u64> {
    let sum: u128 = weights.iter().map(|w| u128::from(*w)).sum();
    let shift = (128 - sum.leading_zeros()).saturating_sub(63);
    weights.iter().map(|w| (w >> shift).max(1)).collect()
}

/// Members of each group, by a map from member to group.
fn groups(of: &[u32], count: u32) -> Vec<Vec<usize>> {
    let mut out = vec![Vec::new(); count as usize];
    for (member, group) in of.iter().enumerate() {
        out[*group as usize].push(member);
    }
    out
}
