//! The Raft group's life: who may join under which name, and what the leader changes next.
//!
//! Keeps: a name is given to an empty disk only when its old session is dead for a lease, a majority of the voters that would
//! be left with it is sound, and no other replacement is running; voters are exchanged in one change, and only for members
//! that have the log; the group never has an even number of voters more than it had; the leader hands over before it goes;
//! every step leads to the lowest wanted names being the voters, or says what it waits for.

use std::collections::{BTreeMap, BTreeSet};

/// A name as the state has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The raft id of its present disk.
    pub id: u64,
    pub address: String,
    /// Of the empty process that was given the id.
    pub boot: String,
}

/// A member as raft on the leader has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub address: String,
    pub voter: bool,
    /// It has all but a little of the log.
    pub caught_up: bool,
    /// Since when it has not answered this leader; 0 for the leader itself.
    pub silent_ms: u64,
}

/// What the leader knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    pub me: u64,
    /// Wanted voters; 0 = nobody has said, the present ones are.
    pub target: u32,
    /// Raft ids below this have been written down; one at or above it is of the first boot, where names and ids are one.
    pub next_id: u64,
    pub names: BTreeMap<u64, Name>,
    /// By raft id.
    pub peers: BTreeMap<u64, Peer>,
    /// Set while voters change: the set that they change to.
    pub joint: Option<BTreeSet<u64>>,
    /// Silence after which a session is dead.
    pub lease_ms: u64,
    /// Answers younger than this count as reachable.
    pub patience_ms: u64,
    /// How long this leader has led: before one lease it declares nobody dead.
    pub led_ms: u64,
}

/// A process that asks to be let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    pub name: u64,
    pub address: String,
    pub boot: String,
    /// The raft id on its disk; 0 = the disk is empty.
    pub id: u64,
}

/// The answer to [`Ask`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Commit it: a new id for an empty disk, or a new address of a known one.
    Admit,
    /// It is in already, with this id.
    Known(u64),
    /// Not now; ask again.
    Wait(String),
    /// Never, as it is: a person must look.
    Refuse(String),
}

/// What the leader does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: the group is as it is wanted.
    Rest,
    /// Nothing can be done now; why, for people.
    Wait(String),
    /// Write down how many are wanted: as many as there are.
    Want(u32),
    /// A voter of the first boot stands in no record yet: write it down, its id is its name.
    Record {
        id: u64,
        address: String,
    },
    /// Tell the group a member's new address.
    Move {
        id: u64,
        address: String,
    },
    AddLearner {
        id: u64,
        address: String,
    },
    /// One joint change to these voters; also the end of one that was left half done.
    Voters(BTreeSet<u64>),
    /// Give up the lead to this member, which stays.
    HandOver(u64),
    /// Take out a learner that nobody wants.
    Remove(u64),
}

impl Group {
    fn sound(&self, id: u64) -> bool {
        let lately = |p: &Peer| p.caught_up && p.silent_ms < self.patience_ms;
        id == self.me || self.peers.get(&id).is_some_and(lately)
    }

    fn voters(&self) -> BTreeSet<u64> {
        let voters = self.peers.iter().filter(|(_, p)| p.voter);
        voters.map(|(id, _)| *id).collect()
    }

    /// Target size as it counts: at least one.
    fn size(&self) -> usize {
        match self.target {
            0 => self.voters().len().max(1),
            n => n as usize,
        }
    }

    /// Ids of the names that are wanted as voters.
    fn wanted(&self) -> BTreeSet<u64> {
        self.names.values().take(self.size()).map(|n| n.id).collect()
    }

    fn has_majority(&self, set: &BTreeSet<u64>) -> bool {
        set.iter().filter(|id| self.sound(**id)).count() * 2 > set.len()
    }

    /// Voters whose disk has been replaced.
    fn orphans(&self) -> BTreeSet<u64> {
        let named: BTreeSet<u64> = self.names.values().map(|n| n.id).collect();
        self.voters().difference(&named).copied().collect()
    }
}

/// Whether a process may have the name it asks for.
#[must_use]
pub fn admit(group: &Group, ask: &Ask) -> Admission {
    let known = group.names.get(&ask.name);
    if ask.id != 0 {
        return admit_disk(group, ask, known);
    }
    if let Some(known) = known.filter(|k| !ask.boot.is_empty() && k.boot == ask.boot) {
        return if known.address == ask.address {
            Admission::Known(known.id)
        } else {
            Admission::Admit
        };
    }
    if known.is_none() && ask.name > group.size() as u64 {
        return Admission::Wait(group.idle(ask.name));
    }
    if group.voters().iter().any(|id| *id >= group.next_id) {
        return Admission::Wait("the members of the first boot are not written down yet".into());
    }
    if group.joint.is_some() {
        return Admission::Wait("the voters are being changed".into());
    }
    if let Some(other) = group.replacing().into_iter().find(|name| *name != ask.name) {
        return Admission::Wait(format!("member {other} is being brought in; one at a time"));
    }
    if let Some(wait) = known.and_then(|known| group.alive(ask.name, known)) {
        return Admission::Wait(wait);
    }
    // The newcomer takes the old one's place among the voters: what is left must decide without both.
    let mut left = group.voters();
    if let Some(known) = known {
        left.remove(&known.id);
    }
    let sound = left.iter().filter(|id| group.sound(**id)).count();
    // The newcomer itself is there.
    if !group.has_majority(&group.voters()) || (sound + 1) * 2 <= left.len() + 1 {
        return Admission::Wait(format!(
            "only {sound} of the {} other voters answer and have the log: too few to change the group safely",
            left.len()
        ));
    }
    Admission::Admit
}

/// A process that has a disk of this cluster.
fn admit_disk(group: &Group, ask: &Ask, known: Option<&Name>) -> Admission {
    match known {
        Some(known) if known.id == ask.id && known.address == ask.address => {
            if group.wanted().contains(&ask.id) {
                Admission::Known(known.id)
            } else {
                Admission::Wait(group.idle(ask.name))
            }
        }
        Some(known) if known.id == ask.id => Admission::Admit,
        Some(known) => Admission::Refuse(format!(
            "the disk of member {} (id {}) was replaced by id {}: remove its data directory",
            ask.name, ask.id, known.id
        )),
        None if group.peers.contains_key(&ask.id) => Admission::Wait("the group is not written down yet".into()),
        None => Admission::Refuse(format!("nobody knows member {} with id {}", ask.name, ask.id)),
    }
}

impl Group {
    fn idle(&self, name: u64) -> String {
        format!(
            "the group wants {} coordinators and this one is number {name}: it is idle until it is wanted",
            self.size()
        )
    }

    /// Names that have been given to a new disk which is not a voter yet, though wanted.
    fn replacing(&self) -> BTreeSet<u64> {
        let wanted = self.wanted();
        let orphans = !self.orphans().is_empty();
        // While the group grows, newcomers do not wait for each other: they take nobody's place.
        let coming = |n: &Name| orphans && wanted.contains(&n.id) && !self.peers.get(&n.id).is_some_and(|p| p.voter);
        let names = self.names.iter().filter(|(_, n)| coming(n));
        names.map(|(name, _)| *name).collect()
    }

    /// Why the name's present holder can't be called dead.
    fn alive(&self, name: u64, known: &Name) -> Option<String> {
        if known.id == self.me {
            return Some(format!("member {name} leads: it is alive"));
        }
        let silent = self.peers.get(&known.id).map_or(u64::MAX, |p| p.silent_ms);
        let silent = silent.min(self.led_ms);
        (silent < self.lease_ms).then(|| {
            format!(
                "member {name} was heard {silent} ms ago; its name is free when it has been silent for {} ms",
                self.lease_ms
            )
        })
    }
}

/// The leader's next step.
#[must_use]
pub fn next(group: &Group) -> Step {
    if let Some(target) = &group.joint {
        return Step::Voters(target.clone());
    }
    if let Some(step) = keep_books(group) {
        return step;
    }
    let voters = group.voters();
    let (next, waiting) = next_voters(group, &voters);
    if next == voters {
        return match waiting {
            Some(why) => Step::Wait(why),
            None => leftover(group, &voters),
        };
    }
    if !group.has_majority(&voters) || !group.has_majority(&next) {
        return Step::Wait(format!(
            "the voters {voters:?} can't be changed to {next:?}: a majority of both must answer and have the log"
        ));
    }
    if next.contains(&group.me) {
        return Step::Voters(next);
    }
    if let Some(to) = next.iter().find(|id| voters.contains(id) && group.sound(**id)) {
        return Step::HandOver(*to);
    }
    // Nobody who votes stays: those who shall come first, beside this leader, one of them takes over then.
    let mut both = next;
    both.insert(group.me);
    if both.len() % 2 == 0 {
        both.extend(voters.iter().find(|id| !both.contains(id)).copied());
    }
    if both == voters || !group.has_majority(&both) {
        return Step::Wait("no member that stays can take over the lead".into());
    }
    Step::Voters(both)
}

/// Records and raft say the same of who is where.
fn keep_books(group: &Group) -> Option<Step> {
    if group.target == 0 {
        return u32::try_from(group.size()).ok().map(Step::Want);
    }
    let unwritten = group.peers.iter().find(|(id, p)| p.voter && **id >= group.next_id);
    if let Some((id, peer)) = unwritten {
        return Some(Step::Record {
            id: *id,
            address: peer.address.clone(),
        });
    }
    let wanted = group.wanted();
    for name in group.names.values() {
        match group.peers.get(&name.id) {
            Some(peer) if peer.address != name.address => {
                return Some(Step::Move {
                    id: name.id,
                    address: name.address.clone(),
                });
            }
            None if wanted.contains(&name.id) => {
                return Some(Step::AddLearner {
                    id: name.id,
                    address: name.address.clone(),
                });
            }
            _ => {}
        }
    }
    None
}

/// The voters that are wanted and can be had now, and who is waited for.
fn next_voters(group: &Group, voters: &BTreeSet<u64>) -> (BTreeSet<u64>, Option<String>) {
    let wanted = group.wanted();
    let have = |id: &u64| voters.contains(id) || group.sound(*id) && group.peers.contains_key(id);
    let (mut next, missing): (BTreeSet<u64>, BTreeSet<u64>) = wanted.iter().copied().partition(have);
    let mut waiting = None;
    if let Some(id) = missing.first() {
        waiting = Some(format!("member id {id} has not caught up with the log yet"));
        // Whoever it replaces stays until then.
        next.extend(group.orphans());
    } else if wanted.len() < group.size() {
        let (there, size) = (wanted.len(), group.size());
        waiting = Some(format!(
            "{size} coordinators are wanted and {there} have come: start the others"
        ));
    }
    // An even number of voters is no gain.
    while next.len() % 2 == 0 && next.len() > voters.len() {
        let newest = group.names.values().rev().map(|n| n.id);
        let Some(last) = newest.into_iter().find(|id| next.contains(id) && !voters.contains(id)) else {
            break;
        };
        next.remove(&last);
        waiting
            .get_or_insert_with(|| format!("member id {last} waits for another: a group has an odd number of voters"));
    }
    (next, waiting)
}

/// Learners that no name has, or whose name is not wanted.
fn leftover(group: &Group, voters: &BTreeSet<u64>) -> Step {
    let wanted = group.wanted();
    let unwanted = group
        .peers
        .keys()
        .find(|id| !voters.contains(id) && !wanted.contains(id));
    unwanted.map_or(Step::Rest, |id| Step::Remove(*id))
}
