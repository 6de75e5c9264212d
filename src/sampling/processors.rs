//! What changes logits before temperature and filters: allowed tokens, minimum length, bias, penalties.

use std::collections::HashMap;

use crate::device::LogitChanges;
use crate::request::{SamplingParams, TokenId};

/// The processors of one sequence.
#[derive(Debug)]
pub(super) struct Processors {
    /// Tokens of the prompt and the completion, with their count in the latter; empty if there is no penalty.
    seen: HashMap<TokenId, u32>,
    /// Tokens that would stop the completion; empty if there is no minimum length.
    stops: Vec<TokenId>,
}

impl Processors {
    pub(super) fn new(
        params: &SamplingParams,
        eos_ids: &[TokenId],
        prompt: &[TokenId],
        generated: &[TokenId],
    ) -> Self {
        let mut processors = Self { seen: HashMap::new(), stops: Vec::new() };
        if params.min_new_tokens > 0 {
            let eos_ids = if params.ignore_eos { &[] } else { eos_ids };
            processors.stops = [eos_ids, &params.stop_token_ids].concat();
        }
        if params.penalises() {
            for &token in prompt {
                processors.seen.entry(token).or_default();
            }
            for &token in generated {
                processors.observe(params, token);
            }
        }
        processors
    }

    /// Counts a token that was appended to the completion.
    pub(super) fn observe(&mut self, params: &SamplingParams, token: TokenId) {
        if params.penalises() {
            let generated = self.seen.entry(token).or_default();
            *generated = generated.saturating_add(1);
        }
    }

    /// Tells whether any logit of this token may change.
    pub(super) fn active(&self, params: &SamplingParams, token_index: usize) -> bool {
        params.allowed_tokens.is_some()
            || !params.logit_bias.is_empty()
            || (token_index < params.min_new_tokens && !self.stops.is_empty())
            || !self.seen.is_empty()
    }

    /// What [`apply`](Self::apply) changes, for devices that do it.
    pub(super) fn changes(&self, params: &SamplingParams, token_index: usize) -> LogitChanges {
        let mut biased = params.logit_bias.clone();
        // Stable: those of one token stay in their order.
        biased.sort_by_key(|&(token, _)| token);
        LogitChanges {
            allowed: params.allowed_tokens.clone(),
            banned: if token_index < params.min_new_tokens { self.stops.clone() } else { Vec::new() },
            biased,
            seen: self.seen.iter().map(|(&token, &generated)| (token, generated)).collect(),
            repetition_penalty: params.repetition_penalty,
            frequency_penalty: params.frequency_penalty,
            presence_penalty: params.presence_penalty,
        }
    }

    /// Writes the processed logits: finite, or negative infinity where a token is ruled out.
    pub(super) fn apply(
        &self,
        params: &SamplingParams,
        token_index: usize,
        logits: &[f32],
        processed: &mut Vec<f32>,
    ) {
        processed.clear();
        match &params.allowed_tokens {
            None => processed.extend_from_slice(logits),
            Some(allowed) => {
                processed.resize(logits.len(), f32::NEG_INFINITY);
                for &token in allowed {
                    change(processed, token, |_| logits[token as usize]);
                }
            }
        }
        if token_index < params.min_new_tokens {
            for &token in &self.stops {
                change(processed, token, |_| f32::NEG_INFINITY);
            }
        }
        for &(token, bias) in &params.logit_bias {
            let banned = bias == f32::NEG_INFINITY;
            change(processed, token, |logit| if banned { bias } else { saturate(logit, logit + bias) });
        }
        // Each entry changes a logit of its own, so the map's order is of no account.
        for (&token, &generated) in &self.seen {
            change(processed, token, |logit| penalise(params, logit, generated));
        }
    }
}

/// Changes the logit of a token that the vocabulary has.
fn change(processed: &mut [f32], token: TokenId, new: impl FnOnce(f32) -> f32) {
    if let Some(logit) = processed.get_mut(token as usize) {
        *logit = new(*logit);
    }
}

/// Keeps a finite logit finite and a ruled-out token ruled out, however extreme the request's numbers.
fn saturate(before: f32, after: f32) -> f32 {
    if before == f32::NEG_INFINITY { before } else { after.clamp(f32::MIN, f32::MAX) }
}

/// Penalises a token that the sequence has; `generated` counts it in the completion.
fn penalise(params: &SamplingParams, logit: f32, generated: u32) -> f32 {
    let repetition = params.repetition_penalty;
    let repeated = if logit > 0.0 { logit / repetition } else { logit * repetition };
    let repeated = saturate(logit, repeated);
    if generated == 0 {
        return repeated;
    }
    saturate(repeated, repeated - params.frequency_penalty * generated as f32 - params.presence_penalty)
}
