//! The failure detector against a model: R1-relevant verdicts only with evidence, and always with it.

use kvpool_policy::failure::{
    Accusation, Admission, Cause, Evidence, FailureDetector, Known, Limits, REPORTERS, Report, Suspicion, Verdict,
    accusation, admit,
};
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
        ..Evidence::default()
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
            ..Evidence::default()
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
            ..Evidence::default()
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

fn accused(reporters: u32, lasting: u32, heard_ms: u64) -> Evidence {
    Evidence {
        accused: Accusation { reporters, lasting },
        ..open(7, heard_ms)
    }
}

fn suspicion(d: &FailureDetector, now: u64) -> Option<Suspicion> {
    d.suspects(now).next().map(|(_, suspicion)| suspicion)
}

#[test]
fn two_reporters_make_a_late_shard_down_before_its_lease() {
    let mut d = FailureDetector::new(LIMITS, 0, 10_000);
    d.watch("s", 7, 10_000);
    d.observe("s", accused(1, 1, 10_000));
    assert_eq!(
        run(&mut d.clone(), 10_000, 20_000).unwrap().0,
        13_000,
        "one reporter is none"
    );
    d.observe("s", accused(REPORTERS, 0, 10_000));
    let (at, verdicts) = run(&mut d, 10_000, 20_000).unwrap();
    let cause = Cause::PeersAgree {
        silent_ms: 1_500,
        reporters: 2,
    };
    assert_eq!((at, verdicts[0].cause), (11_500, cause));
}

#[test]
fn reports_alone_demote_and_never_evict() {
    let mut d = FailureDetector::new(LIMITS, 0, 10_000);
    d.watch("s", 7, 10_000);
    for now in (10_000..60_000).step_by(250) {
        d.observe("s", accused(5, 5, now));
        assert_eq!(d.tick(now), []);
        assert!(suspicion(&d, now).is_some_and(Suspicion::demotes));
    }
    // It lasts for a lease after the last report.
    let mut seen = Vec::new();
    for now in (60_000..64_000).step_by(250) {
        d.observe("s", accused(0, 0, now));
        assert_eq!(d.tick(now), []);
        seen.push(suspicion(&d, now).is_some());
    }
    assert_eq!(seen.iter().filter(|s| **s).count(), 11, "{seen:?}");
    assert!(seen.is_sorted_by_key(|s| !s));
}

#[test]
fn late_and_broken_shards_are_suspected_before_they_are_down() {
    let mut d = FailureDetector::new(LIMITS, 0, 10_000);
    d.watch("s", 7, 10_000);
    assert_eq!(d.tick(10_250), []);
    assert_eq!(suspicion(&d, 11_499), None);
    assert_eq!(suspicion(&d, 11_500), Some(Suspicion::Late { silent_ms: 1_500 }));
    d.observe(
        "s",
        Evidence {
            broken_ms: Some(11_000),
            ..open(7, 11_000)
        },
    );
    assert_eq!(suspicion(&d, 11_100), Some(Suspicion::Broken { since_ms: 100 }));
    d.observe("s", open(7, 11_200));
    assert_eq!(suspicion(&d, 11_250), None);
}

#[test]
fn witnesses_are_counted_by_node_and_only_when_they_are_connected_themselves() {
    let report = |reporter, node, for_ms, unreachable| Report {
        reporter,
        node,
        for_ms,
        unreachable,
        peers: 4,
    };
    let count = |reports: &[Report<'_>]| accusation(reports.iter().copied(), &LIMITS);
    let both = Accusation {
        reporters: 2,
        lasting: 1,
    };
    assert_eq!(count(&[report("a", "n1", 1_000, 1), report("b", "n2", 999, 2)]), both);
    let one = Accusation {
        reporters: 1,
        lasting: 1,
    };
    assert_eq!(count(&[report("a", "n1", 10, 1), report("b", "n1", 1_000, 1)]), one);
    assert_eq!(
        count(&[report("a", "n1", 1_000, 3), report("b", "n2", 1_000, 1)]),
        one,
        "a is cut off"
    );
    assert_eq!(count(&[]), Accusation::default());
}

#[derive(Clone, Debug)]
enum Step {
    Reports(u32),
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
        2 => (0u32..4).prop_map(Step::Reports),
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
        let mut accused = Accusation::default();
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
                    let agreed = accused.reporters >= REPORTERS && now - heard.max(floor) >= LIMITS.lease_ms / 2;
                    let expected = !starved && now >= start + LIMITS.lease_ms && (silent || lost || agreed);
                    let verdicts = d.tick(now);
                    prop_assert_eq!(!verdicts.is_empty(), expected, "at {}", now - start);
                    prop_assert!(verdicts.iter().all(|v| v.incarnation == incarnation));
                    // Nobody falls out of a clear sky.
                    prop_assert!(verdicts.is_empty() || d.suspects(now).any(|(_, s)| s.out_of_contact()));
                }
                Step::Reports(reporters) => {
                    accused = Accusation { reporters, lasting: reporters };
                    d.observe("s", Evidence { incarnation, heard_ms: heard, broken_ms: broken, accused });
                }
                Step::Heard { old: true } => d.observe("s", open(incarnation - 1, now)),
                Step::Heard { old: false } => {
                    heard = now;
                    d.observe("s", Evidence { incarnation, heard_ms: now, broken_ms: broken, accused });
                }
                Step::Broken => {
                    broken = Some(now);
                    d.observe("s", Evidence { incarnation, heard_ms: heard, broken_ms: broken, accused });
                }
                Step::Resumed => {
                    (heard, broken, accused) = (now, None, Accusation::default());
                    d.observe("s", open(incarnation, now));
                }
                Step::NewIncarnation => {
                    incarnation += 1;
                    (heard, broken, accused) = (now, None, Accusation::default());
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
            d.observe("s", Evidence { incarnation: 1, heard_ms: a, broken_ms: c, ..Evidence::default() });
            d.observe("other", open(1, a));
            prop_assert!(d.tick(b).iter().all(|v| v.shard == "s"));
        }
    }
}
