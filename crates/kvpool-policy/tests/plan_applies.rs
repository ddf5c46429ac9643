//! Plans as the replicated state applies them: registration, plan, report and loss go through log entries, and the state
//! accepts every plan as it was made.

use kvpool_policy::placement::{Input, Part, PlaceShard, plan};
use kvpool_state::command::{
    CreateCluster, DrainShard, PlanSlots, RegisterShard, RemoveShard, ShardDown, ShardDrained, SlotsInSync,
};
use kvpool_state::records::{NodeRecord, ShardAddresses, SlotRange};
use kvpool_state::{Command, Refusal, SLOTS, State};

#[derive(Default)]
struct Pool {
    state: State,
    index: u64,
}

impl Pool {
    fn apply(&mut self, command: Command) -> u64 {
        self.index += 1;
        let applied = self
            .state
            .apply(self.index, &command.to_entry(None, 1))
            .expect("the entry is readable");
        assert_eq!(
            applied.response.refusal(),
            Refusal::None,
            "{}",
            applied.response.message
        );
        applied.response.incarnation
    }

    fn register(&mut self, n: u32) -> u64 {
        self.apply(Command::RegisterShard(RegisterShard {
            id: format!("s{n}"),
            pool: "main".into(),
            node: Some(NodeRecord {
                id: format!("n{n}"),
                ..NodeRecord::default()
            }),
            boot_id: "b".into(),
            addresses: Some(ShardAddresses {
                peer: "h:1".into(),
                ..ShardAddresses::default()
            }),
            capacity_bytes: 1 << 30,
        }))
    }

    /// One plan, proposed and applied; `false` when there was nothing left to do.
    fn step(&mut self) -> bool {
        let shards: Vec<PlaceShard> = self
            .state
            .shards()
            .map(|s| PlaceShard {
                number: s.number,
                node: s.node.clone(),
                zone: String::new(),
                capacity_bytes: s.capacity_bytes,
                part: match s.state() {
                    _ if !s.is_up() => Part::Gone,
                    _ if s.out => Part::Leaving,
                    _ => Part::In,
                },
            })
            .collect();
        let (epoch, table) = self.state.slot_table("main").expect("the pool exists");
        let plan = plan(&Input {
            factor: 2,
            shards: &shards,
            table,
            max_filling_per_shard: 2_000,
            max_changes: 4_096,
        });
        if plan.ranges.is_empty() {
            return false;
        }
        let ranges = plan.ranges.clone();
        self.apply(Command::PlanSlots(PlanSlots {
            pool: "main".into(),
            base_epoch: epoch,
            ranges,
            why: "test".into(),
        }));
        let table = self.state.slot_table("main").expect("the pool exists").1;
        for range in &plan.ranges {
            for slot in range.first..=range.last {
                let slot = u16::try_from(slot).expect("a slot");
                assert_eq!(
                    table.get(slot),
                    &range.copies[..],
                    "the state took slot {slot} as planned"
                );
            }
        }
        true
    }

    fn report_all(&mut self) {
        let (epoch, _) = self.state.slot_table("main").expect("the pool exists");
        let up: Vec<(String, u64)> = self
            .state
            .shards()
            .filter(|s| s.is_up())
            .map(|s| (s.id.clone(), s.incarnation))
            .collect();
        for (shard, incarnation) in up {
            let ranges = vec![SlotRange {
                first: 0,
                last: u32::from(SLOTS) - 1,
                copies: vec![],
            }];
            self.apply(Command::SlotsInSync(SlotsInSync {
                pool: "main".into(),
                shard,
                incarnation,
                ranges,
                epoch,
            }));
        }
    }

    fn settle(&mut self) {
        let mut steps = 0;
        while self.step() {
            self.report_all();
            steps += 1;
            assert!(steps < 100, "it does not settle");
        }
    }

    fn in_sync(&self) -> usize {
        let table = self.state.slot_table("main").expect("the pool exists").1;
        table
            .iter()
            .map(|(_, list)| list.iter().filter(|c| c.in_sync).count())
            .sum()
    }
}

#[test]
fn a_pool_lives_through_first_boot_loss_return_and_growth() {
    let mut pool = Pool::default();
    pool.apply(Command::CreateCluster(CreateCluster {
        cluster_id: "c".into(),
        pool: "main".into(),
        factor: 2,
    }));
    let incarnations: Vec<u64> = (1..=3).map(|n| pool.register(n)).collect();
    assert!(pool.step());
    let table = pool.state.slot_table("main").expect("the pool exists").1;
    assert!(
        table.iter().all(|(_, list)| list.len() == 2),
        "an empty table is filled by one plan"
    );
    // Shards report one after the other, and who is in-sync first stands first: later plans put that in order.
    pool.report_all();
    pool.settle();
    let both = 2 * usize::from(SLOTS);
    assert_eq!(pool.in_sync(), both);
    pool.apply(Command::ShardDown(ShardDown {
        id: "s2".into(),
        incarnation: incarnations[1],
        reason: "test".into(),
    }));
    let left = pool.state.slot_table("main").expect("the pool exists").1;
    assert!(
        left.iter().all(|(_, list)| list.first().is_some_and(|c| c.in_sync)),
        "every slot is served on"
    );
    pool.settle();
    assert_eq!(pool.in_sync(), both);
    pool.register(2);
    pool.settle();
    pool.register(4);
    pool.settle();
    assert_eq!(pool.in_sync(), both);
    // One leaves again: the state takes every step of it, and calls it Drained only then.
    let leaver = pool.register(5);
    pool.settle();
    pool.apply(Command::DrainShard(DrainShard {
        id: "s5".into(),
        out: true,
        why: "test".into(),
    }));
    pool.settle();
    pool.apply(Command::ShardDrained(ShardDrained {
        id: "s5".into(),
        incarnation: leaver,
    }));
    pool.apply(Command::RemoveShard(RemoveShard { id: "s5".into() }));
    for shard in pool.state.shards() {
        let table = pool.state.slot_table("main").expect("the pool exists").1;
        let primary = table
            .iter()
            .filter(|(_, l)| l.first().is_some_and(|c| c.shard == shard.number))
            .count();
        assert_eq!(primary, usize::from(SLOTS) / 4, "{}", shard.id);
    }
}
