//! The answer as server-sent events: what is there at once goes out at once.

use std::convert::Infallible;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use dormouse::TokenId;
use futures_util::stream;

use super::answer::usage;
use super::plan::Show;
use super::write::{Part, Writer, weight_version};
use super::{ApiError, Endpoint};
use crate::app::App;
use crate::flow::{Flow, Piece};

/// An answer in pieces. The client's leaving drops it, and with it what has not ended.
struct Answer {
    app: App,
    /// `None` after the last byte.
    flow: Option<Flow>,
    writer: Writer,
    show: Show,
    prompts: Vec<Vec<TokenId>>,
    told: Vec<Told>,
    begun: bool,
}

/// What the client knows of a choice.
#[derive(Debug, Clone, Copy, Default)]
struct Told {
    /// Characters of its text, by its tokens.
    characters: usize,
    /// Whether it has had a piece.
    begun: bool,
    /// Whether it has had its end.
    ended: bool,
}

/// Answers with a stream.
pub fn response(
    app: App,
    mut flow: Flow,
    writer: Writer,
    show: Show,
    prompts: Vec<Vec<TokenId>>,
) -> Response {
    let told = vec![Told::default(); flow.choices().len()];
    let mut answer = Answer { app, flow: Some(flow), writer, show, prompts, told, begun: false };
    event_stream(move |context| answer.poll(context))
}

/// A response of events that a function writes as they come.
pub fn event_stream<F>(mut poll: F) -> Response
where
    F: FnMut(&mut Context<'_>) -> Poll<Option<Vec<u8>>> + Send + 'static,
{
    let body = stream::poll_fn(move |context| {
        poll(context).map(|bytes| bytes.map(|bytes| Ok::<_, Infallible>(Bytes::from(bytes))))
    });
    let headers =
        [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(body)).into_response()
}

/// An event that ends a stream early.
pub fn error_event(error: &ApiError) -> Vec<u8> {
    format!("event: error\ndata: {}\n\n", error.body()).into_bytes()
}

impl Answer {
    /// Bytes of what is new; `None` when all is said.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        let mut out = Vec::new();
        if !std::mem::replace(&mut self.begun, true) && self.show.endpoint == Endpoint::Chat {
            (0..self.told.len()).for_each(|index| self.writer.role(&mut out, index));
            return Poll::Ready(Some(out));
        }
        while out.is_empty() {
            let Some(flow) = &mut self.flow else { return Poll::Ready(None) };
            match flow.poll_step(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(()))) => self.news(&mut out),
                Poll::Ready(Some(Err(error))) => {
                    self.flow = None;
                    return Poll::Ready(Some(error_event(&error.into())));
                }
                Poll::Ready(None) => {
                    self.last(&mut out);
                    self.flow = None;
                    return Poll::Ready(Some(out));
                }
            }
        }
        Poll::Ready(Some(out))
    }

    /// Writes a chunk for each choice that has something new.
    fn news(&mut self, out: &mut Vec<u8>) {
        let Some(flow) = &mut self.flow else { return };
        let samples = flow.samples();
        let version = || self.app.handle.state().version;
        for (index, choice) in flow.choices().iter_mut().enumerate() {
            let told = &mut self.told[index];
            let end = choice.end.as_ref().filter(|_| !told.ended);
            if end.is_none() && choice.piece.is_empty() {
                continue;
            }
            let first = self.show.prompt_ids && !told.begun;
            let prompt = first.then(|| self.prompts[index / samples].as_slice());
            self.writer.begin(out);
            let part = Part { index, piece: &choice.piece, end, text_offset: told.characters, prompt };
            told.characters += self.writer.choice(out, &part);
            (told.begun, told.ended) = (true, end.is_some());
            let mut more = Vec::new();
            if end.is_some() {
                weight_version(end.into_iter(), version, &mut more);
            }
            self.writer.end(out, &more);
            choice.piece = Piece::default();
        }
    }

    fn last(&mut self, out: &mut Vec<u8>) {
        let Some(flow) = &mut self.flow else { return };
        if self.show.usage {
            let mut more = Vec::new();
            let samples = flow.samples();
            usage(flow.choices(), samples, &self.prompts, &mut more);
            self.writer.begin(out);
            self.writer.end(out, &more);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}
