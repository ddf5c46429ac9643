//! Which copy of each slot comes first: present primaries stay as far as quotas allow.

use super::fleet::Fleet;
use super::flow::Flow;
use super::quota::Quotas;
use super::{Copies, Rule, Shortfall};
use kvpool_state::{SLOTS, SlotTable};

/// Puts the primary of each set first, the others behind it in the order of the present list.
pub(super) fn choose(table: &SlotTable, fleet: &Fleet, quotas: &Quotas, sets: &mut [Copies]) {
    let primary = present(table, fleet, sets);
    let mut flow = Flow::new(sets, &quotas.primary, &primary);
    // To quota; then what can't be is spread until no shard is off by more than one.
    flow.run(0, 0);
    flow.run(1, 1);
    flow.run(-1, -1);
    let slots_of = flow.slots_of;
    for (shard, slots) in slots_of.iter().enumerate() {
        for slot in slots {
            let set = &mut sets[usize::from(*slot)];
            *set = ordered(table, fleet, *slot, set, shard as u32);
        }
    }
}

/// Primaries further than one slot from quota.
pub(super) fn unmoved(fleet: &Fleet, quotas: &Quotas, sets: &[Copies]) -> Option<Shortfall> {
    let mut count = vec![0u64; fleet.len()];
    sets.iter()
        .filter_map(|set| set.as_slice().first())
        .for_each(|s| count[*s as usize] += 1);
    let off: u64 = count
        .iter()
        .zip(&quotas.primary)
        .map(|(c, q)| c.abs_diff(*q).saturating_sub(1))
        .sum();
    (off > 0).then(|| Shortfall {
        rule: Rule::PrimaryUnmoved,
        slots: u32::try_from(off).unwrap_or(u32::MAX),
    })
}

fn ordered(table: &SlotTable, fleet: &Fleet, slot: u16, set: &Copies, primary: u32) -> Copies {
    let mut out = Copies::default();
    out.push(primary);
    let listed = table.get(slot).iter().filter_map(|c| fleet.index(c.shard));
    for shard in listed.chain(set.as_slice().iter().copied()) {
        if set.contains(shard) && !out.contains(shard) {
            out.push(shard);
        }
    }
    out
}

/// The first in-sync copy of each slot that is among its target copies.
fn present(table: &SlotTable, fleet: &Fleet, sets: &[Copies]) -> Vec<Option<u32>> {
    let first = |(slot, set): (u16, &Copies)| {
        let listed = table
            .get(slot)
            .iter()
            .filter(|c| c.in_sync)
            .filter_map(|c| fleet.index(c.shard));
        listed.into_iter().find(|s| set.contains(*s))
    };
    (0..SLOTS).zip(sets).map(first).collect()
}
