//! What follows a step: its outcome, new tokens, forks.

use super::sequence::KvPrefix;
use super::{Scheduler, SeqId, Sequence};

impl Scheduler {
    /// The planned step was computed: its positions are in the KV cache now.
    pub(crate) fn complete_step(&mut self) {
        for seq in std::mem::take(&mut self.in_flight) {
            let Some(sequence) = self.sequences.get_mut(&seq) else { continue };
            // Preempted meanwhile: its blocks are gone.
            let Some(end) = sequence.planned.take() else { continue };
            sequence.kv.computed = end;
            self.pool.settle(&mut sequence.kv.table);
            if end >= sequence.prompt_len {
                sequence.recompute_from = usize::MAX;
            }
        }
        self.debug_check();
    }

    /// The planned step failed, and what is in the blocks it wrote is unknown: everything that ran is
    /// preempted and the prefix cache forgotten. Pins keep their blocks, which no step writes to. Returns the
    /// preempted sequences.
    pub(crate) fn fail_step(&mut self) -> Vec<SeqId> {
        self.in_flight.clear();
        let preempted: Vec<SeqId> = self.running.iter().copied().collect();
        for &seq in preempted.iter().rev() {
            self.retract(seq);
        }
        self.clear_prefix_cache();
        preempted
    }

    /// Adds a sampled token to a sequence that waits or runs. Returns whether there is such a sequence.
    ///
    /// # Panics
    /// If the sequence is at its bound already: the engine should have finished it.
    pub(crate) fn append(&mut self, seq: SeqId, token: u32) -> bool {
        let Some(sequence) = self.sequences.get_mut(&seq) else { return false };
        assert!(sequence.tokens.len() < sequence.max_tokens, "sequence {} is at its bound", seq.0);
        sequence.tokens.push(token);
        true
    }

    /// Brings a fork to life: `child` has the parent's prompt, followed by `first_token`. To be called when
    /// the prompt has just been computed and before the parent ends; later, or if the parent lost its blocks
    /// or too many sequences run, the child waits and finds the prompt in the prefix cache or computes it.
    /// Returns false, and does nothing, if `child` is not (any more) a fork of `parent` to come.
    pub(crate) fn fork(&mut self, parent: SeqId, child: SeqId, first_token: u32) -> bool {
        if self.pending_forks.get(&child) != Some(&parent) {
            return false;
        }
        let Some(sequence) = self.sequences.get_mut(&parent) else { return false };
        self.pending_forks.remove(&child);
        sequence.forks.retain(|&fork| fork != child);
        let prompt_len = sequence.prompt_len;
        assert!(prompt_len < sequence.max_tokens, "sequence {} may not generate", parent.0);
        let mut tokens = sequence.tokens[..prompt_len].to_vec();
        tokens.push(first_token);
        let full_blocks = prompt_len / self.pool.block_size();
        let mut fork = Sequence {
            tokens,
            prompt_len,
            max_tokens: sequence.max_tokens,
            salt: sequence.salt.clone(),
            // The parent's rows are the group's.
            recompute_from: usize::MAX,
            forks: Vec::new(),
            preemptions: 0,
            kv: KvPrefix::default(),
            keys: sequence.keys.iter().take(full_blocks).copied().collect(),
            planned: None,
        };
        let shares = self.running.contains(&parent)
            && self.running.len() < self.max_num_seqs
            && sequence.kv.computed == prompt_len
            && sequence.planned.is_none();
        if shares {
            fork.kv = KvPrefix {
                table: self.pool.share(&sequence.kv.table, self.pool.blocks_for(prompt_len)),
                computed: prompt_len,
                indexed: sequence.kv.indexed,
                chain: sequence.kv.chain.clone(),
            };
            self.running.insert(child);
        } else {
            self.waiting.insert(child);
        }
        self.sequences.insert(child, fork);
        self.debug_check();
        true
    }
}
