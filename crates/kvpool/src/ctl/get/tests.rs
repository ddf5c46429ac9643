use kvpool_proto::v1::{MemberStatus, StatusReply};
use kvpool_state::records::{MapShard, SlotCopy, SlotMap, SlotRange};
use serde_json::{Value, json};

use super::*;

fn json_of(rows: Rows) -> Value {
    serde_json::from_str(&rows.render(Output::Json, "things")).unwrap()
}

fn map() -> SlotMap {
    let shard = |number: u32| MapShard {
        number,
        id: format!("shard-{number}"),
        ..Default::default()
    };
    let copy = |shard, in_sync| SlotCopy { shard, in_sync };
    SlotMap {
        pool: "default".into(),
        epoch: 7,
        factor: 2,
        shards: vec![shard(1), shard(2)],
        ranges: vec![
            SlotRange {
                first: 0,
                last: 99,
                copies: vec![copy(1, true), copy(2, true)],
            },
            SlotRange {
                first: 100,
                last: 100,
                copies: vec![copy(2, true), copy(1, false)],
            },
            SlotRange {
                first: 101,
                last: 16383,
                copies: vec![],
            },
        ],
        ..Default::default()
    }
}

#[test]
fn slots_name_their_copies_and_states() {
    let shown = slots(vec![Record::Slots(map())]).render(Output::Table, "slots");
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(
        lines[1].split_whitespace().collect::<Vec<_>>(),
        ["default", "0-99", "100", "in-sync", "shard-1,", "shard-2", "7"]
    );
    assert!(
        lines[2].contains("under-replicated") && lines[2].contains("shard-2, shard-1 (filling)"),
        "{}",
        lines[2]
    );
    assert!(
        lines[3].contains("unserved") && lines[3].contains(" - "),
        "{}",
        lines[3]
    );
    let value = json_of(slots(vec![Record::Slots(map())]));
    assert_eq!(
        value[1]["copies"],
        json!([{"shard": "shard-2", "state": "in-sync"}, {"shard": "shard-1", "state": "filling"}])
    );
    let total: u64 = value
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["count"].as_u64().unwrap())
        .sum();
    assert_eq!(total, 16384);
}

#[test]
fn exactly_the_leader_is_marked() {
    let member = |id: u64, role: &str| MemberStatus {
        id,
        endpoint: format!("127.0.0.1:740{id}"),
        role: role.into(),
        reachable: true,
        lag: 0,
        ..Default::default()
    };
    let mut status = StatusReply {
        leader_id: 2,
        term: 5,
        ..Default::default()
    };
    status.members = vec![member(1, "follower"), member(2, "leader"), member(3, "follower")];
    let value = json_of(members(&status, 0));
    let leaders: Vec<_> = value
        .as_array()
        .unwrap()
        .iter()
        .filter(|m| m["leader"] == true)
        .collect();
    assert_eq!(leaders.len(), 1);
    assert_eq!((&leaders[0]["id"], &leaders[0]["term"]), (&json!(2), &json!(5)));
}

#[test]
fn nodes_sum_their_shards() {
    let shard = |id: &str, node: &str| ShardRecord {
        id: id.into(),
        node: node.into(),
        capacity_bytes: 1 << 30,
        ..Default::default()
    };
    let shards = [shard("a", "n1"), shard("b", "n2"), shard("c", "n1")];
    let records = ["n1", "n2"]
        .map(|id| {
            Record::Node(NodeRecord {
                id: id.into(),
                ..Default::default()
            })
        })
        .to_vec();
    let value = json_of(nodes(records, &shards));
    assert_eq!(value[0]["shards"], json!(["a", "c"]));
    assert_eq!(value[0]["capacity_bytes"], json!(2u64 << 30));
}

#[test]
fn shards_show_what_the_leader_knows_or_at_least_the_record() {
    let record = |id: &str| ShardRecord {
        id: id.into(),
        state: ShardState::Up.into(),
        reason: "registered".into(),
        ..Default::default()
    };
    let status = StatusReply {
        shard_status: vec![ShardStatus {
            id: "a".into(),
            phase: "Suspect".into(),
            r#in: true,
            slots: 9,
            primary: 4,
            reason: "no heartbeat for 2 s".into(),
            ..Default::default()
        }],
        ..Default::default()
    };
    let rows = || shards(&[record("a"), record("b")], &status, 0);
    let value = json_of(rows());
    assert_eq!(
        (&value[0]["state"], &value[0]["phase"]),
        (&json!("Up"), &json!("Suspect"))
    );
    assert_eq!(
        (&value[0]["slots"], &value[0]["slots_primary"], &value[0]["in"]),
        (&json!(9), &json!(4), &json!(true))
    );
    assert_eq!(
        (&value[1]["phase"], &value[1]["reason"]),
        (&json!("Up"), &json!("registered"))
    );
    let table = rows().render(Output::Table, "shards");
    assert!(
        table.contains("Suspect") && table.contains("no heartbeat for 2 s"),
        "{table}"
    );
}
