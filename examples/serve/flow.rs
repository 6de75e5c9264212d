//! Requests on their way through the engine: tokens in, and out come pieces of text with their tokens, one choice
//! for each sample of each prompt.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use dormouse::control::{
    AbortTarget, ControlRequest, Generation, GenerationError, GenerationEvent, GenerationToken, Operation,
};
use dormouse::{
    Completion, CompletionError, FinishReason, Request, RequestId, RequestOutput, StopCause, TokenId,
    TokenLogprob, VersionSpan,
};
use futures_util::Stream;
use futures_util::stream::SelectAll;

use crate::app::App;
use crate::groups::Group;
use crate::openai::ApiError;
use crate::text::{Detokenizer, StopStrings};

/// Events that are taken together at most, so that one reader doesn't keep a thread.
const MAX_EVENTS: usize = 1024;

/// How tokens become text.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Strings that end a completion. Only with a tokenizer.
    pub stops: Vec<String>,
    /// Whether the string that ended it stays in the text.
    pub keep_stop: bool,
    /// Whether special tokens have no text.
    pub skip_special: bool,
}

/// What came of a choice since it was last looked at.
#[derive(Debug, Default)]
pub struct Piece {
    /// Text that is certain.
    pub text: String,
    /// Tokens. Their text may come later, or with those before.
    pub tokens: Vec<TokenId>,
    /// Their logprobs.
    pub logprobs: Vec<f32>,
    /// The likeliest tokens in their places, if asked for.
    pub top: Vec<Vec<TokenLogprob>>,
}

impl Piece {
    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }
}

/// How a choice ended.
#[derive(Debug)]
pub struct End {
    /// Why.
    pub why: Why,
    /// Its tokens; the one that completed a stop string is the last.
    pub tokens: usize,
    /// Prompt tokens whose KV was there already.
    pub cached_tokens: usize,
    /// Which weights made which tokens.
    pub versions: Vec<VersionSpan>,
    /// Seed of its random stream.
    pub seed: u64,
}

/// Why a choice ended.
#[derive(Debug)]
pub enum Why {
    /// This stop string.
    StopString(String),
    /// This token.
    StopToken(TokenId),
    /// It has as many tokens as it may.
    Length,
    /// It was aborted.
    Abort,
    /// It failed.
    Error(CompletionError),
}

impl Why {
    /// OpenAI's name for it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::StopString(_) | Self::StopToken(_) => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error(_) => "error",
        }
    }
}

/// One sample of one prompt.
pub struct Choice {
    /// What came since it was last taken.
    pub piece: Piece,
    /// Set once it has ended.
    pub end: Option<End>,
    text: Detokenizer,
    /// Text that a stop string may still reach.
    held: String,
    stopped: Option<usize>,
    tokens: usize,
}

/// Requests of one client in flight. Dropping it aborts what has not ended.
pub struct Flow {
    app: App,
    reading: Arc<Reading>,
    /// Of the first request; they differ in the prompt only.
    params: dormouse::SamplingParams,
    running: SelectAll<Tagged>,
    ids: Vec<RequestId>,
    samples: usize,
    choices: Vec<Choice>,
    prompt_logprobs: Vec<Option<Vec<f32>>>,
    /// Their common name, if they have one.
    _group: Group,
}

/// A generation that knows which prompt it belongs to.
struct Tagged {
    prompt: usize,
    generation: Generation,
}

impl Stream for Tagged {
    type Item = (usize, Result<GenerationEvent, GenerationError>);

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let prompt = self.prompt;
        self.generation.poll_event(context).map(|event| event.map(|event| (prompt, event)))
    }
}

impl Flow {
    /// Submits requests that differ in their prompts only. If one is refused, those before it are aborted.
    ///
    /// # Errors
    /// The first refusal.
    pub fn start(
        app: &App,
        requests: Vec<Request>,
        group: Option<String>,
        reading: Reading,
        stream: bool,
    ) -> Result<Self, ApiError> {
        let first = requests.first().ok_or_else(|| ApiError::bad("there is no prompt"))?;
        let params = first.params.clone();
        // Stop strings are found here, so tokens must come as they are made.
        let stream = stream || !reading.stops.is_empty();
        let (mut running, mut ids) = (SelectAll::new(), Vec::with_capacity(requests.len()));
        let mut group = Group::new(app, group);
        for (prompt, request) in requests.into_iter().enumerate() {
            let generation = app.handle.submit(request.stream(stream))?;
            ids.push(generation.id());
            group.add(generation.id());
            running.push(Tagged { prompt, generation });
        }
        let choice = || Choice {
            piece: Piece::default(),
            end: None,
            text: Detokenizer::new(reading.skip_special),
            held: String::new(),
            stopped: None,
            tokens: 0,
        };
        let choices = (0..ids.len() * params.samples).map(|_| choice()).collect();
        let prompt_logprobs = ids.iter().map(|_| None).collect();
        let (app, reading, samples) = (app.clone(), Arc::new(reading), params.samples);
        Ok(Self { app, reading, params, running, ids, samples, choices, prompt_logprobs, _group: group })
    }

    /// Number of the first request.
    pub fn id(&self) -> RequestId {
        self.ids[0]
    }

    /// Samples of each prompt: choice `prompt * samples + sample`.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// The choices, by prompt and sample.
    pub fn choices(&mut self) -> &mut [Choice] {
        &mut self.choices
    }

    /// The choices, and by prompt the logprobs of its tokens from the second on, once they are there and if they
    /// were asked for.
    pub fn parts(&mut self) -> (&mut [Choice], &[Option<Vec<f32>>]) {
        (&mut self.choices, &self.prompt_logprobs)
    }

    /// Waits for the end of all choices.
    ///
    /// # Errors
    /// The engine failed.
    pub async fn finish(mut self) -> Result<Self, ApiError> {
        while let Some(step) = std::future::poll_fn(|context| self.poll_step(context)).await {
            step?;
        }
        Ok(self)
    }

    /// Takes in all that is there, once there is something; `None` after the end of all choices.
    pub fn poll_step(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<(), GenerationError>>> {
        for events in 0..MAX_EVENTS {
            match Pin::new(&mut self.running).poll_next(context) {
                Poll::Ready(Some((prompt, Ok(GenerationEvent::Token(token))))) => self.token(prompt, token),
                Poll::Ready(Some((prompt, Ok(GenerationEvent::Done(output))))) => self.done(prompt, output),
                Poll::Ready(Some((prompt, Err(error)))) => {
                    tracing::warn!(request = %self.ids[prompt], %error, "a generation failed");
                    return Poll::Ready(Some(Err(error)));
                }
                Poll::Ready(None) if events == 0 => return Poll::Ready(None),
                Poll::Pending if events == 0 => return Poll::Pending,
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        Poll::Ready(Some(Ok(())))
    }

    fn token(&mut self, prompt: usize, token: GenerationToken) {
        let GenerationToken { sample, token, logprob, top, .. } = token;
        let index = prompt * self.samples + sample;
        if self.choices[index].stopped.is_some() {
            return;
        }
        self.take(index, token, logprob, top);
        let samples = &self.choices[prompt * self.samples..][..self.samples];
        if self.choices[index].stopped.is_some() && samples.iter().all(|choice| choice.stopped.is_some()) {
            let these = AbortTarget::These { requests: vec![self.ids[prompt]], names: Vec::new() };
            // The answer is the output that comes next.
            drop(self.app.handle.control(ControlRequest::new(Operation::Abort(these))));
        }
    }

    /// Adds a token to a choice.
    fn take(&mut self, index: usize, token: TokenId, logprob: f32, top: Vec<TokenLogprob>) {
        let stops_here = self.is_stop(token, self.choices[index].tokens);
        let choice = &mut self.choices[index];
        choice.tokens += 1;
        choice.piece.tokens.push(token);
        choice.piece.logprobs.push(logprob);
        if self.params.top_logprobs > 0 {
            choice.piece.top.push(top);
        }
        let Some(text) = &self.app.text else { return };
        if self.reading.stops.is_empty() {
            if !stops_here {
                choice.text.push(text, token, &mut choice.piece.text);
            }
            return;
        }
        // What is said before the minimum is no stop, nor the beginning of one.
        let early = choice.tokens <= self.params.min_new_tokens;
        let to = if early { &mut choice.piece.text } else { &mut choice.held };
        if !stops_here {
            choice.text.push(text, token, to);
        }
        if !early {
            let stops = StopStrings::new(&self.reading.stops, self.reading.keep_stop);
            choice.stopped = stops.scan(&mut choice.held, &mut choice.piece.text);
        }
    }

    /// Whether the engine ends a completion with this token, whose text is then none of the completion's.
    fn is_stop(&self, token: TokenId, position: usize) -> bool {
        let eos = !self.params.ignore_eos && self.app.handle.config().eos_token_ids().contains(&token);
        (eos || self.params.stop_token_ids.contains(&token)) && position + 1 >= self.params.min_new_tokens
    }

    fn done(&mut self, prompt: usize, output: RequestOutput) {
        self.prompt_logprobs[prompt] = output.prompt_logprobs;
        for completion in output.completions {
            self.end(prompt * self.samples + completion.index, completion);
        }
    }

    fn end(&mut self, index: usize, mut completion: Completion) {
        let mut tops = completion.top_logprobs.take().unwrap_or_default();
        // Without a stream all tokens come now.
        for position in self.choices[index].tokens..completion.tokens.len() {
            if self.choices[index].stopped.is_some() {
                break;
            }
            let top = tops.get_mut(position).map(std::mem::take).unwrap_or_default();
            self.take(index, completion.tokens[position], completion.logprobs[position], top);
        }
        let choice = &mut self.choices[index];
        if let (Some(text), None) = (&self.app.text, choice.stopped) {
            choice.text.finish(text, &mut choice.held);
            let stops = StopStrings::new(&self.reading.stops, self.reading.keep_stop);
            if choice.tokens > self.params.min_new_tokens {
                choice.stopped = stops.scan(&mut choice.held, &mut choice.piece.text);
            }
            choice.piece.text.push_str(&std::mem::take(&mut choice.held));
        }
        let why = match (choice.stopped, completion.finish_reason) {
            (Some(stop), _) => Why::StopString(self.reading.stops[stop].clone()),
            (_, FinishReason::Stop { by: StopCause::Eos(token) | StopCause::TokenId(token) }) => {
                Why::StopToken(token)
            }
            (_, FinishReason::Length) => Why::Length,
            (_, FinishReason::Error(error)) => {
                let request = self.ids[index / self.samples];
                tracing::warn!(%request, sample = completion.index, %error, "a generation failed");
                Why::Error(error)
            }
            _ => Why::Abort,
        };
        completion.versions.retain(|span| span.tokens.start < choice.tokens);
        if let Some(last) = completion.versions.last_mut() {
            last.tokens.end = last.tokens.end.min(choice.tokens);
        }
        choice.end = Some(End {
            why,
            tokens: choice.tokens,
            cached_tokens: completion.cached_tokens,
            versions: completion.versions,
            seed: completion.seed,
        });
    }
}
