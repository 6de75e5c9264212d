//! The answer in one piece.

use std::io::Write as _;

use axum::response::Response;
use dormouse::TokenId;

use super::plan::Show;
use super::write::{Part, Writer, list, weight_version};
use super::{ApiError, json_response};
use crate::app::App;
use crate::flow::{Choice, Flow, Why};

/// Answers with what came of all choices. If all failed it is a failure.
///
/// # Errors
/// How the first choice failed, if all did.
pub fn response(
    app: &App,
    mut flow: Flow,
    writer: &Writer,
    show: &Show,
    prompts: &[Vec<TokenId>],
) -> Result<Response, ApiError> {
    let samples = flow.samples();
    let choices = flow.choices();
    if let Some(error) = failure(choices) {
        return Err(error);
    }
    let mut out = Vec::new();
    writer.begin(&mut out);
    let mut choices_out = Vec::new();
    list(&mut choices_out, choices.iter().enumerate(), |out, (index, choice)| {
        let prompt = show.prompt_ids.then(|| prompts[index / samples].as_slice());
        let (piece, end) = (&choice.piece, choice.end.as_ref());
        writer.choice(out, &Part { index, piece, end, text_offset: 0, prompt });
    });
    // The head opens the list already, and its end closes it.
    out.extend_from_slice(&choices_out[1..choices_out.len() - 1]);
    let mut more = Vec::new();
    usage(choices, samples, prompts, &mut more);
    let ends = choices.iter().filter_map(|choice| choice.end.as_ref());
    weight_version(ends, || app.handle.state().version, &mut more);
    writer.end(&mut out, &more);
    Ok(json_response(out))
}

/// How the first choice failed, if all did.
pub fn failure(choices: &[Choice]) -> Option<ApiError> {
    let mut errors = choices.iter().map(|choice| match &choice.end.as_ref()?.why {
        Why::Error(error) => Some(error),
        _ => None,
    });
    let first = errors.next()??;
    errors.all(|error| error.is_some()).then(|| ApiError::from(first))
}

/// The member that counts tokens. A prompt counts once, however many samples it has.
pub fn usage(choices: &[Choice], samples: usize, prompts: &[Vec<TokenId>], out: &mut Vec<u8>) {
    let prompt: usize = prompts.iter().map(Vec::len).sum();
    let completion: usize =
        choices.iter().filter_map(|choice| choice.end.as_ref()).map(|end| end.tokens).sum();
    // Samples share their prompt: only what the first of them to run found there was cached before.
    let cached = |group: &[Choice]| {
        group.iter().filter_map(|choice| choice.end.as_ref()).map(|end| end.cached_tokens).min().unwrap_or(0)
    };
    let cached: usize = choices.chunks(samples.max(1)).map(cached).sum();
    let total = prompt + completion;
    let _ = write!(
        out,
        ",\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{completion},\"total_tokens\":{total},\
         \"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}}}"
    );
}
