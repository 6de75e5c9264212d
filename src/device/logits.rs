//! What the engine wants to know of logits, so that a device can find it out where they are.
//!
//! A device's answer and what the host finds in the same logits lead to the same bits, so it is of no account who
//! looked at a row.

use super::cpu::log_of_sum;

/// What is wanted of one row of logits.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct RowQuery {
    /// A token whose logit is wanted.
    pub(crate) token: Option<u32>,
    /// How many of the greatest logits are wanted, of those above negative infinity.
    pub(crate) top: usize,
    /// What to draw.
    pub(crate) draw: Option<DrawQuery>,
}

/// Draws from one distribution.
///
/// Scaled logits are `(logit - greatest) / temperature`, after the changes; a token's weight is the exponential of its
/// scaled logit as a fixed-point number. The filters follow each other, and sort tokens by higher logit, then lower id.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DrawQuery {
    /// What comes first.
    pub(crate) changes: LogitChanges,
    /// 0: the first token is drawn.
    pub(crate) temperature: f32,
    /// Tokens with a scaled logit below this are dropped.
    pub(crate) least_scaled: f32,
    /// Of the others all but the first so many are dropped; 0 drops none.
    pub(crate) top_k: usize,
    /// Of the others the shortest beginning whose weight reaches so much of theirs is left; all if it is 1.
    pub(crate) top_p: f32,
    /// 64 random bits for each draw: the weights are laid end to end in the order of ids, and the token at this
    /// share of their sum is drawn.
    pub(crate) random: Vec<u64>,
    /// Whether the tokens that are left are wanted; not if the temperature is 0.
    pub(crate) kept: bool,
}

/// Changes of logits, each kind after the one before. Tokens that the vocabulary doesn't have are passed over.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct LogitChanges {
    /// If there is such a list, all other tokens are ruled out.
    pub(crate) allowed: Option<Vec<u32>>,
    /// Ruled out.
    pub(crate) banned: Vec<u32>,
    /// Additions to logits, by ascending token, those of one token in their order; negative infinity rules out.
    pub(crate) biased: Vec<(u32, f32)>,
    /// Tokens that are penalised, each once, with their count in the completion.
    pub(crate) seen: Vec<(u32, u32)>,
    pub(crate) repetition_penalty: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) presence_penalty: f32,
}

/// A token and its logit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct TokenLogit {
    pub(crate) token: u32,
    pub(crate) logit: f32,
}

/// A token that was drawn.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct DrawnToken {
    pub(crate) token: u32,
    pub(crate) logit: f32,
    /// The logit after the changes.
    pub(crate) changed: f32,
}

/// What a device found in a row.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct RowAnswer {
    /// Whether the logits are a distribution: no NaN, no positive infinity, not all negative infinity. If they are
    /// not, nothing else was found.
    pub(crate) sound: bool,
    pub(crate) greatest: f32,
    /// The sum of `exp(logit - greatest)`, added up as in `log_sum_exp`.
    pub(crate) exps: f32,
    /// Of the token that was asked for.
    pub(crate) token_logit: f32,
    /// The greatest logits, in no particular order.
    pub(crate) top: Vec<TokenLogit>,
    /// Whether the changes left a token to draw. If not, what follows was not found.
    pub(crate) possible: bool,
    /// After the changes; never the negative zero.
    pub(crate) greatest_changed: f32,
    /// The weight of the tokens that the filters leave, if the temperature is not 0.
    pub(crate) weight: u64,
    /// In the order of the random bits.
    pub(crate) drawn: Vec<DrawnToken>,
    /// The tokens that the filters leave, by ascending id, if they are wanted and the temperature is not 0.
    pub(crate) kept: Vec<u32>,
}

impl RowAnswer {
    /// As `log_sum_exp` of the logits: not finite if they are not a distribution.
    pub(crate) fn log_sum_exp(&self) -> f32 {
        if self.sound { log_of_sum(self.greatest, self.exps) } else { f32::NAN }
    }
}

/// Takes in rows of logits, each once, on several threads at once: the logits, or what a device found in them.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU device has the logits at hand"))]
pub(crate) trait LogitsReader: Sync {
    /// What is wanted of a row.
    fn query(&self, row: usize) -> RowQuery;

    /// Takes in the answer to the query.
    fn take_answer(&self, row: usize, answer: &RowAnswer);

    /// Takes in the logits, from devices that don't answer the query.
    fn take_logits(&self, row: usize, logits: &[f32]);
}
