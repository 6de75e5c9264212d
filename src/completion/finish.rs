//! Why a completion ended.

use serde::{Deserialize, Serialize};

use crate::request::TokenId;

/// Why a completion ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// The model or a stop condition ended it.
    Stop {
        /// Which one.
        by: StopCause,
    },
    /// It has `max_new_tokens` tokens.
    Length,
    /// It was aborted; the tokens are those it had, and it can be resumed.
    Abort,
    /// It failed; the tokens are those it had.
    Error(CompletionError),
}

impl FinishReason {
    /// Gives the reason's usual short name.
    pub fn as_str(&self) -> &'static str {
        match self {
            FinishReason::Stop { .. } => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error(_) => "error",
        }
    }
}

impl std::fmt::Display for FinishReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What stopped a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StopCause {
    /// One of the model's own end tokens.
    Eos(TokenId),
    /// One of the request's `stop_token_ids`.
    TokenId(TokenId),
    /// The stop sequence with this index.
    Sequence(usize),
}

/// Why one completion failed. Other requests and the engine are unaffected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "error", rename_all = "snake_case")]
#[non_exhaustive]
pub enum CompletionError {
    /// The model gave logits that are not a distribution: NaN, positive infinity, or all negative infinity.
    #[error("the logits at position {position} are not finite")]
    NonFiniteLogits {
        /// Position in the sequence, prompt included.
        position: usize,
    },
    /// Allowed tokens, bias and minimum length together leave no token.
    #[error("the request's own restrictions leave no token at position {position}")]
    NothingAllowed {
        /// Position in the sequence, prompt included.
        position: usize,
    },
    /// The KV cache could not hold the sequence any longer.
    #[error("needs {needed_blocks} KV blocks, {available_blocks} available")]
    NoCapacity {
        /// Blocks it needs.
        needed_blocks: usize,
        /// Blocks there are for it.
        available_blocks: usize,
    },
}
