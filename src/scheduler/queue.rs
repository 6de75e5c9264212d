//! Coming and going of sequences: add, preempt, finish, abort.

use super::sequence::KvPrefix;
use super::{AddError, NewSequence, Scheduler, SeqId, Sequence};

impl Scheduler {
    /// Queues a sequence at its place.
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    ///
    /// # Panics
    /// If an id is in use, or the lengths contradict each other (see [`NewSequence`]): the engine has checked.
    pub(crate) fn add(&mut self, mut new: NewSequence) -> Result<(), AddError> {
        assert!((1..=new.tokens.len()).contains(&new.prompt_len), "a prompt has at least one token");
        assert!(new.tokens.len() <= new.max_tokens, "a sequence starts within its bound");
        for &id in std::iter::once(&new.id).chain(&new.forks) {
            assert!(!self.is_live(id), "sequence id {} is in use", id.0);
        }
        let (needed_blocks, total_blocks) = (self.pool.blocks_for(new.max_tokens), self.pool.total());
        if needed_blocks > total_blocks {
            return Err(AddError::NeverFits { max_tokens: new.max_tokens, needed_blocks, total_blocks });
        }
        let kv = match new.pinned.take() {
            Some(pin) => self.consume_pin(pin, &new)?,
            None => KvPrefix::default(),
        };
        let id = new.id;
        self.pending_forks.extend(new.forks.iter().map(|&fork| (fork, id)));
        if !kv.table.is_empty() {
            self.claims.insert(id);
        }
        self.sequences.insert(id, Sequence { kv, ..Sequence::new(new) });
        self.waiting.insert(id);
        self.debug_check();
        Ok(())
    }

    /// For tests: takes a sequence's blocks away; its tokens are kept and it waits at its place. Returns whether there
    /// was anything to take. With a step in flight, what that step computes for the sequence is void.
    #[cfg(test)]
    pub(crate) fn preempt(&mut self, seq: SeqId) -> bool {
        let had_blocks = self.retract(seq);
        self.debug_check();
        had_blocks
    }

    /// Ends a sequence; its full blocks stay cached. Returns its tokens, or `None` if it isn't live.
    ///
    /// Forks that have not come yet live on: the first of them takes the sequence's place in the group. A
    /// fork that has not come yet can be ended too: it has no tokens.
    pub(crate) fn finish(&mut self, seq: SeqId) -> Option<Vec<u32>> {
        let tokens = self.end(seq);
        self.debug_check();
        tokens
    }

    /// Ends a sequence in whatever state it is, as [`Scheduler::finish`] does. Costs O(log n).
    pub(crate) fn abort(&mut self, seq: SeqId) -> Option<Vec<u32>> {
        self.finish(seq)
    }

    /// Forgets all cached content. Running sequences and pins keep their blocks, but nothing computed before
    /// is found by others any more.
    pub(crate) fn clear_prefix_cache(&mut self) {
        self.pool.clear_index();
        for sequence in self.running.iter().chain(&self.claims) {
            if let Some(sequence) = self.sequences.get_mut(sequence) {
                sequence.kv.chain = None;
            }
        }
        for pin in self.pins.values_mut() {
            pin.kv.chain = None;
        }
        self.debug_check();
    }

    /// Gives back what a sequence holds.
    fn release_kv(&mut self, seq: SeqId) -> bool {
        let Some(sequence) = self.sequences.get_mut(&seq) else { return false };
        sequence.planned = None;
        let kv = std::mem::take(&mut sequence.kv);
        let had_blocks = !kv.table.is_empty();
        self.pool.release(kv.table);
        had_blocks
    }

    /// Preempts a running sequence, or takes the pinned blocks of a waiting one.
    pub(super) fn retract(&mut self, seq: SeqId) -> bool {
        let had_blocks = self.release_kv(seq);
        self.claims.remove(&seq);
        if self.running.remove(&seq) {
            self.waiting.insert(seq);
            self.preemptions += 1;
            if let Some(sequence) = self.sequences.get_mut(&seq) {
                sequence.preemptions += 1;
            }
        }
        had_blocks
    }

    fn end(&mut self, seq: SeqId) -> Option<Vec<u32>> {
        if let Some(parent) = self.pending_forks.remove(&seq) {
            if let Some(parent) = self.sequences.get_mut(&parent) {
                parent.forks.retain(|&fork| fork != seq);
            }
            return Some(Vec::new());
        }
        self.release_kv(seq);
        self.remove(seq).map(|sequence| sequence.tokens)
    }

    /// Takes a sequence out of every list, and lets a fork that has not come yet take its place.
    pub(super) fn remove(&mut self, seq: SeqId) -> Option<Sequence> {
        let sequence = self.sequences.remove(&seq)?;
        self.running.remove(&seq);
        self.waiting.remove(&seq);
        self.claims.remove(&seq);
        if let Some((&heir, forks)) = sequence.forks.split_first() {
            self.pending_forks.remove(&heir);
            self.pending_forks.extend(forks.iter().map(|&fork| (fork, heir)));
            let new = NewSequence {
                id: heir,
                tokens: sequence.tokens[..sequence.prompt_len].to_vec(),
                prompt_len: sequence.prompt_len,
                max_tokens: sequence.max_tokens,
                salt: sequence.salt.clone(),
                recompute_from: sequence.recompute_from,
                forks: forks.to_vec(),
                pinned: None,
            };
            self.sequences.insert(heir, Sequence::new(new));
            self.waiting.insert(heir);
        }
        Some(sequence)
    }
}
