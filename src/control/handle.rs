//! What callers hold.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::board::Board;
use super::operation::{AbortTarget, ControlRequest, Operation};
use super::options::ControllerOptions;
use super::owner::{self, Job, Time};
use super::reply::{OneShot, Reply, Ticket};
use super::response::{ControlResponse, Outcome, Report, Status};
use super::shared::{Fixed, Shared};
use super::sync::thread;
use super::{ControlError, ControlState, Generation, Metrics, SubmitError, stepper};
use crate::completion::RequestId;
use crate::engine::{AnyEngine, Engine, State};
use crate::model::ModelConfig;
use crate::request::{Request, RequestLimits};
use crate::weights::Manifest;

/// Bytes of the longest control id.
const MAX_ID_BYTES: usize = 256;

/// Drives a controller, from any number of threads and tasks. Clones drive the same one; when the last is gone the
/// controller stops and drops its engine.
#[derive(Clone)]
pub struct Handle(Arc<Owned>);

/// Stops the controller when it is dropped.
struct Owned(Arc<Shared>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.stop(None);
    }
}

impl Handle {
    /// # Panics
    /// If the system has no room for two threads.
    pub(super) fn start(engine: AnyEngine, options: ControllerOptions) -> Self {
        let shared = Shared::new(Board::new(), fixed(&engine, options));
        // From here on a panic stops the controller.
        let handle = Self(Arc::new(Owned(Arc::clone(&shared))));
        let (for_owner, for_stepper) = (Arc::clone(&shared), Arc::clone(&shared));
        // The state is known before anybody can ask for it.
        let held = owner::take(&shared, engine);
        spawn("dormouse-control", move || owner::run(&for_owner, held));
        spawn("dormouse-step", move || stepper::run(&for_stepper));
        handle
    }

    /// Submits a request. Its tokens, if it [streams](Request::stream), and its output come from the
    /// [`Generation`].
    ///
    /// # Errors
    /// [`SubmitError`]; it does not run.
    pub fn submit(&self, request: Request) -> Result<Generation, SubmitError> {
        self.shared().submit(request)
    }

    /// Asks for an operation. It is answered once, whatever happens.
    pub fn control(&self, request: impl Into<ControlRequest>) -> Ticket {
        let ControlRequest { id, operation, deadline } = request.into();
        let operation = operation.caught();
        let name = operation.name();
        let (reply, ticket) = self.shared().name(id, name);
        let Some(mut reply) = reply else { return ticket };
        let span = reply.span();
        let _entered = span.enter();
        tracing::info!("received");
        match operation {
            Operation::Status => {
                let mut board = self.shared().board();
                reply.begin(&board);
                let status = Report::Status(Box::new(board.status()));
                reply.answer(&mut board, Ok(Outcome::Done), vec![status]);
            }
            Operation::Abort(target) => self.shared().abort(&target, reply),
            operation => {
                let until = deadline.and_then(|deadline| Instant::now().checked_add(deadline));
                let time = Time { received: reply.received(), until };
                self.shared().post(Job { operation, time, reply });
            }
        }
        ticket
    }

    /// Carries an operation out and waits for the answer. Not from within a [`WeightSource`](crate::WeightSource) that
    /// the controller reads: it would wait for itself.
    ///
    /// # Errors
    /// The answer's [`ControlError`]; [`Handle::control`] gives the whole answer.
    pub fn run(&self, operation: Operation) -> Result<ControlResponse, ControlError> {
        let response = self.control(operation).wait();
        match response.outcome {
            Ok(_) => Ok(response),
            Err(error) => Err(error),
        }
    }

    /// Ends requests with the tokens they have, and waits until they have ended. Returns those that this call
    /// ended.
    pub fn abort(&self, target: AbortTarget) -> Vec<RequestId> {
        let response = self.control(Operation::Abort(target)).wait();
        let settled = response.report.into_iter().find_map(|report| match report {
            Report::Settled(settled) => Some(settled.aborted),
            _ => None,
        });
        settled.unwrap_or_default()
    }

    /// The state now.
    pub fn state(&self) -> ControlState {
        self.shared().board().state()
    }

    /// The state now, with what is under way.
    pub fn status(&self) -> Status {
        self.shared().board().status()
    }

    /// Counters and gauges now.
    pub fn metrics(&self) -> Metrics {
        self.shared().board().metrics()
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.shared().fixed.config
    }

    /// Limits that requests are checked against.
    pub fn limits(&self) -> RequestLimits {
        self.shared().fixed.limits
    }

    /// Name, dtype and shape of every tensor that a complete set of weights has.
    pub fn expected_weights(&self) -> &Manifest {
        &self.shared().fixed.manifest
    }

    /// Stops the controller: ends what is in flight, with the tokens it has, abandons an open transaction, refuses
    /// what waits, and gives the engine back in the state that it is in. An operation under way is finished.
    ///
    /// # Errors
    /// [`ControlError::Stopped`] if it had stopped before.
    pub fn stop(&self) -> Result<AnyEngine, ControlError> {
        let back = OneShot::new();
        self.shared().stop(Some(Arc::clone(&back)));
        back.wait().ok_or(ControlError::Stopped)
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("state", &self.state()).finish_non_exhaustive()
    }
}

impl Shared {
    /// Gives a control request its id, if nobody has it; otherwise it is answered.
    fn name(&self, id: Option<String>, operation: &'static str) -> (Option<Reply>, Ticket) {
        let named = self.board().claim(id);
        // What a subscriber does with a new span is not ours: not under the lock.
        match named {
            Ok(id) => {
                let (reply, ticket) = Reply::new(id, operation);
                (Some(reply), ticket)
            }
            Err((shown, error)) => {
                let (reply, ticket) = Reply::nameless(shown, operation);
                reply.answer(&mut self.board(), Err(error), Vec::new());
                (None, ticket)
            }
        }
    }
}

impl Board {
    /// Takes a control request's id, or makes one up. An error comes with what to show of the id.
    fn claim(&mut self, id: Option<String>) -> Result<String, (String, ControlError)> {
        let fault = match &id {
            Some(id) if id.is_empty() || id.len() > MAX_ID_BYTES => Some(ControlError::InvalidArgument {
                argument: "id",
                requirement: "must have 1 to 256 bytes",
            }),
            Some(id) if self.control_ids.contains(id) => Some(ControlError::DuplicateId { id: id.clone() }),
            _ => None,
        };
        if let Some(error) = fault {
            return Err((crate::weights::cut(&id.unwrap_or_default()).into(), error));
        }
        let id = id.unwrap_or_else(|| self.next_control_id());
        self.control_ids.insert(id.clone());
        Ok(id)
    }
}

fn fixed(engine: &AnyEngine, options: ControllerOptions) -> Fixed {
    fn of<S: State>(engine: &Engine<S>, options: ControllerOptions) -> Fixed {
        let parts = engine.parts();
        Fixed {
            options,
            config: Arc::clone(&parts.config),
            manifest: Arc::clone(&parts.manifest),
            limits: engine.limits(),
            seed: parts.limits.seed,
        }
    }
    match engine {
        AnyEngine::Awake(engine) => of(engine, options),
        AnyEngine::SleepingKept(engine) => of(engine, options),
        AnyEngine::SleepingDiscarded(engine) => of(engine, options),
        AnyEngine::WeightsLoaded(engine) => of(engine, options),
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) {
    let thread = thread::Builder::new().name(name.into());
    // The handle is not kept: the thread ends by itself when the controller stops.
    drop(thread.spawn(work).expect("the system has room for a thread"));
}
