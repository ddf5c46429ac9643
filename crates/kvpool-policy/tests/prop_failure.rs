//! The failure detector against a model: R1-relevant verdicts only with evidence, and always with it.

use kvpool_policy::failure::{Admission, Cause, Evidence, FailureDetector, Known, Limits, Verdict, admit};
use proptest::prelude::*;

const LIMITS: Limits = Limits {
    lease_ms: 3_000,
    broken_grace_ms: 1_000,
    tick_ms: 250,
};
/// Above this gap between ticks the leader counts as starved.
const STARVED: u64 = 250 + 750;

fn open(incarnation: u64, heard_ms: u64) -> Evidence {
    Evidence {
        incarnation,
        heard_ms,
        broken_ms: None,
    }
}

/// Ticks every 250 ms from `from` to `to`, and returns the first verdict with its time.
fn run(detector: &mut FailureDetector, from: u64, to: u64) -> Option<(u64, Vec<Verdict>)> {
    (from..=to).step_by(250).find_map(|now| {
        let verdicts = detector.tick(now);
        (!verdicts.is_empty()).then_some((now, verdicts))
    })
}

#[test]
fn a_silent_shard_is_down_after_its_lease_and_not_before() {
    let mut d = FailureDetector::new(LIMITS, 0, 0);
    d.watch("s", 7, 0);
    let mut d = FailureDetector::new(LIMITS, 0, 0);
    d.watch("s", 7, 0);
    let (at, verdicts) = run(&mut d, 0, 10_000).unwrap();
    assert_eq!(at, 3_000);
    let cause = Cause::LeaseExpired { silent_ms: 3_000 };
    assert_eq!(
        verdicts,
        [Verdict {
            shard: "s".into(),
            incarnation: 7,
            cause
        }]
    );
    d.forget("s");
    assert_eq!(run(&mut d, 3_250, 20_000), None);
}

#[test]
fn a_broken_session_is_down_after_the_grace_unless_resumed() {
    let mut d = FailureDetector::new(LIMITS, 0, 10_000);
    d.watch("s", 7, 10_000);
    d.observe(
        "s",
        Evidence {
            incarnation: 7,
            heard_ms: 10_000,
            broken_ms: Some(10_000),
        },
    );
    let (at, verdicts) = run(&mut d.clone(), 10_000, 20_000).unwrap();
    assert_eq!(
        (at, verdicts[0].cause),
        (11_000, Cause::SessionBroken { since_ms: 1_000 })
    );
    assert_eq!(run(&mut d, 10_000, 10_750), None);
    d.observe("s", open(7, 10_900));
    assert_eq!(run(&mut d, 11_000, 13_750), None, "resumed");
}

#[test]
fn a_new_leader_declares_nobody_dead_for_one_lease() {
    let mut d = FailureDetector::new(LIMITS, 50_000, 50_000);
    d.watch("s", 7, 50_000);
    d.observe(
        "s",
        Evidence {
            incarnation: 7,
            heard_ms: 40_000,
            broken_ms: Some(40_000),
        },
    );
    assert_eq!(run(&mut d, 50_000, 60_000).unwrap().0, 53_000);
}

#[test]
fn a_starved_leader_gives_everybody_a_new_lease() {
    let mut d = FailureDetector::new(LIMITS, 0, 10_000);
    d.watch("s", 7, 10_000);
    assert_eq!(d.tick(60_000), [], "it slept: what was sent meanwhile is not read yet");
    assert_eq!(run(&mut d, 60_250, 62_750), None);
    assert_eq!(run(&mut d, 63_000, 70_000).unwrap().0, 63_000);
}

#[test]
fn admission() {
    let known = |up| {
        Some(Known {
            up,
            boot_id: "b",
            incarnation: 7,
        })
    };
    assert_eq!(admit(known(true), "b", 7, None), Admission::Resume { incarnation: 7 });
    assert_eq!(
        admit(known(true), "b", 7, Some("b")),
        Admission::Resume { incarnation: 7 }
    );
    assert_eq!(
        admit(known(false), "b", 7, None),
        Admission::Register,
        "declared Down: it clears"
    );
    assert_eq!(
        admit(known(true), "c", 0, None),
        Admission::Register,
        "restarted (fault O31)"
    );
    assert_eq!(admit(known(true), "c", 7, None), Admission::Register);
    assert_eq!(admit(known(true), "b", 6, None), Admission::Register);
    assert_eq!(admit(None, "b", 7, None), Admission::Register);
    assert_eq!(admit(None, "b", 0, None), Admission::Register);
    assert_eq!(admit(known(true), "c", 0, Some("b")), Admission::Duplicate);
}

#[derive(Clone, Debug)]
enum Step {
    /// Time passes and the leader ticks.
    Tick(u64),
    Heard {
        old: bool,
    },
    Broken,
    Resumed,
    NewIncarnation,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (1u64..1_500).prop_map(Step::Tick),
        4 => any::<bool>().prop_map(|old| Step::Heard { old }),
        1 => Just(Step::Broken),
        1 => Just(Step::Resumed),
        1 => Just(Step::NewIncarnation),
    ];
    prop::collection::vec(step, 0..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// A verdict exactly when the newest incarnation has been silent for a lease or broken for the grace, counted from the
    /// last starvation, and not within the leader's first lease.
    #[test]
    fn verdicts_equal_the_model(start in 0u64..1_000_000, steps in steps()) {
        let mut d = FailureDetector::new(LIMITS, start, start);
        d.watch("s", 1, start);
        let (mut now, mut last_tick, mut floor) = (start, start, start);
        let (mut incarnation, mut heard, mut broken) = (1, start, None);
        for step in steps {
            match step {
                Step::Tick(ms) => {
                    now += ms;
                    let starved = now - last_tick > STARVED;
                    last_tick = now;
                    if starved {
                        floor = now;
                    }
                    let silent = now - heard.max(floor) >= LIMITS.lease_ms;
                    let lost = broken.is_some_and(|b: u64| now - b.max(floor) >= LIMITS.broken_grace_ms);
                    let expected = !starved && now >= start + LIMITS.lease_ms && (silent || lost);
                    let verdicts = d.tick(now);
                    prop_assert_eq!(!verdicts.is_empty(), expected, "at {}", now - start);
                    prop_assert!(verdicts.iter().all(|v| v.incarnation == incarnation));
                }
                Step::Heard { old: true } => d.observe("s", open(incarnation - 1, now)),
                Step::Heard { old: false } => {
                    heard = now;
                    d.observe("s", Evidence { incarnation, heard_ms: now, broken_ms: broken });
                }
                Step::Broken => {
                    broken = Some(now);
                    d.observe("s", Evidence { incarnation, heard_ms: heard, broken_ms: broken });
                }
                Step::Resumed => {
                    (heard, broken) = (now, None);
                    d.observe("s", open(incarnation, now));
                }
                Step::NewIncarnation => {
                    incarnation += 1;
                    (heard, broken) = (now, None);
                    d.watch("s", incarnation, now);
                }
            }
        }
    }

    /// Any times, in any order: no panic, and never a shard that is not watched.
    #[test]
    fn any_input_is_survived(inputs in prop::collection::vec((any::<u64>(), any::<u64>(), any::<Option<u64>>()), 0..40)) {
        let mut d = FailureDetector::new(LIMITS, u64::MAX - 5, 3);
        d.watch("s", 1, u64::MAX);
        for (a, b, c) in inputs {
            d.observe("s", Evidence { incarnation: 1, heard_ms: a, broken_ms: c });
            d.observe("other", open(1, a));
            prop_assert!(d.tick(b).iter().all(|v| v.shard == "s"));
        }
    }
}
