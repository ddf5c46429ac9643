use super::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

fn op(called: u64, returned: u64, call: Call) -> Operation {
    Operation {
        called,
        returned: Some(returned),
        call,
    }
}

fn lost(called: u64, call: Call) -> Operation {
    Operation {
        called,
        returned: None,
        call,
    }
}

const fn swap(expected: Value, new: u64, won: bool) -> Call {
    Call::Swap {
        expected,
        new: Some(new),
        won,
    }
}

fn broken(history: &[Operation]) -> bool {
    matches!(check(history, None), Verdict::Broken(_))
}

fn fine(history: &[Operation]) -> bool {
    check(history, None) == Verdict::Linearizable
}

#[test]
fn calls_one_after_the_other() {
    use Call::{Read, Write};
    assert!(fine(&[]));
    assert!(fine(&[
        op(1, 2, Read(None)),
        op(3, 4, Write(Some(1))),
        op(5, 6, Read(Some(1)))
    ]));
    assert!(
        broken(&[op(1, 2, Write(Some(1))), op(3, 4, Read(None))]),
        "a stale read"
    );
    assert!(broken(&[op(1, 2, Read(Some(9)))]), "a value from nowhere");
    assert!(broken(&[
        op(1, 2, Write(Some(1))),
        op(3, 4, Write(Some(2))),
        op(5, 6, Read(Some(1)))
    ]));
    assert!(fine(&[
        op(1, 2, Write(Some(1))),
        op(3, 4, Write(None)),
        op(5, 6, Read(None))
    ]));
}

#[test]
fn calls_at_the_same_time() {
    use Call::{Read, Write};
    let (a, b) = (op(1, 10, Write(Some(1))), op(2, 9, Write(Some(2))));
    for last in [1, 2] {
        assert!(fine(&[a, b, op(11, 12, Read(Some(last)))]));
    }
    assert!(
        fine(&[a, op(3, 4, Read(None)), op(5, 6, Read(Some(1)))]),
        "it takes effect in between"
    );
    assert!(
        broken(&[a, op(3, 4, Read(Some(1))), op(5, 6, Read(None))]),
        "back in time while the write is under way"
    );
    let split = [a, b, op(11, 12, Read(Some(1))), op(13, 14, Read(Some(2)))];
    assert!(broken(&split), "two readers disagree about the order");
}

#[test]
fn swaps() {
    use Call::Write;
    assert!(fine(&[op(1, 2, swap(None, 1, true)), op(3, 4, swap(Some(1), 2, true))]));
    assert!(
        broken(&[op(1, 5, swap(None, 1, true)), op(2, 6, swap(None, 2, true))]),
        "both won"
    );
    assert!(fine(&[op(1, 5, swap(None, 1, true)), op(2, 6, swap(None, 2, false))]));
    assert!(broken(&[op(1, 2, swap(None, 1, false))]), "lost against nobody");
    assert!(broken(&[op(1, 2, Write(Some(3))), op(3, 4, swap(None, 1, true))]));
}

#[test]
fn unknown_outcomes_may_have_happened_or_not() {
    use Call::{Read, Write};
    let write = lost(1, Write(Some(1)));
    assert!(fine(&[write, op(5, 6, Read(None))]));
    assert!(fine(&[write, op(5, 6, Read(None)), op(7, 8, Read(Some(1)))]), "late");
    assert!(
        broken(&[write, op(5, 6, Read(Some(1))), op(7, 8, Read(None))]),
        "and back"
    );
    assert!(
        broken(&[op(1, 2, Read(Some(1))), lost(3, Write(Some(1)))]),
        "not before it was called"
    );
    assert!(fine(&[lost(1, swap(None, 1, true)), op(2, 3, Read(Some(1)))]));
    assert!(fine(&[lost(1, swap(None, 1, false)), op(2, 3, swap(None, 2, false))]));
    assert!(broken(&[
        op(0, 1, Write(Some(5))),
        lost(2, swap(None, 1, true)),
        op(3, 4, Read(Some(1)))
    ]));
}

#[test]
fn the_search_is_bounded() {
    // Writes whose outcome is unknown, swaps that lost for no reason: the worst there is.
    let mut history: Vec<Operation> = (0..40).map(|i| lost(1, Call::Write(Some(100 + i)))).collect();
    history.extend((0..40).map(|i| op(2, 100, swap(Some(100 + i), 7, false))));
    history.push(op(101, 102, Call::Read(Some(7))));
    assert_ne!(check(&history, None), Verdict::Linearizable);
}

/// A history as a real register gives it: calls of several clients that take effect at a moment in between.
fn random_history(rng: &mut SmallRng, length: u64) -> Vec<Operation> {
    let mut history = Vec::new();
    let mut value: Value = None;
    // Moments of effect are 1000 apart; calls and returns lie around them and overlap.
    for moment in 1..=length {
        let at = moment * 1_000;
        let known = rng.random_range(0..10) > 0;
        let happens = known || rng.random_range(0..2) == 0;
        let new = (rng.random_range(0..8) > 0).then_some(moment);
        let call = match rng.random_range(0..3) {
            0 => Call::Read(value),
            1 => Call::Write(new),
            _ => {
                let expected = if rng.random_range(0..2) == 0 {
                    value
                } else {
                    Some(moment / 2)
                };
                Call::Swap {
                    expected,
                    new,
                    won: expected == value,
                }
            }
        };
        if happens {
            match call {
                Call::Write(new) => value = new,
                Call::Swap { new, won: true, .. } => value = new,
                _ => {}
            }
        }
        history.push(Operation {
            called: at - rng.random_range(0..6_000).min(at),
            returned: known.then(|| at + rng.random_range(1..6_000)),
            call,
        });
    }
    history
}

#[test]
fn histories_of_a_real_register_pass_and_spoiled_ones_do_not() {
    let (mut spoiled, mut noticed) = (0, 0);
    for seed in 0..400 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let length = rng.random_range(1..120);
        let mut history = random_history(&mut rng, length);
        assert_eq!(check(&history, None), Verdict::Linearizable, "seed {seed}: {history:?}");
        // A read that tells of a value which was never there, or was gone long ago.
        let at = rng.random_range(0..history.len());
        if let (Call::Read(saw), Some(_)) = (history[at].call, history[at].returned) {
            history[at].call = Call::Read(Some(saw.map_or(1_000_000, |v| v + 1_000_000)));
            assert!(broken(&history), "seed {seed}: a value from nowhere");
            let long_ago = history.iter().find_map(|op| match op.call {
                Call::Write(Some(old)) if op.called + 40_000 < history[at].called => Some(old),
                _ => None,
            });
            let overwritten = history.iter().any(|op| {
                matches!(op.call, Call::Write(_))
                    && op.returned.is_some_and(|r| r < history[at].called)
                    && op.called > 20_000
            });
            if let (Some(old), true) = (long_ago, overwritten) {
                history[at].call = Call::Read(Some(old));
                spoiled += 1;
                // An undecided one has not passed.
                noticed += u32::from(!fine(&history));
            }
        }
    }
    assert!(spoiled > 15, "enough old values were read: {spoiled}");
    assert!(
        noticed * 10 >= spoiled * 8,
        "{noticed} of {spoiled} stale reads noticed"
    );
}

#[test]
fn keys_are_checked_alone() {
    let mut all = Histories::default();
    all.add("a", op(1, 2, Call::Write(Some(1))));
    all.add("b", op(3, 4, Call::Read(None)));
    assert_eq!(all.check(|_| None), Verdict::Linearizable);
    assert_eq!(all.len(), 2);
    all.add("a", op(5, 6, Call::Read(None)));
    let Verdict::Broken(why) = all.check(|_| None) else {
        panic!()
    };
    assert!(why.starts_with("key a: "), "{why}");
}
