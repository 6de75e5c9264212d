//! How to sample.

use serde::{Deserialize, Serialize};

use super::{TokenId, wire};

/// How to continue a prompt: length, stops, sampling, and what to report.
///
/// The processors run in vLLM's order: allowed tokens, minimum length, bias, penalties, temperature, `min_p`,
/// `top_k`, `top_p`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct SamplingParams {
    /// Completions to draw; `n` in JSON. Default 1.
    #[serde(rename = "n", alias = "samples")]
    pub samples: usize,
    /// Most tokens of one completion. Default 16, as in vLLM.
    #[serde(alias = "max_tokens")]
    pub max_new_tokens: usize,
    /// Tokens before anything may stop a completion. Until then tokens that would stop it are not sampled.
    /// Default 0.
    #[serde(alias = "min_tokens")]
    pub min_new_tokens: usize,
    /// Divides the logits; 0 is greedy. Default 1.
    pub temperature: f32,
    /// Keeps exactly this many tokens, lower ids first among equals; 0 (or -1 in JSON) keeps all. Default 0.
    #[serde(deserialize_with = "wire::top_k")]
    pub top_k: usize,
    /// Keeps the shortest run of the likeliest tokens whose probability reaches this; 1 keeps all. Default 1.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the likeliest; 0 keeps all. Default 0.
    pub min_p: f32,
    /// Seed of the random stream. Default none: the engine picks one and reports it.
    pub seed: Option<u64>,
    /// Tokens that end a completion, besides the model's own end tokens.
    pub stop_token_ids: Vec<TokenId>,
    /// Token sequences that end a completion whose generated tokens end with one of them.
    pub stop_sequences: Vec<Vec<TokenId>>,
    /// Whether the model's own end tokens are ordinary tokens. Default false.
    pub ignore_eos: bool,
    /// Divides positive and multiplies negative logits of tokens in the prompt or completion. Default 1.
    pub repetition_penalty: f32,
    /// Taken from the logit of a token the completion has. Default 0.
    pub presence_penalty: f32,
    /// Taken from the logit of a token for each time the completion has it. Default 0.
    pub frequency_penalty: f32,
    /// Added to logits, in order; negative infinity bans a token. In JSON a map from token id to bias or a
    /// list of pairs, with `null` for negative infinity.
    #[serde(with = "wire::logit_bias")]
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The only tokens to sample, if given; `allowed_token_ids` in JSON.
    #[serde(rename = "allowed_token_ids", alias = "allowed_tokens")]
    pub allowed_tokens: Option<Vec<TokenId>>,
    /// Accepted for compatibility: the logprob of each chosen token is given whatever this says. Default
    /// true.
    pub logprobs: bool,
    /// Whether to give each token's logprob in the distribution it was drawn from, too. Default false.
    pub processed_logprobs: bool,
    /// How many of the model's likeliest tokens to report at each position. Default 0.
    pub top_logprobs: usize,
    /// Whether to give the tokens that sampling could choose from at each position. Without `top_k`, `top_p`,
    /// `min_p` or `allowed_tokens` that is the whole vocabulary, each time. Default false.
    pub return_kept_set: bool,
    /// Whether to give the logprobs of the prompt's tokens. Default false.
    #[serde(alias = "score")]
    pub prompt_logprobs: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            samples: 1,
            max_new_tokens: 16,
            min_new_tokens: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            stop_token_ids: Vec::new(),
            stop_sequences: Vec::new(),
            ignore_eos: false,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_tokens: None,
            logprobs: true,
            processed_logprobs: false,
            top_logprobs: 0,
            return_kept_set: false,
            prompt_logprobs: false,
        }
    }
}

impl SamplingParams {
    /// Tells whether tokens already seen change the logits.
    pub(crate) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}
