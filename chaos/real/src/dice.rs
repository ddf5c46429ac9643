//! Random numbers that a seed replays for ever: splitmix64, which no library changes under us.

use std::time::Duration;

/// A stream of random numbers. Equal seeds give equal streams.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Dice(seed)
    }

    /// A stream of its own for part `n` of the work, so that parts don't depend on each other's speed.
    #[must_use]
    pub fn fork(&self, n: u64) -> Self {
        Dice(mix(self.0 ^ mix(n.wrapping_add(0x5851_f42d_4c95_7f2d))))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `0..bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// True in `percent` of 100 throws.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn up_to(&mut self, longest: Duration) -> Duration {
        let micros = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.below(micros.saturating_add(1)))
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        let at = usize::try_from(self.below(from.len() as u64)).ok()?;
        from.get(at)
    }
}

/// The finalizer of splitmix64.
#[must_use]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
