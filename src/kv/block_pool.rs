//! The pool: hands blocks out, counts holders, keeps content nobody holds until room is needed.

use std::collections::BTreeMap;

use super::prefix_cache::PrefixIndex;
use super::{BlockId, BlockKey, BlockTable, KeyFn, Parent, Salt};

/// What happens to full blocks that nobody holds any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefixCache {
    /// No block is ever indexed: no hit, not even between requests that run together.
    Off,
    /// They stay until their room is needed.
    Unlimited,
    /// At most so many stay. `AtMost(0)` is `Off`, so that "no cache" means no hits at all.
    AtMost(usize),
}

/// The cached start of a token sequence.
#[derive(Debug)]
pub(crate) struct Prefix {
    /// Blocks that hold it. Not held by anyone on behalf of this value: [`BlockPool::hold`] does that.
    pub(crate) blocks: Vec<BlockId>,
    /// What the next block comes after.
    pub(crate) parent: Parent,
}

/// The blocks of a KV cache, and who holds them.
#[derive(Debug)]
pub(crate) struct BlockPool {
    pub(super) block_size: usize,
    pub(super) max_cached: usize,
    /// Number of holders, by block.
    pub(super) holders: Vec<u32>,
    /// A stack: the block that became free last is used first.
    pub(super) free: Vec<BlockId>,
    /// Cached blocks by the moment they lost their last holder.
    pub(super) lru: BTreeMap<u64, BlockId>,
    /// That moment, by block; stale for blocks that are not cached.
    pub(super) released_at: Vec<u64>,
    /// Counts releases. Not time.
    moment: u64,
    pub(super) index: PrefixIndex,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks.
    ///
    /// # Panics
    /// If a slot number (`num_blocks * block_size`) doesn't fit a `u32`, or `block_size` is 0.
    pub(crate) fn new(
        block_size: usize,
        num_blocks: usize,
        cache: PrefixCache,
        weights_digest: [u8; 32],
        key_fn: KeyFn,
    ) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        let slots = num_blocks.checked_mul(block_size).and_then(|slots| u32::try_from(slots).ok());
        assert!(slots.is_some(), "{num_blocks} blocks of {block_size} tokens exceed 2^32 slots");
        let max_cached = match cache {
            PrefixCache::Off => 0,
            PrefixCache::Unlimited => usize::MAX,
            PrefixCache::AtMost(blocks) => blocks,
        };
        Self {
            block_size,
            max_cached,
            holders: vec![0; num_blocks],
            free: (0..num_blocks as u32).rev().map(BlockId).collect(),
            lru: BTreeMap::new(),
            released_at: vec![0; num_blocks],
            moment: 0,
            index: PrefixIndex::new(num_blocks, weights_digest, key_fn),
        }
    }

    /// Tokens in a block.
    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks that hold `tokens` tokens.
    pub(crate) fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// All blocks.
    pub(crate) fn total(&self) -> usize {
        self.holders.len()
    }

    /// Blocks with no holder and no content.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks with content and no holder.
    pub(crate) fn cached(&self) -> usize {
        self.lru.len()
    }

    /// Blocks with a holder.
    pub(crate) fn owned(&self) -> usize {
        self.total() - self.free() - self.cached()
    }

    /// Blocks that can be handed out, if need be by evicting what is cached.
    pub(crate) fn available(&self) -> usize {
        self.free() + self.cached()
    }

    /// Whether full blocks are indexed.
    pub(crate) fn caches_prefixes(&self) -> bool {
        self.max_cached > 0
    }

    /// Whether more than one holder has the block: whoever wants to write copies it first.
    pub(crate) fn is_shared(&self, block: BlockId) -> bool {
        self.holders[block.index()] > 1
    }

    /// Whether the block is cached, that is, part of [`BlockPool::available`].
    pub(crate) fn is_cached(&self, block: BlockId) -> bool {
        self.holders[block.index()] == 0 && self.index.node(block).is_some()
    }

    /// Appends fresh blocks until the table covers `tokens` tokens.
    ///
    /// # Panics
    /// If [`BlockPool::available`] is less than what is missing; the caller has checked.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, tokens: usize) {
        while table.blocks.len() < self.blocks_for(tokens) {
            table.blocks.push(self.take());
        }
    }

    /// Replaces a shared block by a fresh one, for writing. Returns the copy to make: (from, to).
    ///
    /// # Panics
    /// If no block is available; the caller has checked.
    pub(crate) fn copy_on_write(&mut self, table: &mut BlockTable, index: usize) -> (BlockId, BlockId) {
        let (from, to) = (table.blocks[index], self.take());
        table.blocks[index] = to;
        self.let_go(from);
        (from, to)
    }

    /// A table that holds the given indexed or owned blocks.
    pub(crate) fn hold(&mut self, blocks: &[BlockId]) -> BlockTable {
        for &block in blocks {
            self.acquire(block);
        }
        BlockTable { blocks: blocks.to_vec(), replacements: Vec::new() }
    }

    /// A second table with the first `count` blocks of `table`.
    pub(crate) fn share(&mut self, table: &BlockTable, count: usize) -> BlockTable {
        self.hold(&table.blocks[..count])
    }

    /// Gives back all blocks, the last first: the tail of a prefix is evicted before its start.
    pub(crate) fn release(&mut self, table: BlockTable) {
        let mut table = table;
        self.truncate(&mut table, 0);
    }

    /// Gives back all but the first `count` blocks, the last first.
    pub(crate) fn truncate(&mut self, table: &mut BlockTable, count: usize) {
        // Own duplicates go before the chain is let go in its order.
        self.settle(table);
        while table.blocks.len() > count {
            if let Some(block) = table.blocks.pop() {
                self.let_go(block);
            }
        }
    }

    /// Puts blocks of equal content in the place of own ones, once the step that writes both is complete.
    pub(crate) fn settle(&mut self, table: &mut BlockTable) {
        for (index, block) in table.replacements.drain(..) {
            let own = std::mem::replace(&mut table.blocks[index], block);
            self.let_go(own);
        }
    }

    /// Appends the keys of the full blocks of `tokens` that `keys` doesn't have yet.
    pub(crate) fn extend_keys(&self, keys: &mut Vec<BlockKey>, salt: Option<&Salt>, tokens: &[u32]) {
        self.index.extend_keys(keys, salt, tokens, self.block_size);
    }

    /// Finds the longest indexed prefix of `tokens`, of at most `keys.len()` blocks.
    pub(crate) fn lookup(&self, keys: &[BlockKey], salt: Option<&Salt>, tokens: &[u32]) -> Prefix {
        let mut prefix = Prefix { blocks: Vec::new(), parent: Parent::Root(salt.cloned()) };
        for (key, tokens) in keys.iter().zip(tokens.chunks_exact(self.block_size)) {
            let Some(block) = self.index.find(key, &prefix.parent, tokens) else { break };
            let Some(node) = self.index.node(block) else { break };
            prefix.parent = Parent::Node(node.id);
            prefix.blocks.push(block);
        }
        prefix
    }

    /// Makes a block of the table findable: it holds `tokens` (a full block of them) after `parent`, or will
    /// when the step being planned is complete. Returns the parent of the block that follows.
    ///
    /// If another block holds the same already, the table takes hold of that one too and will
    /// [settle](BlockPool::settle) on it: later blocks then have a parent that lives as long as they do, and
    /// samples that happen to agree share memory.
    pub(crate) fn index_block(
        &mut self,
        table: &mut BlockTable,
        index: usize,
        key: BlockKey,
        parent: Parent,
        tokens: &[u32],
    ) -> Parent {
        debug_assert_eq!(tokens.len(), self.block_size, "only full blocks are indexed");
        if let Some(block) = self.index.find(&key, &parent, tokens) {
            self.acquire(block);
            table.replacements.push((index, block));
            return self.index.node(block).map_or(parent, |node| Parent::Node(node.id));
        }
        Parent::Node(self.index.insert(table.blocks[index], key, parent, tokens))
    }

    /// Forgets all content: cached blocks become free, owned ones stay with their holders, unindexed.
    pub(crate) fn clear_index(&mut self) {
        self.index.clear();
        while let Some((_, block)) = self.lru.pop_first() {
            self.free.push(block);
        }
    }

    fn take(&mut self) -> BlockId {
        if self.free.is_empty() {
            self.evict();
        }
        let block = self.free.pop().expect("the caller checked that a block is available");
        self.holders[block.index()] = 1;
        block
    }

    fn acquire(&mut self, block: BlockId) {
        let holders = &mut self.holders[block.index()];
        *holders += 1;
        if *holders == 1 {
            let cached = self.lru.remove(&self.released_at[block.index()]);
            assert_eq!(cached, Some(block), "block {} had no holder and was not cached", block.0);
        }
    }

    fn let_go(&mut self, block: BlockId) {
        let holders = &mut self.holders[block.index()];
        *holders = holders.checked_sub(1).expect("a block is let go of by each holder once");
        if *holders > 0 {
            return;
        }
        if self.index.node(block).is_none() {
            self.free.push(block);
            return;
        }
        self.released_at[block.index()] = self.moment;
        self.lru.insert(self.moment, block);
        self.moment += 1;
        if self.lru.len() > self.max_cached {
            self.evict();
        }
    }

    /// Turns the least recently used cached block, if any, into a free one without content.
    fn evict(&mut self) {
        if let Some((_, block)) = self.lru.pop_first() {
            self.index.remove(block);
            self.free.push(block);
        }
    }
}
