//! Eviction order: S3-FIFO over bytes. A small probation queue in front of a main FIFO, one hit bit per block.
//!
//! Pure bookkeeping under one lock of the store; reads never come here (a hit only sets the block's bit). A block is
//! in the queue exactly while it is in the index, except between [`Queue::candidate`] and the index check after it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::block::{Block, NO_NODE};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Probation: new blocks that no ghost remembers.
    Small,
    /// Proven blocks.
    Main,
}

struct Node {
    block: Option<Arc<Block>>,
    lane: Lane,
    /// Towards the newest.
    newer: u32,
    /// Towards the oldest; the next free node for a free one.
    older: u32,
}

#[derive(Clone, Copy)]
struct Ends {
    newest: u32,
    oldest: u32,
    bytes: u64,
    len: usize,
}

const EMPTY: Ends = Ends {
    newest: NO_NODE,
    oldest: NO_NODE,
    bytes: 0,
    len: 0,
};

pub(crate) struct Queue {
    nodes: Vec<Node>,
    free: u32,
    lanes: [Ends; 2],
    /// Bytes the probation queue may hold before it is evicted from first.
    small_target: u64,
}

impl Queue {
    pub(crate) fn new(small_target: u64) -> Self {
        Self {
            nodes: Vec::new(),
            free: NO_NODE,
            lanes: [EMPTY; 2],
            small_target,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.lanes[0].len + self.lanes[1].len
    }

    /// Bytes and blocks of a lane.
    pub(crate) fn lane(&self, lane: Lane) -> (u64, usize) {
        let ends = self.lanes[lane as usize];
        (ends.bytes, ends.len)
    }

    /// Puts a block at the newest end.
    pub(crate) fn push(&mut self, block: Arc<Block>, lane: Lane) {
        let ends = self.lanes[lane as usize];
        let node = Node {
            block: None,
            lane,
            newer: NO_NODE,
            older: ends.newest,
        };
        let at = if self.free == NO_NODE {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        } else {
            let at = self.free;
            self.free = self.nodes[at as usize].older;
            self.nodes[at as usize] = node;
            at
        };
        if ends.newest == NO_NODE {
            self.lanes[lane as usize].oldest = at;
        } else {
            self.nodes[ends.newest as usize].newer = at;
        }
        let ends = &mut self.lanes[lane as usize];
        ends.newest = at;
        ends.bytes += block.charge();
        ends.len += 1;
        block.node.store(at, Ordering::Relaxed);
        self.nodes[at as usize].block = Some(block);
    }

    /// Takes a block out; false if it was in no lane.
    pub(crate) fn unlink(&mut self, block: &Block) -> bool {
        let at = block.node.swap(NO_NODE, Ordering::Relaxed);
        if at == NO_NODE {
            return false;
        }
        let node = &mut self.nodes[at as usize];
        node.block = None;
        let (lane, newer, older) = (node.lane as usize, node.newer, node.older);
        node.older = self.free;
        self.free = at;
        match newer {
            NO_NODE => self.lanes[lane].newest = older,
            _ => self.nodes[newer as usize].older = older,
        }
        match older {
            NO_NODE => self.lanes[lane].oldest = newer,
            _ => self.nodes[older as usize].newer = newer,
        }
        self.lanes[lane].bytes -= block.charge();
        self.lanes[lane].len -= 1;
        true
    }

    /// Takes out the next block to evict, moving kept ones on: those hit since they were last looked at, and those
    /// that `keep` names. Looks at no more than `budget` blocks and lowers it by as many.
    pub(crate) fn candidate(
        &mut self,
        budget: &mut usize,
        keep: impl Fn(&Arc<Block>) -> bool,
        drop_first: impl Fn(&Block) -> bool,
    ) -> Option<(Arc<Block>, Lane)> {
        while *budget > 0 {
            *budget -= 1;
            let small = self.lanes[Lane::Small as usize];
            let main = self.lanes[Lane::Main as usize];
            let (lane, at) = if small.bytes > self.small_target || main.len == 0 {
                (Lane::Small, small.oldest)
            } else {
                (Lane::Main, main.oldest)
            };
            let block = self.nodes.get(at as usize)?.block.clone()?;
            self.unlink(&block);
            if drop_first(&block) {
                return Some((block, lane));
            }
            let hit = block.hit.swap(false, Ordering::Relaxed);
            if hit || keep(&block) {
                self.push(block, Lane::Main);
                continue;
            }
            return Some((block, lane));
        }
        None
    }
}
