//! What a peer is known to lack: writes and removals that did not reach it while it was slow or gone.
//!
//! Kept by the copy that took the write, per incarnation of the peer (a new incarnation is filled by slot transfer and has
//! no gaps). Two uses: a block with a gap is not "confirmed" at that peer, so its body is not streamed on the strength of
//! a copy that is not there; and the catch-up task brings the writes over when the peer answers again. Bounded: beyond
//! the bound nothing of this peer counts as confirmed, which costs speed and never truth.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Keys remembered per peer.
const MAX_KEYS: usize = 8192;
/// After this time nothing of the write itself is under way any more.
const SETTLED: Duration = Duration::from_secs(1);

/// What is missing under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    /// The write or removal that did not arrive.
    pub(crate) write_id: u64,
    pub(crate) removal: bool,
}

#[derive(Default)]
struct Inner {
    keys: BTreeMap<Bytes, (Gap, Instant)>,
    overflowed: bool,
}

#[derive(Default)]
pub(crate) struct Gaps {
    inner: Mutex<Inner>,
}

impl Gaps {
    /// A write of the key did not arrive. The newest of several counts.
    pub(crate) fn add(&self, key: &Bytes, gap: Gap) {
        let inner = &mut *self.inner.lock();
        let full = inner.keys.len() >= MAX_KEYS;
        match inner.keys.get_mut(key) {
            Some((known, _)) if known.write_id >= gap.write_id => {}
            Some(known) => *known = (gap, Instant::now()),
            None if full => inner.overflowed = true,
            None => drop(inner.keys.insert(key.clone(), (gap, Instant::now()))),
        }
    }

    /// This write of the key, and with it all older ones, reached the peer.
    pub(crate) fn close(&self, key: &[u8], write_id: u64) {
        let mut inner = self.inner.lock();
        if inner.keys.get(key).is_some_and(|(gap, _)| gap.write_id <= write_id) {
            inner.keys.remove(key);
        }
    }

    /// Whether the peer is known to hold the current write of the key.
    pub(crate) fn is_confirmed(&self, key: &[u8]) -> bool {
        let inner = self.inner.lock();
        !inner.overflowed && !inner.keys.contains_key(key)
    }

    /// Some gaps that have been open for a while (a write under way has one until it is confirmed). They stay listed
    /// until closed.
    pub(crate) fn some(&self, max: usize) -> Vec<(Bytes, Gap)> {
        let inner = self.inner.lock();
        let old = inner.keys.iter().filter(|(_, (_, since))| since.elapsed() >= SETTLED);
        old.take(max).map(|(key, (gap, _))| (key.clone(), *gap)).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.inner.lock().keys.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn gap(write_id: u64) -> Gap {
        Gap {
            write_id,
            removal: false,
        }
    }

    #[test]
    fn a_gap_is_open_until_its_write_arrives_and_the_bound_holds() {
        let gaps = Gaps::default();
        let key = Bytes::from_static(b"k");
        assert!(gaps.is_confirmed(&key));
        gaps.add(&key, gap(5));
        gaps.add(&key, gap(4));
        assert!(!gaps.is_confirmed(&key));
        assert!(gaps.is_confirmed(b"other"));
        gaps.close(&key, 4);
        assert!(!gaps.is_confirmed(&key), "an older write does not close it");
        gaps.close(&key, 5);
        assert!(gaps.is_confirmed(&key));
        for i in 0..=MAX_KEYS {
            gaps.add(&Bytes::from(i.to_string()), gap(1));
        }
        assert_eq!(gaps.len(), MAX_KEYS);
        assert!(!gaps.is_confirmed(b"other"), "beyond the bound nothing is confirmed");
    }
}
