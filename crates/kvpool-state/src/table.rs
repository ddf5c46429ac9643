//! The slot table of one pool: slot → list of copies, primary first. Equal lists share memory, so that a clone is cheap.

use crate::SLOTS;
use crate::records::{SlotCopy, SlotRange};
use std::sync::Arc;

/// Most copies that a slot's list may name (the factor, and one being filled for each).
pub const MAX_COPIES: usize = 8;
/// Highest factor of a pool.
pub const MAX_FACTOR: u32 = 4;

/// The list of one slot.
pub type SlotList = Arc<[SlotCopy]>;

/// `SLOTS` lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotTable {
    lists: Vec<SlotList>,
}

impl Default for SlotTable {
    fn default() -> Self {
        let empty: SlotList = Arc::from(Vec::new());
        SlotTable {
            lists: vec![empty; usize::from(SLOTS)],
        }
    }
}

impl SlotTable {
    /// The copies of a slot, primary first. Slots above the range have none.
    #[must_use]
    pub fn get(&self, slot: u16) -> &[SlotCopy] {
        self.lists.get(usize::from(slot)).map_or(&[], |l| l)
    }

    /// Puts a list in place. `false` when the slot is out of range.
    pub fn set(&mut self, slot: u16, list: SlotList) -> bool {
        match self.lists.get_mut(usize::from(slot)) {
            Some(place) => {
                *place = list;
                true
            }
            None => false,
        }
    }

    /// All lists in slot order.
    pub fn iter(&self) -> impl Iterator<Item = (u16, &SlotList)> {
        (0..SLOTS).zip(self.lists.iter())
    }

    /// Rewrites lists: `change` gets each list and gives a new one, or `None` to keep it. Neighbouring slots with equal lists
    /// share the result. Returns how many slots changed.
    pub fn rewrite(&mut self, mut change: impl FnMut(u16, &[SlotCopy]) -> Option<Vec<SlotCopy>>) -> u32 {
        let mut changed = 0;
        let mut last: Option<SlotList> = None;
        for (slot, place) in (0..SLOTS).zip(self.lists.iter_mut()) {
            if let Some(list) = change(slot, place)
                && list[..] != place[..]
            {
                let shared = match &last {
                    Some(l) if l[..] == list[..] => l.clone(),
                    _ => Arc::from(list),
                };
                last = Some(shared.clone());
                *place = shared;
                changed += 1;
            }
        }
        changed
    }

    /// Runs of equal lists, covering every slot once, in order.
    #[must_use]
    pub fn to_ranges(&self) -> Vec<SlotRange> {
        let mut out: Vec<SlotRange> = Vec::new();
        for (slot, list) in self.iter() {
            match out.last_mut() {
                Some(r) if r.copies[..] == list[..] => r.last = u32::from(slot),
                _ => out.push(SlotRange {
                    first: u32::from(slot),
                    last: u32::from(slot),
                    copies: list.to_vec(),
                }),
            }
        }
        out
    }

    /// A table from ranges; slots that no range names have an empty list.
    ///
    /// # Errors
    /// A sentence that names the range when one is out of bounds, overlaps or has too many or repeated copies.
    pub fn from_ranges(ranges: &[SlotRange]) -> Result<Self, String> {
        let mut table = SlotTable::default();
        let mut next = 0u32;
        for r in ranges {
            check_range(r)?;
            if r.first < next {
                return Err(format!("slot range {}-{} overlaps or is out of order", r.first, r.last));
            }
            next = r.last + 1;
            table.put_range(r);
        }
        Ok(table)
    }

    /// Puts a checked range in place.
    fn put_range(&mut self, range: &SlotRange) {
        let list: SlotList = Arc::from(range.copies.clone());
        for place in self
            .lists
            .iter_mut()
            .take(range.last as usize + 1)
            .skip(range.first as usize)
        {
            *place = list.clone();
        }
    }
}

/// Bounds of a range and of its list.
///
/// # Errors
/// A sentence that names the range and the fault.
pub fn check_range(range: &SlotRange) -> Result<(), String> {
    let name = format!("slot range {}-{}", range.first, range.last);
    if range.first > range.last || range.last >= u32::from(SLOTS) {
        return Err(format!("{name} is not within 0-{}", SLOTS - 1));
    }
    if range.copies.len() > MAX_COPIES {
        return Err(format!(
            "{name} has {} copies, at most {MAX_COPIES}",
            range.copies.len()
        ));
    }
    let twice = range
        .copies
        .iter()
        .enumerate()
        .any(|(i, c)| range.copies.iter().take(i).any(|d| d.shard == c.shard));
    if twice {
        Err(format!("{name} names a shard twice"))
    } else {
        Ok(())
    }
}
