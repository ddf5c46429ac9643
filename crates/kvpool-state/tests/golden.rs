//! Golden bytes of format 1: every command, record and snapshot item. They may never change; a new format gets its own file.
//! A failing test prints what the build writes now.

#![allow(clippy::unwrap_used)] // tests

mod common;

use common::{Driver, create, down, drain, drained, every_slot, in_sync, lost, plan, range, register, remove};
use kvpool_state::command::{
    AdmitMember, ConfigureGroup, ConfigurePool, RegisterShard, ReleaseBrake, Response, StateHash, decode,
};
use kvpool_state::records::{
    ClusterRecord, Decision, Event, MapShard, MemberRecord, MemberRole, NodeRecord, PoolRecord, Record, RequestId,
    ShardAddresses, ShardRecord, ShardState, SlotCopy, SlotMap, SlotRange,
};
use kvpool_state::{Command, Refusal, State};
use prost::Message;
use std::fmt::Write;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut out, b| {
        write!(out, "{b:02x}").unwrap();
        out
    })
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap())
        .collect()
}

/// Compares by name; prints all that differ at once.
fn compare(golden: &[(&str, &str)], written: &[(&str, Vec<u8>)]) {
    let mut wrong = String::new();
    for (i, (name, bytes)) in written.iter().enumerate() {
        if golden.get(i) != Some(&(*name, hex(bytes).as_str())) {
            writeln!(wrong, "    (\"{name}\", \"{}\"),", hex(bytes)).unwrap();
        }
    }
    assert!(wrong.is_empty(), "these bytes are not the golden ones:\n{wrong}");
    assert_eq!(golden.len(), written.len());
}

fn addresses() -> ShardAddresses {
    ShardAddresses {
        peer: "h:1".into(),
        resp: "h:2".into(),
        lm: "h:3".into(),
        http: "h:4".into(),
    }
}

fn node() -> NodeRecord {
    let labels = [("gpu".to_owned(), "h100".to_owned())].into();
    NodeRecord {
        id: "n1".into(),
        zone: "z1".into(),
        labels,
    }
}

fn request() -> RequestId {
    RequestId {
        created_at_ms: 1_700_000_000_000,
        client: 0xfeed,
        sequence: 3,
    }
}

fn commands() -> Vec<(&'static str, Command)> {
    let mut full = range(7, 300, &[1, 2]);
    full.copies[0].in_sync = true;
    let registration = RegisterShard {
        id: "s1".into(),
        pool: "main".into(),
        node: Some(node()),
        boot_id: "b1".into(),
        addresses: Some(addresses()),
        capacity_bytes: 1 << 37,
    };
    vec![
        ("CreateCluster", create()),
        (
            "ConfigurePool",
            Command::ConfigurePool(ConfigurePool {
                pool: "main".into(),
                factor: 3,
            }),
        ),
        ("RegisterShard", Command::RegisterShard(registration)),
        ("ShardDown", down("s1", 12)),
        ("PlanSlots", plan("main", 4, vec![full])),
        ("SlotsInSync", in_sync("main", "s1", 12, 5, vec![range(7, 300, &[])])),
        (
            "AdmitMember",
            Command::AdmitMember(AdmitMember {
                name: 2,
                address: "h:7400".into(),
                boot: "b2".into(),
                member_id: 101,
                why: "its disk was lost".into(),
            }),
        ),
        (
            "ConfigureGroup",
            Command::ConfigureGroup(ConfigureGroup {
                target_members: 5,
                feature_level: 2,
                why: "asked".into(),
            }),
        ),
        (
            "StateHash",
            Command::StateHash(StateHash {
                revision: 10_000,
                hash: vec![7; 32],
            }),
        ),
        ("ShardLost", lost("s1", 12)),
        ("DrainShard", drain("s1", true)),
        ("ShardDrained", drained("s1", 12)),
        ("RemoveShard", remove("s1")),
        (
            "ReleaseBrake",
            Command::ReleaseBrake(ReleaseBrake {
                pool: "main".into(),
                for_ms: 600_000,
            }),
        ),
    ]
}

fn shard() -> ShardRecord {
    ShardRecord {
        id: "s1".into(),
        node: "n1".into(),
        pool: "main".into(),
        number: 2,
        boot_id: "b1".into(),
        incarnation: 12,
        addresses: Some(addresses()),
        capacity_bytes: 1 << 37,
        state: ShardState::Down.into(),
        since_ms: 1_700_000_000_000,
        reason: "no heartbeat".into(),
        ..ShardRecord::default()
    }
}

/// The fields that part 2 added.
fn shard_of_part_2() -> ShardRecord {
    ShardRecord {
        state: ShardState::Draining.into(),
        out: true,
        downs: 3,
        last_down_ms: 1_700_000_000_001,
        ..shard()
    }
}

fn slot_map() -> SlotMap {
    let copies = vec![
        SlotCopy {
            shard: 1,
            in_sync: true,
        },
        SlotCopy {
            shard: 2,
            in_sync: false,
        },
    ];
    let map_shard = MapShard {
        number: 1,
        id: "s1".into(),
        incarnation: 12,
        node: "n1".into(),
        peer: "h:1".into(),
        up: true,
        dropped_at: 8,
    };
    SlotMap {
        pool: "main".into(),
        cluster_id: "c-1".into(),
        cluster_generation: 1,
        epoch: 9,
        generation: 1,
        factor: 2,
        shards: vec![map_shard],
        ranges: vec![
            SlotRange {
                first: 0,
                last: 8191,
                copies,
            },
            SlotRange {
                first: 8192,
                last: 16383,
                copies: vec![],
            },
        ],
    }
}

fn records() -> Vec<(&'static str, Record)> {
    let cluster = ClusterRecord {
        cluster_id: "c-1".into(),
        cluster_generation: 1,
        created_at_ms: 5,
        feature_level: 1,
        ..ClusterRecord::default()
    };
    let grown = ClusterRecord {
        target_members: 3,
        next_member_id: 102,
        hashed_revision: 10_000,
        state_hash: vec![7; 32],
        ..cluster.clone()
    };
    let member = MemberRecord {
        name: 2,
        id: 101,
        address: "h:7400".into(),
        boot: "b2".into(),
        role: MemberRole::Voter.into(),
        since_ms: 5,
        reason: "its disk was lost".into(),
    };
    vec![
        ("ClusterRecord", Record::Cluster(cluster)),
        ("NodeRecord", Record::Node(node())),
        ("ShardRecord", Record::Shard(shard())),
        (
            "PoolRecord",
            Record::Pool(PoolRecord {
                name: "main".into(),
                factor: 2,
                generation: 1,
                ..PoolRecord::default()
            }),
        ),
        ("SlotMap", Record::Slots(slot_map())),
        ("MemberRecord", Record::Member(member)),
        ("ClusterRecord 2", Record::Cluster(grown)),
        ("ShardRecord of part 2", Record::Shard(shard_of_part_2())),
        (
            "PoolRecord of part 2",
            Record::Pool(PoolRecord {
                name: "main".into(),
                factor: 2,
                generation: 1,
                brake_released_until_ms: 1_700_000_000_002,
            }),
        ),
    ]
}

#[test]
fn commands_of_format_1() {
    let written: Vec<(&str, Vec<u8>)> = commands()
        .into_iter()
        .map(|(name, c)| (name, c.to_entry(Some(request()), 1_700_000_000_001)))
        .collect();
    compare(COMMANDS, &written);
}

#[test]
fn golden_commands_are_read_as_what_they_were() {
    for ((name, command), (golden, bytes)) in commands().into_iter().zip(COMMANDS) {
        assert_eq!(name, *golden);
        let (read, envelope) = decode(&unhex(bytes)).unwrap();
        assert_eq!(read, command);
        assert_eq!(
            (envelope.format, envelope.min_reader, envelope.request),
            (1, command.level(), Some(request()))
        );
    }
}

#[test]
fn records_of_format_1() {
    let event = |r: Record| {
        Event {
            revision: 42,
            record: Some(r),
        }
        .encode_to_vec()
    };
    let mut written: Vec<(&str, Vec<u8>)> = records().into_iter().map(|(name, r)| (name, event(r))).collect();
    let decision = Decision {
        number: 42,
        at_ms: 6,
        what: "shard s1 is Down".into(),
        why: "no heartbeat".into(),
    };
    written.push(("Decision", decision.encode_to_vec()));
    let refusal = Refusal::StaleEpoch.into();
    let response = Response {
        revision: 42,
        refusal,
        message: "m".into(),
        incarnation: 12,
        epoch: 9,
    };
    written.push(("Response", response.encode_to_vec()));
    compare(RECORDS, &written);
    for ((_, record), (_, bytes)) in records().into_iter().zip(RECORDS) {
        assert_eq!(Event::decode(unhex(bytes).as_slice()).unwrap().record, Some(record));
    }
}

/// A state with one item of each kind.
fn state() -> State {
    let mut driver = Driver::created();
    let id = RequestId {
        created_at_ms: driver.now_ms,
        client: 1,
        sequence: 1,
    };
    let incarnation = driver
        .apply(&register("s1", "main", "n1", "b1"), Some(id))
        .response
        .incarnation;
    let number = driver.state.shard("s1").unwrap().number;
    driver.ok(&plan("main", driver.epoch(), vec![range(0, 99, &[number])]));
    driver.ok(&plan("main", driver.epoch(), vec![range(50, 99, &[])]));
    driver.ok(&in_sync("main", "s1", incarnation, driver.epoch(), every_slot()));
    driver.state
}

#[test]
fn snapshot_items_of_format_1() {
    let names = [
        "Header", "Cluster", "Node", "Shard", "Pool", "Request", "Decision", "Decision", "Decision", "Decision", "End",
    ];
    let items: Vec<Vec<u8>> = state().snapshot_items().collect();
    assert_eq!(items.len(), names.len());
    compare(SNAPSHOT, &names.into_iter().zip(items).collect::<Vec<_>>());
    let golden: Vec<Vec<u8>> = SNAPSHOT.iter().map(|(_, bytes)| unhex(bytes)).collect();
    assert_eq!(State::from_snapshot_items(&golden).unwrap(), state());
}

/// Kinds of items that came after format 1 was first released.
#[test]
fn snapshot_items_of_the_group() {
    let mut driver = Driver::created();
    driver.ok(&Command::AdmitMember(AdmitMember {
        name: 2,
        address: "h:7400".into(),
        member_id: 2,
        ..AdmitMember::default()
    }));
    let names = ["Header", "Cluster", "Pool", "Decision", "Decision", "Member", "End"];
    let items: Vec<Vec<u8>> = driver.state.snapshot_items().collect();
    assert_eq!(items.len(), names.len());
    compare(GROUP_SNAPSHOT, &names.into_iter().zip(items).collect::<Vec<_>>());
    let golden: Vec<Vec<u8>> = GROUP_SNAPSHOT.iter().map(|(_, bytes)| unhex(bytes)).collect();
    assert_eq!(State::from_snapshot_items(&golden).unwrap(), driver.state);
}

const GROUP_SNAPSHOT: &[(&str, &str)] = &[
    ("Header", "0a0c0801100218c0843d28ffb418"),
    ("Cluster", "120f0a03632d31100118c0843d20013003"),
    ("Pool", "2a130a0a0a046d61696e1002180110011a0310ff7f"),
    (
        "Decision",
        "3a3c080110c0843d1a1263726561746520636c757374657220632d312220666972737420626f6f743a20657665727920736565642077617320656d707479",
    ),
    (
        "Decision",
        "3a22080210c0843d1a1a6d656d6265722032206973206964203220617420683a37343030",
    ),
    ("Member", "f20612080210021a06683a37343030280130c0843d"),
    ("End", "4006"),
];

const COMMANDS: &[(&str, &str)] = &[
    (
        "CreateCluster",
        "080110011801220d0a03632d3112046d61696e18022a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "ConfigurePool",
        "08011001180222080a046d61696e10032a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "RegisterShard",
        "08011001180322420a02733112046d61696e1a150a026e3112027a311a0b0a03677075120468313030220262312a140a03683a311203683a321a03683a332203683a34308080808080042a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "ShardDown",
        "08011001180422140a027331100c1a0c6e6f206865617274626561742a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "PlanSlots",
        "080110011805221f0a046d61696e10041a0f080710ac021a04080110011a0208022204746573742a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "SlotsInSync",
        "08011001180622150a046d61696e12027331180c2205080710ac0228052a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "AdmitMember",
        "080110021807222308021206683a373430301a02623220652a11697473206469736b20776173206c6f73742a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "ConfigureGroup",
        "080110021808220b080510021a0561736b65642a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "StateHash",
        "080110021809222508904e122007070707070707070707070707070707070707070707070707070707070707072a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "ShardLost",
        "08011002180a22140a027331100c1a0c6e6f206865617274626561742a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "DrainShard",
        "08011002180b220c0a02733110011a04746573742a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "ShardDrained",
        "08011002180c22060a027331100c2a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "RemoveShard",
        "08011002180d22040a0273312a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
    (
        "ReleaseBrake",
        "08011002180e220a0a046d61696e10c0cf242a0d0880d095ffbc3110edfd0318033081d095ffbc31",
    ),
];

const RECORDS: &[(&str, &str)] = &[
    ("ClusterRecord", "082a120b0a03632d31100118052001"),
    ("NodeRecord", "082a1a150a026e3112027a311a0b0a03677075120468313030"),
    (
        "ShardRecord",
        "082a224a0a02733112026e311a046d61696e20022a026231300c3a140a03683a311203683a321a03683a332203683a344080808080800448025080d095ffbc315a0c6e6f20686561727462656174",
    ),
    ("PoolRecord", "082a2a0a0a046d61696e10021801"),
    (
        "SlotMap",
        "082a32410a046d61696e1203632d3118012009280130023a15080112027331180c22026e312a03683a3130013808420d10ff3f1a04080110011a020802420608804010ff7f",
    ),
    (
        "MemberRecord",
        "082a3a27080210651a06683a3734303022026232280130053a11697473206469736b20776173206c6f7374",
    ),
    (
        "ClusterRecord 2",
        "082a12340a03632d311001180520012803306638904e42200707070707070707070707070707070707070707070707070707070707070707",
    ),
    (
        "ShardRecord of part 2",
        "082a22550a02733112026e311a046d61696e20022a026231300c3a140a03683a311203683a321a03683a332203683a344080808080800448035080d095ffbc315a0c6e6f20686561727462656174600168037081d095ffbc31",
    ),
    ("PoolRecord of part 2", "082a2a110a046d61696e100218012082d095ffbc31"),
    (
        "Decision",
        "082a10061a10736861726420733120697320446f776e220c6e6f20686561727462656174",
    ),
    ("Response", "082a10061a016d200c2809"),
];

const SNAPSHOT: &[(&str, &str)] = &[
    ("Header", "0a0e0801100518c0843d200128ffb418"),
    ("Cluster", "120d0a03632d31100118c0843d2001"),
    ("Node", "1a070a026e3112017a"),
    (
        "Shard",
        "223e0a02733112026e311a046d61696e2a02623130023a100a0e3132372e302e302e313a37303030408080808004480150c0843d5a0a72656769737465726564",
    ),
    (
        "Pool",
        "2a210a0a0a046d61696e1002180110051a0610311a0210011a05083210ff7f22021004",
    ),
    ("Request", "32120a0808c0843d100118011206080220022802"),
    (
        "Decision",
        "3a3c080110c0843d1a1263726561746520636c757374657220632d312220666972737420626f6f743a20657665727920736565642077617320656d707479",
    ),
    (
        "Decision",
        "3a30080210c0843d1a1f736861726420733120697320557020617320696e6361726e6174696f6e20322207626f6f74206231",
    ),
    (
        "Decision",
        "3a2e080310c0843d1a20706f6f6c206d61696e3a203120736c6f742072616e67657320706c616e6e6564220474657374",
    ),
    (
        "Decision",
        "3a2e080410c0843d1a20706f6f6c206d61696e3a203120736c6f742072616e67657320706c616e6e6564220474657374",
    ),
    ("End", "400a"),
];
