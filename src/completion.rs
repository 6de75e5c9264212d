//! What a request gives back: for each sample its tokens, their logprobs, and the weights that made them.

mod finish;
mod version;

#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::request::{SamplingParams, TokenId};
pub use finish::{CompletionError, FinishReason, StopCause};
pub use version::VersionSpan;

/// Names a request within one engine; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(u64);

impl RequestId {
    pub(crate) const fn new(id: u64) -> Self {
        Self(id)
    }

    /// Gives the number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A token and its logprob.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// Its logprob in the model's distribution.
    pub logprob: f32,
}

/// What a request gave.
///
/// [`Request::resume`](crate::Request::resume) goes on from one that was aborted. It survives a round trip
/// through JSON unchanged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestOutput {
    /// The engine's name for the request.
    pub request: RequestId,
    /// The caller's name for it, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The prompt.
    pub prompt: Vec<TokenId>,
    /// If asked for: logprobs of the prompt's tokens from the second on; the first has none. Fewer
    /// than that if the request ended before all were computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<f32>>,
    /// One completion for each sample, by ascending index.
    pub completions: Vec<Completion>,
}

/// One sample of a prompt's continuation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Completion {
    /// Which of the `n` samples.
    pub index: usize,
    /// Generated tokens, the one that stopped it included.
    pub tokens: Vec<TokenId>,
    /// Logprob of each token in the model's distribution: log-softmax of the raw logits. Always finite.
    pub logprobs: Vec<f32>,
    /// If asked for: logprob of each token in the distribution it was drawn from, after all processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processed_logprobs: Option<Vec<f32>>,
    /// If asked for: the model's likeliest tokens at each position, likeliest first, lower ids first among
    /// equals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<Vec<Vec<TokenLogprob>>>,
    /// If asked for: the tokens that could be drawn at each position, by ascending id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Vec<Vec<TokenId>>>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Prompt tokens whose KV was there already when the sample began to run: from the prefix cache, the group's
    /// prefill or the session. Of the run that gave this output: if it was resumed, or retracted, the last.
    pub cached_tokens: usize,
    /// Which weights made which tokens: ascending, without gaps, all tokens.
    pub versions: Vec<VersionSpan>,
    /// Seed of the random stream.
    pub seed: u64,
}

impl Completion {
    /// Makes a completion without tokens for a sample that is about to start.
    pub(crate) fn start(index: usize, seed: u64, params: &SamplingParams) -> Self {
        Self {
            index,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            processed_logprobs: params.processed_logprobs.then(Vec::new),
            top_logprobs: (params.top_logprobs > 0).then(Vec::new),
            kept: params.return_kept_set.then(Vec::new),
            finish_reason: FinishReason::Abort,
            cached_tokens: 0,
            versions: Vec::new(),
            seed,
        }
    }

    /// Tells why a resumed sample needs no further tokens; `None` if it goes on.
    pub(crate) fn already_finished(&self, params: &SamplingParams) -> Option<FinishReason> {
        match self.finish_reason {
            FinishReason::Stop { .. } => Some(self.finish_reason.clone()),
            _ if self.tokens.len() >= params.max_new_tokens => Some(FinishReason::Length),
            _ => None,
        }
    }
}
