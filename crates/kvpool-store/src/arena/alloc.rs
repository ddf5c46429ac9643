//! The books of the arena: which extent is free, carved or taken, and the ledger of bytes. Safe code, no I/O.
//!
//! A block takes whole extents for its full pieces and one tail piece for the rest. Tail pieces come in power-of-two
//! classes; an extent is carved for one class and returns to the free extents with its last piece. All extents are
//! alike and a block needs no two adjacent ones, so free bytes are never unusable (no external fragmentation).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::PIECE_BYTES;

/// The smallest tail class, and the unit of piece offsets, in bytes.
pub(super) const UNIT_BYTES: usize = 256;
/// Tail classes: 256 B, 512 B, 1 KiB ... 128 KiB.
pub const CLASS_COUNT: usize = 10;
/// Metadata freed before the heap is trimmed.
const TRIM_BYTES: u64 = 8 << 20;
const UNITS_PER_EXTENT: u32 = (PIECE_BYTES / UNIT_BYTES) as u32;

/// Bytes of a piece of tail class `class`.
#[must_use]
pub const fn class_bytes(class: usize) -> usize {
    UNIT_BYTES << class
}

/// What a block takes from the ledger, fixed when it is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Bytes of the value.
    pub(crate) len: u64,
    /// Whole extents.
    pub(crate) extents: u32,
    /// Class of the tail piece, if there is one.
    pub(crate) tail: Option<u8>,
    /// Bytes outside the arena: entry, key, lists.
    pub(crate) metadata: u64,
}

impl Cost {
    pub(crate) fn new(len: u64, metadata: u64) -> Self {
        let mut extents = (len / PIECE_BYTES as u64) as u32;
        let rest = (len % PIECE_BYTES as u64) as usize;
        let tail = (0..CLASS_COUNT).find(|&class| rest <= class_bytes(class));
        let tail = match (rest, tail) {
            (0, _) => None,
            (_, Some(class)) => Some(class as u8),
            (_, None) => {
                extents += 1;
                None
            }
        };
        Self {
            len,
            extents,
            tail,
            metadata,
        }
    }

    /// Arena bytes of the pieces.
    pub(crate) fn arena_bytes(&self) -> u64 {
        let tail = self.tail.map_or(0, |class| class_bytes(class as usize));
        self.extents as u64 * PIECE_BYTES as u64 + tail as u64
    }

    /// Everything the block is charged with, in bytes.
    pub(crate) fn charge(&self) -> u64 {
        self.arena_bytes() + self.metadata
    }
}

/// Why memory could not be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Short {
    /// The limit is reached: something must be evicted first.
    Memory,
    /// Too many bytes belong to unfinished writes: evicting would not help.
    InFlight,
}

/// Memory in use, in bytes. `arena_used + metadata + fixed <= limit` at every moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryBytes {
    /// The hard limit.
    pub limit: u64,
    /// Extents taken or carved, whole.
    pub arena_used: u64,
    /// Room left for extents and metadata.
    pub free: u64,
    /// Extents whose pages are in memory, used or not.
    pub resident: u64,
    /// Bytes of unfinished writes (part of `arena_used` and `metadata`).
    pub in_flight: u64,
    /// Entries, keys and lists outside the arena.
    pub metadata: u64,
    /// Fixed tables outside the arena.
    pub fixed: u64,
}

/// Use of one tail class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassBytes {
    /// Bytes of one piece.
    pub piece_bytes: u64,
    /// Bytes of extents carved for the class.
    pub carved: u64,
    /// Bytes of pieces in use.
    pub used: u64,
}

/// An extent carved into pieces of one class.
struct Carved {
    class: u8,
    used: u16,
    taken: Box<[u64]>,
}

#[derive(Default)]
struct Class {
    /// Carved extents with a free piece. The lowest is used first, so that high ones drain and return.
    partial: BTreeSet<u32>,
    extents: u32,
    pieces: u64,
}

pub(super) struct Books {
    extents: u32,
    limit: u64,
    fixed: u64,
    in_flight_max: u64,
    used_extents: u32,
    metadata: u64,
    /// The most metadata since the heap was last trimmed.
    metadata_peak: u64,
    in_flight: u64,
    /// Free extents whose pages are in memory.
    warm: Runs,
    /// Free extents never touched, or given back to the kernel.
    cold: Runs,
    classes: [Class; CLASS_COUNT],
    carved: HashMap<u32, Carved>,
}

impl Books {
    pub(super) fn new(limit: u64, fixed: u64) -> Self {
        // Offsets are u32 units of 256 B: one store spans at most 1 TiB.
        let most = u64::from(u32::MAX / UNITS_PER_EXTENT);
        let extents = (limit.saturating_sub(fixed) / PIECE_BYTES as u64).min(most) as u32;
        let mut cold = Runs::default();
        cold.add(0, extents);
        Self {
            extents,
            limit,
            fixed,
            // A quarter always stays with published blocks: a burst of writers can't empty the cache.
            in_flight_max: limit / 4 * 3,
            used_extents: 0,
            metadata: 0,
            metadata_peak: 0,
            in_flight: 0,
            warm: Runs::default(),
            cold,
            classes: Default::default(),
            carved: HashMap::new(),
        }
    }

    pub(super) fn extents(&self) -> u32 {
        self.extents
    }

    /// Takes the pieces of a block; offsets are in units, in the order of the pieces.
    pub(super) fn take(&mut self, cost: &Cost) -> Result<Vec<u32>, Short> {
        if self.in_flight + cost.charge() > self.in_flight_max {
            return Err(Short::InFlight);
        }
        let new_tail = cost
            .tail
            .is_some_and(|class| self.classes[class as usize].partial.is_empty());
        let need = cost.extents + u32::from(new_tail);
        let used = u64::from(self.used_extents) + u64::from(need);
        let bytes = used * PIECE_BYTES as u64 + self.metadata + cost.metadata + self.fixed;
        if used > u64::from(self.extents) || bytes > self.limit {
            return Err(Short::Memory);
        }
        let mut offsets = Vec::with_capacity(cost.extents as usize + 1);
        self.take_extents(cost.extents, &mut offsets);
        for offset in &mut offsets {
            *offset *= UNITS_PER_EXTENT;
        }
        if let Some(class) = cost.tail {
            offsets.push(self.take_tail(class));
        }
        self.metadata += cost.metadata;
        self.metadata_peak = self.metadata_peak.max(self.metadata);
        self.in_flight += cost.charge();
        Ok(offsets)
    }

    fn take_extents(&mut self, count: u32, out: &mut Vec<u32>) {
        self.used_extents += count;
        let missing = self.warm.take(count, out);
        let missing = self.cold.take(missing, out);
        debug_assert_eq!(missing, 0, "free extents = all - used");
    }

    fn take_tail(&mut self, class: u8) -> u32 {
        let size = class_bytes(class as usize);
        let slots = PIECE_BYTES / size;
        let first = self.classes[class as usize].partial.first().copied();
        let extent = first.unwrap_or_else(|| {
            let mut got = Vec::with_capacity(1);
            self.take_extents(1, &mut got);
            let extent = got.first().copied().unwrap_or_default();
            let taken = vec![0u64; slots.div_ceil(64)].into_boxed_slice();
            let fresh = Carved { class, used: 0, taken };
            self.carved.insert(extent, fresh);
            let book = &mut self.classes[class as usize];
            book.partial.insert(extent);
            book.extents += 1;
            extent
        });
        let mut slot = 0;
        if let Some(carved) = self.carved.get_mut(&extent) {
            slot = first_zero(&carved.taken);
            carved.taken[slot / 64] |= 1 << (slot % 64);
            carved.used += 1;
            if carved.used as usize == slots {
                self.classes[class as usize].partial.remove(&extent);
            }
        }
        self.classes[class as usize].pieces += 1;
        extent * UNITS_PER_EXTENT + (slot * size / UNIT_BYTES) as u32
    }

    /// The last reference to a block is gone: its pieces are free.
    pub(super) fn give_back(&mut self, cost: &Cost, offsets: impl Iterator<Item = u32>) {
        self.metadata -= cost.metadata;
        let mut run: Option<(u32, u32)> = None;
        for (index, offset) in offsets.enumerate() {
            let extent = offset / UNITS_PER_EXTENT;
            if index as u32 >= cost.extents {
                self.give_back_tail(extent, offset % UNITS_PER_EXTENT);
                continue;
            }
            self.used_extents -= 1;
            match &mut run {
                Some((start, len)) if *start + *len == extent => *len += 1,
                _ => {
                    if let Some((start, len)) = run.replace((extent, 1)) {
                        self.warm.add(start, len);
                    }
                }
            }
        }
        if let Some((start, len)) = run {
            self.warm.add(start, len);
        }
    }

    fn give_back_tail(&mut self, extent: u32, unit: u32) {
        let Some(carved) = self.carved.get_mut(&extent) else {
            debug_assert!(false, "a tail piece lies in a carved extent");
            return;
        };
        let class = carved.class as usize;
        let slot = unit as usize * UNIT_BYTES / class_bytes(class);
        carved.taken[slot / 64] &= !(1 << (slot % 64));
        carved.used -= 1;
        let book = &mut self.classes[class];
        book.pieces -= 1;
        if carved.used == 0 {
            book.partial.remove(&extent);
            book.extents -= 1;
            self.carved.remove(&extent);
            self.used_extents -= 1;
            self.warm.add(extent, 1);
        } else {
            book.partial.insert(extent);
        }
    }

    pub(super) fn landed(&mut self, cost: &Cost) {
        self.in_flight -= cost.charge();
    }

    /// A free extent whose pages must go so that resident pages and metadata together stay within the limit.
    pub(super) fn take_excess_resident(&mut self) -> Option<u32> {
        let resident = u64::from(self.extents - self.cold.count) * PIECE_BYTES as u64;
        if resident + self.metadata + self.fixed <= self.limit {
            return None;
        }
        let mut got = Vec::with_capacity(1);
        self.warm.take(1, &mut got);
        let extent = got.first().copied()?;
        self.cold.add(extent, 1);
        Some(extent)
    }

    /// True once after many small entries have gone: the allocator keeps their pages unless told to give them back.
    pub(super) fn heap_shrank(&mut self) -> bool {
        let shrank = self.metadata_peak - self.metadata > TRIM_BYTES;
        if shrank {
            self.metadata_peak = self.metadata;
        }
        shrank
    }

    /// A run of at most `max` cold extents that may be faulted in within the limit.
    pub(super) fn cold_run(&self, max: u32) -> Option<(u32, u32)> {
        let resident = u64::from(self.extents - self.cold.count) * PIECE_BYTES as u64;
        let room = self.limit.saturating_sub(resident + self.metadata + self.fixed);
        let max = u64::from(max).min(room / PIECE_BYTES as u64) as u32;
        let (start, len) = self.cold.first()?;
        (max > 0).then_some((start, len.min(max)))
    }

    /// The extents of `cold_run` are in memory now; those taken meanwhile are no longer cold.
    pub(super) fn warmed(&mut self, start: u32, count: u32) {
        for extent in start..start + count {
            if self.cold.remove(extent) {
                self.warm.add(extent, 1);
            }
        }
    }

    pub(super) fn bytes(&self) -> MemoryBytes {
        let arena_used = u64::from(self.used_extents) * PIECE_BYTES as u64;
        let resident = u64::from(self.extents - self.cold.count) * PIECE_BYTES as u64;
        MemoryBytes {
            limit: self.limit,
            arena_used,
            free: self.limit.saturating_sub(arena_used + self.metadata + self.fixed),
            resident,
            in_flight: self.in_flight,
            metadata: self.metadata,
            fixed: self.fixed,
        }
    }

    pub(super) fn classes(&self) -> Vec<ClassBytes> {
        let of = |(class, book): (usize, &Class)| ClassBytes {
            piece_bytes: class_bytes(class) as u64,
            carved: u64::from(book.extents) * PIECE_BYTES as u64,
            used: book.pieces * class_bytes(class) as u64,
        };
        self.classes.iter().enumerate().map(of).collect()
    }
}

fn first_zero(words: &[u64]) -> usize {
    let free = words.iter().position(|&word| word != u64::MAX);
    free.map_or(0, |word| word * 64 + words[word].trailing_ones() as usize)
}

/// Free extents as maximal runs, found by start (to join neighbours) and by length (best fit).
#[derive(Default)]
struct Runs {
    by_start: BTreeMap<u32, u32>,
    by_len: BTreeSet<(u32, u32)>,
    count: u32,
}

impl Runs {
    fn insert(&mut self, start: u32, len: u32) {
        if len > 0 {
            self.by_start.insert(start, len);
            self.by_len.insert((len, start));
            self.count += len;
        }
    }

    fn delete(&mut self, start: u32, len: u32) {
        self.by_start.remove(&start);
        self.by_len.remove(&(len, start));
        self.count -= len;
    }

    /// Adds a run and joins it with its neighbours.
    fn add(&mut self, mut start: u32, mut len: u32) {
        let before = self.by_start.range(..start).next_back();
        if let Some((&s, &l)) = before
            && s + l == start
        {
            self.delete(s, l);
            start = s;
            len += l;
        }
        if let Some(&l) = self.by_start.get(&(start + len)) {
            self.delete(start + len, l);
            len += l;
        }
        self.insert(start, len);
    }

    /// Takes up to `count` extents in as few runs as possible; returns how many are missing.
    fn take(&mut self, mut count: u32, out: &mut Vec<u32>) -> u32 {
        while count > 0 {
            let fit = self.by_len.range((count, 0)..).next();
            let Some(&(len, start)) = fit.or_else(|| self.by_len.last()) else {
                break;
            };
            let got = len.min(count);
            self.delete(start, len);
            self.insert(start + got, len - got);
            out.extend(start..start + got);
            count -= got;
        }
        count
    }

    fn first(&self) -> Option<(u32, u32)> {
        self.by_start.first_key_value().map(|(&start, &len)| (start, len))
    }

    /// Takes out one extent; false if it is not here.
    fn remove(&mut self, extent: u32) -> bool {
        let Some((&start, &len)) = self.by_start.range(..=extent).next_back() else {
            return false;
        };
        if extent >= start + len {
            return false;
        }
        self.delete(start, len);
        self.insert(start, extent - start);
        self.insert(extent + 1, start + len - extent - 1);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o10_costs_at_the_class_boundaries() {
        let mib = 1 << 20;
        for (len, extents, tail) in [
            (0, 0, None),
            (1, 0, Some(0)),
            (256, 0, Some(0)),
            (257, 0, Some(1)),
            (4095, 0, Some(4)),
            (4096, 0, Some(4)),
            (4097, 0, Some(5)),
            (128 * 1024, 0, Some(9)),
            (128 * 1024 + 1, 1, None),
            (PIECE_BYTES as u64, 1, None),
            (PIECE_BYTES as u64 + 1, 1, Some(0)),
            (16 * mib - 1, 64, None),
            (16 * mib, 64, None),
        ] {
            let cost = Cost::new(len, 0);
            assert_eq!((cost.extents, cost.tail), (extents, tail), "length {len}");
            assert!(cost.arena_bytes() >= len);
        }
    }

    #[test]
    fn runs_join_neighbours_and_fit_best() {
        let mut runs = Runs::default();
        for (start, len) in [(0, 4), (10, 2), (20, 8), (4, 6)] {
            runs.add(start, len);
        }
        assert_eq!(runs.by_start.len(), 2);
        assert_eq!(runs.by_start[&0], 12);
        let mut out = Vec::new();
        assert_eq!(runs.take(8, &mut out), 0);
        assert_eq!(out, (20..28).collect::<Vec<_>>());
        assert_eq!(runs.take(100, &mut out), 88);
        assert_eq!(runs.count, 0);
    }

    #[test]
    fn extents_given_back_join_again_and_the_ledger_ends_at_zero() {
        let mut books = Books::new(64 * PIECE_BYTES as u64, 0);
        let costs: Vec<Cost> = [3 * PIECE_BYTES as u64, 100, 70_000, 5 * PIECE_BYTES as u64 + 9]
            .iter()
            .map(|&len| Cost::new(len, 500))
            .collect();
        let taken: Vec<Vec<u32>> = costs
            .iter()
            .map(|cost| books.take(cost).expect("room for four small blocks"))
            .collect();
        for (cost, offsets) in costs.iter().zip(taken) {
            books.landed(cost);
            books.give_back(cost, offsets.into_iter());
        }
        let bytes = books.bytes();
        assert_eq!((bytes.arena_used, bytes.metadata, bytes.in_flight), (0, 0, 0));
        assert!(books.carved.is_empty());
        assert_eq!(books.warm.count + books.cold.count, 64);
    }
}
