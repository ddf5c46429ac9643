//! A set of slots, 2 KiB, whatever is in it.

use kvpool_state::SLOTS;
use kvpool_state::records::SlotRange;

const WORDS: usize = SLOTS as usize / 64;

/// A set of hash slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSet {
    words: Box<[u64; WORDS]>,
}

impl Default for SlotSet {
    fn default() -> Self {
        SlotSet {
            words: Box::new([0; WORDS]),
        }
    }
}

impl SlotSet {
    /// The slots of the ranges; what lies outside of 0..SLOTS is left out.
    #[must_use]
    pub fn from_ranges(ranges: &[SlotRange]) -> Self {
        let mut set = SlotSet::default();
        for range in ranges {
            for slot in range.first..=range.last.min(u32::from(SLOTS) - 1) {
                if let Some(word) = set.words.get_mut(slot as usize / 64) {
                    *word |= 1 << (slot % 64);
                }
            }
        }
        set
    }

    #[must_use]
    pub fn contains(&self, slot: u16) -> bool {
        self.words
            .get(usize::from(slot) / 64)
            .is_some_and(|w| w >> (slot % 64) & 1 == 1)
    }

    pub fn add(&mut self, other: &SlotSet) {
        for (mine, theirs) in self.words.iter_mut().zip(other.words.iter()) {
            *mine |= theirs;
        }
    }

    pub fn remove(&mut self, other: &SlotSet) {
        for (mine, theirs) in self.words.iter_mut().zip(other.words.iter()) {
            *mine &= !theirs;
        }
    }

    #[must_use]
    pub fn len(&self) -> u32 {
        self.words.iter().map(|w| w.count_ones()).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }

    /// Runs of slots, in order, without copies.
    #[must_use]
    pub fn to_ranges(&self) -> Vec<SlotRange> {
        let mut out: Vec<SlotRange> = Vec::new();
        for slot in (0..SLOTS).filter(|s| self.contains(*s)).map(u32::from) {
            match out.last_mut() {
                Some(range) if range.last + 1 == slot => range.last = slot,
                _ => out.push(SlotRange {
                    first: slot,
                    last: slot,
                    copies: Vec::new(),
                }),
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u32, last: u32) -> SlotRange {
        SlotRange {
            first,
            last,
            copies: Vec::new(),
        }
    }

    #[test]
    fn ranges_come_back_merged() {
        let set = SlotSet::from_ranges(&[range(0, 3), range(4, 70), range(16383, 16383)]);
        assert_eq!(set.to_ranges(), [range(0, 70), range(16383, 16383)]);
        assert_eq!(set.len(), 72);
        let mut rest = set.clone();
        rest.remove(&SlotSet::from_ranges(&[range(10, 20)]));
        assert_eq!(rest.to_ranges(), [range(0, 9), range(21, 70), range(16383, 16383)]);
        rest.add(&set);
        assert_eq!(rest, set);
    }

    #[test]
    fn nonsense_ranges_are_harmless() {
        assert!(SlotSet::from_ranges(&[range(9, 3), range(20_000, u32::MAX)]).is_empty());
        assert_eq!(SlotSet::from_ranges(&[range(16_000, u32::MAX)]).len(), 384);
    }
}
