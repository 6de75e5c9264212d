//! Verifies the pool's bookkeeping against its holders.

use std::collections::{BTreeMap, BTreeSet};

use super::prefix_cache::NodeId;
use super::{BlockId, BlockPool, BlockTable, Parent};

/// The first thing found wrong with the bookkeeping. A bug of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KvFault {
    /// A reference count is not the number of holders.
    #[error("block {block} counts {counted} holders and has {actual}")]
    Holders { block: u32, counted: u32, actual: u32 },
    /// A block is in none or several of: free, cached, owned.
    #[error("block {block} is {free} times free, {cached} times cached and {owned} times owned")]
    State { block: u32, free: u32, cached: u32, owned: u32 },
    /// A block without holders is free although it is indexed, or cached although it isn't.
    #[error("block {block} has no holder, indexed: {indexed}, cached: {cached}")]
    Content { block: u32, indexed: bool, cached: bool },
    /// The eviction order has a block under another moment than its own.
    #[error("block {block} is cached at moment {listed}, but was released at {released}")]
    Moment { block: u32, listed: u64, released: u64 },
    /// The index reaches a block through no key, several keys, or a key that is not its own.
    #[error("block {block} has {entries} entries under its key")]
    Entries { block: u32, entries: usize },
    /// The index has entries of blocks that don't know about it.
    #[error("{entries} index entries for {blocks} indexed blocks")]
    StrayEntries { entries: usize, blocks: usize },
    /// Two blocks are indexed for the same content.
    #[error("block {block} duplicates an indexed block")]
    Duplicate { block: u32 },
    /// A block that is held or cached outlives the prefix it continues.
    #[error("block {block} would outlive its parent")]
    Orphan { block: u32 },
    /// More blocks are cached than the cap allows.
    #[error("{cached} blocks are cached, at most {max_cached} may be")]
    OverCap { cached: usize, max_cached: usize },
}

impl BlockPool {
    /// Verifies everything, given all tables that hold blocks. Costs O(blocks log blocks).
    ///
    /// # Errors
    /// The first [`KvFault`] found.
    pub(crate) fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> Result<(), KvFault> {
        let mut actual = vec![0u32; self.total()];
        for block in tables.flat_map(BlockTable::holds) {
            actual[block.index()] += 1;
        }
        for ((block, &counted), actual) in (0u32..).zip(&self.holders).zip(actual) {
            if counted != actual {
                return Err(KvFault::Holders { block, counted, actual });
            }
        }
        self.check_states()?;
        self.check_index()
    }

    fn check_states(&self) -> Result<(), KvFault> {
        let mut free = vec![0u32; self.total()];
        let mut cached = vec![0u32; self.total()];
        for block in &self.free {
            free[block.index()] += 1;
        }
        for (&listed, &block) in &self.lru {
            cached[block.index()] += 1;
            let released = self.released_at[block.index()];
            if listed != released {
                return Err(KvFault::Moment { block: block.0, listed, released });
            }
        }
        for ((block, free), cached) in (0u32..).zip(free).zip(cached) {
            let owned = u32::from(self.holders[block as usize] > 0);
            if free + cached + owned != 1 {
                return Err(KvFault::State { block, free, cached, owned });
            }
            let indexed = self.index.node(BlockId(block)).is_some();
            if owned == 0 && indexed != (cached == 1) {
                return Err(KvFault::Content { block, indexed, cached: cached == 1 });
            }
        }
        if self.cached() > self.max_cached {
            return Err(KvFault::OverCap { cached: self.cached(), max_cached: self.max_cached });
        }
        Ok(())
    }

    fn check_index(&self) -> Result<(), KvFault> {
        let by_id: BTreeMap<NodeId, BlockId> =
            self.index.indexed().map(|(block, node)| (node.id, block)).collect();
        let mut contents = BTreeSet::new();
        let mut blocks = 0;
        for (block, node) in self.index.indexed() {
            blocks += 1;
            let entries = self.index.bucket_entries(&node.key, block);
            if entries != 1 {
                return Err(KvFault::Entries { block: block.0, entries });
            }
            if !contents.insert((&node.parent, &node.tokens)) {
                return Err(KvFault::Duplicate { block: block.0 });
            }
            let Parent::Node(parent) = &node.parent else { continue };
            if !by_id.get(parent).is_some_and(|&parent| self.outlives(parent, block)) {
                return Err(KvFault::Orphan { block: block.0 });
            }
        }
        let entries = self.index.num_entries();
        if entries != blocks {
            return Err(KvFault::StrayEntries { entries, blocks });
        }
        Ok(())
    }

    /// Whether `parent` can't be evicted before `child`.
    fn outlives(&self, parent: BlockId, child: BlockId) -> bool {
        let owned = |block: BlockId| self.holders[block.index()] > 0;
        owned(parent) || (!owned(child) && self.released_at[parent.index()] > self.released_at[child.index()])
    }
}
