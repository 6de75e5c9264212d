//! Why a controller refuses or fails.

use std::fmt;
use std::time::Duration;

use super::{ControlState, TagError, TransactionId};
use crate::completion::RequestOutput;
use crate::engine::{
    BeginError, CommitError, LoadError, ParkError, RestoreError, SleepError, TensorError, UpdateError,
    VerifyError, WakeError,
};
use crate::request::RequestError;
use crate::weights::{BucketError, PushError};

/// The step that must come before an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingStep {
    /// A sleep of the KV cache.
    SleepKvCache,
    /// A wake of the weights.
    WakeWeights,
    /// A complete update: there are no weights, or torn ones.
    UpdateWeights,
    /// A wake of the KV cache.
    WakeKvCache,
    /// A commit or an abandon of the open transaction.
    EndTransaction(TransactionId),
    /// A resume.
    Resume,
}

impl MissingStep {
    /// Its name for machines.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SleepKvCache => "sleep(kv_cache)",
            Self::WakeWeights => "wakeup(weights)",
            Self::UpdateWeights => "update_weights",
            Self::WakeKvCache => "wakeup(kv_cache)",
            Self::EndTransaction(_) => "commit or abandon",
            Self::Resume => "resume",
        }
    }
}

impl fmt::Display for MissingStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EndTransaction(transaction) => write!(f, "commit or abandon of transaction {transaction}"),
            Self::UpdateWeights => f.write_str("a complete update_weights"),
            other => f.write_str(other.as_str()),
        }
    }
}

/// Why a control operation was not done. Unless a variant says otherwise, the engine is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Another step must come first. Nothing was done.
    #[error("{operation} needs {missing} first: the engine is {state}")]
    Conflict {
        /// The operation.
        operation: &'static str,
        /// The state it met.
        state: Box<ControlState>,
        /// What must come first.
        missing: MissingStep,
    },
    /// Requests are in flight and the operation doesn't settle them. Nothing was done.
    #[error("{live_requests} requests are in flight: abort, drain or retract them, or wait")]
    InFlight {
        /// Requests that have not ended.
        live_requests: usize,
    },
    /// The deadline passed. Before its turn, and while weights came in: the engine is as it was. While requests
    /// ran to their end: it serves as before, and those that ended have ended.
    #[error("the deadline passed after {waited:?}, {during}")]
    Deadline {
        /// What was waited for.
        during: &'static str,
        /// Since the submission.
        waited: Duration,
    },
    /// A step failed in a way that no other can follow, while requests were to run to their end. Those in the engine
    /// have failed; those set aside still wait. A sleep that aborts or retracts leads out.
    #[error("the engine is broken ({message}): it must sleep, with requests aborted or retracted")]
    Broken {
        /// What the step said.
        message: String,
    },
    /// The list of tags means nothing.
    #[error(transparent)]
    Tags(#[from] TagError),
    /// An argument is out of range.
    #[error("{argument}: {requirement}")]
    InvalidArgument {
        /// Its name.
        argument: &'static str,
        /// What it must be.
        requirement: &'static str,
    },
    /// A request with this id has not been answered yet. That one goes on.
    #[error("a control request with the id `{}` is under way", crate::weights::cut(id))]
    DuplicateId {
        /// The id.
        id: String,
    },
    /// Too many control requests wait.
    #[error("{limit} control requests wait, which is the limit")]
    QueueFull {
        /// The limit.
        limit: usize,
    },
    /// There is no such transaction.
    #[error("no transaction {transaction} is open{}", over.as_ref().map(|o| format!(": {o}")).unwrap_or_default())]
    UnknownTransaction {
        /// The number.
        transaction: TransactionId,
        /// How it ended, if it is the last one that did.
        over: Option<String>,
    },
    /// A sleep failed.
    #[error(transparent)]
    Sleep(#[from] SleepError),
    /// The weights could not be put aside.
    #[error(transparent)]
    Park(#[from] ParkError),
    /// A load failed.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A transaction could not be begun.
    #[error(transparent)]
    Begin(#[from] BeginError),
    /// A push failed, and its transaction is over: the weights are as before it (torn, if it was in place).
    #[error(transparent)]
    Push(#[from] PushError),
    /// A bucket is malformed; if it was pushed, its transaction is over as after any push that fails.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// A commit failed, and the transaction is over: the weights are as before it (torn, if it was in place).
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// An update failed: the weights are as before it (torn, if it was in place).
    #[error(transparent)]
    Update(#[from] UpdateError),
    /// Weights could not be restored.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The engine could not wake: its weights are loaded, which may be what the same operation did before.
    #[error(transparent)]
    Wake(#[from] WakeError),
    /// The weights are not what came in.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// A tensor could not be read back.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The controller has stopped.
    #[error("the controller has stopped")]
    Stopped,
}

/// Why a request was not accepted. It does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Requests are not accepted now.
    #[error("not serving: the engine is {state}")]
    NotServing {
        /// The state.
        state: Box<ControlState>,
        /// When to ask again: a guess.
        retry_after: Duration,
    },
    /// Too many requests are in flight.
    #[error("{live_requests} requests are in flight, which is the limit")]
    QueueFull {
        /// Requests that have not ended.
        live_requests: usize,
    },
    /// The request is not valid.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The controller has stopped.
    #[error("the controller has stopped")]
    Stopped,
}

/// Why a request that was accepted gave no output of its own.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum GenerationError {
    /// The engine's steps failed. The request was aborted.
    #[error("the engine failed: {message}")]
    Step {
        /// What the engine said.
        message: String,
        /// The tokens that it had; [`Request::resume`](crate::Request::resume) goes on from them.
        partial: Box<RequestOutput>,
    },
    /// The controller stopped without an output: it panicked, which is a bug of this crate.
    #[error("the controller has stopped")]
    Stopped,
}
