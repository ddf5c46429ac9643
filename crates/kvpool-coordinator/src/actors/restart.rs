//! The one restart policy, and the children that supervisors keep by it.
//!
//! Invariant: a child that keeps crashing is tried again for ever, ever more rarely, and raises a condition; it never takes
//! its supervisor down.

use crate::metric_definitions as m;
use parking_lot::Mutex;
use ractor::{ActorRef, Message, SupervisionEvent};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// More failures than this within [`WINDOW`] raise a condition.
const MOST: usize = 5;
const WINDOW: Duration = Duration::from_secs(60);
const FIRST: Duration = Duration::from_millis(20);
const LAST: Duration = Duration::from_secs(10);

/// At most [`MOST`] failures in [`WINDOW`] are quiet; the wait doubles with each.
#[derive(Debug, Default)]
pub(crate) struct RestartPolicy {
    failures: VecDeque<Instant>,
}

/// What follows a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Restart {
    pub(crate) after: Duration,
    pub(crate) raise: bool,
}

impl RestartPolicy {
    pub(crate) fn failed(&mut self, now: Instant) -> Restart {
        self.failures.retain(|at| now.saturating_duration_since(*at) < WINDOW);
        // 16 doublings are beyond the longest wait.
        if self.failures.len() >= 16 {
            self.failures.pop_front();
        }
        let earlier = u32::try_from(self.failures.len()).unwrap_or(u32::MAX);
        self.failures.push_back(now);
        Restart {
            after: (FIRST * 2u32.saturating_pow(earlier)).min(LAST),
            raise: self.failures.len() > MOST,
        }
    }
}

/// Actors that keep failing, for the status. Bounded by the number of actors.
#[derive(Clone, Default)]
pub(crate) struct Conditions(Arc<Mutex<BTreeMap<String, Failing>>>);

#[derive(Clone, Debug)]
pub(crate) struct Failing {
    pub(crate) message: String,
    last: Instant,
}

impl Conditions {
    fn raise(&self, actor: &str, message: String) {
        self.0.lock().insert(
            actor.to_owned(),
            Failing {
                message,
                last: Instant::now(),
            },
        );
    }

    fn clear(&self, actor: &str) {
        self.0.lock().remove(actor);
    }

    /// Actors that failed too often lately.
    pub(crate) fn failing(&self) -> BTreeMap<String, Failing> {
        let mut all = self.0.lock();
        all.retain(|_, f| f.last.elapsed() < WINDOW);
        all.clone()
    }
}

struct Child<M> {
    actor: Option<ActorRef<M>>,
    policy: RestartPolicy,
}

impl<M> Default for Child<M> {
    fn default() -> Self {
        Child {
            actor: None,
            policy: RestartPolicy::default(),
        }
    }
}

/// The children of one supervisor, by name.
pub(crate) struct Nursery<M> {
    kind: &'static str,
    conditions: Conditions,
    children: BTreeMap<String, Child<M>>,
}

impl<M: Message> Nursery<M> {
    pub(crate) fn new(kind: &'static str, conditions: Conditions) -> Self {
        Nursery {
            kind,
            conditions,
            children: BTreeMap::new(),
        }
    }

    pub(crate) fn put(&mut self, name: &str, actor: ActorRef<M>) {
        self.children.entry(name.to_owned()).or_default().actor = Some(actor);
    }

    /// The running child.
    pub(crate) fn get(&self, name: &str) -> Option<&ActorRef<M>> {
        self.children.get(name)?.actor.as_ref()
    }

    /// True also while the child waits for its restart.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.children.contains_key(name)
    }

    /// True when the child is wanted and not running: a late respawn of one that was removed, or replaced, is not.
    pub(crate) fn is_missing(&self, name: &str) -> bool {
        self.children.get(name).is_some_and(|c| c.actor.is_none())
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.children.keys().cloned().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.children.len()
    }

    /// Ends a child that is not wanted any more.
    pub(crate) fn remove(&mut self, name: &str) {
        if let Some(actor) = self.children.remove(name).and_then(|c| c.actor) {
            actor.kill();
        }
        self.conditions.clear(&self.label(name));
    }

    /// A child may have died. Its name and when to start it again; `None` for other events and for children that were
    /// removed on purpose.
    pub(crate) fn died(&mut self, event: &SupervisionEvent) -> Option<(String, Duration)> {
        let (who, why) = match event {
            SupervisionEvent::ActorFailed(who, error) => (who, error.to_string()),
            SupervisionEvent::ActorTerminated(who, _, _) => (who, "ended".to_owned()),
            _ => return None,
        };
        let is_it = |c: &Child<M>| c.actor.as_ref().is_some_and(|a| a.get_id() == who.get_id());
        let name = self
            .children
            .iter()
            .find(|(_, c)| is_it(c))
            .map(|(name, _)| name.clone())?;
        let after = self.failed(&name, &why);
        Some((name, after))
    }

    /// A start or a life failed: when to try again.
    pub(crate) fn failed(&mut self, name: &str, why: &str) -> Duration {
        let label = self.label(name);
        let child = self.children.entry(name.to_owned()).or_default();
        child.actor = None;
        let restart = child.policy.failed(Instant::now());
        metrics::counter!(m::ACTOR_RESTARTS, "kind" => self.kind).increment(1);
        tracing::warn!(actor = %label, why, after = ?restart.after, "an actor failed and is started again");
        if restart.raise {
            let window = WINDOW.as_secs();
            self.conditions
                .raise(&label, format!("failed more than {MOST} times in {window} s: {why}"));
        }
        restart.after
    }

    fn label(&self, name: &str) -> String {
        if name.is_empty() {
            self.kind.to_owned()
        } else {
            format!("{}({name})", self.kind)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_then_a_condition_is_raised_and_calm_forgives() {
        let mut policy = RestartPolicy::default();
        let start = Instant::now();
        let waits: Vec<_> = (0..30).map(|i| policy.failed(start + Duration::from_secs(i))).collect();
        assert_eq!(
            waits[0],
            Restart {
                after: FIRST,
                raise: false
            }
        );
        assert_eq!(waits[1].after, FIRST * 2);
        assert!(!waits[MOST - 1].raise && waits[MOST].raise);
        assert_eq!(
            waits[29],
            Restart {
                after: LAST,
                raise: true
            }
        );
        let calm = policy.failed(start + WINDOW * 3);
        assert_eq!(
            calm,
            Restart {
                after: FIRST,
                raise: false
            }
        );
    }
}
