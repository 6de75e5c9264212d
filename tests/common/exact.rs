//! Everything of an output that must be the same bits between any two runs, in a form that shows what differs.

#![allow(dead_code, reason = "each test binary uses a part")]

use dormouse::{Completion, FinishReason, RequestOutput, TokenId, TokenLogprob};

/// All numbers of a sample, as bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exact {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) logprobs: Vec<u32>,
    pub(crate) processed: Option<Vec<u32>>,
    pub(crate) top: Option<Vec<Vec<(TokenId, u32)>>>,
    pub(crate) kept: Option<Vec<Vec<TokenId>>>,
    pub(crate) finish_reason: FinishReason,
}

/// The logprobs' bits.
pub(crate) fn to_bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The alternatives of one position.
pub(crate) fn top_to_bits(row: &[TokenLogprob]) -> Vec<(TokenId, u32)> {
    row.iter().map(|top| (top.token, top.logprob.to_bits())).collect()
}

pub(crate) fn completion(completion: &Completion) -> Exact {
    let top = completion.top_logprobs.as_ref();
    Exact {
        tokens: completion.tokens.clone(),
        logprobs: to_bits(&completion.logprobs),
        processed: completion.processed_logprobs.as_deref().map(to_bits),
        top: top.map(|rows| rows.iter().map(|row| top_to_bits(row)).collect()),
        kept: completion.kept.clone(),
        finish_reason: completion.finish_reason.clone(),
    }
}

/// The prompt's logprobs and each sample.
pub(crate) fn output(output: &RequestOutput) -> (Option<Vec<u32>>, Vec<Exact>) {
    (output.prompt_logprobs.as_deref().map(to_bits), output.completions.iter().map(completion).collect())
}

/// Fails with the first request whose output is other bits.
pub(crate) fn assert_same(what: &str, outputs: &[RequestOutput], expected: &[RequestOutput]) {
    assert_eq!(outputs.len(), expected.len(), "{what}: one output for each request");
    for (i, (got, expected)) in outputs.iter().zip(expected).enumerate() {
        assert_eq!(got.prompt, expected.prompt, "{what}: outputs come in the order of the requests");
        assert_eq!(output(got), output(expected), "{what}: request {i}");
    }
}
