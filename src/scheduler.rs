//! The scheduler: decides which positions of which sequences the next step computes, and where their keys and
//! values go. Continuous batching, chunked prefill, preemption by recomputation, groups, sessions.
//!
//! A pure state machine: no clock, no device, no threads, no logits. The engine drives it:
//!
//! ```text
//!   add ──▶ plan ──▶ (copies, then the chunks, on the device) ──▶ complete_step ──▶ append / fork / finish ─┐
//!             ▲                              └─ failed ─▶ fail_step                                         │
//!             └─────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Architecture invariants:
//! - Order of arrival decides: room is made for the oldest by preempting the youngest, nobody is preempted to
//!   admit another, nobody overtakes in the queue. So the oldest always makes progress, and every sequence ends.
//! - Tokens survive everything but the end of the sequence; blocks can always be computed again.
//! - The same calls give the same plans: nothing is decided by hash order, time or chance.

mod check;
mod pin;
mod plan;
mod queue;
mod sequence;
mod step;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::kv::{BlockId, BlockPool, KeyFn, PrefixCache, Salt, chained_blake3};

use pin::Pin;
pub(crate) use pin::PinId;
pub(crate) use sequence::Sequence;

/// A sequence, and its place in the queue: a smaller id arrived earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SeqId(pub(crate) u64);

/// What a scheduler may use.
#[derive(Debug, Clone)]
pub(crate) struct SchedulerConfig {
    /// Tokens in a block.
    pub(crate) block_size: usize,
    /// Blocks in the pool.
    pub(crate) num_blocks: usize,
    /// Most sequences that run (hold blocks and get rows) at a time.
    pub(crate) max_num_seqs: usize,
    /// Most rows (positions computed) in a step.
    pub(crate) max_num_batched_tokens: usize,
    /// What stays of full blocks that nobody holds.
    pub(crate) prefix_cache: PrefixCache,
    /// Digest of the weights that compute the blocks: seeds every block key.
    pub(crate) weights_digest: [u8; 32],
}

/// A sequence to be scheduled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewSequence {
    /// Its identity and place in the queue; not in use.
    pub(crate) id: SeqId,
    /// Prompt, and what was generated before, if it is resumed. Not empty.
    pub(crate) tokens: Vec<u32>,
    /// Tokens of the prompt: `1..=tokens.len()`.
    pub(crate) prompt_len: usize,
    /// The length, prompt included, that it may reach; at least `tokens.len()`.
    pub(crate) max_tokens: usize,
    /// Namespace of its cached prefixes.
    pub(crate) salt: Option<Salt>,
    /// Positions from here on are computed rather than taken from the cache, until the prompt has been
    /// computed once (prompt logprobs need the rows). `usize::MAX` takes all it can from the cache.
    pub(crate) recompute_from: usize,
    /// Further samples of the same prompt, which come to life by [`Scheduler::fork`]. Ids as `id`, ascending.
    pub(crate) forks: Vec<SeqId>,
    /// Blocks kept by [`Scheduler::finish_and_pin`], whose tokens `tokens` continues. Consumed if added.
    pub(crate) pinned: Option<PinId>,
}

/// Why a sequence was not added. The scheduler is unchanged; a pin named by the request is still there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddError {
    /// Even alone the sequence would not fit, at the length it may reach.
    #[error("a sequence of {max_tokens} tokens needs {needed_blocks} kv blocks of {total_blocks}")]
    NeverFits { max_tokens: usize, needed_blocks: usize, total_blocks: usize },
    /// The pin doesn't exist (any more).
    #[error("pin {} does not exist", pin.0)]
    UnknownPin { pin: PinId },
    /// The tokens don't continue the pinned ones.
    #[error("{common_tokens} of {pinned_tokens} pinned tokens start the sequence")]
    PinMismatch { common_tokens: usize, pinned_tokens: usize },
    /// The pinned blocks were computed for another salt.
    #[error("the pinned blocks belong to another cache salt")]
    PinSaltDiffers,
}

/// Positions of one sequence to compute in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The sequence.
    pub(crate) seq: SeqId,
    /// Positions, each a row of the step. Their tokens are `sequence(seq).tokens()[positions]`.
    pub(crate) positions: Range<usize>,
    /// Whether the last known token is among them, so that the last row's logits give the next one.
    pub(crate) samples: bool,
}

/// A sequence that began to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// The sequence.
    pub(crate) seq: SeqId,
    /// How many of its tokens need no computing, because blocks that hold them were found or pinned.
    pub(crate) cached_tokens: usize,
}

/// The oldest waiting sequence can't ever be admitted as things are: nothing runs, everything that can be
/// evicted would be, and pinned blocks hold the rest. The engine unpins, or ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stuck {
    /// The sequence.
    pub(crate) seq: SeqId,
    /// Blocks it needs to begin.
    pub(crate) needed_blocks: usize,
    /// Blocks it could get.
    pub(crate) available_blocks: usize,
}

/// One step of the model.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct StepPlan {
    /// What to compute, the oldest sequence first. Empty: there is nothing to do, and no step is in flight.
    pub(crate) chunks: Vec<Chunk>,
    /// Blocks (from, to) to copy, in this order, before the step computes anything.
    pub(crate) copies: Vec<(BlockId, BlockId)>,
    /// Sequences that began to run, with what they found cached.
    pub(crate) admitted: Vec<Admitted>,
    /// Sequences that lost their blocks and wait again, tokens kept.
    pub(crate) preempted: Vec<SeqId>,
    /// A sequence that the engine has to end, or make room for by unpinning.
    pub(crate) stuck: Option<Stuck>,
}

/// What the scheduler holds now, and what it has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SchedulerStats {
    /// Sequences waiting for admission, without forks that are still to come.
    pub(crate) waiting: usize,
    /// Sequences that run.
    pub(crate) running: usize,
    /// Forks whose parent's prompt is not computed yet.
    pub(crate) pending_forks: usize,
    /// Blocks without content.
    pub(crate) free_blocks: usize,
    /// Blocks with content and no holder.
    pub(crate) cached_blocks: usize,
    /// Blocks with a holder.
    pub(crate) owned_blocks: usize,
    /// Blocks held by pins, counted once for each pin that holds them.
    pub(crate) pinned_blocks: usize,
    /// Pins.
    pub(crate) pins: usize,
    /// Preemptions so far.
    pub(crate) preemptions: u64,
    /// Admissions so far, readmissions included.
    pub(crate) admissions: u64,
    /// Tokens that admissions found cached or pinned so far.
    pub(crate) cached_tokens: u64,
}

/// Schedules sequences over the blocks of one KV cache.
#[derive(Debug)]
pub(crate) struct Scheduler {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    pool: BlockPool,
    sequences: BTreeMap<SeqId, Sequence>,
    /// Sequences that hold blocks and get rows.
    running: BTreeSet<SeqId>,
    /// Sequences that wait for admission: thousands cost nothing per step.
    waiting: BTreeSet<SeqId>,
    /// Waiting sequences that hold the blocks of a consumed pin.
    claims: BTreeSet<SeqId>,
    /// Forks to come, with the sequence whose prompt they share.
    pending_forks: BTreeMap<SeqId, SeqId>,
    pins: BTreeMap<PinId, Pin>,
    next_pin: u64,
    /// Sequences with a chunk in the step being computed.
    in_flight: Vec<SeqId>,
    preemptions: u64,
    admissions: u64,
    cached_tokens: u64,
}

impl Scheduler {
    /// A scheduler with nothing to do.
    ///
    /// # Panics
    /// If the block size, the number of sequences or of batched tokens is 0, or slots exceed a `u32`.
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        Self::with_key_fn(config, chained_blake3)
    }

    /// As [`Scheduler::new`], with another hash of blocks.
    pub(crate) fn with_key_fn(config: SchedulerConfig, key_fn: KeyFn) -> Self {
        assert!(config.max_num_seqs > 0, "at least one sequence must be able to run");
        assert!(config.max_num_batched_tokens > 0, "a step computes at least one row");
        let SchedulerConfig { block_size, num_blocks, prefix_cache, weights_digest, .. } = config;
        Self {
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            pool: BlockPool::new(block_size, num_blocks, prefix_cache, weights_digest, key_fn),
            sequences: BTreeMap::new(),
            running: BTreeSet::new(),
            waiting: BTreeSet::new(),
            claims: BTreeSet::new(),
            pending_forks: BTreeMap::new(),
            pins: BTreeMap::new(),
            next_pin: 0,
            in_flight: Vec::new(),
            preemptions: 0,
            admissions: 0,
            cached_tokens: 0,
        }
    }

    /// A sequence that is waiting or running; `None` for forks to come and ended sequences.
    pub(crate) fn sequence(&self, seq: SeqId) -> Option<&Sequence> {
        self.sequences.get(&seq)
    }

    /// Whether `seq` waits, runs or is a fork to come.
    pub(crate) fn is_live(&self, seq: SeqId) -> bool {
        self.sequences.contains_key(&seq) || self.pending_forks.contains_key(&seq)
    }

    /// Whether `seq` runs.
    pub(crate) fn is_running(&self, seq: SeqId) -> bool {
        self.running.contains(&seq)
    }

    /// Whether nothing waits, runs or is to come. Pins may exist.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Whether a planned step is neither completed nor failed.
    pub(crate) fn step_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// The slots of a running sequence's positions: where the step writes their keys and values.
    ///
    /// # Panics
    /// If `seq` doesn't exist or its blocks don't cover the positions, as those of a chunk are.
    pub(crate) fn slots(&self, seq: SeqId, positions: Range<usize>) -> impl Iterator<Item = u32> + '_ {
        let (table, block_size) = (&self.sequences[&seq].kv.table, self.pool.block_size());
        positions.map(move |position| table.slot(position, block_size))
    }

    /// What there is now, and what was done.
    pub(crate) fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            pending_forks: self.pending_forks.len(),
            free_blocks: self.pool.free(),
            cached_blocks: self.pool.cached(),
            owned_blocks: self.pool.owned(),
            pinned_blocks: self.pins.values().map(Pin::num_blocks).sum(),
            pins: self.pins.len(),
            preemptions: self.preemptions,
            admissions: self.admissions,
            cached_tokens: self.cached_tokens,
        }
    }
}
