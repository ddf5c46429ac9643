//! Builders and checks shared by the tests of the state.

#![allow(dead_code)] // each test binary uses a part

use kvpool_state::command::{
    CreateCluster, DrainShard, PlanSlots, RegisterShard, RemoveShard, ShardDown, ShardDrained, ShardLost, SlotsInSync,
};
use kvpool_state::records::{NodeRecord, RequestId, ShardAddresses, SlotCopy, SlotRange};
use kvpool_state::{Applied, Command, Refusal, SLOTS, State};
use proptest::prelude::ProptestConfig;

/// A seed that is known (and printed) before the run, so that any failure can be replayed.
pub fn config(cases: u32) -> ProptestConfig {
    use proptest::test_runner::RngSeed;
    let default = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let seed = match default.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => std::time::UNIX_EPOCH
            .elapsed()
            .map_or(0, |since| since.as_nanos() as u64),
    };
    println!("PROPTEST_RNG_SEED={seed}");
    ProptestConfig {
        rng_seed: RngSeed::Fixed(seed),
        ..default
    }
}

pub fn create() -> Command {
    Command::CreateCluster(CreateCluster {
        cluster_id: "c-1".into(),
        pool: "main".into(),
        factor: 2,
    })
}

pub fn register(id: &str, pool: &str, node: &str, boot: &str) -> Command {
    Command::RegisterShard(RegisterShard {
        id: id.into(),
        pool: pool.into(),
        node: Some(NodeRecord {
            id: node.into(),
            zone: "z".into(),
            ..NodeRecord::default()
        }),
        boot_id: boot.into(),
        addresses: Some(ShardAddresses {
            peer: "127.0.0.1:7000".into(),
            ..ShardAddresses::default()
        }),
        capacity_bytes: 1 << 30,
    })
}

pub fn down(id: &str, incarnation: u64) -> Command {
    Command::ShardDown(ShardDown {
        id: id.into(),
        incarnation,
        reason: "no heartbeat".into(),
    })
}

pub fn lost(id: &str, incarnation: u64) -> Command {
    Command::ShardLost(ShardLost {
        id: id.into(),
        incarnation,
        reason: "no heartbeat".into(),
    })
}

pub fn drain(id: &str, out: bool) -> Command {
    Command::DrainShard(DrainShard {
        id: id.into(),
        out,
        why: "test".into(),
    })
}

pub fn drained(id: &str, incarnation: u64) -> Command {
    Command::ShardDrained(ShardDrained {
        id: id.into(),
        incarnation,
    })
}

pub fn remove(id: &str) -> Command {
    Command::RemoveShard(RemoveShard { id: id.into() })
}

pub fn range(first: u32, last: u32, shards: &[u32]) -> SlotRange {
    let copies = shards
        .iter()
        .map(|shard| SlotCopy {
            shard: *shard,
            in_sync: false,
        })
        .collect();
    SlotRange { first, last, copies }
}

pub fn plan(pool: &str, base_epoch: u64, ranges: Vec<SlotRange>) -> Command {
    Command::PlanSlots(PlanSlots {
        pool: pool.into(),
        base_epoch,
        ranges,
        why: "test".into(),
    })
}

pub fn in_sync(pool: &str, shard: &str, incarnation: u64, epoch: u64, ranges: Vec<SlotRange>) -> Command {
    Command::SlotsInSync(SlotsInSync {
        pool: pool.into(),
        shard: shard.into(),
        incarnation,
        ranges,
        epoch,
    })
}

pub fn every_slot() -> Vec<SlotRange> {
    vec![range(0, u32::from(SLOTS) - 1, &[])]
}

/// A state that is driven with growing indices.
#[derive(Clone, Default)]
pub struct Driver {
    pub state: State,
    pub index: u64,
    pub now_ms: u64,
}

impl Driver {
    pub fn created() -> Driver {
        let mut driver = Driver {
            now_ms: 1_000_000,
            ..Driver::default()
        };
        driver.ok(&create());
        driver
    }

    pub fn apply(&mut self, command: &Command, request: Option<RequestId>) -> Applied {
        self.index += 1;
        self.state
            .apply(self.index, &command.to_entry(request, self.now_ms))
            .expect("an encoded command is readable")
    }

    pub fn ok(&mut self, command: &Command) -> Applied {
        let applied = self.apply(command, None);
        assert_eq!(
            applied.response.refusal(),
            Refusal::None,
            "{command:?}: {}",
            applied.response.message
        );
        applied
    }

    pub fn refused(&mut self, command: &Command) -> Refusal {
        let applied = self.apply(command, None);
        assert!(applied.events.is_empty(), "a refused command changes nothing");
        applied.response.refusal()
    }

    pub fn epoch(&self) -> u64 {
        self.state.slot_table("main").expect("the pool exists").0
    }

    /// A slot's list: shard numbers, each with whether it is in-sync.
    pub fn list(&self, slot: u16) -> Vec<(u32, bool)> {
        let list = self.state.slot_table("main").expect("the pool exists").1.get(slot);
        list.iter().map(|c| (c.shard, c.in_sync)).collect()
    }

    /// Registers shards `s1`, `s2`, … on as many nodes; returns their incarnations.
    pub fn shards(&mut self, count: u32) -> Vec<u64> {
        let one = |n| register(&format!("s{n}"), "main", &format!("n{n}"), "boot");
        (1..=count).map(|n| self.ok(&one(n)).response.incarnation).collect()
    }
}
