//! One answer on its way: to a thread that blocks, or to a task that is woken.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tracing::Span;

use super::board::Board;
use super::caught::quietly;
use super::sync::{Condvar, Mutex};
use super::{ControlError, ControlResponse, ControlState, Lifecycle, Outcome, Report};

/// A place for one value, filled once.
pub(super) struct OneShot<T> {
    state: Mutex<State<T>>,
    filled: Condvar,
}

struct State<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

impl<T> OneShot<T> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { value: None, waker: None }), filled: Condvar::default() })
    }

    /// Fills the place; a task that waits is woken by whoever gets its waker.
    #[must_use = "somebody may wait"]
    pub(super) fn fill(&self, value: T) -> Option<Waker> {
        let mut state = self.state.lock();
        state.value = Some(value);
        self.filled.notify_all();
        state.waker.take()
    }

    pub(super) fn wait(&self) -> T {
        let mut state = self.state.lock();
        loop {
            match state.value.take() {
                Some(value) => return value,
                None => state = self.filled.wait(state),
            }
        }
    }

    /// Waits for so long at most.
    fn wait_timeout(&self, timeout: Duration) -> Option<T> {
        let until = Instant::now().checked_add(timeout);
        let mut state = self.state.lock();
        loop {
            match state.value.take() {
                Some(value) => return Some(value),
                None if until.is_some_and(|until| Instant::now() >= until) => return None,
                None => state = self.filled.wait_until(state, until),
            }
        }
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<T> {
        // What a waker does when it is cloned or dropped is not ours: not under the lock.
        let waker = context.waker().clone();
        let replaced = {
            let mut state = self.state.lock();
            if let Some(value) = state.value.take() {
                return Poll::Ready(value);
            }
            state.waker.replace(waker)
        };
        drop(replaced);
        Poll::Pending
    }
}

/// A [`ControlResponse`] to come: [`wait`](Ticket::wait) for it, or await it in any runtime. Dropping the ticket
/// drops the answer, not the operation.
#[must_use = "the answer comes here"]
pub struct Ticket(Arc<OneShot<Box<ControlResponse>>>);

impl Ticket {
    /// Waits for the answer.
    pub fn wait(self) -> ControlResponse {
        *self.0.wait()
    }

    /// Waits for the answer, for so long at most.
    ///
    /// # Errors
    /// The ticket, if the answer has not come. The operation goes on.
    pub fn wait_timeout(self, timeout: Duration) -> Result<ControlResponse, Self> {
        match self.0.wait_timeout(timeout) {
            Some(response) => Ok(*response),
            None => Err(self),
        }
    }
}

impl Future for Ticket {
    type Output = ControlResponse;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<ControlResponse> {
        self.0.poll(context).map(|response| *response)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket")
    }
}

/// The ticket's other half: a control request that was not answered yet.
pub(super) struct Reply {
    /// `None` once it was answered.
    to: Option<Arc<OneShot<Box<ControlResponse>>>>,
    /// The request's, from its receipt to its answer.
    span: Span,
    id: String,
    operation: &'static str,
    received: Instant,
    /// When its turn came, and the state of then.
    begun: Option<(Instant, ControlState)>,
    /// Whether the id is this request's own: another one that is under way may have it.
    named: bool,
}

impl Reply {
    pub(super) fn new(id: String, operation: &'static str) -> (Self, Ticket) {
        let to = OneShot::new();
        let ticket = Ticket(Arc::clone(&to));
        let span = tracing::info_span!("control", id, operation);
        let received = Instant::now();
        (Self { to: Some(to), span, id, operation, received, begun: None, named: true }, ticket)
    }

    /// The reply to a request that is refused for its id.
    pub(super) fn nameless(id: String, operation: &'static str) -> (Self, Ticket) {
        let (mut reply, ticket) = Self::new(id, operation);
        reply.named = false;
        (reply, ticket)
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn operation(&self) -> &'static str {
        self.operation
    }

    pub(super) fn span(&self) -> Span {
        self.span.clone()
    }

    pub(super) fn received(&self) -> Instant {
        self.received
    }

    /// Its turn has come.
    pub(super) fn begin(&mut self, board: &Board) {
        self.begun = Some((Instant::now(), board.state()));
    }

    /// Answers, with the board's state as the state after. The answer is on its way when the board is unlocked.
    pub(super) fn answer(
        mut self,
        board: &mut Board,
        outcome: Result<Outcome, ControlError>,
        report: Vec<Report>,
    ) {
        let mut response = self.response(board.state(), outcome, report);
        response.serial = board.counters.answer(&response);
        if self.named {
            board.control_ids.remove(&response.id);
        }
        board.after(move || self.deliver(response));
    }

    fn deliver(mut self, response: ControlResponse) {
        // Whoever carries the request out is in its span, unless another request's end is what answers it.
        quietly(|| match Span::current().id() == self.span.id() {
            true => log(&response),
            false => self.span.in_scope(|| log(&response)),
        });
        let to = self.to.take().expect("it is answered once, by value");
        if let Some(waker) = to.fill(Box::new(response)) {
            waker.wake();
        }
    }

    fn response(
        &mut self,
        state_after: ControlState,
        outcome: Result<Outcome, ControlError>,
        report: Vec<Report>,
    ) -> ControlResponse {
        let now = Instant::now();
        let (begun, state_before) = self.begun.take().unwrap_or_else(|| (now, state_after.clone()));
        ControlResponse {
            id: std::mem::take(&mut self.id),
            operation: self.operation,
            serial: 0,
            outcome,
            state_before,
            state_after,
            report,
            queued: begun.saturating_duration_since(self.received),
            executed: now.saturating_duration_since(begun),
        }
    }
}

/// An owner that panics drops what it was at: that is answered, too.
impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(to) = self.to.take() {
            let stopped = ControlState {
                lifecycle: Lifecycle::Stopped,
                broken: false,
                paused: false,
                admitting: false,
                epoch: 0,
                version: None,
                transaction: None,
            };
            let response = self.response(stopped, Err(ControlError::Stopped), Vec::new());
            if let Some(waker) = to.fill(Box::new(response)) {
                waker.wake();
            }
        }
    }
}

fn log(response: &ControlResponse) {
    let ControlResponse { id, operation, serial, state_before, state_after, queued, executed, .. } = response;
    match &response.outcome {
        Ok(outcome) => {
            let outcome = outcome.as_str();
            tracing::info!(
                id, operation, serial, %state_before, %state_after, ?queued, ?executed, "{outcome}"
            );
        }
        Err(error) => {
            let kind = error.kind().as_str();
            tracing::warn!(
                id, operation, serial, %state_before, %state_after, ?queued, ?executed, kind, %error, "refused"
            );
        }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply")
            .field("id", &self.id)
            .field("operation", &self.operation)
            .finish_non_exhaustive()
    }
}
