//! Checks a request against the limits of an engine.
//!
//! Lengths come before contents, so a hostile list costs nothing.

use super::{Request, RequestError, SamplingParams, TokenId, TokenList};
use crate::completion::{Completion, VersionSpan};

/// What an engine can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Most tokens of a sequence, prompt and completion together.
    pub max_model_len: usize,
}

impl RequestLimits {
    fn check_tokens(&self, list: TokenList, tokens: &[TokenId]) -> Result<(), RequestError> {
        match tokens.iter().position(|&token| token as usize >= self.vocab_size) {
            None => Ok(()),
            Some(index) => Err(RequestError::TokenOutOfVocabulary {
                list,
                index,
                token: tokens[index],
                vocab_size: self.vocab_size,
            }),
        }
    }
}

fn check_len(list: TokenList, len: usize, limit: usize) -> Result<(), RequestError> {
    if len > limit { Err(RequestError::ListTooLong { list, len, limit }) } else { Ok(()) }
}

impl Request {
    /// Checks everything about the request that does not depend on what else is running.
    ///
    /// # Errors
    /// The first thing found to be wrong.
    pub fn validate(&self, limits: &RequestLimits) -> Result<(), RequestError> {
        let params = &self.params;
        check_lengths(self, limits)?;
        check_numbers(params)?;
        if let Some(id) = self.id.as_deref().filter(|id| id.len() > Self::MAX_ID_BYTES) {
            return Err(RequestError::IdTooLong { bytes: id.len(), limit: Self::MAX_ID_BYTES });
        }
        if let Some(salt) = self.cache_salt.as_deref().filter(|s| s.len() > Self::MAX_CACHE_SALT_BYTES) {
            return Err(RequestError::SaltTooLong { bytes: salt.len(), limit: Self::MAX_CACHE_SALT_BYTES });
        }
        check_lists(params, limits)?;
        limits.check_tokens(TokenList::Prompt, &self.prompt)?;
        let mut next_index = 0;
        for (position, carried) in self.resume.iter().flatten().enumerate() {
            if carried.index < next_index || carried.index >= params.samples {
                let samples = params.samples;
                return Err(RequestError::ResumeIndex { position, index: carried.index, samples });
            }
            next_index = carried.index + 1;
            check_carried(carried, params, limits)?;
        }
        Ok(())
    }
}

fn check_lengths(request: &Request, limits: &RequestLimits) -> Result<(), RequestError> {
    let &SamplingParams { samples, max_new_tokens, min_new_tokens, .. } = &request.params;
    let prompt_tokens = request.prompt.len();
    if prompt_tokens == 0 {
        return Err(RequestError::EmptyPrompt);
    }
    let max_model_len = limits.max_model_len;
    if prompt_tokens.checked_add(max_new_tokens).is_none_or(|total| total > max_model_len) {
        return Err(RequestError::TooLong { prompt_tokens, max_new_tokens, max_model_len });
    }
    if samples == 0 || samples > Request::MAX_SAMPLES {
        return Err(RequestError::SampleCount { samples, limit: Request::MAX_SAMPLES });
    }
    if max_new_tokens == 0 && !request.params.prompt_logprobs {
        return Err(RequestError::NothingToDo);
    }
    if min_new_tokens > max_new_tokens {
        return Err(RequestError::MinOverMax { min_new_tokens, max_new_tokens });
    }
    Ok(())
}

fn check_numbers(params: &SamplingParams) -> Result<(), RequestError> {
    let ok = |good: bool, error: RequestError| if good { Ok(()) } else { Err(error) };
    let value = params.temperature;
    ok(value.is_finite() && value >= 0.0, RequestError::Temperature { value })?;
    let value = params.top_p;
    ok(value > 0.0 && value <= 1.0, RequestError::TopP { value })?;
    let value = params.min_p;
    ok((0.0..=1.0).contains(&value), RequestError::MinP { value })?;
    let value = params.repetition_penalty;
    ok(value.is_finite() && value > 0.0, RequestError::RepetitionPenalty { value })?;
    let value = params.presence_penalty;
    ok(value.is_finite(), RequestError::PresencePenalty { value })?;
    let value = params.frequency_penalty;
    ok(value.is_finite(), RequestError::FrequencyPenalty { value })?;
    let count = params.top_logprobs;
    let limit = Request::MAX_TOP_LOGPROBS;
    ok(count <= limit, RequestError::TopLogprobs { count, limit })
}

fn check_lists(params: &SamplingParams, limits: &RequestLimits) -> Result<(), RequestError> {
    check_len(TokenList::StopTokenIds, params.stop_token_ids.len(), Request::MAX_STOP_TOKEN_IDS)?;
    check_len(TokenList::StopSequences, params.stop_sequences.len(), Request::MAX_STOP_SEQUENCES)?;
    check_len(TokenList::LogitBias, params.logit_bias.len(), Request::MAX_LOGIT_BIAS)?;
    limits.check_tokens(TokenList::StopTokenIds, &params.stop_token_ids)?;
    for (index, sequence) in params.stop_sequences.iter().enumerate() {
        let (len, limit) = (sequence.len(), Request::MAX_STOP_SEQUENCE_TOKENS);
        if len == 0 || len > limit {
            return Err(RequestError::StopSequenceLength { index, len, limit });
        }
        limits.check_tokens(TokenList::StopSequences, sequence)?;
    }
    for (index, &(token, value)) in params.logit_bias.iter().enumerate() {
        if token as usize >= limits.vocab_size {
            let (list, vocab_size) = (TokenList::LogitBias, limits.vocab_size);
            return Err(RequestError::TokenOutOfVocabulary { list, index, token, vocab_size });
        }
        if value.is_nan() || value == f32::INFINITY {
            return Err(RequestError::LogitBias { token, value });
        }
    }
    match params.allowed_tokens.as_deref() {
        None => Ok(()),
        Some([]) => Err(RequestError::NoAllowedTokens),
        Some(tokens) => {
            check_len(TokenList::AllowedTokens, tokens.len(), limits.vocab_size)?;
            limits.check_tokens(TokenList::AllowedTokens, tokens)
        }
    }
}

/// Checks what an earlier run, possibly after a journey, says it produced.
fn check_carried(
    carried: &Completion,
    params: &SamplingParams,
    limits: &RequestLimits,
) -> Result<(), RequestError> {
    let (index, tokens) = (carried.index, carried.tokens.len());
    if tokens > params.max_new_tokens {
        return Err(RequestError::ResumeTooLong { index, tokens, max_new_tokens: params.max_new_tokens });
    }
    let length = |field: &'static str, len: usize| {
        if len == tokens { Ok(()) } else { Err(RequestError::ResumeLength { index, field, len, tokens }) }
    };
    let optional = |field: &'static str, wanted: bool, len: Option<usize>| {
        if wanted != len.is_some() {
            return Err(RequestError::ResumeField { index, field, wanted });
        }
        length(field, len.unwrap_or(tokens))
    };
    length("logprobs", carried.logprobs.len())?;
    let processed = carried.processed_logprobs.as_deref();
    optional("processed_logprobs", params.processed_logprobs, processed.map(<[f32]>::len))?;
    optional("top_logprobs", params.top_logprobs > 0, carried.top_logprobs.as_ref().map(Vec::len))?;
    optional("kept", params.return_kept_set, carried.kept.as_ref().map(Vec::len))?;
    for logprobs in [Some(carried.logprobs.as_slice()), processed].into_iter().flatten() {
        if let Some(position) = logprobs.iter().position(|logprob| !logprob.is_finite() || *logprob > 0.0) {
            return Err(RequestError::ResumeLogprob { index, position, value: logprobs[position] });
        }
    }
    VersionSpan::check_cover(&carried.versions, tokens).map_err(|covered| RequestError::ResumeVersions {
        index,
        covered,
        tokens,
    })?;
    limits.check_tokens(TokenList::Resume, &carried.tokens)
}
