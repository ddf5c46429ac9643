//! Which shards are to hold each slot: the present copies that the rules allow, then the least moves that bring every shard to
//! its quota.

use super::chooser::Chooser;
use super::fleet::Fleet;
use super::flow::Flow;
use super::quota::Quotas;
use super::{Copies, Rule, Shortfall};
use kvpool_state::records::SlotCopy;
use kvpool_state::{MAX_FACTOR, SLOTS, SlotTable};
use std::collections::{BTreeMap, VecDeque};

/// Bound of the search for detours: looks at a possible move.
const MAX_PROBES: u64 = 4_000_000;
/// A choice is kept for this part of the room of the chosen shard, so that neighbouring slots share lists (few ranges) while
/// the copies of one shard still go to many others.
const RUN_PART: i64 = 8;

/// Target copies of every slot, in no particular order.
pub(super) fn choose(table: &SlotTable, fleet: &Fleet, quotas: &Quotas) -> Vec<Copies> {
    let slots = usize::from(SLOTS);
    let mut choice = Choice {
        table,
        fleet,
        quotas,
        sets: vec![Copies::default(); slots],
        count: vec![0; fleet.len()],
    };
    choice.keep();
    choice.swap_within_lists();
    choice.fill_missing();
    choice.move_excess();
    choice.move_by_detours();
    choice.sets
}

/// What is left beyond tolerance.
pub(super) fn unmoved(fleet: &Fleet, quotas: &Quotas, sets: &[Copies]) -> Option<Shortfall> {
    let mut count = vec![0u64; fleet.len()];
    sets.iter()
        .flat_map(|set| set.as_slice())
        .for_each(|s| count[*s as usize] += 1);
    let over: u64 = (0..fleet.len())
        .map(|s| {
            count[s]
                .saturating_sub(quotas.copies[s])
                .max(quotas.copies[s].saturating_sub(count[s]))
        })
        .enumerate()
        .map(|(s, off)| off.saturating_sub(quotas.tolerance(s)))
        .sum();
    (over > 0).then(|| Shortfall {
        rule: Rule::Unmoved,
        slots: u32::try_from(over).unwrap_or(u32::MAX),
    })
}

struct Choice<'a> {
    table: &'a SlotTable,
    fleet: &'a Fleet,
    quotas: &'a Quotas,
    sets: Vec<Copies>,
    /// Copies per shard in `sets`.
    count: Vec<i64>,
}

impl Choice<'_> {
    fn list(&self, slot: usize) -> &[SlotCopy] {
        self.table.get(u16::try_from(slot).unwrap_or(SLOTS))
    }

    fn room(&self, shard: u32) -> i64 {
        self.quotas.copies[shard as usize] as i64 - self.count[shard as usize]
    }

    fn rooms(&self) -> Vec<i64> {
        (0..self.fleet.len()).map(|s| self.room(s as u32)).collect()
    }

    fn allowed(&self, beside: &Copies, shard: u32) -> bool {
        self.fleet.allowed(beside, shard, self.quotas.per_slot)
    }

    fn put(&mut self, slot: usize, from: u32, to: u32) {
        self.sets[slot].replace(from, to);
        self.count[from as usize] -= 1;
        self.count[to as usize] += 1;
    }

    /// The copies of each list, in its order, as far as the rules allow.
    fn keep(&mut self) {
        for slot in 0..self.sets.len() {
            let mut set = Copies::default();
            for shard in self.list(slot).iter().filter_map(|c| self.fleet.index(c.shard)) {
                if self.allowed(&set, shard) {
                    set.push(shard);
                }
            }
            set.as_slice().iter().for_each(|s| self.count[*s as usize] += 1);
            self.sets[slot] = set;
        }
    }

    /// Moves that cost nothing: a list on its way from one shard to another names both. Done first, so that a transfer once
    /// begun stays the one that is wanted.
    fn swap_within_lists(&mut self) {
        for _ in 0..MAX_FACTOR {
            let mut room: Vec<u64> = self.rooms().iter().map(|r| u64::try_from(*r).unwrap_or(0)).collect();
            let excess: Vec<u64> = self.rooms().iter().map(|r| u64::try_from(-*r).unwrap_or(0)).collect();
            let mut leaving = vec![Copies::default(); self.sets.len()];
            let mut coming = vec![0; self.sets.len()];
            for slot in 0..self.sets.len() {
                if let Some(to) = self.waiting(slot, &room) {
                    leaving[slot] = self.replaceable(slot, to);
                    coming[slot] = to;
                    room[to as usize] -= u64::from(leaving[slot].len > 0);
                }
            }
            if leaving.iter().all(|set| set.len == 0) {
                return;
            }
            // Which of two shards above quota leaves a slot is settled for all slots together; one by one, the last ones
            // would find that those who could leave already have.
            let mut flow = Flow::new(&leaving, &excess, &vec![None; leaving.len()]);
            flow.run(0, 0);
            for (from, slots) in (0..).zip(&flow.slots_of) {
                let most = usize::try_from(-self.room(from)).unwrap_or(0);
                for slot in slots.iter().take(most).map(|s| usize::from(*s)) {
                    self.put(slot, from, coming[slot]);
                }
            }
        }
    }

    /// A shard with room that the list names beside the chosen ones.
    fn waiting(&self, slot: usize, room: &[u64]) -> Option<u32> {
        if self.list(slot).len() <= self.sets[slot].len {
            return None;
        }
        let listed = self.list(slot).iter().filter_map(|c| self.fleet.index(c.shard));
        listed
            .into_iter()
            .find(|s| !self.sets[slot].contains(*s) && room[*s as usize] > 0)
    }

    /// The copies above quota whose place `to` may take.
    fn replaceable(&self, slot: usize, to: u32) -> Copies {
        let set = self.sets[slot];
        let mut out = Copies::default();
        let fits = |from: &&u32| self.room(**from) < 0 && self.allowed(&set.without(**from), to);
        set.as_slice().iter().filter(fits).for_each(|s| out.push(*s));
        out
    }

    /// Fills sets up to the number of copies a slot can have, whatever the quotas.
    fn fill_missing(&mut self) {
        let mut chooser = Chooser::new(self.fleet, self.quotas.per_slot, &self.rooms(), false);
        let mut run = Run::default();
        for slot in 0..self.sets.len() {
            let before = self.sets[slot];
            if before.len as u32 >= self.quotas.per_slot {
                continue;
            }
            if run.left == 0 || run.before != before {
                run.end(&mut chooser);
                run = Run::new(&chooser, before);
            }
            run.left -= 1;
            run.used += 1;
            self.sets[slot] = run.after;
            run.added().iter().for_each(|s| self.count[*s as usize] += 1);
        }
    }

    /// Moves copies from shards above quota straight to shards below it.
    fn move_excess(&mut self) {
        let mut chooser = Chooser::new(self.fleet, self.quotas.per_slot, &self.rooms(), true);
        if chooser.is_empty() {
            return;
        }
        let slots_of = self.slots_of();
        for from in (0..self.fleet.len() as u32)
            .filter(|s| self.room(*s) < 0)
            .collect::<Vec<_>>()
        {
            let number = self.fleet.numbers[from as usize];
            let in_sync = |slot: &u16| self.table.get(*slot).iter().any(|c| c.shard == number && c.in_sync);
            // A copy that is still filling is cheaper to move: little of it is there.
            let (full, filling): (Vec<u16>, Vec<u16>) = slots_of[from as usize].iter().partition(|s| in_sync(s));
            let mut run: Option<(u32, i64, i64)> = None;
            for slot in filling.into_iter().chain(full).map(usize::from) {
                if self.room(from) >= 0 || chooser.is_empty() {
                    break;
                }
                let rest = self.sets[slot].without(from);
                let to = match run {
                    Some((to, left, _)) if left > 0 && self.allowed(&rest, to) => to,
                    _ => {
                        end_run(&mut chooser, run.take());
                        let Some(to) = chooser.pick(&rest) else { continue };
                        run = Some((to, (chooser.room(to) / RUN_PART).max(1), 0));
                        to
                    }
                };
                run = run.map(|(to, left, used)| (to, left - 1, used + 1));
                self.put(slot, from, to);
            }
            end_run(&mut chooser, run);
        }
    }

    fn slots_of(&self) -> Vec<Vec<u16>> {
        let mut out = vec![Vec::new(); self.fleet.len()];
        for (slot, set) in (0..SLOTS).zip(&self.sets) {
            set.as_slice().iter().for_each(|s| out[*s as usize].push(slot));
        }
        out
    }

    /// Where no direct move is allowed, chains of moves are: from the shard above quota to a third one, from there on, until one
    /// with room is reached. Shortest chains first, each for as many slots as it is good for, within [`MAX_PROBES`].
    fn move_by_detours(&mut self) {
        let over: Vec<u32> = (0..self.fleet.len() as u32).filter(|s| self.room(*s) < 0).collect();
        if over.is_empty() {
            return;
        }
        let mut alike = BTreeMap::<Copies, Vec<u16>>::new();
        for (slot, set) in (0..SLOTS).zip(&mut self.sets) {
            set.shards[..set.len].sort_unstable();
            alike.entry(*set).or_default().push(slot);
        }
        let mut probes = MAX_PROBES;
        for from in over {
            while self.room(from) < 0 {
                let Some(chain) = self.detour(&alike, from, &mut probes) else {
                    break;
                };
                if !self.follow(&mut alike, from, &chain) {
                    break;
                }
            }
        }
    }

    /// Breadth-first search over shards; slots with the same copies are looked at once.
    fn detour(&self, alike: &BTreeMap<Copies, Vec<u16>>, from: u32, probes: &mut u64) -> Option<Vec<Hop>> {
        let mut sets_of: Vec<Vec<&Copies>> = vec![Vec::new(); self.fleet.len()];
        for set in alike.keys() {
            set.as_slice().iter().for_each(|s| sets_of[*s as usize].push(set));
        }
        let mut reached: Vec<Option<Hop>> = vec![None; self.fleet.len()];
        let mut open: Vec<u32> = (0..self.fleet.len() as u32).filter(|s| *s != from).collect();
        let mut queue = VecDeque::from([from]);
        while let Some(at) = queue.pop_front() {
            for set in &sets_of[at as usize] {
                let rest = set.without(at);
                let mut i = 0;
                while let Some(to) = open.get(i).copied() {
                    *probes = probes.checked_sub(1)?;
                    if !self.allowed(&rest, to) {
                        i += 1;
                        continue;
                    }
                    open.swap_remove(i);
                    reached[to as usize] = Some(Hop {
                        set: **set,
                        from: at,
                        to,
                    });
                    if self.room(to) > 0 {
                        return Some(chain(&reached, to));
                    }
                    queue.push_back(to);
                }
            }
        }
        None
    }

    /// Takes a chain for as many slots as it has. `false` when it has none: it needs one slot twice.
    fn follow(&mut self, alike: &mut BTreeMap<Copies, Vec<u16>>, from: u32, chain: &[Hop]) -> bool {
        let needed = |set: &Copies| chain.iter().filter(|h| h.set == *set).count();
        let slots = |h: &Hop| alike.get(&h.set).map_or(0, Vec::len) / needed(&h.set).max(1);
        let to = chain.first().map_or(from, |h| h.to);
        let most = usize::try_from(self.room(to).min(-self.room(from))).unwrap_or(0);
        let times = chain.iter().map(slots).fold(most, usize::min);
        for hop in chain {
            let Some(slots) = alike.get_mut(&hop.set) else { continue };
            let taken = slots.split_off(slots.len().saturating_sub(times));
            if slots.is_empty() {
                alike.remove(&hop.set);
            }
            let mut set = hop.set;
            set.replace(hop.from, hop.to);
            set.shards[..set.len].sort_unstable();
            for slot in &taken {
                self.sets[usize::from(*slot)] = set;
            }
            self.count[hop.from as usize] -= taken.len() as i64;
            self.count[hop.to as usize] += taken.len() as i64;
            alike.entry(set).or_default().extend(taken);
        }
        times > 0
    }
}

/// A move of slots with these copies from one shard to another.
#[derive(Clone, Copy)]
struct Hop {
    set: Copies,
    from: u32,
    to: u32,
}

/// The chain that leads to `to`, last hop first.
fn chain(reached: &[Option<Hop>], to: u32) -> Vec<Hop> {
    std::iter::successors(reached[to as usize], |hop| reached[hop.from as usize]).collect()
}

/// Slots in a row that get the same new copies.
#[derive(Default)]
struct Run {
    before: Copies,
    after: Copies,
    left: i64,
    used: i64,
}

impl Run {
    fn new(chooser: &Chooser<'_>, before: Copies) -> Run {
        let mut after = before;
        let mut left = i64::MAX;
        while let Some(shard) = chooser.pick(&after) {
            after.push(shard);
            left = left.min(chooser.room(shard) / RUN_PART);
        }
        Run {
            before,
            after,
            left: left.clamp(1, i64::from(SLOTS)),
            used: 0,
        }
    }

    fn added(&self) -> &[u32] {
        &self.after.as_slice()[self.before.len..]
    }

    fn end(&self, chooser: &mut Chooser<'_>) {
        self.added().iter().for_each(|s| chooser.change(*s, -self.used));
    }
}

fn end_run(chooser: &mut Chooser<'_>, run: Option<(u32, i64, i64)>) {
    if let Some((to, _, used)) = run {
        chooser.change(to, -used);
    }
}
