//! Bookkeeping of the paged KV cache: which block is whose, and which blocks hold which tokens.
//!
//! Nothing here touches memory: a [`BlockId`] names a block of every layer's cache, and [`BlockPool`] says who
//! may write to it. Every block is *free*, *cached* (nobody holds it, but the prefix index knows its content;
//! evicted when room is needed) or *owned* (one holder or more; possibly indexed as well).
//!
//! Architecture invariants:
//! - `kv` has no clock, no device and no randomness: the same calls give the same blocks.
//! - A holder of an indexed block also holds the blocks of the prefix before it, and gives them back after it,
//!   so the least recently used block is always a leaf of the index: evicting it strands no descendant.
//! - A hit is verified token by token: a colliding hash costs a comparison, never a wrong block.

mod block_pool;
mod check;
mod prefix_cache;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use block_pool::{BlockPool, PrefixCache};
pub(crate) use check::KvFault;
pub(crate) use prefix_cache::{BlockKey, KeyFn, Parent, Salt, chained_blake3};

/// One block of the KV cache, in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockId(pub(crate) u32);

impl BlockId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// The blocks of one sequence, in the order of its positions. The table is a *holder* of each of them.
///
/// Not `Clone`: a second table is a second holder, which only [`BlockPool::share`] makes. A table that holds
/// blocks must go back through [`BlockPool::release`]; dropped instead, its blocks stay owned for ever, which
/// [`BlockPool::check`] reports.
#[derive(Debug, Default)]
#[must_use = "a dropped table leaks its blocks"]
pub(crate) struct BlockTable {
    blocks: Vec<BlockId>,
    /// Blocks of equal content that take the place of an own one when the step in flight is complete: the
    /// table holds both till then. Indices ascend.
    replacements: Vec<(usize, BlockId)>,
}

impl BlockTable {
    /// The blocks, in the order of positions.
    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the table holds nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The slot of a position: `block * block_size + offset`.
    ///
    /// # Panics
    /// If no block of the table covers `position`.
    pub(crate) fn slot(&self, position: usize, block_size: usize) -> u32 {
        let block = self.blocks[position / block_size];
        // Both factors fit: the pool refuses to be larger than u32 slots.
        (block.index() * block_size + position % block_size) as u32
    }

    /// Every hold of this table: one for each block, one for each replacement.
    fn holds(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.blocks.iter().copied().chain(self.replacements.iter().map(|&(_, block)| block))
    }
}
