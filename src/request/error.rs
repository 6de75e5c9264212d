//! Why a request is refused.

use std::fmt;

use super::TokenId;

/// A list of tokens, or of lists of tokens, in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TokenList {
    /// The prompt.
    Prompt,
    /// `stop_token_ids`.
    StopTokenIds,
    /// `stop_sequences`.
    StopSequences,
    /// `logit_bias`.
    LogitBias,
    /// `allowed_tokens`.
    AllowedTokens,
    /// The tokens of a sample that is resumed.
    Resume,
}

impl fmt::Display for TokenList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TokenList::Prompt => "prompt",
            TokenList::StopTokenIds => "stop_token_ids",
            TokenList::StopSequences => "stop_sequences",
            TokenList::LogitBias => "logit_bias",
            TokenList::AllowedTokens => "allowed_token_ids",
            TokenList::Resume => "resume",
        })
    }
}

/// Why a request is refused. The engine and all other requests are unaffected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The model has no such token.
    #[error("token {token} at index {index} of {list} is outside the vocabulary of {vocab_size}")]
    TokenOutOfVocabulary {
        /// Where the token stands.
        list: TokenList,
        /// Index in the list; for a stop sequence or a resumed sample, in that one.
        index: usize,
        /// The token.
        token: TokenId,
        /// Number of tokens in the model's vocabulary.
        vocab_size: usize,
    },
    /// The longest completion would not fit the context.
    #[error(
        "{prompt_tokens} prompt tokens and {max_new_tokens} new ones exceed max_model_len {max_model_len}"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Most new tokens.
        max_new_tokens: usize,
        /// Most tokens of a sequence.
        max_model_len: usize,
    },
    /// A session's turn has one sample: its history goes on from it.
    #[error("a session's turn has 1 sample, not {samples}")]
    SessionSamples {
        /// Samples asked for.
        samples: usize,
    },
    /// The number of samples is 0 or too large.
    #[error("n is {samples}, not 1 to {limit}")]
    SampleCount {
        /// Samples asked for.
        samples: usize,
        /// Most samples.
        limit: usize,
    },
    /// `max_new_tokens` is 0 and the prompt is not to be scored.
    #[error("max_new_tokens is 0 and prompt_logprobs is off: nothing to do")]
    NothingToDo,
    /// The minimum length exceeds the maximum.
    #[error("min_new_tokens {min_new_tokens} exceeds max_new_tokens {max_new_tokens}")]
    MinOverMax {
        /// Least new tokens.
        min_new_tokens: usize,
        /// Most new tokens.
        max_new_tokens: usize,
    },
    /// The temperature is negative or not finite.
    #[error("temperature is {value}, not finite and at least 0")]
    Temperature {
        /// The temperature.
        value: f32,
    },
    /// `top_p` is out of range.
    #[error("top_p is {value}, not above 0 and at most 1")]
    TopP {
        /// The value.
        value: f32,
    },
    /// `min_p` is out of range.
    #[error("min_p is {value}, not 0 to 1")]
    MinP {
        /// The value.
        value: f32,
    },
    /// The repetition penalty is not positive or not finite.
    #[error("repetition_penalty is {value}, not finite and above 0")]
    RepetitionPenalty {
        /// The penalty.
        value: f32,
    },
    /// The presence penalty is not finite.
    #[error("presence_penalty is {value}, not finite")]
    PresencePenalty {
        /// The penalty.
        value: f32,
    },
    /// The frequency penalty is not finite.
    #[error("frequency_penalty is {value}, not finite")]
    FrequencyPenalty {
        /// The penalty.
        value: f32,
    },
    /// A bias is not a number or positive infinity.
    #[error("logit_bias of token {token} is {value}, not finite or negative infinity")]
    LogitBias {
        /// The token.
        token: TokenId,
        /// Its bias.
        value: f32,
    },
    /// A list has too many entries; they have not been looked at.
    #[error("{list} has {len} entries, more than {limit}")]
    ListTooLong {
        /// The list.
        list: TokenList,
        /// Its entries.
        len: usize,
        /// Most entries.
        limit: usize,
    },
    /// A stop sequence is empty or too long.
    #[error("stop sequence {index} has {len} tokens, not 1 to {limit}")]
    StopSequenceLength {
        /// Which sequence.
        index: usize,
        /// Its tokens.
        len: usize,
        /// Most tokens.
        limit: usize,
    },
    /// The list of allowed tokens is given but empty.
    #[error("allowed_token_ids is empty: no token could be sampled")]
    NoAllowedTokens,
    /// Too many alternatives are asked for.
    #[error("top_logprobs is {count}, more than {limit}")]
    TopLogprobs {
        /// Alternatives asked for.
        count: usize,
        /// Most alternatives.
        limit: usize,
    },
    /// The cache salt is too long.
    #[error("cache_salt has {bytes} bytes, more than {limit}")]
    SaltTooLong {
        /// Bytes of the salt.
        bytes: usize,
        /// Most bytes.
        limit: usize,
    },
    /// The caller's id is too long.
    #[error("id has {bytes} bytes, more than {limit}")]
    IdTooLong {
        /// Bytes of the id.
        bytes: usize,
        /// Most bytes.
        limit: usize,
    },
    /// The output to resume continues another prompt.
    #[error("the output to resume has another prompt, from token {index} on")]
    ResumePrompt {
        /// The first index at which the prompts differ.
        index: usize,
    },
    /// The resumed samples are not in ascending order, or one is not among those asked for.
    #[error("resumed sample {index} at position {position} is out of order or not below n = {samples}")]
    ResumeIndex {
        /// Position in the list of resumed samples.
        position: usize,
        /// The sample's index.
        index: usize,
        /// Samples asked for.
        samples: usize,
    },
    /// A resumed sample is longer than a completion may be.
    #[error("resumed sample {index} has {tokens} tokens, more than max_new_tokens {max_new_tokens}")]
    ResumeTooLong {
        /// The sample.
        index: usize,
        /// Its tokens.
        tokens: usize,
        /// Most new tokens.
        max_new_tokens: usize,
    },
    /// A resumed sample lacks an optional output that the request asks for, or has one it does not.
    #[error("resumed sample {index} and the request disagree about {field} (asked for: {wanted})")]
    ResumeField {
        /// The sample.
        index: usize,
        /// The output.
        field: &'static str,
        /// Whether the request asks for it.
        wanted: bool,
    },
    /// An output of a resumed sample does not have one value for each token.
    #[error("resumed sample {index} has {tokens} tokens but {len} entries of {field}")]
    ResumeLength {
        /// The sample.
        index: usize,
        /// The output.
        field: &'static str,
        /// Its entries.
        len: usize,
        /// The sample's tokens.
        tokens: usize,
    },
    /// A logprob of a resumed sample is not finite.
    #[error("resumed sample {index} has logprob {value} at token {position}")]
    ResumeLogprob {
        /// The sample.
        index: usize,
        /// Which token.
        position: usize,
        /// Its logprob.
        value: f32,
    },
    /// The version spans of a resumed sample do not cover its tokens once, in order.
    #[error("the version spans of resumed sample {index} cover {covered} of its {tokens} tokens in order")]
    ResumeVersions {
        /// The sample.
        index: usize,
        /// Tokens covered before the first gap, overlap or excess.
        covered: usize,
        /// The sample's tokens.
        tokens: usize,
    },
    /// The sequence needs more blocks than the whole cache has.
    #[error("needs {needed_blocks} KV blocks, the cache has {total_blocks}")]
    NeverFits {
        /// Blocks the longest completion needs.
        needed_blocks: usize,
        /// Blocks of the cache.
        total_blocks: usize,
    },
    /// A live request has this id.
    #[error("a live request has the id {id:?}")]
    DuplicateId {
        /// The id.
        id: String,
    },
}
