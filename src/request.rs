//! What a caller asks for: a prompt, how to sample, and optionally where an aborted run had got to.

mod error;
mod params;
mod validate;
mod wire;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::completion::{Completion, RequestOutput};
pub use error::{RequestError, TokenList};
pub use params::SamplingParams;
pub use validate::RequestLimits;

/// Id of one token, an index into the model's vocabulary.
pub type TokenId = u32;

/// One prompt and how to continue it.
///
/// Nothing is checked while a request is built or parsed: the engine validates it when it is submitted,
/// against its own vocabulary and context length.
///
/// In JSON the sampling parameters stand beside the prompt, under vLLM's names: `{"prompt": [1, 2], "n": 4,
/// "max_new_tokens": 48, "temperature": 0.7}`. Unknown names are errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use = "a request does nothing until an engine gets it"]
pub struct Request {
    /// Token ids to continue.
    pub prompt: Vec<TokenId>,
    /// The caller's own name for the request, given back in the output; unique among live requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Keeps the prefix cache of this request apart from that of requests with another salt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Whether each token is handed out by the step after it was sampled, see
    /// [`StepOutput::tokens`](crate::StepOutput::tokens); for submitted requests only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stream: bool,
    /// How to sample. In JSON its fields stand beside `prompt`.
    #[serde(flatten)]
    pub params: SamplingParams,
    /// What earlier runs of this request produced, by ascending sample index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) resume: Option<Vec<Completion>>,
}

impl Request {
    /// Most samples of one prompt.
    pub const MAX_SAMPLES: usize = 1024;
    /// Most entries of `stop_token_ids`.
    pub const MAX_STOP_TOKEN_IDS: usize = 4096;
    /// Most stop sequences.
    pub const MAX_STOP_SEQUENCES: usize = 256;
    /// Most tokens of one stop sequence.
    pub const MAX_STOP_SEQUENCE_TOKENS: usize = 256;
    /// Most entries of `logit_bias`.
    pub const MAX_LOGIT_BIAS: usize = 4096;
    /// Most alternatives reported for each token.
    pub const MAX_TOP_LOGPROBS: usize = 256;
    /// Most bytes of the cache salt.
    pub const MAX_CACHE_SALT_BYTES: usize = 256;
    /// Most bytes of the caller's id.
    pub const MAX_ID_BYTES: usize = 256;

    /// Makes a request with the default parameters: one sample of 16 tokens at temperature 1.
    pub fn new(prompt: impl Into<Vec<TokenId>>) -> Self {
        Self {
            prompt: prompt.into(),
            id: None,
            cache_salt: None,
            stream: false,
            params: SamplingParams::default(),
            resume: None,
        }
    }

    /// Replaces all sampling parameters.
    pub fn params(mut self, params: SamplingParams) -> Self {
        self.params = params;
        self
    }

    /// Sets how many samples of the prompt to draw.
    pub fn samples(mut self, samples: usize) -> Self {
        self.params.samples = samples;
        self
    }

    /// Sets the most tokens of one completion, those of earlier runs included.
    pub fn max_new_tokens(mut self, tokens: usize) -> Self {
        self.params.max_new_tokens = tokens;
        self
    }

    /// Sets how many tokens come before anything may stop a completion.
    pub fn min_new_tokens(mut self, tokens: usize) -> Self {
        self.params.min_new_tokens = tokens;
        self
    }

    /// Sets the temperature; 0 is greedy.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.params.temperature = temperature;
        self
    }

    /// Keeps the `top_k` likeliest tokens; 0 keeps all.
    pub fn top_k(mut self, top_k: usize) -> Self {
        self.params.top_k = top_k;
        self
    }

    /// Keeps the likeliest tokens that together reach this probability; 1 keeps all.
    pub fn top_p(mut self, top_p: f32) -> Self {
        self.params.top_p = top_p;
        self
    }

    /// Keeps tokens at least `min_p` times as likely as the likeliest; 0 keeps all.
    pub fn min_p(mut self, min_p: f32) -> Self {
        self.params.min_p = min_p;
        self
    }

    /// Sets the seed; without one the engine picks it and reports it in each completion.
    pub fn seed(mut self, seed: u64) -> Self {
        self.params.seed = Some(seed);
        self
    }

    /// Sets tokens that end a completion, besides the model's own end tokens.
    pub fn stop_token_ids(mut self, tokens: impl Into<Vec<TokenId>>) -> Self {
        self.params.stop_token_ids = tokens.into();
        self
    }

    /// Sets token sequences that end a completion when its generated tokens end with one of them.
    pub fn stop_sequences(mut self, sequences: Vec<Vec<TokenId>>) -> Self {
        self.params.stop_sequences = sequences;
        self
    }

    /// Sets whether the model's own end tokens are ordinary tokens.
    pub fn ignore_eos(mut self, ignore: bool) -> Self {
        self.params.ignore_eos = ignore;
        self
    }

    /// Sets the penalty for tokens seen in the prompt or the completion; 1 is none.
    pub fn repetition_penalty(mut self, penalty: f32) -> Self {
        self.params.repetition_penalty = penalty;
        self
    }

    /// Sets what is taken from the logit of a token the completion already has; 0 is none.
    pub fn presence_penalty(mut self, penalty: f32) -> Self {
        self.params.presence_penalty = penalty;
        self
    }

    /// Sets what is taken from the logit of a token for each time the completion has it; 0 is none.
    pub fn frequency_penalty(mut self, penalty: f32) -> Self {
        self.params.frequency_penalty = penalty;
        self
    }

    /// Sets what is added to logits; negative infinity bans a token.
    pub fn logit_bias(mut self, bias: Vec<(TokenId, f32)>) -> Self {
        self.params.logit_bias = bias;
        self
    }

    /// Restricts sampling to these tokens.
    pub fn allowed_tokens(mut self, tokens: impl Into<Vec<TokenId>>) -> Self {
        self.params.allowed_tokens = Some(tokens.into());
        self
    }

    /// Accepts the usual switch for logprobs of chosen tokens. They are given whatever it says.
    pub fn logprobs(mut self, logprobs: bool) -> Self {
        self.params.logprobs = logprobs;
        self
    }

    /// Sets whether to give each token's logprob in the distribution it was drawn from, too.
    pub fn processed_logprobs(mut self, give: bool) -> Self {
        self.params.processed_logprobs = give;
        self
    }

    /// Sets how many of the model's likeliest tokens to report at each position.
    pub fn top_logprobs(mut self, count: usize) -> Self {
        self.params.top_logprobs = count;
        self
    }

    /// Sets whether to give the tokens that sampling could choose from at each position.
    pub fn return_kept_set(mut self, give: bool) -> Self {
        self.params.return_kept_set = give;
        self
    }

    /// Sets whether to score the prompt; with `max_new_tokens(0)` nothing else is done.
    pub fn prompt_logprobs(mut self, give: bool) -> Self {
        self.params.prompt_logprobs = give;
        self
    }

    /// Sets the salt of the prefix cache.
    pub fn cache_salt(mut self, salt: impl Into<String>) -> Self {
        self.cache_salt = Some(salt.into());
        self
    }

    /// Sets whether tokens are handed out as they are sampled.
    pub fn stream(mut self, stream: bool) -> Self {
        self.stream = stream;
        self
    }

    /// Sets the caller's own name for the request.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Makes a copy of this request that goes on where `partial` ended.
    ///
    /// Each sample keeps its tokens, logprobs, version spans, index and seed, so it draws from the random
    /// stream it would have drawn from uninterrupted. `max_new_tokens` still counts from the first token. A
    /// sample that stopped stays as it is; one that had reached a smaller `max_new_tokens`, was aborted or
    /// failed goes on. Samples missing from `partial` start anew. Logprobs of the prompt are computed again.
    ///
    /// `partial` must come from a request with the same prompt and the same optional outputs; the rest of the
    /// checks are made at submission, since a partial may have travelled.
    ///
    /// # Errors
    /// [`RequestError::ResumePrompt`] if `partial` continues another prompt.
    pub fn resume(&self, partial: &RequestOutput) -> Result<Self, RequestError> {
        if self.prompt != partial.prompt {
            let same = self.prompt.iter().zip(&partial.prompt).take_while(|(a, b)| a == b).count();
            return Err(RequestError::ResumePrompt { index: same });
        }
        let mut request = self.clone();
        request.resume = Some(partial.completions.clone());
        Ok(request)
    }

    /// Finds what earlier runs produced for one sample.
    pub(crate) fn carried(&self, sample: usize) -> Option<&Completion> {
        let carried = self.resume.as_deref()?;
        carried.binary_search_by_key(&sample, |completion| completion.index).ok().map(|at| &carried[at])
    }
}
