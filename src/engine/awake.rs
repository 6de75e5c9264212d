//! Generation: what only an awake engine does. All through `&self`, from any number of threads.

use super::executor::{Ended, Progress};
use super::requests::{LiveRequest, Owner, SessionTurn};
use super::{Awake, Engine, EngineStats, GenerateError, Session, StepError, WakeReport};
use crate::completion::{FinishReason, RequestId, RequestOutput, TokenLogprob};
use crate::request::{Request, RequestError, TokenId};
use crate::weights::WeightVersion;

/// What [`Engine::step`] did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepOutput {
    /// Submitted requests that have ended since the last call, in order of their end. Each is handed out
    /// once.
    pub outputs: Vec<RequestOutput>,
    /// Tokens of requests that [stream](crate::Request::stream), sampled since the last call, in order. Each is
    /// handed out once, and before or with its request's output; one whose request was aborted, or taken while
    /// the engine slept, is in that output only.
    pub tokens: Vec<StepToken>,
    /// Tokens computed in this step, prompt tokens among them.
    pub computed_tokens: usize,
    /// Tokens sampled in this step.
    pub sampled_tokens: usize,
    /// Sequences that lost their blocks to others.
    pub preempted: usize,
    /// Requests that have not ended.
    pub live_requests: usize,
}

impl StepOutput {
    /// Whether there is nothing left to do.
    pub fn is_idle(&self) -> bool {
        self.live_requests == 0
    }
}

/// A token of a request that streams.
#[derive(Debug, Clone, PartialEq)]
pub struct StepToken {
    /// The request.
    pub request: RequestId,
    /// Which of its samples.
    pub sample: usize,
    /// Position in the completion, from 0.
    pub position: usize,
    /// The token.
    pub token: TokenId,
    /// Its logprob in the model's distribution.
    pub logprob: f32,
    /// If asked for with [`Request::top_logprobs`]: the model's likeliest tokens at this position, as
    /// [`Completion::top_logprobs`](crate::Completion::top_logprobs) has them. Otherwise empty.
    pub top: Vec<TokenLogprob>,
}

/// What [`Engine::abort`] did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Aborted {
    /// Requests that this call ended. Ids that are unknown or had ended already are not among them.
    pub aborted: Vec<RequestId>,
    /// Outputs of submitted requests, with the tokens and logprobs they had: those aborted now, and any that
    /// had ended before and were not handed out yet. Each is handed out once, here or by a step. (An aborted
    /// `generate` call returns its own.)
    pub outputs: Vec<RequestOutput>,
}

impl Engine<Awake> {
    /// Generates for all requests and returns their outputs in the same order. Requests of calls on other
    /// threads, and submitted ones, are batched with them.
    ///
    /// # Errors
    /// [`GenerateError::Request`] if any request is not valid (none ran), [`GenerateError::Step`] if the
    /// device failed (the call's requests are aborted).
    pub fn generate(&self, requests: &[Request]) -> Result<Vec<RequestOutput>, GenerateError> {
        let invalid = |(index, source)| GenerateError::Request { index, source };
        let requests = requests.iter().map(|request| (request.clone(), None)).collect();
        let ids = self.enqueue(requests, Owner::Caller).map_err(invalid)?;
        let ended = self.wait(&ids)?;
        Ok(ended.into_iter().map(|ended| ended.output).collect())
    }

    /// Logprobs of each sequence's tokens given those before them: for a sequence of `n` tokens `n - 1`
    /// values, of tokens 1 to n - 1. Bit for bit the values that generation returns for the same tokens.
    ///
    /// # Errors
    /// As [`Engine::generate`]; [`GenerateError::Score`] if the weights give no distribution for a sequence.
    pub fn score<S: AsRef<[TokenId]>>(&self, sequences: &[S]) -> Result<Vec<Vec<f32>>, GenerateError> {
        let request = |s: &S| Request::new(s.as_ref()).max_new_tokens(0).prompt_logprobs(true);
        let requests: Vec<Request> = sequences.iter().map(request).collect();
        let outputs = self.generate(&requests)?;
        let scores = |(index, output): (usize, RequestOutput)| match &output.completions[0].finish_reason {
            FinishReason::Error(source) => Err(GenerateError::Score { index, source: source.clone() }),
            _ => Ok(output.prompt_logprobs.unwrap_or_default()),
        };
        outputs.into_iter().enumerate().map(scores).collect()
    }

    /// Queues a request for a loop of your own: [`Engine::step`] computes it and hands it out.
    ///
    /// # Errors
    /// [`RequestError`]; nothing was queued.
    pub fn submit(&self, request: Request) -> Result<RequestId, RequestError> {
        let mut ids = self.enqueue(vec![(request, None)], Owner::Stepper).map_err(|(_, error)| error)?;
        Ok(ids.remove(0))
    }

    /// Runs one step for all requests, of whatever thread, and hands out submitted requests that have ended.
    /// Does nothing when there is nothing to do.
    ///
    /// # Errors
    /// [`StepError`]; requests are still in flight.
    pub fn step(&self) -> Result<StepOutput, StepError> {
        let Progress { computed_tokens, sampled_tokens, preempted, live_requests } =
            self.state.shared.step_unless(&self.state.weights, |_| false)?.unwrap_or_default();
        let mut mailbox = self.state.shared.mailbox();
        let (outputs, tokens) = (mailbox.take_finished(), mailbox.take_streamed());
        Ok(StepOutput { outputs, tokens, computed_tokens, sampled_tokens, preempted, live_requests })
    }

    /// Ends requests now, wherever they are: waiting, in the middle of a prompt, decoding. A step in progress
    /// is finished first; when this returns, their blocks are free.
    ///
    /// An output that was aborted can be submitted again and goes on with the same random stream:
    /// [`Request::resume`].
    pub fn abort(&self, ids: &[RequestId]) -> Aborted {
        self.state.shared.between_steps(|serving| {
            let aborted = serving.abort(ids);
            Aborted { aborted, outputs: serving.mailbox.take_finished_alone() }
        })
    }

    /// Ends all requests now; see [`Engine::abort`].
    pub fn abort_all(&self) -> Aborted {
        self.state.shared.between_steps(|serving| {
            let ids = serving.executor.live_requests();
            let aborted = serving.abort(&ids);
            Aborted { aborted, outputs: serving.mailbox.take_finished_alone() }
        })
    }

    /// The live request that was submitted with this id ([`Request::id`]).
    pub fn find(&self, caller_id: &str) -> Option<RequestId> {
        self.state.shared.mailbox().find(caller_id)
    }

    /// Starts a conversation whose KV stays between its turns.
    pub fn session(&self) -> Session<'_> {
        Session::new(self)
    }

    /// Forgets all cached prefixes. Running sequences keep their blocks.
    pub fn clear_prefix_cache(&self) {
        self.state.shared.between_steps(|serving| serving.executor.clear_prefix_cache());
    }

    /// A snapshot of queues, blocks and counters. Waits for a step in progress.
    pub fn stats(&self) -> EngineStats {
        self.state.shared.stats()
    }

    /// Version of the weights that serve.
    pub fn version(&self) -> WeightVersion {
        self.state.weights.version().clone()
    }

    /// What waking did.
    pub fn report(&self) -> &WakeReport {
        &self.state.report
    }

    /// Checks and queues requests: all or, with the index of the first bad one, none.
    pub(super) fn enqueue(
        &self,
        requests: Vec<(Request, Option<SessionTurn>)>,
        owner: Owner,
    ) -> Result<Vec<RequestId>, (usize, RequestError)> {
        let limits = self.limits();
        for (index, (request, _)) in requests.iter().enumerate() {
            request.validate(&limits).map_err(|error| (index, error))?;
        }
        let mut mailbox = self.state.shared.mailbox();
        let mut ids = Vec::with_capacity(requests.len());
        for (index, (request, _)) in requests.iter().enumerate() {
            match mailbox.register(request.id.as_deref()) {
                Ok(id) => ids.push(id),
                Err(error) => {
                    requests[..index].iter().for_each(|(r, _)| mailbox.unregister(r.id.as_deref()));
                    return Err((index, error));
                }
            }
        }
        let engine_seed = self.core.parts.limits.seed;
        let eos = &self.core.parts.config.eos_token_ids;
        for (&id, (request, session)) in ids.iter().zip(requests) {
            let seed = default_seed(engine_seed, id);
            mailbox.submit(LiveRequest::new(id, request, owner, session, seed, eos));
        }
        Ok(ids)
    }

    /// Steps until all of these have ended.
    pub(super) fn wait(&self, ids: &[RequestId]) -> Result<Vec<Ended>, StepError> {
        let shared = &self.state.shared;
        let mut ended = Vec::with_capacity(ids.len());
        for &id in ids {
            loop {
                if let Some(one) = shared.mailbox().take_awaited(id) {
                    ended.push(one);
                    break;
                }
                if let Err(error) =
                    shared.step_unless(&self.state.weights, |mailbox| mailbox.is_awaited_there(id))
                {
                    shared.abandon(&ids[ended.len()..]);
                    return Err(error);
                }
            }
        }
        Ok(ended)
    }

    /// Gives a session's blocks back.
    pub(super) fn unpin(&self, pin: crate::scheduler::PinId) {
        self.state.shared.mailbox().unpin(pin);
    }
}

/// Seed of a request that brings none: by its number.
pub(crate) fn default_seed(engine_seed: u64, request: RequestId) -> u64 {
    // Spread first: neighbouring engine seeds (ranks, say) must not give one stream, shifted by a request.
    splitmix(splitmix(engine_seed).wrapping_add(request.get()))
}

/// Spreads consecutive numbers over all 64 bits.
///
/// Source: Steele et al. 2014, "Fast splittable pseudorandom number generators" (SplitMix64's finaliser).
fn splitmix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
