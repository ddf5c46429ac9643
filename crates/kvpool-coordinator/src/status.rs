//! The status in words: what is degraded and why. Made from state, raft's status and what this member has observed; the
//! leader knows most, so a follower asks it.

mod shards;

use crate::core::Core;
use crate::metric_definitions as m;
use kvpool_proto::v1::{Condition, MemberStatus, PoolStatus, StatusReply};
use kvpool_raft::Status;
use kvpool_state::records::{MemberRecord, PoolRecord};
use kvpool_state::{SLOTS, State};
use std::collections::BTreeMap;

/// Entries that a follower may be behind without a word.
const LAG: u64 = 1_000;

/// This member's report.
pub(crate) fn report(core: &Core) -> StatusReply {
    let raft = core.status();
    let duty = core.duty.borrow().clone();
    let has_quorum = core.contacts.quorum(&raft) && raft.leader.is_some();
    let members = members(core, &raft);
    let mut reply = StatusReply {
        member_id: core.raft_id(),
        is_leader: raft.is_leader(),
        cluster_id: core.cluster_id(),
        term: raft.term,
        leader_id: raft.leader.as_ref().filter(|_| has_quorum).map_or(0, |l| l.id),
        ..StatusReply::default()
    };
    let mut conditions = Vec::new();
    if !has_quorum {
        conditions.push(condition(
            "no_quorum",
            "coordinators",
            "a quorum of the coordinators is out of contact: changes wait, reads and writes of blocks go on",
        ));
    }
    member_conditions(&members, raft.is_leader(), &mut conditions);
    let suspects = duty.as_ref().map(|d| d.suspects()).unwrap_or_default();
    if let Some(why) = core.waits.lock().as_deref() {
        conditions.push(condition("not_a_member", &core.name.to_string(), why));
    }
    core.replica.read(|state| {
        reply.revision = state.revision();
        match state.cluster() {
            Some(cluster) => reply.cluster_generation = cluster.cluster_generation,
            None => conditions.push(condition(
                "no_cluster",
                "cluster",
                "the cluster has not been created yet",
            )),
        }
        reply.shards = state.shards().cloned().collect();
        reply.shard_status = shards::status(state, &suspects);
        reply.pools = state.pools().map(|p| pool_status(state, p)).collect();
    });
    shards::conditions(&suspects, &reply.shards, &mut conditions);
    let placements = duty.as_ref().map(|d| d.placements.lock().clone()).unwrap_or_default();
    for pool in &mut reply.pools {
        let placement = placements.get(&pool.name).cloned().unwrap_or_default();
        pool.settled = placement.settled && placement.epoch == pool.epoch;
        let words = placement
            .shortfall
            .iter()
            .map(|s| format!("{} ({} slots)", s.rule.words(), s.slots));
        pool_conditions(pool, &words.collect::<Vec<_>>().join("; "), &mut conditions);
    }
    let held = duty.as_ref().map(|d| d.held.lock().clone()).unwrap_or_default();
    for (pool, held) in held {
        conditions.push(Condition {
            since_ms: held.since_ms,
            ..condition("mass_failure", &pool, &held.words)
        });
    }
    for (actor, failing) in core.conditions.failing() {
        conditions.push(condition("actor_failing", &actor, &failing.message));
    }
    if let Some(duty) = &duty {
        shards::unheard(duty, &suspects, &reply.shards, &mut conditions);
        if let Some(why) = duty.group_waits.lock().as_deref() {
            conditions.push(condition("group_waits", "coordinators", why));
        }
    }
    reply.members = members;
    reply.healthy = conditions.is_empty();
    reply.conditions = conditions;
    reply
}

fn condition(kind: &str, subject: &str, message: &str) -> Condition {
    Condition {
        kind: kind.into(),
        subject: subject.into(),
        message: message.into(),
        since_ms: 0,
    }
}

fn members(core: &Core, raft: &Status) -> Vec<MemberStatus> {
    let known: BTreeMap<u64, String> = if raft.members.is_empty() {
        core.seeds.clone()
    } else {
        raft.members.clone()
    };
    let records: BTreeMap<u64, MemberRecord> = core.replica.read(|s| s.members().map(|m| (m.id, m.clone())).collect());
    let leader = raft.leader.as_ref().map(|l| l.id);
    let one = |(id, endpoint): (u64, String)| {
        let me = id == core.raft_id();
        let role = match (me, leader == Some(id)) {
            (true, _) => raft.role.name(),
            (false, true) => "leader",
            (false, false) if raft.is_leader() && raft.voters.contains(&id) => "follower",
            (false, false) if raft.is_leader() => "learner",
            (false, false) => "unknown",
        };
        MemberStatus {
            id,
            endpoint,
            role: role.into(),
            reachable: me || core.contacts.reachable(id) || leader == Some(id) && core.contacts.quorum(raft),
            lag: raft
                .followers
                .get(&id)
                .filter(|_| raft.is_leader())
                .map_or(0, |f| f.lag),
            name: records.get(&id).map_or(0, |m| m.name),
            since_ms: records.get(&id).map_or(0, |m| m.since_ms),
        }
    };
    known.into_iter().map(one).collect()
}

/// Only a leader hears every member all the time; a follower's silence towards another one means nothing.
fn member_conditions(members: &[MemberStatus], leads: bool, out: &mut Vec<Condition>) {
    for member in members.iter().filter(|_| leads) {
        let subject = member.id.to_string();
        if !member.reachable {
            let text = format!("coordinator {} at {} does not answer", member.id, member.endpoint);
            out.push(condition("member_unreachable", &subject, &text));
        } else if member.lag > LAG {
            let text = format!("coordinator {} is {} entries behind", member.id, member.lag);
            out.push(condition("member_lagging", &subject, &text));
        }
    }
}

pub(crate) fn pool_status(state: &State, pool: &PoolRecord) -> PoolStatus {
    let mut status = PoolStatus {
        name: pool.name.clone(),
        factor: pool.factor,
        ..PoolStatus::default()
    };
    let shards = state.shards().filter(|s| s.pool == pool.name && s.is_up());
    status.shards_up = u32::try_from(shards.count()).unwrap_or(u32::MAX);
    let Some((epoch, table)) = state.slot_table(&pool.name) else {
        return status;
    };
    status.epoch = epoch;
    for (_, copies) in table.iter() {
        let in_sync = copies.iter().filter(|c| c.in_sync).count();
        match in_sync {
            0 => status.unserved += 1,
            n if n < pool.factor as usize => status.under_replicated += 1,
            _ => status.in_sync += 1,
        }
        status.filling += u32::from(copies.iter().any(|c| !c.in_sync));
    }
    status
}

fn pool_conditions(pool: &PoolStatus, why: &str, out: &mut Vec<Condition>) {
    let because = if why.is_empty() {
        String::new()
    } else {
        format!(": {why}")
    };
    if pool.unserved > 0 {
        let text = format!(
            "{} of {SLOTS} slots of pool {} have no complete copy{because}",
            pool.unserved, pool.name
        );
        out.push(condition("unserved", &pool.name, &text));
    }
    if pool.under_replicated > 0 {
        let (n, factor) = (pool.under_replicated, pool.factor);
        let text = format!(
            "{n} of {SLOTS} slots of pool {} have fewer than {factor} complete copies{because}",
            pool.name
        );
        out.push(condition("under_replicated", &pool.name, &text));
    }
}

/// Gauges that are cheapest to set now and then.
pub(crate) fn set_gauges(core: &Core) {
    let raft = core.status();
    let suspects = core.duty.borrow().as_ref().map(|d| d.suspects()).unwrap_or_default();
    let pools: Vec<PoolStatus> = core.replica.read(|s| {
        shards::set_gauges(s, &suspects);
        s.pools().map(|p| pool_status(s, p)).collect()
    });
    metrics::gauge!(m::IS_LEADER).set(f64::from(u8::from(raft.is_leader())));
    #[allow(clippy::cast_precision_loss)]
    metrics::gauge!(m::TERM).set(raft.term as f64);
    for pool in pools {
        let states = [
            ("in_sync", pool.in_sync),
            ("under_replicated", pool.under_replicated),
            ("unserved", pool.unserved),
            ("filling", pool.filling),
        ];
        for (state, slots) in states {
            metrics::gauge!(m::SLOTS, "pool" => pool.name.clone(), "state" => state).set(f64::from(slots));
        }
        #[allow(clippy::cast_precision_loss)]
        metrics::gauge!(m::EPOCH, "pool" => pool.name).set(pool.epoch as f64);
    }
}
