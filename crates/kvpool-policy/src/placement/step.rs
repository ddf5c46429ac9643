//! The next step from the present lists towards the target: the transfer primitive.

use super::fleet::Fleet;
use super::{Copies, Input, Part, Plan};
use kvpool_state::SLOTS;
use kvpool_state::records::{SlotCopy, SlotRange};
use kvpool_state::table::MAX_COPIES;

/// A present list without copies that are gone.
struct Present {
    in_sync: Vec<u32>,
    filling: Vec<u32>,
}

impl Present {
    fn new(list: &[SlotCopy], fleet: &Fleet) -> Present {
        let mut out = Present {
            in_sync: Vec::new(),
            filling: Vec::new(),
        };
        for copy in list {
            let Some(shard) = fleet.index(copy.shard) else { continue };
            if !out.in_sync.contains(&shard) && !out.filling.contains(&shard) {
                if copy.in_sync {
                    out.in_sync.push(shard)
                } else {
                    out.filling.push(shard)
                }
            }
        }
        out
    }
}

/// Targets as indices of the shards that are there. Copies that others can't reach stand behind those they can.
pub(super) fn goals(target: &[Copies], fleet: &Fleet, present: &Fleet) -> Vec<Copies> {
    let index = |shard: &u32| present.index(fleet.numbers[*shard as usize]);
    let demoted = |shard: &u32| present.part[*shard as usize] == Part::Demoted;
    let goal = |copies: &Copies| {
        let mut shards: Vec<u32> = copies.as_slice().iter().filter_map(index).collect();
        shards.sort_by_key(demoted);
        let mut out = Copies::default();
        shards.into_iter().for_each(|s| out.push(s));
        out
    };
    target.iter().map(goal).collect()
}

pub(super) fn next(input: &Input<'_>, fleet: &Fleet, factor: u32, target: &[Copies]) -> Plan {
    let mut plan = Plan {
        settled: true,
        ..Plan::default()
    };
    let mut budget = Budget {
        filling: vec![0; fleet.len()],
        max: input.max_filling_per_shard,
        fleet,
    };
    // Fewest copies first, so that repair comes before rebalancing when room for filling is short.
    let mut by_copies: Vec<Vec<(u16, Present)>> = (0..=MAX_COPIES).map(|_| Vec::new()).collect();
    for (slot, list) in input.table.iter() {
        let present = Present::new(list, fleet);
        let copies = present.in_sync.len();
        plan.under_replicated += u32::from((copies as u32) < factor);
        plan.unserved += u32::from(copies == 0);
        if copies > 0 {
            present.filling.iter().for_each(|s| budget.filling[*s as usize] += 1);
        }
        by_copies[copies.min(MAX_COPIES)].push((slot, present));
    }
    let mut changed: Vec<(u16, Vec<SlotCopy>)> = Vec::new();
    for (slot, present) in by_copies.into_iter().flatten() {
        let list = input.table.get(slot);
        let goal = &target[usize::from(slot)];
        let at_goal = goal.as_slice().iter().map(|s| copy(fleet, *s, true));
        if at_goal.eq(list.iter().copied()) {
            continue;
        }
        plan.settled = false;
        if present.in_sync.is_empty() {
            let new = unserved(fleet, &present, goal);
            if new[..] != list[..] {
                changed.push((slot, new));
            }
        } else if changed.len() < input.max_changes as usize {
            let new = served(fleet, &present, goal, &mut budget);
            if new[..] != list[..] {
                changed.push((slot, new));
            }
        }
    }
    changed.sort_by_key(|(slot, _)| *slot);
    plan.ranges = join(changed);
    plan
}

fn copy(fleet: &Fleet, shard: u32, in_sync: bool) -> SlotCopy {
    SlotCopy {
        shard: fleet.numbers[shard as usize],
        in_sync,
    }
}

/// How many slots each shard is filling.
struct Budget<'a> {
    filling: Vec<u32>,
    max: u32,
    fleet: &'a Fleet,
}

impl Budget<'_> {
    fn take(&mut self, shard: u32) -> bool {
        let filling = &mut self.filling[shard as usize];
        let free = *filling < self.max && takes_new(self.fleet, shard);
        *filling += u32::from(free);
        free
    }
}

fn takes_new(fleet: &Fleet, shard: u32) -> bool {
    fleet.part[shard as usize] == Part::In
}

/// Nothing to copy from: what is there stays in front (it may hold a part), the whole target comes behind it. Shards that take
/// nothing new are passed over while another one takes the slot.
fn unserved(fleet: &Fleet, present: &Present, goal: &Copies) -> Vec<SlotCopy> {
    let leaving = |s: &&u32| fleet.part[**s as usize] == Part::Leaving;
    let some = goal.as_slice().iter().any(|s| takes_new(fleet, *s));
    let wanted = |s: &&u32| !some || takes_new(fleet, **s);
    let missing = goal
        .as_slice()
        .iter()
        .filter(|s| !present.filling.contains(s))
        .filter(wanted);
    present
        .filling
        .iter()
        .filter(|s| !leaving(s))
        .chain(missing)
        .take(MAX_COPIES)
        .map(|s| copy(fleet, *s, false))
        .collect()
}

/// In-sync copies in front: those of the target, and others while too few of the target are in-sync. Then the filling ones.
fn served(fleet: &Fleet, present: &Present, goal: &Copies, budget: &mut Budget) -> Vec<SlotCopy> {
    let in_target = present.in_sync.iter().filter(|s| goal.contains(**s)).count();
    // Without anybody to take over, a shard that leaves keeps the last copy.
    let mut spare = present.in_sync.len().min(goal.len.max(1)).saturating_sub(in_target);
    let mut in_sync: Vec<u32> = Vec::new();
    for shard in &present.in_sync {
        if goal.contains(*shard) {
            in_sync.push(*shard);
        } else if spare > 0 {
            spare -= 1;
            in_sync.push(*shard);
        }
    }
    if let Some(primary) = goal.as_slice().first()
        && let Some(place) = in_sync.iter().position(|s| s == primary)
    {
        in_sync[..=place].rotate_right(1);
    }
    in_sync.sort_by_key(|s| matches!(fleet.part[*s as usize], Part::Demoted | Part::Leaving));
    let mut filling: Vec<u32> = present.filling.iter().copied().filter(|s| goal.contains(*s)).collect();
    for shard in goal.as_slice() {
        if !in_sync.contains(shard) && !filling.contains(shard) && budget.take(*shard) {
            filling.push(*shard);
        }
    }
    let in_sync = in_sync.into_iter().map(|s| copy(fleet, s, true));
    in_sync
        .chain(filling.into_iter().map(|s| copy(fleet, s, false)))
        .collect()
}

fn join(changed: Vec<(u16, Vec<SlotCopy>)>) -> Vec<SlotRange> {
    let mut out: Vec<SlotRange> = Vec::new();
    for (slot, copies) in changed.into_iter().filter(|(slot, _)| *slot < SLOTS) {
        let slot = u32::from(slot);
        match out.last_mut() {
            Some(last) if last.last + 1 == slot && last.copies == copies => last.last = slot,
            _ => out.push(SlotRange {
                first: slot,
                last: slot,
                copies,
            }),
        }
    }
    out
}
