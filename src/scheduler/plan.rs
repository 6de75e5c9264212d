//! Planning a step.

use std::ops::Bound::{Excluded, Unbounded};

use super::sequence::KvPrefix;
use super::{Admitted, Chunk, Scheduler, SeqId, StepPlan, Stuck};

/// Blocks an admission needs, and could get.
struct Shortage {
    needed_blocks: usize,
    available_blocks: usize,
}

impl Scheduler {
    /// Plans the next step: running sequences first, then waiting ones, both from the oldest on.
    ///
    /// Blocks that the step fills are indexed now, so that identical prompts share a prefill in flight: within
    /// a step, all keys and values of a layer are stored before its attention runs. If the step fails,
    /// [`Scheduler::fail_step`] takes that back.
    ///
    /// # Panics
    /// If the last planned step is neither completed nor failed.
    pub(crate) fn plan(&mut self) -> StepPlan {
        assert!(!self.step_in_flight(), "a step is in flight");
        let mut plan = StepPlan::default();
        let mut rows = self.max_num_batched_tokens;
        self.plan_running(&mut plan, &mut rows);
        // Whoever just lost blocks must not take others' right back, unless nobody else is left.
        if plan.preempted.is_empty() || self.running.is_empty() {
            self.admit_waiting(&mut plan, &mut rows);
        }
        self.in_flight = plan.chunks.iter().map(|chunk| chunk.seq).collect();
        self.debug_check();
        plan
    }

    fn plan_running(&mut self, plan: &mut StepPlan, rows: &mut usize) {
        let mut next = self.running.first().copied();
        while let Some(seq) = next.filter(|_| *rows > 0) {
            let sequence = &self.sequences[&seq];
            let count = sequence.uncomputed().min(*rows);
            let end = sequence.kv.computed + count;
            if count > 0 && self.make_room(seq, end, plan) {
                self.plan_chunk(seq, end, plan);
                *rows -= count;
            }
            next = self.running.range((Excluded(seq), Unbounded)).next().copied();
        }
    }

    /// Makes the blocks available that a running sequence needs up to `end`. Returns false if the sequence
    /// was the youngest itself and is preempted now.
    fn make_room(&mut self, seq: SeqId, end: usize, plan: &mut StepPlan) -> bool {
        // Preempting a sibling may leave a shared block to this one alone: ask again each time.
        while self.sequences[&seq].kv.missing_blocks(&self.pool, end) > self.pool.available() {
            if let Some(claim) = self.claims.last().copied() {
                self.retract(claim);
                continue;
            }
            let Some(youngest) = self.running.last().copied() else { return false };
            self.retract(youngest);
            plan.preempted.push(youngest);
            if youngest == seq {
                return false;
            }
        }
        true
    }

    fn admit_waiting(&mut self, plan: &mut StepPlan, rows: &mut usize) {
        while *rows > 0 && self.running.len() < self.max_num_seqs {
            let Some(seq) = self.waiting.first().copied() else { return };
            match self.acquire_all(seq) {
                Ok(cached_tokens) => {
                    self.waiting.remove(&seq);
                    self.claims.remove(&seq);
                    self.running.insert(seq);
                    self.admissions += 1;
                    self.cached_tokens += cached_tokens as u64;
                    plan.admitted.push(Admitted { seq, cached_tokens });
                    let count = self.sequences[&seq].uncomputed().min(*rows);
                    self.plan_chunk(seq, cached_tokens + count, plan);
                    *rows -= count;
                }
                // Those that run will end and make room.
                Err(_) if !self.running.is_empty() => return,
                Err(shortage) => {
                    // Nothing runs: what waiting sequences hold must not block the oldest.
                    if let Some(claim) = self.claims.last().copied() {
                        self.retract(claim);
                        continue;
                    }
                    let Shortage { needed_blocks, available_blocks } = shortage;
                    plan.stuck = Some(Stuck { seq, needed_blocks, available_blocks });
                    return;
                }
            }
        }
    }

    /// Takes all the blocks that a waiting sequence needs for its tokens, cached ones first, if there is also
    /// room for the token that follows. Returns the number of tokens that need no computing.
    ///
    /// The whole need at once, not that of the first chunk: an admitted sequence gets through its prefill
    /// unless an older one grows.
    fn acquire_all(&mut self, seq: SeqId) -> Result<usize, Shortage> {
        let others = self.running.len();
        let sequence = self.sequences.get_mut(&seq).expect("waiting sequences exist");
        let len = sequence.tokens.len();
        let end = (len + 1).min(sequence.max_tokens);
        // After a preemption the others get room to grow by a block each, lest they preempt it at once again.
        let spare = if sequence.preemptions > 0 { others } else { 0 };
        if sequence.kv.table.is_empty() {
            let mut kv = KvPrefix::default();
            let mut available_blocks = self.pool.available();
            let mut hits = Vec::new();
            if self.pool.caches_prefixes() {
                let limit = sequence.max_cached_blocks(self.pool.block_size());
                self.pool.extend_keys(&mut sequence.keys, sequence.salt.as_ref(), &sequence.tokens);
                let keys = &sequence.keys[..limit];
                let prefix = self.pool.lookup(keys, sequence.salt.as_ref(), &sequence.tokens);
                available_blocks -= prefix.blocks.iter().filter(|&&block| self.pool.is_cached(block)).count();
                kv.chain = Some(prefix.parent);
                hits = prefix.blocks;
            }
            let needed_blocks = self.pool.blocks_for(end) - hits.len();
            if needed_blocks + spare > available_blocks {
                return Err(Shortage { needed_blocks, available_blocks });
            }
            kv.table = self.pool.hold(&hits);
            kv.computed = hits.len() * self.pool.block_size();
            kv.indexed = hits.len();
            sequence.kv = kv;
        } else {
            let needed_blocks = sequence.kv.missing_blocks(&self.pool, end);
            let available_blocks = self.pool.available();
            if needed_blocks + spare > available_blocks {
                return Err(Shortage { needed_blocks, available_blocks });
            }
        }
        self.pool.grow(&mut sequence.kv.table, len);
        Ok(sequence.kv.computed)
    }

    /// Plans positions `computed..end` of a running sequence; the blocks they need are available.
    fn plan_chunk(&mut self, seq: SeqId, end: usize, plan: &mut StepPlan) {
        let pool = &mut self.pool;
        let block_size = pool.block_size();
        let sequence = self.sequences.get_mut(&seq).expect("running sequences exist");
        let kv = &mut sequence.kv;
        if kv.write_is_shared(pool) {
            plan.copies.push(pool.copy_on_write(&mut kv.table, kv.computed / block_size));
        }
        pool.grow(&mut kv.table, end);
        if kv.chain.is_some() {
            pool.extend_keys(&mut sequence.keys, sequence.salt.as_ref(), &sequence.tokens);
        }
        for index in kv.indexed..end / block_size {
            let Some(parent) = kv.chain.take() else { break };
            let tokens = &sequence.tokens[index * block_size..(index + 1) * block_size];
            kv.chain = Some(pool.index_block(&mut kv.table, index, sequence.keys[index], parent, tokens));
            kv.indexed = index + 1;
        }
        sequence.planned = Some(end);
        let samples = end == sequence.tokens.len();
        plan.chunks.push(Chunk { seq, positions: kv.computed..end, samples });
    }
}
