//! A driver with a simulated KV cache.
//!
//! "Computing" a position writes a digest of the salt and of all tokens up to it into its slot; "attention"
//! demands that every earlier position holds just that. Stale, missing or wrongly shared blocks can't hide.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::kv::{KeyFn, PrefixCache, Salt, chained_blake3};
use crate::scheduler::{AddError, Chunk, NewSequence, PinId, Scheduler, SchedulerConfig, SeqId, StepPlan};

pub(super) const GARBAGE: u64 = 0xdead;

pub(super) fn config(block_size: usize, num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        block_size,
        num_blocks,
        max_num_seqs: 64,
        max_num_batched_tokens: 64,
        prefix_cache: PrefixCache::Unlimited,
        weights_digest: [1; 32],
    }
}

fn digest(salt: &Option<Salt>, tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (salt, tokens).hash(&mut hasher);
    hasher.finish() | 1 << 63
}

/// What the driver expects of a live sequence.
#[derive(Debug, Clone)]
struct Expected {
    tokens: Vec<u32>,
    prompt_len: usize,
    max_tokens: usize,
    salt: Option<Salt>,
    preemptions: usize,
}

#[derive(Debug)]
pub(super) struct Sim {
    pub(super) scheduler: Scheduler,
    block_size: usize,
    max_rows: usize,
    slots: Vec<u64>,
    next_id: u64,
    live: BTreeMap<SeqId, Expected>,
    /// Forks to come, each with its parent at the time of submission.
    pending: BTreeSet<SeqId>,
    /// Ended sequences that reached their bound.
    pub(super) finished: BTreeMap<SeqId, Vec<u32>>,
    pub(super) aborted: BTreeSet<SeqId>,
    pub(super) pins: BTreeMap<PinId, (Option<Salt>, Vec<u32>)>,
    /// Cached tokens at each sequence's first admission.
    pub(super) cached: BTreeMap<SeqId, usize>,
    pub(super) preemptions: BTreeMap<SeqId, usize>,
    /// End a sequence that is stuck, as the engine does.
    pub(super) stuck: Vec<SeqId>,
}

impl Sim {
    pub(super) fn new(config: SchedulerConfig) -> Self {
        Self::with_key_fn(config, chained_blake3)
    }

    pub(super) fn with_key_fn(config: SchedulerConfig, key_fn: KeyFn) -> Self {
        Self {
            block_size: config.block_size,
            max_rows: config.max_num_batched_tokens,
            slots: vec![GARBAGE; config.block_size * config.num_blocks],
            scheduler: Scheduler::with_key_fn(config, key_fn),
            next_id: 0,
            live: BTreeMap::new(),
            pending: BTreeSet::new(),
            finished: BTreeMap::new(),
            aborted: BTreeSet::new(),
            pins: BTreeMap::new(),
            cached: BTreeMap::new(),
            preemptions: BTreeMap::new(),
            stuck: Vec::new(),
        }
    }

    pub(super) fn new_sequence(prompt: &[u32], max_new_tokens: usize) -> NewSequence {
        NewSequence {
            id: SeqId(u64::MAX),
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            max_tokens: prompt.len() + max_new_tokens,
            salt: None,
            recompute_from: usize::MAX,
            forks: Vec::new(),
            pinned: None,
        }
    }

    /// Submits a prompt; the answer has `max_new_tokens` tokens.
    pub(super) fn submit(&mut self, prompt: &[u32], max_new_tokens: usize) -> SeqId {
        self.add(Self::new_sequence(prompt, max_new_tokens), 0).unwrap()
    }

    /// Submits a sequence with `forks` further samples under the next ids.
    pub(super) fn add(&mut self, mut new: NewSequence, forks: u64) -> Result<SeqId, AddError> {
        new.id = SeqId(self.next_id);
        new.forks = (1..=forks).map(|fork| SeqId(self.next_id + fork)).collect();
        self.enqueue(new)
    }

    fn enqueue(&mut self, new: NewSequence) -> Result<SeqId, AddError> {
        let id = new.id;
        let pinned = new.pinned;
        let expected = Expected {
            tokens: new.tokens.clone(),
            prompt_len: new.prompt_len,
            max_tokens: new.max_tokens,
            salt: new.salt.clone(),
            preemptions: 0,
        };
        let forks = new.forks.clone();
        self.scheduler.add(new)?;
        pinned.map(|pin| self.pins.remove(&pin));
        self.next_id = self.next_id.max(forks.last().unwrap_or(&id).0 + 1);
        self.pending.extend(forks);
        self.live.insert(id, expected);
        Ok(id)
    }

    /// Runs one step. Returns the plan; an empty one did nothing.
    pub(super) fn step(&mut self) -> StepPlan {
        let plan = self.begin();
        self.complete(&plan);
        plan
    }

    /// Plans a step and lets the device compute it.
    pub(super) fn begin(&mut self) -> StepPlan {
        let plan = self.scheduler.plan();
        self.check();
        self.record(&plan);
        for &(from, to) in &plan.copies {
            for offset in 0..self.block_size {
                let slot = |block: u32| block as usize * self.block_size + offset;
                self.slots[slot(to.0)] = self.slots[slot(from.0)];
            }
        }
        let mut written = BTreeSet::new();
        for chunk in &plan.chunks {
            let expected = &self.live[&chunk.seq];
            assert_eq!(self.scheduler.sequence(chunk.seq).unwrap().tokens(), expected.tokens);
            for (position, slot) in chunk.positions.clone().zip(self.slots_of(chunk)) {
                assert!(written.insert(slot), "slot {slot} is written twice in a step");
                self.slots[slot] = digest(&expected.salt, &expected.tokens[..=position]);
            }
        }
        for chunk in &plan.chunks {
            self.attend(chunk);
        }
        plan
    }

    fn slots_of(&self, chunk: &Chunk) -> Vec<usize> {
        self.scheduler.slots(chunk.seq, chunk.positions.clone()).map(|slot| slot as usize).collect()
    }

    fn attend(&self, chunk: &Chunk) {
        let expected = &self.live[&chunk.seq];
        let slots = self.scheduler.slots(chunk.seq, 0..chunk.positions.end);
        for (position, slot) in slots.enumerate() {
            let holds = self.slots[slot as usize];
            let wants = digest(&expected.salt, &expected.tokens[..=position]);
            assert_eq!(holds, wants, "{:?} attends to foreign KV at position {position}", chunk.seq);
        }
    }

    fn record(&mut self, plan: &StepPlan) {
        let rows: usize = plan.chunks.iter().map(|chunk| chunk.positions.len()).sum();
        assert!(rows <= self.max_rows);
        assert!(plan.chunks.is_sorted_by_key(|chunk| chunk.seq) || !plan.admitted.is_empty());
        if let Some(oldest) = self.scheduler.running.first() {
            assert!(plan.chunks.iter().any(|chunk| chunk.seq == *oldest), "the oldest makes no progress");
        }
        if plan.admitted.is_empty() {
            let youngest = plan.chunks.last().map(|chunk| chunk.seq);
            assert!(plan.preempted.iter().all(|&seq| Some(seq) > youngest), "preempted for a younger one");
        }
        for admitted in &plan.admitted {
            let len = self.live[&admitted.seq].tokens.len();
            assert!(admitted.cached_tokens < len, "the last token must be computed");
            self.cached.entry(admitted.seq).or_insert(admitted.cached_tokens);
        }
        for &seq in &plan.preempted {
            *self.preemptions.entry(seq).or_default() += 1;
            self.live.get_mut(&seq).unwrap().preemptions += 1;
        }
        if let Some(stuck) = plan.stuck {
            assert!(plan.chunks.is_empty() && stuck.needed_blocks > stuck.available_blocks);
            self.stuck.push(stuck.seq);
            self.abort(stuck.seq);
        }
    }

    /// The step succeeded: samples tokens, forks and finishes as the engine does.
    pub(super) fn complete(&mut self, plan: &StepPlan) {
        self.scheduler.complete_step();
        self.check();
        for chunk in plan.chunks.iter().filter(|chunk| chunk.samples) {
            self.sample(chunk.seq);
        }
    }

    fn sample(&mut self, seq: SeqId) {
        let Some(expected) = self.live.get(&seq).cloned() else { return };
        let forks = self.scheduler.sequence(seq).unwrap().forks().to_vec();
        let may_grow = expected.tokens.len() < expected.max_tokens;
        for fork in forks {
            assert!(self.pending.remove(&fork));
            let mut tokens = expected.tokens[..expected.prompt_len].to_vec();
            if expected.prompt_len == expected.max_tokens {
                // Nothing to generate: the engine answers for the fork from the parent's logits.
                assert_eq!(self.scheduler.finish(fork), Some(Vec::new()));
                self.finished.insert(fork, tokens);
                continue;
            }
            tokens.push(Self::next_token(fork, &tokens));
            assert!(self.scheduler.fork(seq, fork, tokens[expected.prompt_len]));
            self.live.insert(fork, Expected { tokens, preemptions: 0, ..expected.clone() });
            self.check();
            self.finish_if_done(fork);
        }
        if may_grow {
            let token = Self::next_token(seq, &expected.tokens);
            assert!(self.scheduler.append(seq, token));
            self.live.get_mut(&seq).unwrap().tokens.push(token);
        }
        self.finish_if_done(seq);
    }

    /// Even ids are greedy, so that generations coincide; odd ids are not.
    fn next_token(seq: SeqId, tokens: &[u32]) -> u32 {
        let seed = if seq.0.is_multiple_of(2) { 0 } else { seq.0 };
        let mut hasher = DefaultHasher::new();
        (seed, tokens).hash(&mut hasher);
        hasher.finish() as u32 & 1
    }

    fn finish_if_done(&mut self, seq: SeqId) {
        let expected = &self.live[&seq];
        if expected.tokens.len() == expected.max_tokens {
            let tokens = self.scheduler.finish(seq);
            assert_eq!(tokens.as_ref(), Some(&expected.tokens), "tokens lost or repeated");
            self.finished.insert(seq, tokens.unwrap());
            self.forget(seq);
        }
    }

    /// The device failed: what it wrote is anything.
    pub(super) fn fail(&mut self, plan: &StepPlan) {
        let touched = plan.chunks.iter().filter(|chunk| self.scheduler.is_live(chunk.seq));
        let slots: Vec<usize> = touched
            .filter(|chunk| !self.scheduler.sequence(chunk.seq).unwrap().blocks().is_empty())
            .flat_map(|chunk| self.slots_of(chunk))
            .collect();
        for slot in slots {
            self.slots[slot] = GARBAGE;
        }
        for (_, to) in &plan.copies {
            self.slots[to.0 as usize * self.block_size..][..self.block_size].fill(GARBAGE);
        }
        self.scheduler.fail_step();
        assert_eq!(self.scheduler.stats().running, 0);
        assert_eq!(self.scheduler.stats().cached_blocks, 0);
        self.check();
    }

    pub(super) fn abort(&mut self, seq: SeqId) {
        let tokens = self.scheduler.abort(seq);
        self.check();
        match self.live.get(&seq) {
            Some(expected) => assert_eq!(tokens.as_ref(), Some(&expected.tokens)),
            None => assert_eq!(tokens, self.pending.contains(&seq).then(Vec::new)),
        }
        if tokens.is_some() {
            self.aborted.insert(seq);
        }
        self.pending.remove(&seq);
        self.forget(seq);
    }

    /// Drops an ended sequence from the books, and enters the fork that took its place, if one did.
    fn forget(&mut self, seq: SeqId) {
        let Some(mut ended) = self.live.remove(&seq) else { return };
        let heir = self.pending.iter().copied().find(|&fork| self.scheduler.sequence(fork).is_some());
        if let Some(heir) = heir {
            self.pending.remove(&heir);
            ended.tokens.truncate(ended.prompt_len);
            self.live.insert(heir, ended);
        }
    }

    pub(super) fn finish_and_pin(&mut self, seq: SeqId) -> Option<PinId> {
        let (tokens, pin) = self.scheduler.finish_and_pin(seq)?;
        assert_eq!(tokens, self.live[&seq].tokens);
        self.pins.insert(pin, (self.live[&seq].salt.clone(), tokens.clone()));
        self.finished.insert(seq, tokens);
        self.forget(seq);
        self.check();
        Some(pin)
    }

    pub(super) fn live_ids(&self) -> Vec<SeqId> {
        self.live.keys().chain(&self.pending).copied().collect()
    }

    pub(super) fn total_bound(&self) -> usize {
        let forks = self.pending.len() + 1;
        self.live.values().map(|expected| expected.max_tokens + 2).sum::<usize>() * forks
    }

    /// Steps until nothing is left, within a bound that starvation would exceed. Returns the steps.
    pub(super) fn run_to_end(&mut self) -> usize {
        let bound = 16 + 4 * self.total_bound();
        for steps in 0..bound {
            if self.scheduler.is_idle() {
                assert!(self.live.is_empty() && self.pending.is_empty());
                return steps;
            }
            let plan = self.step();
            assert!(!plan.chunks.is_empty() || plan.stuck.is_some(), "a step without progress: {self:?}");
        }
        panic!("not idle after {bound} steps: {self:?}");
    }

    pub(super) fn check(&self) {
        if let Err(fault) = self.scheduler.check() {
            panic!("{fault}");
        }
    }

    /// Nothing is left behind when nothing is live and nothing pinned.
    pub(super) fn assert_all_free(&self) {
        let stats = self.scheduler.stats();
        assert_eq!((stats.waiting, stats.running, stats.pending_forks, stats.pins), (0, 0, 0, 0));
        assert_eq!((stats.owned_blocks, stats.pinned_blocks), (0, 0));
        assert_eq!(stats.free_blocks + stats.cached_blocks, self.slots.len() / self.block_size);
    }
}
