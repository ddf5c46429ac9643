//! The judge itself: random true histories pass, and every way of spoiling one is noticed.

use super::*;
use crate::dice::Dice;

/// A history as a linearizable store gives it: operations overlap, each takes effect at one moment within.
fn honest(seed: u64) -> (Vec<Op>, Log) {
    let mut dice = Dice::new(seed);
    let mut log = Log::default();
    let mut now = BTreeMap::new();
    let mut ops = Vec::new();
    for revision in 1..=60_u64 {
        let effect = revision * 100;
        let (start, end) = (effect - dice.below(250).min(effect), effect + dice.below(250));
        let key = u32::try_from(dice.below(3)).unwrap();
        let what = match dice.below(10) {
            0..=4 => What::Read {
                value: now.get(&key).copied(),
                revision: revision - 1,
            },
            5..=8 => {
                now.insert(key, revision * 7);
                log.change(key, revision, revision * 7).unwrap();
                What::Write {
                    value: revision * 7,
                    revision,
                }
            }
            _ => {
                if dice.percent(50) {
                    now.insert(key, revision * 7);
                    log.change(key, revision, revision * 7).unwrap();
                }
                What::UnknownWrite { value: revision * 7 }
            }
        };
        ops.push(Op { start, end, key, what });
    }
    log.cover(0, 30);
    log.cover(25, 60);
    log.tidy();
    (ops, log)
}

#[test]
fn true_histories_pass() {
    for seed in 0..500 {
        let (ops, log) = honest(seed);
        let verdict = check(&ops, &log);
        assert_eq!(verdict.violations, Vec::<String>::new(), "seed {seed}");
        assert_eq!(verdict.not_compared, 0);
    }
}

#[test]
fn a_wrong_value_is_noticed() {
    for seed in 0..200 {
        let (mut ops, log) = honest(seed);
        let at = ops.iter().position(|op| matches!(op.what, What::Read { .. })).unwrap();
        if let What::Read { value, .. } = &mut ops[at].what {
            *value = Some(value.unwrap_or(0) + 1);
        }
        assert!(!check(&ops, &log).violations.is_empty(), "seed {seed}");
    }
}

#[test]
fn a_lost_acknowledged_write_is_noticed() {
    for seed in 0..200 {
        let (ops, mut log) = honest(seed);
        let lost = ops.iter().find_map(|op| match op.what {
            What::Write { revision, .. } => Some((op.key, revision)),
            _ => None,
        });
        let (key, revision) = lost.unwrap();
        log.changes.get_mut(&key).unwrap().remove(&revision);
        assert!(!check(&ops, &log).violations.is_empty(), "seed {seed}");
    }
}

#[test]
fn a_stale_read_is_noticed() {
    for seed in 0..200 {
        let (mut ops, log) = honest(seed);
        let last = ops.iter().map(|op| op.end).max().unwrap();
        ops.push(Op {
            start: last + 1,
            end: last + 2,
            key: 0,
            what: What::Read {
                value: log.at(0, 1).unwrap(),
                revision: 1,
            },
        });
        assert!(
            check(&ops, &log).violations.iter().any(|v| v.contains("had ended")),
            "seed {seed}"
        );
    }
}

#[test]
fn a_write_applied_twice_is_noticed() {
    for seed in 0..200 {
        let (ops, mut log) = honest(seed);
        let again = ops.iter().find_map(|op| match op.what {
            What::Write { value, .. } => Some((op.key, value)),
            _ => None,
        });
        let (key, value) = again.unwrap();
        log.change(key, 61, value).unwrap();
        assert!(
            check(&ops, &log).violations.iter().any(|v| v.contains("nobody")),
            "seed {seed}"
        );
    }
}

#[test]
fn what_nobody_saw_is_said_and_not_judged() {
    let mut log = Log::default();
    log.change(0, 3, 9).unwrap();
    log.cover(2, 5);
    log.tidy();
    let read = |revision, value| Op {
        start: revision,
        end: revision,
        key: 0,
        what: What::Read { value, revision },
    };
    let verdict = check(&[read(2, Some(1)), read(4, Some(9)), read(8, Some(1))], &log);
    assert_eq!((verdict.compared, verdict.not_compared), (1, 2));
    assert_eq!(
        verdict.violations,
        ["R2: key 0 became 9 at revision 3, which nobody (more) asked for"]
    );
}

#[test]
fn a_gap_in_a_watch_is_noticed() {
    let mut log = Log::default();
    for revision in [3, 5, 8] {
        log.change(0, revision, revision).unwrap();
    }
    let seen = BTreeSet::from([(3, 0), (8, 0)]);
    assert_eq!(log.missed(&[(0, 8)], &seen).len(), 1);
    assert!(log.missed(&[(0, 4), (5, 8)], &seen).is_empty());
    assert!(log.change(0, 3, 4).is_err());
}
