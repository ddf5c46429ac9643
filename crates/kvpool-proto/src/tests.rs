use crate::meta::{Reason, Refused};
use crate::{JoinToken, unmapped};
use kvpool_state::command::{Refusal, Response};
use kvpool_state::records::*;
use prost::Message;
use std::collections::BTreeMap;
use std::time::Duration;

/// Every field is set, so that a missing or differing tag shows: what one type writes the other reads back whole.
fn same_bytes<A: Message + Default + PartialEq + std::fmt::Debug, B: Message + Default + PartialEq>(hand: &A) {
    let bytes = hand.encode_to_vec();
    let generated = B::decode(bytes.as_slice()).expect("the generated type reads it");
    assert_eq!(generated.encode_to_vec(), bytes, "the generated type knows every field");
    assert_eq!(&A::decode(bytes.as_slice()).expect("reads itself"), hand);
}

fn slot_map() -> SlotMap {
    SlotMap {
        pool: "default".into(),
        cluster_id: "c".into(),
        cluster_generation: 1,
        epoch: 300,
        generation: 2,
        factor: 2,
        shards: vec![MapShard {
            number: 1,
            id: "shard-1".into(),
            incarnation: 17,
            node: "node-1".into(),
            peer: "127.0.0.1:1".into(),
            up: true,
            dropped_at: 299,
        }],
        ranges: vec![SlotRange {
            first: 1,
            last: 16383,
            copies: vec![
                SlotCopy {
                    shard: 1,
                    in_sync: true,
                },
                SlotCopy {
                    shard: 2,
                    in_sync: false,
                },
            ],
        }],
    }
}

fn shard() -> ShardRecord {
    ShardRecord {
        id: "shard-1".into(),
        node: "node-1".into(),
        pool: "default".into(),
        number: 1,
        boot_id: "b".into(),
        incarnation: 17,
        addresses: Some(ShardAddresses {
            peer: "127.0.0.1:1".into(),
            resp: "127.0.0.1:2".into(),
            lm: "127.0.0.1:3".into(),
            http: "127.0.0.1:4".into(),
        }),
        capacity_bytes: 1 << 40,
        state: ShardState::Down.into(),
        since_ms: 1_700_000_000_000,
        reason: "lease expired".into(),
        ..ShardRecord::default()
    }
}

fn draining() -> ShardRecord {
    ShardRecord {
        state: ShardState::Draining.into(),
        out: true,
        downs: 2,
        last_down_ms: 3,
        ..shard()
    }
}

#[test]
fn hand_tagged_records_equal_the_proto_file() {
    let labels = BTreeMap::from([("rack".into(), "r1".into())]);
    let cluster = ClusterRecord {
        cluster_id: "c".into(),
        cluster_generation: 2,
        created_at_ms: 3,
        feature_level: 1,
        target_members: 3,
        next_member_id: 4,
        hashed_revision: 5,
        state_hash: vec![6; 32],
    };
    let member = MemberRecord {
        name: 1,
        id: 101,
        address: "h:1".into(),
        boot: "b".into(),
        role: MemberRole::Idle.into(),
        since_ms: 2,
        reason: "r".into(),
    };
    let node = NodeRecord {
        id: "n".into(),
        zone: "z".into(),
        labels,
    };
    let pool = PoolRecord {
        name: "default".into(),
        factor: 2,
        generation: 1,
        brake_released_until_ms: 7,
    };
    same_bytes::<_, unmapped::ClusterRecord>(&cluster);
    same_bytes::<_, unmapped::NodeRecord>(&node);
    same_bytes::<_, unmapped::ShardRecord>(&shard());
    same_bytes::<_, unmapped::ShardRecord>(&draining());
    same_bytes::<_, unmapped::PoolRecord>(&pool);
    same_bytes::<_, unmapped::MemberRecord>(&member);
    same_bytes::<_, unmapped::SlotMap>(&slot_map());
    same_bytes::<_, unmapped::Decision>(&Decision {
        number: 1,
        at_ms: 2,
        what: "w".into(),
        why: "y".into(),
    });
    same_bytes::<_, unmapped::RequestId>(&RequestId {
        created_at_ms: 1,
        client: 2,
        sequence: 3,
    });
    same_bytes::<_, unmapped::Response>(&Response {
        revision: 1,
        refusal: Refusal::StaleEpoch.into(),
        message: "m".into(),
        incarnation: 4,
        epoch: 5,
    });
    let records = [
        Record::Cluster(cluster),
        Record::Node(node),
        Record::Shard(shard()),
        Record::Pool(pool),
        Record::Slots(slot_map()),
        Record::Member(member),
    ];
    for record in records {
        same_bytes::<_, unmapped::Event>(&Event {
            revision: 9,
            record: Some(record),
        });
    }
}

#[test]
fn enums_equal_the_proto_file() {
    for n in 0..32 {
        let hand = Refusal::try_from(n).ok().map(|r| r.word().to_uppercase());
        let generated = unmapped::Refusal::try_from(n).ok();
        let generated = generated.map(|r| r.as_str_name().trim_start_matches("REFUSAL_").to_owned());
        assert_eq!(hand, generated);
        let hand = ShardState::try_from(n).ok().map(|r| r.word().to_uppercase());
        let generated = unmapped::ShardState::try_from(n).ok();
        let generated = generated.map(|r| r.as_str_name().trim_start_matches("SHARD_STATE_").to_owned());
        assert_eq!(hand, generated);
        let hand = MemberRole::try_from(n).ok().map(|r| r.word().to_uppercase());
        let generated = unmapped::MemberRole::try_from(n).ok();
        let generated = generated.map(|r| r.as_str_name().trim_start_matches("MEMBER_ROLE_").to_owned());
        assert_eq!(hand, generated);
    }
}

/// Format 1 of a shard record and of a slot map, byte by byte: clients of other versions read these.
#[test]
fn golden_bytes() {
    let golden = "0a0773686172642d3112066e6f64652d311a0764656661756c7420012a01623011\
        3a340a0b3132372e302e302e313a31120b3132372e302e302e313a321a0b3132372e302e302e313a33220b3132372e302e302e313a34\
        4080808080802048025080d095ffbc315a0d6c656173652065787069726564";
    assert_eq!(hex(&shard().encode_to_vec()), golden);
    let golden = "0a0764656661756c74120163180120ac0228023002";
    let bytes = hex(&slot_map().encode_to_vec());
    assert!(bytes.starts_with(golden), "{bytes}");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn a_refusal_survives_the_wire() {
    for reason in Reason::ALL {
        let refused = Refused::new(reason, "why")
            .with_leader(Some("127.0.0.1:9".into()))
            .with_retry_after(Duration::from_millis(20));
        let status = tonic::Status::from(refused.clone());
        assert_eq!(Refused::from_status(&status), Some(refused));
    }
    assert_eq!(Refused::from_status(&tonic::Status::unavailable("gone")), None);
}

#[test]
fn a_token_is_compared_whole_and_never_shown() {
    let token: JoinToken = "s3cret-\u{fc}".parse().unwrap();
    let mut metadata = tonic::metadata::MetadataMap::new();
    assert!(!token.is_in(&metadata), "no token is not a token");
    token.attach(&mut metadata);
    assert!(token.is_in(&metadata));
    assert!(!"s3cret-\u{fd}".parse::<JoinToken>().unwrap().is_in(&metadata));
    assert!(!"s3cret".parse::<JoinToken>().unwrap().is_in(&metadata));
    assert!(!JoinToken::default().is_in(&metadata));
    assert!(
        !token.equals(b"s3cret-\xc3\xbc\0"),
        "a longer one with a zero behind is another one"
    );
    assert!(!format!("{token:?} {metadata:?}").contains("s3cret"));
    assert!("x".repeat(257).parse::<JoinToken>().is_err());
}
