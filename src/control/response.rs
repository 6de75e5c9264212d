//! What a controller answers.

use std::time::{Duration, Instant};

use super::{ControlError, ControlState, TransactionId};
use crate::completion::RequestId;
use crate::engine::{
    EngineStats, LoadReport, MemoryReport, SleepReport, UpdateReport, VerifyReport, WakeReport,
};
use crate::weights::{WeightTensor, WeightVersion};

/// The one answer to a [`ControlRequest`](super::ControlRequest).
#[derive(Debug)]
#[non_exhaustive]
pub struct ControlResponse {
    /// The request's id.
    pub id: String,
    /// Name of the operation.
    pub operation: &'static str,
    /// Its place among the controller's answers, from 1.
    pub serial: u64,
    /// Whether it was done. An error says what state the engine is in; `state_after` says it, too.
    pub outcome: Result<Outcome, ControlError>,
    /// The state when the operation's turn came.
    pub state_before: ControlState,
    /// The state when it was answered.
    pub state_after: ControlState,
    /// What was done, in the order of doing; also what was done before an error.
    pub report: Vec<Report>,
    /// Time until its turn came.
    pub queued: Duration,
    /// Time from then to the answer.
    pub executed: Duration,
}

impl ControlResponse {
    /// Whether it was done now or before.
    pub fn is_ok(&self) -> bool {
        self.outcome.is_ok()
    }
}

/// How an operation succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was done.
    Done,
    /// There was nothing to do: the engine was in the wanted state.
    Already,
}

impl Outcome {
    /// Its name in messages and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Already => "already",
        }
    }
}

/// What one phase of an operation did.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Report {
    /// Requests in flight were settled, by a pause, a sleep or an abort.
    Settled(SettledReport),
    /// The engine, or its weights, went to sleep.
    Sleep(SleepReport),
    /// Weights were loaded or restored.
    Load(LoadReport),
    /// Weights were updated.
    Update(UpdateReport),
    /// The engine woke.
    Wake(WakeReport),
    /// A transaction was begun.
    Begun(TransactionId),
    /// A push arrived.
    Pushed {
        /// The transaction.
        transaction: TransactionId,
        /// Time to take it in.
        receiving: Duration,
    },
    /// A transaction was abandoned.
    Abandoned(TransactionId),
    /// Resident weights were compared with what came in.
    Verified(VerifyReport),
    /// A tensor was read back.
    Tensor(WeightTensor),
    /// The state.
    Status(Box<Status>),
}

/// Requests in flight and what became of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SettledReport {
    /// Ran to their own end.
    pub drained: Vec<RequestId>,
    /// Ended with the tokens they had.
    pub aborted: Vec<RequestId>,
    /// Kept their tokens; they go on after the wake.
    pub retracted: Vec<RequestId>,
    /// Stay where they are until the resume.
    pub kept: Vec<RequestId>,
}

/// A controller at a moment.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Status {
    /// The state.
    pub state: ControlState,
    /// The operation under way.
    pub busy: Option<Busy>,
    /// Control requests that wait for their turn.
    pub control_queue: usize,
    /// Requests that have not ended; those that are set aside included.
    pub live_requests: usize,
    /// Of them: those set aside for the next wake or resume, or for a slow reader.
    pub requests_aside: usize,
    /// Memory by part.
    pub memory: MemoryReport,
    /// Counters and gauges of the engine since it woke; zero while it sleeps.
    pub engine: EngineStats,
    /// Why the engine's last step failed, if it did; of a broken engine, what broke it.
    pub step_error: Option<String>,
}

impl Status {
    /// Version of the weights.
    pub fn version(&self) -> Option<&WeightVersion> {
        self.state.version.as_ref()
    }
}

/// The operation under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Busy {
    /// Its id.
    pub id: String,
    /// Its name.
    pub operation: &'static str,
    /// When its turn came.
    pub since: Instant,
}
