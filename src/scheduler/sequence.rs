//! Scheduling state of one sequence.

use super::{NewSequence, SeqId};
use crate::kv::{BlockId, BlockKey, BlockPool, BlockTable, Parent, Salt};

/// Keys and values that exist for the start of a token sequence.
#[derive(Debug, Default)]
pub(super) struct KvPrefix {
    /// The blocks; they may reach beyond `computed`.
    pub(super) table: BlockTable,
    /// Positions `..computed` are in the blocks.
    pub(super) computed: usize,
    /// Blocks that are indexed, from the first on; those of the step in flight included.
    pub(super) indexed: usize,
    /// What the next block to be indexed comes after. `None` indexes no more: the cache is off, or was
    /// cleared since.
    pub(super) chain: Option<Parent>,
}

impl KvPrefix {
    /// Whether writing position `computed` needs a copy of its block first.
    pub(super) fn write_is_shared(&self, pool: &BlockPool) -> bool {
        let (index, offset) = (self.computed / pool.block_size(), self.computed % pool.block_size());
        offset > 0 && pool.is_shared(self.table.blocks()[index])
    }

    /// Blocks to be taken from the pool before positions `computed..end` can be written.
    pub(super) fn missing_blocks(&self, pool: &BlockPool, end: usize) -> usize {
        let growth = pool.blocks_for(end).saturating_sub(self.table.len());
        growth + usize::from(self.write_is_shared(pool))
    }
}

/// One sequence: its tokens, and what of it is in the KV cache.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    pub(super) max_tokens: usize,
    pub(super) salt: Option<Salt>,
    pub(super) recompute_from: usize,
    pub(super) forks: Vec<SeqId>,
    pub(super) preemptions: u32,
    pub(super) kv: KvPrefix,
    /// Keys of full blocks, as far as they were needed. They depend on tokens and salt only.
    pub(super) keys: Vec<BlockKey>,
    /// Where `computed` will be when the step in flight is complete.
    pub(super) planned: Option<usize>,
}

impl Sequence {
    pub(super) fn new(new: NewSequence) -> Self {
        Self {
            tokens: new.tokens,
            prompt_len: new.prompt_len,
            max_tokens: new.max_tokens,
            salt: new.salt,
            recompute_from: new.recompute_from,
            forks: new.forks,
            preemptions: 0,
            kv: KvPrefix::default(),
            keys: Vec::new(),
            planned: None,
        }
    }

    /// Prompt and generated tokens.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Positions whose keys and values are in the blocks.
    #[cfg(test)]
    pub(crate) fn computed(&self) -> usize {
        self.kv.computed
    }

    /// The block table: what attention reads.
    pub(crate) fn blocks(&self) -> &[BlockId] {
        self.kv.table.blocks()
    }

    /// Samples of the prompt that are still to be forked off.
    #[cfg(test)]
    pub(crate) fn forks(&self) -> &[SeqId] {
        &self.forks
    }

    /// Known tokens that are not in the KV cache; at least 1 when there is something to sample.
    pub(super) fn uncomputed(&self) -> usize {
        self.tokens.len() - self.kv.computed
    }

    /// Leading blocks that may come from the cache: the last token is always computed (its logits are
    /// wanted), and so are the positions the caller asked for.
    pub(super) fn max_cached_blocks(&self, block_size: usize) -> usize {
        self.recompute_from.min(self.tokens.len().saturating_sub(1)) / block_size
    }
}
