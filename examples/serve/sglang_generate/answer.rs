//! What came of the choices, as SGLang writes it.

use std::task::{Context, Poll};

use axum::response::Response;
use dormouse::TokenId;
use serde_json::{Value, json};

use super::Show;
use crate::app::App;
use crate::control_answer::version_name;
use crate::flow::{Choice, End, Flow, Piece, Why};
use crate::openai::{self, ApiError, list, put};

/// What a choice has said so far, as JSON, so that each repetition is a copy.
#[derive(Default)]
struct SoFar {
    /// Inside of a string.
    text: Vec<u8>,
    /// Insides of lists.
    ids: Vec<u8>,
    logprobs: Vec<u8>,
    top: Vec<u8>,
    tokens: usize,
    told: bool,
}

impl SoFar {
    fn add(&mut self, app: &App, show: &Show, choice: &Choice) {
        let piece = &choice.piece;
        let mut text = Vec::new();
        put(&mut text, piece.text.as_str());
        self.text.extend_from_slice(&text[1..text.len() - 1]);
        for (index, (&token, &logprob)) in piece.tokens.iter().zip(&piece.logprobs).enumerate() {
            for buffer in [&mut self.ids, &mut self.logprobs, &mut self.top] {
                if self.tokens > 0 {
                    buffer.push(b',');
                }
            }
            self.tokens += 1;
            put(&mut self.ids, &token);
            if show.logprobs {
                put(&mut self.logprobs, &triple(app, show, logprob, token));
            }
            if show.top {
                let top: Vec<_> =
                    piece.top[index].iter().map(|one| triple(app, show, one.logprob, one.token)).collect();
                put(&mut self.top, &top);
            }
        }
    }

    fn write(
        &self,
        out: &mut Vec<u8>,
        app: &App,
        show: &Show,
        prompt: usize,
        end: Option<&End>,
        prompt_logprobs: Option<&[f32]>,
    ) {
        out.extend_from_slice(b"{\"text\":\"");
        out.extend_from_slice(&self.text);
        out.extend_from_slice(b"\",\"output_ids\":[");
        out.extend_from_slice(&self.ids);
        out.extend_from_slice(b"],\"meta_info\":");
        let mut meta = json!({
            "id": show.rids[prompt],
            "finish_reason": end.map(|end| finish(end, self.tokens)),
            "prompt_tokens": show.prompts[prompt].len(),
            "completion_tokens": self.tokens,
            "cached_tokens": end.map_or(0, |end| end.cached_tokens),
        });
        if let Some(end) = end {
            let last = end.versions.last().map(|span| span.version.clone());
            let version = last.or_else(|| app.handle.state().version);
            meta["weight_version"] = json!(version.map(|version| version_name(&version)));
            meta["weight_versions"] = json!(end.versions);
            meta["seed"] = json!(end.seed);
            meta["e2e_latency"] = json!(show.received.elapsed().as_secs_f64());
        }
        if let Some(logprobs) = prompt_logprobs.filter(|_| show.logprobs) {
            let rest = show.prompts[prompt].iter().skip(1).zip(logprobs);
            let first = show.prompts[prompt].first().map(|&token| json!([null, token, null]));
            let rest = rest.map(|(&token, &logprob)| triple(app, show, logprob, token));
            meta["input_token_logprobs"] = first.into_iter().chain(rest).skip(show.from).collect();
        }
        put(out, &meta);
        out.pop();
        let logprobs = show.logprobs.then_some((&b",\"output_token_logprobs\":["[..], &self.logprobs));
        let top = show.top.then_some((&b",\"output_top_logprobs\":["[..], &self.top));
        for (name, list) in logprobs.into_iter().chain(top) {
            out.extend_from_slice(name);
            out.extend_from_slice(list);
            out.push(b']');
        }
        out.extend_from_slice(b"}}");
    }
}

/// `[logprob, id, text]`, the text only if asked for.
fn triple(app: &App, show: &Show, logprob: f32, token: TokenId) -> Value {
    let text = app.text.as_ref().filter(|_| show.texts).map(|text| text.decode(&[token], false));
    json!([logprob, token, text])
}

fn finish(end: &End, tokens: usize) -> Value {
    match &end.why {
        Why::StopString(stop) => json!({"type": "stop", "matched": stop}),
        Why::StopToken(token) => json!({"type": "stop", "matched": token}),
        Why::Length => json!({"type": "length", "length": tokens}),
        Why::Abort => json!({"type": "abort", "message": "the request was aborted"}),
        Why::Error(error) => json!({"type": "abort", "message": error.to_string(), "status_code": 500}),
    }
}

/// Answers in one piece. If all choices failed it is a failure.
///
/// # Errors
/// How the first choice failed, if all did.
pub fn whole(app: &App, mut flow: Flow, show: &Show) -> Result<Response, ApiError> {
    let samples = flow.samples();
    let (choices, scores) = flow.parts();
    if let Some(error) = openai::failure(choices) {
        return Err(error);
    }
    let mut out = Vec::new();
    list(&mut out, choices.iter().enumerate(), |out, (index, choice)| {
        let mut so_far = SoFar::default();
        so_far.add(app, show, choice);
        let prompt = index / samples;
        so_far.write(out, app, show, prompt, choice.end.as_ref(), scores[prompt].as_deref());
    });
    Ok(openai::json_response(if show.many { out } else { out[1..out.len() - 1].to_vec() }))
}

/// Answers in pieces.
pub fn stream(app: App, flow: Flow, show: Show) -> Response {
    let mut answer = Answer { so_far: Vec::new(), app, flow: Some(flow), show };
    openai::event_stream(move |context| answer.poll(context))
}

/// An answer in pieces.
struct Answer {
    app: App,
    /// `None` after the last byte.
    flow: Option<Flow>,
    show: Show,
    so_far: Vec<SoFar>,
}

impl Answer {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        let mut out = Vec::new();
        while out.is_empty() {
            let Some(flow) = &mut self.flow else { return Poll::Ready(None) };
            match flow.poll_step(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(()))) => self.news(&mut out),
                Poll::Ready(Some(Err(error))) => {
                    self.flow = None;
                    return Poll::Ready(Some(openai::error_event(&error.into())));
                }
                Poll::Ready(None) => {
                    self.flow = None;
                    return Poll::Ready(Some(b"data: [DONE]\n\n".to_vec()));
                }
            }
        }
        Poll::Ready(Some(out))
    }

    fn news(&mut self, out: &mut Vec<u8>) {
        let Some(flow) = &mut self.flow else { return };
        let samples = flow.samples();
        let (choices, scores) = flow.parts();
        self.so_far.resize_with(choices.len(), SoFar::default);
        for (index, (choice, so_far)) in choices.iter_mut().zip(&mut self.so_far).enumerate() {
            let end = choice.end.as_ref().filter(|_| !so_far.told);
            if end.is_none() && choice.piece.is_empty() {
                continue;
            }
            so_far.add(&self.app, &self.show, choice);
            so_far.told = end.is_some();
            out.extend_from_slice(b"data: ");
            let prompt = index / samples;
            so_far.write(out, &self.app, &self.show, prompt, end, scores[prompt].as_deref());
            // SGLang's clients tell choices apart by this.
            out.pop();
            out.extend_from_slice(format!(",\"index\":{index}}}\n\n").as_bytes());
            choice.piece = Piece::default();
        }
    }
}
