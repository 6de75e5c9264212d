//! Runs steps: asks the scheduler what, the transformer for logits, the samplers for tokens.

mod rows;

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use rows::Row;

use super::core::{Core, Parts};
use super::requests::{LiveRequest, Owner, SessionTurn};
use super::{EngineStats, MemoryReport, StepError, StepToken};
use crate::completion::{CompletionError, FinishReason, RequestId, RequestOutput};
use crate::kv::Salt;
use crate::model::{KvMemory, Workspace};
use crate::sampling::{SampleError, Sampled, SamplerScratch};
use crate::scheduler::{AddError, NewSequence, PinId, Scheduler, SeqId, StepPlan};
use crate::weights::{ResidentWeights, WeightVersion};

/// A request's end, on its way to its owner.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) output: RequestOutput,
    pub(crate) owner: Owner,
    /// A session's blocks, kept for its next turn.
    pub(crate) pin: Option<PinId>,
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Progress {
    pub(crate) computed_tokens: usize,
    pub(crate) sampled_tokens: usize,
    pub(crate) preempted: usize,
    pub(crate) live_requests: usize,
}

/// What a closed executor leaves.
#[derive(Debug)]
pub(crate) struct Closed {
    pub(crate) kv: KvMemory,
    pub(crate) workspace: Workspace,
    pub(crate) blocks_dropped: usize,
    /// Requests that had not ended, their KV forgotten.
    pub(crate) retracted: Vec<LiveRequest>,
}

/// Scheduler, KV cache and live requests. Exists only while the engine is awake.
#[derive(Debug)]
pub(crate) struct Executor {
    parts: Arc<Parts>,
    version: WeightVersion,
    kv: KvMemory,
    workspace: Workspace,
    scheduler: Scheduler,
    requests: BTreeMap<RequestId, LiveRequest>,
    /// Request and sample of each sequence.
    sequences: BTreeMap<SeqId, (RequestId, usize)>,
    next_seq: u64,
    ended: Vec<Ended>,
    /// Tokens of requests that stream.
    streamed: Vec<StepToken>,
    /// Buffers that no thread samples with at the moment.
    scratches: Mutex<Vec<SamplerScratch>>,
    stats: EngineStats,
    /// Set while a step runs; still set at the next one if the step panicked.
    in_step: bool,
}

impl Executor {
    pub(crate) fn new(core: &Core, version: WeightVersion, kv: KvMemory, workspace: Workspace) -> Self {
        Self {
            scheduler: Scheduler::new(core.parts.scheduler_config(&version)),
            parts: Arc::clone(&core.parts),
            version,
            kv,
            workspace,
            requests: BTreeMap::new(),
            sequences: BTreeMap::new(),
            next_seq: 0,
            ended: Vec::new(),
            streamed: Vec::new(),
            scratches: Mutex::default(),
            stats: EngineStats::default(),
            in_step: false,
        }
    }

    pub(crate) fn memory(&self) -> MemoryReport {
        MemoryReport {
            kv_cache_bytes: self.kv.committed() as u64,
            workspace_bytes: self.workspace.committed() as u64,
            ..MemoryReport::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn kv_address(&self) -> usize {
        self.kv.address()
    }

    pub(crate) fn has_live(&self) -> bool {
        !self.requests.is_empty()
    }

    pub(crate) fn live_requests(&self) -> Vec<RequestId> {
        self.requests.keys().copied().collect()
    }

    pub(crate) fn take_streamed(&mut self) -> Vec<StepToken> {
        std::mem::take(&mut self.streamed)
    }

    pub(crate) fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    pub(crate) fn unpin(&mut self, pin: PinId) {
        self.scheduler.unpin(pin);
    }

    pub(crate) fn clear_prefix_cache(&mut self) {
        self.scheduler.clear_prefix_cache();
    }

    /// Queues a request. Samples that carry no tokens yet share one prefill as forks of the first.
    pub(crate) fn start(&mut self, mut request: LiveRequest) {
        let mut open: Vec<usize> =
            (0..request.samples.len()).filter(|&i| !request.samples[i].ended).collect();
        if open.is_empty() && request.wants_prompt_logprobs() {
            // All samples are carried whole, but the prompt is still to be scored.
            open.push(0);
        }
        let ids: Vec<SeqId> = open.iter().map(|_| self.next_seq_id()).collect();
        for (&sample, &seq) in open.iter().zip(&ids) {
            request.samples[sample].seq = Some(seq);
            self.sequences.insert(seq, (request.id, sample));
        }
        let fresh = open.len() == request.samples.len()
            && request.samples.iter().all(|sample| sample.completion.tokens.is_empty());
        let leaders = if fresh { 1 } else { ids.len() };
        let mut refused = None;
        for (&sample, &seq) in open.iter().zip(&ids).take(leaders) {
            let forks = if fresh { ids[1..].to_vec() } else { Vec::new() };
            // One sequence computes the prompt's logprobs.
            let scores = request.wants_prompt_logprobs() && sample == open[0];
            let new = new_sequence(&request, sample, seq, forks, scores);
            if let Err(error) = self.add(new) {
                refused = Some(error);
            }
        }
        let id = request.id;
        self.requests.insert(id, request);
        if let Some(error) = refused {
            self.end_request(id, FinishReason::Error(no_capacity(&error)));
        } else if open.is_empty() {
            self.close_if_ended(id);
        }
    }

    /// Adds a sequence; pinned blocks that it cannot go on from (its salt is another) are let go, and it
    /// computes its history anew, as it does if another needed the blocks meanwhile.
    fn add(&mut self, mut new: NewSequence) -> Result<(), AddError> {
        let Some(pin) = new.pinned else { return self.scheduler.add(new) };
        if self.scheduler.add(new.clone()).is_ok() {
            return Ok(());
        }
        self.scheduler.unpin(pin);
        new.pinned = None;
        self.scheduler.add(new)
    }

    fn next_seq_id(&mut self) -> SeqId {
        self.next_seq += 1;
        SeqId(self.next_seq)
    }

    /// Ends these requests with what they have; returns those that were live.
    pub(crate) fn abort(&mut self, ids: &[RequestId]) -> Vec<RequestId> {
        let mut aborted = Vec::new();
        for &id in ids {
            // Looked up one by one: an id that is listed twice ends once.
            if self.requests.contains_key(&id) {
                self.end_request(id, FinishReason::Abort);
                aborted.push(id);
            }
        }
        aborted
    }

    /// Runs one step: at most `max_num_batched_tokens` tokens of the running sequences.
    pub(crate) fn step(&mut self, weights: &ResidentWeights) -> Result<Progress, StepError> {
        if std::mem::replace(&mut self.in_step, true) {
            return Err(StepError::Poisoned);
        }
        let result = self.run_step(weights);
        self.in_step = false;
        result
    }

    fn run_step(&mut self, weights: &ResidentWeights) -> Result<Progress, StepError> {
        let plan = self.scheduler.plan();
        self.note_plan(&plan);
        let mut progress = Progress { preempted: plan.preempted.len(), ..Progress::default() };
        if plan.chunks.is_empty() {
            progress.live_requests = self.requests.len();
            return Ok(progress);
        }
        let (batch, wanted) = self.batch(&plan);
        progress.computed_tokens = batch.tokens.len();
        let rows = match self.compute(weights, &batch, &wanted) {
            Ok(rows) => rows,
            Err(error) => {
                self.scheduler.fail_step();
                tracing::warn!(%error, "step failed; its sequences will be recomputed");
                return Err(error.into());
            }
        };
        self.scheduler.complete_step();
        for row in rows {
            match row {
                Row::Prompt { request, position, logprob } => self.score(request, position, logprob),
                Row::Next { seq, samples } => progress.sampled_tokens += self.advance(seq, samples),
            }
        }
        self.stats.steps += 1;
        self.stats.computed_tokens += progress.computed_tokens as u64;
        self.stats.sampled_tokens += progress.sampled_tokens as u64;
        progress.live_requests = self.requests.len();
        Ok(progress)
    }

    /// Takes in the logprob of a prompt's token.
    fn score(&mut self, id: RequestId, position: usize, logprob: f32) {
        if !logprob.is_finite() {
            let error = CompletionError::NonFiniteLogits { position };
            self.end_request(id, FinishReason::Error(error));
        } else if let Some(request) = self.requests.get_mut(&id) {
            request.prompt_logprobs.push(logprob);
        }
    }

    fn note_plan(&mut self, plan: &StepPlan) {
        self.stats.preemptions += plan.preempted.len() as u64;
        for admitted in &plan.admitted {
            let (request, sample) = self.sequences[&admitted.seq];
            let request = self.requests.get_mut(&request).expect("its sequence is live");
            let prompt_len = request.prompt().len();
            let cached = admitted.cached_tokens.min(prompt_len);
            let live = &mut request.samples[sample];
            // After a preemption it may find what it computed itself: that doesn't count.
            if !std::mem::replace(&mut live.admitted, true) && !live.ended {
                live.completion.cached_tokens = cached;
                self.stats.prompt_tokens += prompt_len as u64;
                self.stats.cached_tokens += cached as u64;
            }
        }
        // A conversation between its turns is not in others' way: its next turn computes the history anew.
        if let Some(stuck) = &plan.stuck
            && !self.scheduler.unpin_oldest()
        {
            let error = CompletionError::NoCapacity {
                needed_blocks: stuck.needed_blocks,
                available_blocks: stuck.available_blocks,
            };
            let (request, _) = self.sequences[&stuck.seq];
            self.end_request(request, FinishReason::Error(error));
        }
    }

    /// Appends the sampled tokens to a sequence and to those forked from it now; returns how many.
    fn advance(&mut self, seq: SeqId, samples: Vec<(usize, Result<Sampled, SampleError>)>) -> usize {
        let Some(&(id, leader)) = self.sequences.get(&seq) else { return 0 };
        if samples.is_empty() {
            self.end_scored(id, leader);
            return 0;
        }
        let count = samples.len();
        // Forks first: they share the leader's blocks, which its own end would release.
        for (sample, sampled) in samples.into_iter().rev() {
            let request = self.requests.get_mut(&id).expect("it has an open sample");
            let prompt_len = request.prompt().len();
            let live = &mut request.samples[sample];
            let token = sampled.as_ref().map(|s| s.token).ok();
            match sampled {
                Ok(sampled) => {
                    if request.request.stream && request.owner == Owner::Stepper {
                        self.streamed.push(StepToken {
                            request: id,
                            sample,
                            position: live.completion.tokens.len(),
                            token: sampled.token,
                            logprob: sampled.logprob,
                            top: sampled.top.clone().unwrap_or_default(),
                        });
                    }
                    live.push(
                        sampled,
                        &request.request.params,
                        &self.parts.config.eos_token_ids,
                        &self.version,
                    );
                }
                Err(error) => {
                    let position = prompt_len + live.completion.tokens.len();
                    live.end(FinishReason::Error(error.at(position)));
                }
            }
            let ended = live.ended;
            let own = live.seq.expect("an open sample has a sequence");
            if sample != leader {
                self.scheduler.fork(seq, own, token.unwrap_or_default());
                // One that has to wait may find less, or nothing, when it is admitted.
                if self.scheduler.is_running(own) {
                    live.admitted = true;
                    live.completion.cached_tokens = prompt_len;
                    self.stats.prompt_tokens += prompt_len as u64;
                    self.stats.cached_tokens += prompt_len as u64;
                }
            } else if let (false, Some(token)) = (ended, token) {
                self.scheduler.append(own, token);
            }
            if ended {
                self.end_sample(id, sample);
            }
        }
        self.close_if_ended(id);
        count
    }

    /// Ends a request that only scored its prompt. A session keeps the blocks for its next turn.
    fn end_scored(&mut self, id: RequestId, leader: usize) {
        let request = self.requests.get_mut(&id).expect("its sequence was running");
        if request.session.is_some() {
            request.samples[leader].end(FinishReason::Length);
            self.end_sample(id, leader);
            self.close_if_ended(id);
        } else {
            self.end_request(id, FinishReason::Length);
        }
    }

    /// Releases the blocks of an ended sample, or keeps them for its session.
    fn end_sample(&mut self, id: RequestId, sample: usize) {
        let request = self.requests.get_mut(&id).expect("the caller looked it up");
        let Some(seq) = request.samples[sample].seq.take() else { return };
        self.sequences.remove(&seq);
        if request.session.is_some() {
            let pinned = self.scheduler.finish_and_pin(seq).map(|(_, pin)| pin);
            request.session = Some(SessionTurn { pinned });
        } else {
            self.scheduler.finish(seq);
        }
    }

    /// Ends all open samples of a request for the same reason.
    fn end_request(&mut self, id: RequestId, reason: FinishReason) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if let Some(turn) = &mut request.session {
            turn.pinned = None;
        }
        for sample in &mut request.samples {
            if let Some(seq) = sample.seq.take() {
                self.sequences.remove(&seq);
                self.scheduler.abort(seq);
            }
            if !sample.ended {
                sample.end(reason.clone());
            }
        }
        self.close_if_ended(id);
    }

    fn close_if_ended(&mut self, id: RequestId) {
        if !self.requests.get(&id).is_some_and(LiveRequest::has_ended) {
            return;
        }
        let request = self.requests.remove(&id).expect("looked up above");
        let aborted =
            request.samples.iter().any(|s| matches!(s.completion.finish_reason, FinishReason::Abort));
        *if aborted { &mut self.stats.aborted } else { &mut self.stats.finished } += 1;
        let pin = request.session.and_then(|turn| turn.pinned);
        let owner = request.owner;
        self.ended.push(Ended { output: request.into_output(), owner, pin });
    }

    pub(crate) fn stats(&self) -> EngineStats {
        let scheduler = self.scheduler.stats();
        EngineStats {
            live_requests: self.requests.len(),
            waiting: scheduler.waiting,
            running: scheduler.running,
            blocks: self.parts.limits.kv.num_blocks,
            blocks_free: scheduler.free_blocks,
            blocks_cached: scheduler.cached_blocks,
            blocks_owned: scheduler.owned_blocks,
            ..self.stats
        }
    }

    /// Ends serving: what has not ended is retracted.
    pub(crate) fn close(self) -> Closed {
        let stats = self.scheduler.stats();
        let mut retracted: Vec<LiveRequest> = self.requests.into_values().collect();
        retracted.iter_mut().for_each(LiveRequest::retract);
        Closed {
            kv: self.kv,
            workspace: self.workspace,
            blocks_dropped: stats.cached_blocks + stats.owned_blocks,
            retracted,
        }
    }
}

/// Submission checks lengths against the pool: what is refused all the same gets an answer instead of waiting
/// for ever.
fn no_capacity(error: &AddError) -> CompletionError {
    match *error {
        AddError::NeverFits { needed_blocks, total_blocks, .. } => {
            CompletionError::NoCapacity { needed_blocks, available_blocks: total_blocks }
        }
        _ => CompletionError::NoCapacity { needed_blocks: 0, available_blocks: 0 },
    }
}

fn new_sequence(
    request: &LiveRequest,
    sample: usize,
    seq: SeqId,
    forks: Vec<SeqId>,
    scores: bool,
) -> NewSequence {
    let prompt_len = request.prompt().len();
    // The sequence of a sample that has ended only scores the prompt.
    let carried = &request.samples[sample];
    let carried = if carried.ended { &[] } else { carried.completion.tokens.as_slice() };
    let tokens = [request.prompt(), carried].concat();
    NewSequence {
        id: seq,
        tokens,
        prompt_len,
        max_tokens: prompt_len + request.request.params.max_new_tokens,
        salt: request.request.cache_salt.as_ref().map(|salt| Salt(salt.as_bytes().into())),
        recompute_from: if scores { request.prompt_logprobs.len() } else { usize::MAX },
        forks,
        pinned: request.session.and_then(|turn| turn.pinned),
    }
}
