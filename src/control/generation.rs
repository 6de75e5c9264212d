//! A request's tokens and output on their way to whoever asked: a thread or a task.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::GenerationError;
use super::shared::Shared;
use super::sync::{Condvar, Mutex};
use crate::completion::{RequestId, RequestOutput, TokenLogprob};
use crate::request::TokenId;

/// A token of a request that [streams](crate::Request::stream).
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationToken {
    /// Which of the request's samples.
    pub sample: usize,
    /// Position in the completion, from 0.
    pub position: usize,
    /// The token.
    pub token: TokenId,
    /// Its logprob in the model's distribution.
    pub logprob: f32,
    /// The likeliest tokens, if the request asks for [`top_logprobs`](crate::Request::top_logprobs).
    pub top: Vec<TokenLogprob>,
}

/// What comes of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum GenerationEvent {
    /// The next token of one of its samples; only if it streams. Each token comes once, in order for its sample.
    Token(GenerationToken),
    /// The whole output. It is the last event, and comes once.
    Done(RequestOutput),
}

type Event = Result<GenerationEvent, GenerationError>;

/// No event came in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no event came in time")]
pub struct TimedOut;

/// A request that a controller accepted. Take its events one by one, or [`wait`](Generation::wait) for its
/// output; as a [`Stream`](futures_core::Stream) in any runtime, or blocking.
///
/// Dropping it before its end aborts the request. A reader that stops reading without dropping it holds no blocks
/// for long: see [`ControllerOptions::stream_buffer`](super::ControllerOptions::stream_buffer).
#[must_use = "dropping a generation aborts its request"]
pub struct Generation {
    id: RequestId,
    epoch: u64,
    outlet: Arc<Outlet>,
    shared: Arc<Shared>,
}

impl Generation {
    pub(super) fn new(id: RequestId, epoch: u64, outlet: Arc<Outlet>, shared: Arc<Shared>) -> Self {
        Self { id, epoch, outlet, shared }
    }

    /// The request's number; the output has it, too.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The epoch that accepted it, see [`ControlState::epoch`](super::ControlState::epoch).
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Waits for the next event; `None` after the last.
    pub fn next_event(&mut self) -> Option<Event> {
        self.next_event_until(None).unwrap_or(None)
    }

    /// Waits for the next event, for so long at most; `None` after the last.
    ///
    /// # Errors
    /// [`TimedOut`], if none has come. Nothing is lost.
    pub fn next_event_timeout(&mut self, timeout: Duration) -> Result<Option<Event>, TimedOut> {
        self.next_event_until(Instant::now().checked_add(timeout))
    }

    fn next_event_until(&mut self, until: Option<Instant>) -> Result<Option<Event>, TimedOut> {
        let mut pipe = self.outlet.pipe.lock();
        loop {
            match pipe.take() {
                Taken::Event(event, caught_up) => {
                    drop(pipe);
                    self.resume_if(caught_up);
                    return Ok(Some(event));
                }
                Taken::Over => return Ok(None),
                Taken::Nothing if until.is_some_and(|until| Instant::now() >= until) => return Err(TimedOut),
                Taken::Nothing => pipe = self.outlet.arrived.wait_until(pipe, until),
            }
        }
    }

    /// The next event, for a task; `None` after the last.
    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        // What a waker does when it is cloned or dropped is not ours: not under the lock.
        let waker = context.waker().clone();
        let mut pipe = self.outlet.pipe.lock();
        match pipe.take() {
            Taken::Event(event, caught_up) => {
                drop(pipe);
                self.resume_if(caught_up);
                Poll::Ready(Some(event))
            }
            Taken::Over => Poll::Ready(None),
            Taken::Nothing => {
                let replaced = pipe.waker.replace(waker);
                drop(pipe);
                drop(replaced);
                Poll::Pending
            }
        }
    }

    /// Blocking iterator over the events that are left.
    pub fn events(&mut self) -> impl Iterator<Item = Event> + '_ {
        std::iter::from_fn(|| self.next_event())
    }

    /// Waits for the output; tokens that were not taken are passed over.
    ///
    /// # Errors
    /// [`GenerationError`].
    pub fn wait(mut self) -> Result<RequestOutput, GenerationError> {
        loop {
            match self.next_event() {
                Some(Ok(GenerationEvent::Token(_))) => {}
                Some(Ok(GenerationEvent::Done(output))) => return Ok(output),
                Some(Err(error)) => return Err(error),
                None => return Err(GenerationError::Stopped),
            }
        }
    }

    /// Awaits the output; tokens that were not taken are passed over.
    ///
    /// # Errors
    /// [`GenerationError`].
    pub async fn output(mut self) -> Result<RequestOutput, GenerationError> {
        loop {
            match std::future::poll_fn(|context| self.poll_event(context)).await {
                Some(Ok(GenerationEvent::Token(_))) => {}
                Some(Ok(GenerationEvent::Done(output))) => return Ok(output),
                Some(Err(error)) => return Err(error),
                None => return Err(GenerationError::Stopped),
            }
        }
    }

    fn resume_if(&self, caught_up: bool) {
        if caught_up {
            self.shared.reader_caught_up(self.id);
        }
    }
}

impl futures_core::Stream for Generation {
    type Item = Event;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.get_mut().poll_event(context)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.outlet.pipe.lock().is_closed() {
            self.shared.reader_gone(self.id);
        }
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation").field("id", &self.id).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

/// Where the controller puts a request's events.
pub(super) struct Outlet {
    pipe: Mutex<Pipe>,
    arrived: Condvar,
}

struct Pipe {
    tokens: VecDeque<GenerationToken>,
    end: End,
    waker: Option<Waker>,
    /// Tokens that the reader may be behind.
    capacity: usize,
    /// Set while the request waits for the reader.
    overrun: bool,
}

enum End {
    /// More may come.
    Open,
    /// The last event, not taken yet.
    There(Box<Event>),
    /// Taken.
    Over,
}

enum Taken {
    /// An event, and whether the reader has caught up with a request that waits for it.
    Event(Event, bool),
    Nothing,
    Over,
}

impl Pipe {
    fn take(&mut self) -> Taken {
        if let Some(token) = self.tokens.pop_front() {
            let caught_up = self.overrun && self.tokens.len() <= self.capacity / 2;
            if caught_up {
                self.overrun = false;
            }
            return Taken::Event(Ok(GenerationEvent::Token(token)), caught_up);
        }
        match std::mem::replace(&mut self.end, End::Over) {
            End::Open => {
                self.end = End::Open;
                Taken::Nothing
            }
            End::There(event) => Taken::Event(*event, false),
            End::Over => Taken::Over,
        }
    }

    /// Whether no event comes any more that is not here.
    fn is_closed(&self) -> bool {
        !matches!(self.end, End::Open)
    }
}

impl Outlet {
    pub(super) fn new(capacity: usize) -> Arc<Self> {
        let pipe = Pipe { tokens: VecDeque::new(), end: End::Open, waker: None, capacity, overrun: false };
        Arc::new(Self { pipe: Mutex::new(pipe), arrived: Condvar::default() })
    }

    /// Adds tokens; returns whether the reader is now too far behind. A task that waits is woken by whoever gets
    /// its waker.
    pub(super) fn push(
        &self,
        tokens: impl IntoIterator<Item = GenerationToken>,
        wakers: &mut Vec<Waker>,
    ) -> bool {
        let mut pipe = self.pipe.lock();
        pipe.tokens.extend(tokens);
        // It stays so until the reader has caught up, even if it reads a little meanwhile.
        pipe.overrun |= pipe.tokens.len() > pipe.capacity;
        self.arrived.notify_all();
        wakers.extend(pipe.waker.take());
        pipe.overrun
    }

    /// Adds the last event.
    pub(super) fn close(&self, event: Event, wakers: &mut Vec<Waker>) {
        let mut pipe = self.pipe.lock();
        pipe.end = End::There(Box::new(event));
        self.arrived.notify_all();
        wakers.extend(pipe.waker.take());
    }
}
