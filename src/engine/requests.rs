//! A request between its submission and its end.

use std::sync::Arc;

use crate::completion::{Completion, FinishReason, RequestId, RequestOutput, VersionSpan};
use crate::request::{Request, SamplingParams, TokenId};
use crate::sampling::{Sampled, Sampler, stop_cause};
use crate::scheduler::{PinId, SeqId};
use crate::weights::WeightVersion;

/// Who gets the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The next step's output.
    Stepper,
    /// A call that waits for it.
    Caller,
}

/// A conversation's claim on the blocks of its history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionTurn {
    /// Blocks of the turns before.
    pub(crate) pinned: Option<PinId>,
}

/// A request that has not ended, with all that it has produced.
#[derive(Debug)]
pub(crate) struct LiveRequest {
    pub(crate) id: RequestId,
    pub(crate) request: Request,
    pub(crate) owner: Owner,
    pub(crate) session: Option<SessionTurn>,
    pub(crate) prompt_logprobs: Vec<f32>,
    pub(crate) samples: Vec<LiveSample>,
}

/// One of a request's n samples.
#[derive(Debug)]
pub(crate) struct LiveSample {
    /// What there is so far. Its finish reason counts once `ended` is set; until then it is what it would be
    /// if the request ended now.
    pub(crate) completion: Completion,
    pub(crate) ended: bool,
    /// Whether it got blocks since the request was started or went on: what it found then counts as cached.
    pub(crate) admitted: bool,
    /// Its sequence in the scheduler, while there is one.
    pub(crate) seq: Option<SeqId>,
    sampler: Sampler,
}

impl LiveRequest {
    /// Starts a request, or goes on with the samples that it carries.
    pub(crate) fn new(
        id: RequestId,
        request: Request,
        owner: Owner,
        session: Option<SessionTurn>,
        default_seed: u64,
        eos: &[TokenId],
    ) -> Self {
        // Samples that a partial lacks belong to its group: they draw from the group's seed.
        let group_seed = request.resume.as_ref().and_then(|carried| carried.first()).map(|first| first.seed);
        let seed = request.params.seed.or(group_seed).unwrap_or(default_seed);
        let params = Arc::new(request.params.clone());
        let samples = (0..params.samples)
            .map(|index| {
                let carried = request.carried(index).cloned();
                let completion = carried.unwrap_or_else(|| Completion::start(index, seed, &params));
                LiveSample::new(&request.prompt, completion, &params, eos)
            })
            .collect();
        Self { id, request, owner, session, prompt_logprobs: Vec::new(), samples }
    }

    pub(crate) fn prompt(&self) -> &[TokenId] {
        &self.request.prompt
    }

    /// Whether logprobs of the prompt are wanted and not all there.
    pub(crate) fn wants_prompt_logprobs(&self) -> bool {
        self.request.params.prompt_logprobs && self.prompt_logprobs.len() + 1 < self.prompt().len()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.samples.iter().all(|sample| sample.ended)
    }

    /// Makes the output; what has not ended counts as aborted.
    pub(crate) fn into_output(self) -> RequestOutput {
        RequestOutput {
            request: self.id,
            id: self.request.id,
            prompt: self.request.prompt,
            prompt_logprobs: self.request.params.prompt_logprobs.then_some(self.prompt_logprobs),
            completions: self.samples.into_iter().map(|sample| sample.completion).collect(),
        }
    }

    /// Forgets what belongs to the weights and the KV cache of before; keeps the tokens.
    pub(crate) fn retract(&mut self) {
        self.prompt_logprobs.clear();
        for sample in &mut self.samples {
            sample.seq = None;
            sample.admitted = false;
        }
    }
}

impl LiveSample {
    fn new(
        prompt: &[TokenId],
        mut completion: Completion,
        params: &Arc<SamplingParams>,
        eos: &[TokenId],
    ) -> Self {
        let Completion { seed, index, ref tokens, .. } = completion;
        let sampler = Sampler::new(Arc::clone(params), eos, seed, index, prompt, tokens);
        let finished = completion.already_finished(params).filter(|_| !tokens.is_empty());
        let ended = finished.is_some();
        completion.finish_reason = finished.unwrap_or(FinishReason::Abort);
        if !ended {
            completion.cached_tokens = 0;
        }
        Self { completion, ended, admitted: false, seq: None, sampler }
    }

    pub(crate) fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// Takes in a sampled token, which may end the sample.
    pub(crate) fn push(
        &mut self,
        sampled: Sampled,
        params: &SamplingParams,
        eos: &[TokenId],
        version: &WeightVersion,
    ) {
        let completion = &mut self.completion;
        completion.tokens.push(sampled.token);
        completion.logprobs.push(sampled.logprob);
        push_if_wanted(&mut completion.processed_logprobs, sampled.processed_logprob);
        push_if_wanted(&mut completion.top_logprobs, sampled.top);
        push_if_wanted(&mut completion.kept, sampled.kept);
        VersionSpan::push(&mut completion.versions, version);
        self.sampler.observe(sampled.token);
        if let Some(by) = stop_cause(params, eos, &completion.tokens) {
            self.end(FinishReason::Stop { by });
        } else if completion.tokens.len() >= params.max_new_tokens {
            self.end(FinishReason::Length);
        }
    }

    /// Ends the sample for this reason.
    pub(crate) fn end(&mut self, reason: FinishReason) {
        self.completion.finish_reason = reason;
        self.ended = true;
    }
}

fn push_if_wanted<T>(list: &mut Option<Vec<T>>, value: Option<T>) {
    if let (Some(list), Some(value)) = (list, value) {
        list.push(value);
    }
}
