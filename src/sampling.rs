//! Draws tokens from logits: a pure function of logits, parameters, seed, sample and position.
//!
//! What else is in the batch, and what was drawn before, has no influence: random numbers come from a
//! counter, and the only state, the counts behind penalties, is a function of the sequence's tokens.
//!
//! Weights are summed as integers, so that no sum depends on its order, and all orders are total: higher
//! logit first, lower id first among equals.

mod asked;
mod filter;
mod philox;
mod processors;
mod softmax;
mod stop;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::completion::{CompletionError, TokenLogprob};
use crate::request::{SamplingParams, TokenId};
use filter::Cut;
use processors::Processors;
pub(crate) use softmax::logprob;

/// `ln(sum(exp(logits)))`, the denominator of every logprob, of sampled and of scored tokens alike. Not finite if
/// the logits are not a distribution; else not below any logit.
pub(crate) use crate::device::cpu::log_sum_exp;
pub(crate) use stop::stop_cause;

/// Why no token can be drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampleError {
    /// The logits hold NaN or positive infinity, or nothing but negative infinity.
    NonFiniteLogits,
    /// The request's own restrictions leave no token.
    NothingAllowed,
}

impl SampleError {
    /// Adds where in the sequence it happened.
    pub(crate) fn at(self, position: usize) -> CompletionError {
        match self {
            SampleError::NonFiniteLogits => CompletionError::NonFiniteLogits { position },
            SampleError::NothingAllowed => CompletionError::NothingAllowed { position },
        }
    }
}

/// A drawn token and what the request wants to know about it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sampled {
    pub(crate) token: TokenId,
    /// In the model's distribution.
    pub(crate) logprob: f32,
    /// In the distribution it was drawn from.
    pub(crate) processed_logprob: Option<f32>,
    /// The model's likeliest tokens, likeliest first.
    pub(crate) top: Option<Vec<TokenLogprob>>,
    /// The tokens that could be drawn, by ascending id.
    pub(crate) kept: Option<Vec<TokenId>>,
}

/// Buffers of one thread's sampling, kept from call to call. Their contents never matter.
#[derive(Debug, Default)]
pub(crate) struct SamplerScratch {
    /// Logits after the processors.
    processed: Vec<f32>,
    /// Fixed-point weight of each token.
    weights: Vec<u64>,
    /// Weight of each interval of logits.
    histogram: Vec<u64>,
    /// Tokens in the order of [`filter::key`].
    keys: Vec<u64>,
}

/// Draws the tokens of one sequence.
#[derive(Debug)]
pub(crate) struct Sampler {
    params: Arc<SamplingParams>,
    seed: u64,
    sample: u32,
    processors: Processors,
}

impl Sampler {
    /// Makes the sampler of a sequence that already has these tokens.
    ///
    /// It equals one that was made for the prompt alone and observed the generated tokens one by one.
    pub(crate) fn new(
        params: Arc<SamplingParams>,
        eos_ids: &[TokenId],
        seed: u64,
        sample: usize,
        prompt: &[TokenId],
        generated: &[TokenId],
    ) -> Self {
        let processors = Processors::new(&params, eos_ids, prompt, generated);
        // A validated request has at most 1024 samples.
        Self { params, seed, sample: sample as u32, processors }
    }

    /// Takes note of a token that was appended to the sequence.
    pub(crate) fn observe(&mut self, token: TokenId) {
        self.processors.observe(&self.params, token);
    }

    /// Draws the token with index `token_index` in the completion.
    ///
    /// # Errors
    /// [`SampleError`]; nothing has changed.
    pub(crate) fn sample(
        &self,
        logits: &[f32],
        token_index: usize,
        scratch: &mut SamplerScratch,
    ) -> Result<Sampled, SampleError> {
        let params = &*self.params;
        let raw_max = softmax::checked_max(logits).ok_or(SampleError::NonFiniteLogits)?;
        let lse = log_sum_exp(logits);
        let active = self.processors.active(params, token_index);
        let mut buffer = std::mem::take(&mut scratch.processed);
        let (processed, max) = if active {
            self.processors.apply(params, token_index, logits, &mut buffer);
            (buffer.as_slice(), softmax::checked_max(&buffer))
        } else {
            (logits, Some(raw_max))
        };
        let drawn = max
            .ok_or(SampleError::NothingAllowed)
            .map(|max| self.draw(&Processed { logits: processed, max }, token_index, scratch));
        scratch.processed = buffer;
        let drawn = drawn?;
        let logprob = logprob(logits, lse, drawn.token);
        self.conclude(active, drawn, logprob, || top(logits, lse, params.top_logprobs, scratch))
    }

    /// Completes a draw with what the request wants to know; `active`: whether processors had a part in it.
    fn conclude(
        &self,
        active: bool,
        drawn: Drawn,
        logprob: f32,
        top: impl FnOnce() -> Vec<TokenLogprob>,
    ) -> Result<Sampled, SampleError> {
        let params = &*self.params;
        let Drawn { token, mut logprob_drawn, kept } = drawn;
        if !logprob.is_finite() {
            return Err(SampleError::NonFiniteLogits);
        }
        if !active && params.temperature == 1.0 && !filter::filters(params) {
            // Nothing was changed: the two distributions are one, to the last bit.
            logprob_drawn = logprob;
        }
        Ok(Sampled {
            token,
            logprob,
            processed_logprob: params.processed_logprobs.then_some(logprob_drawn),
            top: (params.top_logprobs > 0).then(top),
            kept,
        })
    }

    fn draw(&self, processed: &Processed<'_>, token_index: usize, scratch: &mut SamplerScratch) -> Drawn {
        let params = &*self.params;
        let logits = processed.logits;
        if params.temperature == 0.0 {
            // The maximum is one of the logits.
            let token = logits.iter().position(|&logit| logit == processed.max).unwrap_or(0) as TokenId;
            return Drawn::greedy(params, token);
        }
        let temperature = params.temperature;
        let scaled = |logit: f32| (logit - processed.max) / temperature;
        let mut total = softmax::fill_weights(logits, scaled, &mut scratch.weights);
        let cut = filter::cut(params, logits, scaled, scratch);
        if cut != Cut::NONE {
            total = filter::drop_weights(logits, cut, &mut scratch.weights);
        }
        let random = self.random(token_index);
        // Multiplying instead of dividing keeps every weight's share exact to 2^-64.
        let target = ((u128::from(random) * u128::from(total)) >> 64) as u64;
        let token = pick(&scratch.weights, target);
        Drawn {
            token: token as TokenId,
            logprob_drawn: logprob_drawn(scaled(logits[token]), total),
            kept: params.return_kept_set.then(|| cut.kept(logits)),
        }
    }

    /// The random bits that draw the token with this index.
    pub(crate) fn random(&self, token_index: usize) -> u64 {
        philox::draw(self.seed, self.sample, token_index as u64)
    }
}

/// Logits after the processors and the largest of them, which is finite.
struct Processed<'a> {
    logits: &'a [f32],
    max: f32,
}

struct Drawn {
    token: TokenId,
    logprob_drawn: f32,
    kept: Option<Vec<TokenId>>,
}

impl Drawn {
    /// Of a distribution that is this token alone.
    fn greedy(params: &SamplingParams, token: TokenId) -> Self {
        Self { token, logprob_drawn: 0.0, kept: params.return_kept_set.then(|| vec![token]) }
    }
}

/// The logprob of a token with this scaled logit, where the weight of all is `total`.
fn logprob_drawn(scaled: f32, total: u64) -> f32 {
    let log_total = (total as f64 / softmax::WEIGHT_ONE as f64).ln();
    (f64::from(scaled) - log_total) as f32
}

/// Finds the token at `target` when the weights are laid end to end in the order of ids.
///
/// `target` must be less than their sum.
fn pick(weights: &[u64], target: u64) -> usize {
    let mut below = 0;
    for (block, chunk) in weights.chunks(64).enumerate() {
        let end = below + chunk.iter().sum::<u64>();
        if target < end {
            for (index, weight) in chunk.iter().enumerate() {
                below += weight;
                if target < below {
                    return block * 64 + index;
                }
            }
        }
        below = end;
    }
    unreachable!("target {target} is not below the sum of weights {below}")
}

/// Lists the model's likeliest tokens. Those it rules out have no finite logprob and are left out.
fn top(logits: &[f32], lse: f32, count: usize, scratch: &mut SamplerScratch) -> Vec<TokenLogprob> {
    filter::select(logits, count, &mut scratch.keys);
    scratch.keys.sort_unstable();
    let tokens = scratch.keys.iter().map(|&key| filter::key_token(key));
    tokens.map(|token| TokenLogprob { token, logprob: logprob(logits, lse, token) }).collect()
}
