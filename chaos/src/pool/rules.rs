//! What must never be seen of the replicated state. One rule, one function.
//!
//! The first member to apply an entry brings the state before and after it: those are judged by the rules (R2, R4, R12, the
//! promises of slot copies). Every other member that applies it, restores a snapshot or is at rest must hold the same (R10),
//! and what a watcher gets must be what changed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvpool_raft::MemberId;
use kvpool_state::command::{Command, Refusal, Response, decode};
use kvpool_state::records::{Event, Record, RequestId, ShardState, SlotCopy};
use kvpool_state::{SLOTS, State};

use crate::oracle::Oracle;

/// Decisions that a state may keep.
const MAX_DECISIONS: usize = 1_024;

type Check = Result<(), String>;

/// What the first member did with an entry.
struct Step {
    entry: Vec<u8>,
    response: Response,
    after: State,
    changed: Vec<Record>,
}

#[derive(Default)]
struct Book {
    steps: BTreeMap<u64, Step>,
    answers: BTreeMap<RequestId, Response>,
    /// Client and time of a call → the request id it used.
    calls: BTreeMap<(u64, u64), u64>,
    /// Pool and shard number → per slot the epoch at which the shard was last taken from its list.
    unlisted: BTreeMap<(String, u32), Vec<u64>>,
    /// Shard and incarnation → per slot the epoch of the map by which it was filled; 0 = it is not complete.
    filled: BTreeMap<(String, u64), Vec<u64>>,
    /// Term → when it was first seen led.
    led_since: BTreeMap<u64, u64>,
}

/// See the module. Clones share it.
#[derive(Clone)]
pub struct Rules {
    book: Arc<Mutex<Book>>,
    oracle: Oracle,
}

fn slots() -> Vec<u64> {
    vec![0; usize::from(SLOTS)]
}

impl Rules {
    /// Rules that report to `oracle`.
    pub fn new(oracle: Oracle) -> Rules {
        Rules {
            book: Arc::default(),
            oracle,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, index: u64, checks: impl IntoIterator<Item = Check>) {
        for what in checks.into_iter().filter_map(Result::err) {
            self.oracle.violation(format!("entry {index}: {what}"));
        }
    }

    /// True when nobody has applied this entry yet.
    pub fn is_new(&self, index: u64) -> bool {
        !self.lock().steps.contains_key(&index)
    }

    /// The first member applied an entry.
    pub fn first(&self, index: u64, entry: &[u8], before: &State, after: &State, response: &Response) {
        let Ok((command, envelope)) = decode(entry) else {
            return;
        };
        self.oracle.count(kind(&command));
        if response.refusal() != Refusal::None {
            self.oracle.count("a command was refused by the state");
        }
        let changed = changed(before, after);
        let mut book = self.lock();
        let book = &mut *book;
        let checks = [
            grows(index, &command, before, after),
            answered_once(book, envelope.request, response, &changed),
            obeys_fences(&command, before, &changed),
            in_sync_is_earned(book, &command, before, after),
            last_copy_stays(&command, before, after),
            lists_are_sound(before, after),
            bounded(after),
        ];
        note_unlisted(book, before, after);
        let step = Step {
            entry: entry.to_vec(),
            response: response.clone(),
            after: after.clone(),
            changed,
        };
        book.steps.insert(index, step);
        self.report(index, checks);
    }

    /// Another member, or another life of the first, applied an entry.
    pub fn again(&self, member: MemberId, index: u64, state: &State, response: &Response) {
        let book = self.lock();
        let Some(step) = book.steps.get(&index) else { return };
        let answer = if step.response == *response {
            Ok(())
        } else {
            Err(format!(
                "member {member} answers {response:?}, another {:?}",
                step.response
            ))
        };
        // Every few entries the whole of it.
        let whole = if !index.is_multiple_of(8) || step.after == *state {
            Ok(())
        } else {
            Err(format!("the state of member {member} differs from another's"))
        };
        self.report(index, [answer, whole]);
    }

    /// A member replaced its state by a snapshot's, or is at rest with this one.
    pub fn holds(&self, member: MemberId, state: &State) {
        let index = state.revision();
        let same = self.lock().steps.get(&index).is_some_and(|step| step.after == *state);
        let check = if same || index == 0 {
            Ok(())
        } else {
            Err(format!("member {member} holds a state that no member had there"))
        };
        self.report(index, [check]);
    }

    /// A member replaced its state by a snapshot.
    pub fn restored(&self, member: MemberId, state: &State) {
        self.oracle.restored_state();
        self.holds(member, state);
    }

    /// Some entry that was applied and that a leader had decided, but no registration: those have no fence.
    pub fn any_decided(&self, random: impl FnOnce(u64) -> u64) -> Option<Vec<u8>> {
        let book = self.lock();
        let decided = book.steps.values().filter(|step| {
            decode(&step.entry).is_ok_and(|(command, envelope)| {
                envelope.request.is_none()
                    && matches!(
                        command,
                        Command::PlanSlots(_) | Command::ShardDown(_) | Command::SlotsInSync(_)
                    )
            })
        });
        let decided: Vec<&Step> = decided.collect();
        let at = random(decided.len() as u64) as usize;
        decided.get(at).map(|step| step.entry.clone())
    }

    /// The last entry that anyone applied.
    pub fn newest(&self) -> u64 {
        self.lock().steps.last_key_value().map_or(0, |(index, _)| *index)
    }

    /// A watcher whose position was `from` got all changes up to `revision`.
    pub fn watched_changes(&self, watcher: &str, from: u64, revision: u64, events: &[Event]) {
        let book = self.lock();
        let due = book.steps.range(from + 1..=revision.max(from + 1));
        let due = due.filter(|(index, _)| **index <= revision);
        let due: Vec<(u64, &Record)> = due
            .flat_map(|(index, step)| step.changed.iter().map(move |record| (*index, record)))
            .collect();
        let got: Vec<(u64, &Record)> = events
            .iter()
            .filter_map(|e| Some((e.revision, e.record.as_ref()?)))
            .collect();
        let check = if due == got {
            Ok(())
        } else {
            let of = |list: &[(u64, &Record)]| list.iter().map(|(index, _)| *index).collect::<Vec<_>>();
            Err(format!(
                "watcher {watcher} at {from} was sent changes of {:?}, due were {:?}",
                of(&got),
                of(&due)
            ))
        };
        self.report(revision, [check]);
    }

    /// A watcher got everything as of `revision`.
    pub fn watched_relist(&self, watcher: &str, revision: u64, records: &[Record]) {
        let book = self.lock();
        let check = match book.steps.get(&revision) {
            Some(step) if step.after.records() == records => Ok(()),
            Some(_) => Err(format!("watcher {watcher} was sent a list that is not the state's")),
            None => Err(format!("watcher {watcher} was sent a list of no revision")),
        };
        self.report(revision, [check]);
    }

    /// A watcher's position must not go back.
    pub fn position(&self, watcher: &str, before: u64, now: u64) {
        if now < before {
            self.oracle
                .violation(format!("watcher {watcher} went back from revision {before} to {now}"));
        }
    }

    /// What an incarnation of a shard holds: per slot the epoch of the map by which it was filled; 0 = not complete.
    pub fn filled(&self, shard: &str, incarnation: u64) -> Vec<u64> {
        let book = self.lock();
        let filled = book.filled.get(&(shard.to_owned(), incarnation));
        filled.cloned().unwrap_or_else(slots)
    }

    /// An incarnation of a shard holds something else now.
    pub fn set_filled(&self, shard: &str, incarnation: u64, filled: Vec<u64>) {
        self.lock().filled.insert((shard.to_owned(), incarnation), filled);
    }

    /// A member leads a term.
    pub fn leads(&self, term: u64, now: u64) {
        self.lock().led_since.entry(term).or_insert(now);
    }

    /// The leader of a term declares a shard Down: not within a lease of its beginning, since it has heard nobody yet (O38).
    pub fn declares_down(&self, term: u64, shard: &str, now: u64, least: u64) {
        let since = self.lock().led_since.get(&term).copied().unwrap_or(now);
        if now.saturating_sub(since) < least {
            self.oracle.violation(format!(
                "the leader of term {term} declared {shard} Down {} ms after it began to lead",
                (now - since) / 1_000_000
            ));
        }
    }

    /// A shard obeyed a leader of `term` after one of `highest` (R1).
    pub fn obeys(&self, shard: &str, highest: u64, term: u64) {
        if term < highest {
            self.oracle
                .violation(format!("shard {shard} obeyed term {term} after term {highest}"));
        }
    }

    /// A shard routes by the map of `epoch` after one of `before` (R4).
    pub fn adopts(&self, shard: &str, before: u64, epoch: u64) {
        if epoch < before {
            self.oracle
                .violation(format!("shard {shard} went back from epoch {before} to {epoch}"));
        }
    }
}

/// The command's kind, as coverage counts it.
fn kind(command: &Command) -> &'static str {
    match command {
        Command::CreateCluster(_) => "command: create cluster",
        Command::ConfigurePool(_) => "command: configure pool",
        Command::RegisterShard(_) => "command: register shard",
        Command::ShardDown(_) => "command: shard down",
        Command::PlanSlots(_) => "command: plan slots",
        Command::SlotsInSync(_) => "command: slots in-sync",
        _ => "command: another",
    }
}

/// The records that an entry changed, in the order of a list.
fn changed(before: &State, after: &State) -> Vec<Record> {
    let mut out = Vec::new();
    if before.cluster() != after.cluster() {
        out.extend(after.cluster().cloned().map(Record::Cluster));
    }
    let nodes = after.nodes().filter(|n| !before.nodes().any(|old| old == *n));
    out.extend(nodes.cloned().map(Record::Node));
    let shards = after.shards().filter(|s| before.shard(&s.id) != Some(s));
    out.extend(shards.cloned().map(Record::Shard));
    let pools = after.pools().filter(|p| before.pool(&p.name) != Some(p));
    out.extend(pools.cloned().map(Record::Pool));
    let epoch = |state: &State, pool: &str| state.slot_table(pool).map(|(epoch, _)| epoch);
    let maps = after
        .pools()
        .filter(|p| epoch(before, &p.name) != epoch(after, &p.name));
    out.extend(maps.filter_map(|p| after.slot_map(&p.name)).map(Record::Slots));
    let members = after.members().filter(|m| !before.members().any(|old| old == *m));
    out.extend(members.cloned().map(Record::Member));
    out
}

/// R4: log time, revision, generations, epochs and incarnations only grow; an epoch with every change of a list.
fn grows(index: u64, command: &Command, before: &State, after: &State) -> Check {
    let times = (before.log_time_ms(), after.log_time_ms());
    if times.1 < times.0 || after.revision() < before.revision() {
        return Err(format!(
            "log time went from {} to {}, or the revision back",
            times.0, times.1
        ));
    }
    if before.cluster().map(|c| c.cluster_generation) > after.cluster().map(|c| c.cluster_generation) {
        return Err("the cluster generation went back".to_owned());
    }
    for old in before.pools() {
        let name = &old.name;
        let new = after.pool(name).ok_or_else(|| format!("pool {name} is gone"))?;
        let (Some((was, table)), Some((is, now))) = (before.slot_table(name), after.slot_table(name)) else {
            return Err(format!("pool {name} has no table"));
        };
        if new.generation < old.generation || is < was || (is == was && table != now) {
            return Err(format!(
                "epoch of pool {name} went from {was} to {is}, or its generation back"
            ));
        }
    }
    for old in before.shards() {
        let Some(new) = after.shard(&old.id) else { continue };
        let registered = matches!(command, Command::RegisterShard(c) if c.id == old.id) && new.incarnation == index;
        if new.incarnation != old.incarnation && !registered {
            return Err(format!(
                "incarnation of shard {} went from {} to {} without its registration",
                old.id, old.incarnation, new.incarnation
            ));
        }
    }
    Ok(())
}

/// R2: a request id gets one answer and takes effect once.
fn answered_once(book: &mut Book, request: Option<RequestId>, response: &Response, changed: &[Record]) -> Check {
    let Some(id) = request else { return Ok(()) };
    // Clients make one call at a time, so a call is known by its client and time.
    let call = (id.client, id.created_at_ms);
    if *book.calls.entry(call).or_insert(id.sequence) != id.sequence {
        return Err(format!(
            "one call took effect under two request ids, one of them {id:?}"
        ));
    }
    match book.answers.get(&id) {
        Some(known) if known == response && changed.is_empty() => Ok(()),
        Some(_) if response.refusal() == Refusal::RequestExpired && changed.is_empty() => Ok(()),
        Some(known) => Err(format!(
            "the repeated request {id:?} changed {} records and was answered {response:?} after {known:?}",
            changed.len()
        )),
        None => {
            book.answers.insert(id, response.clone());
            Ok(())
        }
    }
}

/// R1: a command for another epoch or incarnation than the present one changes nothing.
fn obeys_fences(command: &Command, before: &State, changed: &[Record]) -> Check {
    let incarnation = |id: &str| before.shard(id).map(|s| s.incarnation);
    let stale = match command {
        Command::PlanSlots(c) => before.slot_table(&c.pool).map(|(epoch, _)| epoch) != Some(c.base_epoch),
        Command::ShardDown(c) => incarnation(&c.id) != Some(c.incarnation),
        Command::SlotsInSync(c) => incarnation(&c.shard) != Some(c.incarnation),
        _ => false,
    };
    if stale && !changed.is_empty() {
        return Err(format!("a command with a stale fence was obeyed: {}", kind(command)));
    }
    Ok(())
}

/// Slots whose lists differ, with both lists, of every pool.
fn moved<'a>(
    before: &'a State,
    after: &'a State,
) -> impl Iterator<Item = (&'a str, u16, &'a [SlotCopy], &'a [SlotCopy])> {
    let tables = after.pools().filter_map(|pool| {
        let (was, old) = before.slot_table(&pool.name)?;
        let (is, new) = after.slot_table(&pool.name)?;
        (was != is).then_some((pool.name.as_str(), old, new))
    });
    tables.flat_map(|(pool, old, new)| {
        let lists = old.iter().zip(new.iter());
        lists
            .filter(|((_, a), (_, b))| !Arc::ptr_eq(a, b) && a != b)
            .map(move |((slot, a), (_, b))| (pool, slot, &a[..], &b[..]))
    })
}

/// A copy becomes in-sync only by the report of its shard's present incarnation, which had filled it since the last time
/// that it was taken from the list.
fn in_sync_is_earned(book: &Book, command: &Command, before: &State, after: &State) -> Check {
    for (pool, slot, old, new) in moved(before, after) {
        for copy in new.iter().filter(|c| c.in_sync) {
            if old.iter().any(|c| c.shard == copy.shard && c.in_sync) {
                continue;
            }
            let Command::SlotsInSync(report) = command else {
                return Err(format!(
                    "slot {slot}: shard number {} became in-sync by {}",
                    copy.shard,
                    kind(command)
                ));
            };
            let shard = after.shards().find(|s| s.pool == pool && s.number == copy.shard);
            let Some(shard) = shard.filter(|s| s.id == report.shard) else {
                return Err(format!("slot {slot}: {} reported for another shard", report.shard));
            };
            let at = usize::from(slot);
            let unlisted = book.unlisted.get(&(pool.to_owned(), copy.shard)).map_or(0, |u| u[at]);
            let filled = book
                .filled
                .get(&(shard.id.clone(), shard.incarnation))
                .map_or(0, |f| f[at]);
            if filled == 0 || filled < unlisted {
                return Err(format!(
                    "slot {slot} of {} is in-sync: filled by epoch {filled}, taken from it at epoch {unlisted}",
                    shard.id
                ));
            }
        }
    }
    Ok(())
}

/// A plan leaves every slot that has an in-sync copy one.
fn last_copy_stays(command: &Command, before: &State, after: &State) -> Check {
    if !matches!(command, Command::PlanSlots(_)) {
        return Ok(());
    }
    let in_sync = |list: &[SlotCopy]| list.iter().any(|c| c.in_sync);
    match moved(before, after).find(|(_, _, old, new)| in_sync(old) && !in_sync(new)) {
        Some((_, slot, ..)) => Err(format!("a plan took the last in-sync copy of slot {slot}")),
        None => Ok(()),
    }
}

/// Lists name shards that are Up, each once, in-sync copies first.
fn lists_are_sound(before: &State, after: &State) -> Check {
    let up = |number: u32, pool: &str| {
        let mut shards = after.shards();
        shards.any(|s| s.number == number && s.pool == pool && s.state() == ShardState::Up)
    };
    for (pool, slot, _, list) in moved(before, after) {
        let twice = (1..list.len()).any(|i| list[..i].iter().any(|c| c.shard == list[i].shard));
        if twice || !list.is_sorted_by_key(|c| !c.in_sync) || !list.iter().all(|c| up(c.shard, pool)) {
            return Err(format!("the list of slot {slot} of pool {pool} is {list:?}"));
        }
    }
    Ok(())
}

/// R12, as far as queries show it.
fn bounded(after: &State) -> Check {
    let decisions = after.decisions().count();
    if decisions > MAX_DECISIONS {
        return Err(format!("{decisions} decisions are kept"));
    }
    Ok(())
}

fn note_unlisted(book: &mut Book, before: &State, after: &State) {
    for (pool, slot, old, new) in moved(before, after) {
        let Some((epoch, _)) = after.slot_table(pool) else {
            continue;
        };
        for gone in old.iter().filter(|c| !new.iter().any(|n| n.shard == c.shard)) {
            let unlisted = book.unlisted.entry((pool.to_owned(), gone.shard)).or_insert_with(slots);
            unlisted[usize::from(slot)] = epoch;
        }
    }
}
