//! When a completion ends by itself.

use crate::completion::StopCause;
use crate::request::{SamplingParams, TokenId};

/// Tells what stops a completion after its last token, if anything does.
///
/// `generated` holds the completion's tokens only: a stop sequence never reaches back into the prompt.
pub(crate) fn stop_cause(
    params: &SamplingParams,
    eos_ids: &[TokenId],
    generated: &[TokenId],
) -> Option<StopCause> {
    let &last = generated.last()?;
    if generated.len() < params.min_new_tokens {
        return None;
    }
    if !params.ignore_eos && eos_ids.contains(&last) {
        return Some(StopCause::Eos(last));
    }
    if params.stop_token_ids.contains(&last) {
        return Some(StopCause::TokenId(last));
    }
    let sequence = params.stop_sequences.iter().position(|sequence| generated.ends_with(sequence))?;
    Some(StopCause::Sequence(sequence))
}
