//! What the bench writes and how it checks what it reads.
//!
//! A value is a fixed random pattern with an 8-byte stamp at the start of every 512-byte sector. The stamp follows from
//! key, version and sector, so a stale, mixed, shifted or truncated value is seen by looking at the stamps alone (cheap,
//! after every read); before and after each timed window every byte is compared.

/// Bytes between two stamps.
const SECTOR: usize = 512;

/// Buffers of one client thread, kept over the whole run so that all servers meet the same warm memory.
pub struct Lane {
    /// The value to send, or to compare with.
    pub source: Vec<u8>,
    /// The value read.
    pub target: Vec<u8>,
}

impl Lane {
    /// Buffers for values of up to `max` bytes, all of them touched.
    pub fn new(max: usize) -> Self {
        let mut state = 0x2545_F491_4F6C_DD1Du64;
        let mut source = vec![0; max];
        for word in source.chunks_mut(8) {
            state = mix(state);
            let bytes = state.to_le_bytes();
            word.copy_from_slice(&bytes[..word.len()]);
        }
        Self {
            source,
            target: vec![1; max],
        }
    }

    /// Makes the first `len` bytes of `source` the value of `stamp`.
    pub fn stamp(&mut self, stamp: u64, len: usize) {
        for (sector, bytes) in self.source[..len].chunks_mut(SECTOR).enumerate() {
            if let Some(head) = bytes.first_chunk_mut::<8>() {
                *head = (stamp ^ sector as u64).to_le_bytes();
            }
        }
    }

    /// True if the stamps of the value read are those of `stamp`.
    pub fn stamps_match(&self, stamp: u64, len: usize) -> bool {
        let mut sectors = self.target[..len].chunks(SECTOR).enumerate();
        sectors.all(|(sector, bytes)| match bytes.first_chunk::<8>() {
            Some(head) => u64::from_le_bytes(*head) == stamp ^ sector as u64,
            None => true,
        })
    }

    /// The stamp that the first sector read carries.
    pub fn first_stamp(&self) -> u64 {
        self.target
            .first_chunk::<8>()
            .map_or(0, |head| u64::from_le_bytes(*head))
    }

    /// True if every byte read is right.
    pub fn all_match(&mut self, stamp: u64, len: usize) -> bool {
        self.stamp(stamp, len);
        self.source[..len] == self.target[..len]
    }
}

/// The stamp of one version of a key's value.
pub fn stamp_of(key: u32, len: u64, version: u64) -> u64 {
    mix(mix(u64::from(key) << 40 ^ len) ^ version)
}

/// SplitMix64's finaliser.
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_versions_and_single_flipped_bytes_are_seen() {
        let len = 10 * SECTOR + 100;
        let mut lane = Lane::new(len);
        let stamp = stamp_of(3, len as u64, 1);
        lane.stamp(stamp, len);
        lane.target = lane.source.clone();
        assert!(lane.stamps_match(stamp, len) && lane.all_match(stamp, len));
        let next = stamp_of(3, len as u64, 2);
        assert!(!lane.stamps_match(next, len) && !lane.all_match(next, len));
        lane.target[5 * SECTOR + 77] ^= 1;
        assert!(!lane.all_match(stamp, len));
    }
}
