//! What a controller can be asked for.

use std::fmt;
use std::time::Duration;

use super::Tags;
use crate::completion::RequestId;
use crate::engine::InFlight;
use crate::weights::{LoadOptions, LoraAdapter, UpdateOptions, WeightSource};

/// An operation with its name.
#[derive(Debug)]
#[must_use = "a request does nothing until a handle gets it"]
pub struct ControlRequest {
    /// The caller's name for it, at most 256 bytes, unique among requests that were not answered yet. Without
    /// one the controller makes one up.
    pub id: Option<String>,
    /// What to do.
    pub operation: Operation,
    /// How long it may take, from its submission: the wait for its turn, for requests to end, and for weights
    /// to come in. When it passes, what was not begun is not begun and what was under way is undone. What
    /// takes no waiting, such as freeing memory, is finished.
    pub deadline: Option<Duration>,
}

impl ControlRequest {
    /// Makes a request without a deadline, to be named by the controller.
    pub fn new(operation: Operation) -> Self {
        Self { id: None, operation, deadline: None }
    }

    /// Names it.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Sets how long it may take.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }
}

impl From<Operation> for ControlRequest {
    fn from(operation: Operation) -> Self {
        Self::new(operation)
    }
}

/// What a controller can be asked for. [`Status`](Operation::Status) and [`Abort`](Operation::Abort) are answered
/// while another operation is under way; the others one after another, in the order they came.
#[non_exhaustive]
pub enum Operation {
    /// Stops accepting requests and running steps. When it is answered, no step is in progress.
    Pause(PauseMode),
    /// Undoes a pause. Requests are accepted again if the engine is awake.
    Resume,
    /// Puts parts of the engine to sleep.
    Sleep(SleepPlan),
    /// Wakes parts of the engine: the weights before the KV cache. Weights that were discarded are awaited.
    WakeUp {
        /// Which.
        tags: Tags,
    },
    /// Brings a complete set of weights to an engine without a KV cache, wherever its weights are. They are
    /// resident then.
    LoadWeights {
        /// What comes in.
        weights: Payload,
        /// What is accepted and checked.
        options: LoadOptions,
    },
    /// Replaces weights that are awake (or awaited, if all come), in one go. The KV cache must be asleep.
    UpdateWeights {
        /// What comes in.
        weights: Payload,
        /// What is accepted and checked, and where it is built.
        options: UpdateOptions,
    },
    /// Begins an update whose weights come with [`Push`](Operation::Push), under the same conditions as
    /// [`UpdateWeights`](Operation::UpdateWeights).
    Begin {
        /// What is accepted and checked, and where it is built.
        options: UpdateOptions,
        /// After so long without a push it is abandoned; `None`: as the controller's options say.
        idle: Option<Duration>,
    },
    /// Brings weights to the open transaction. One that fails ends the transaction.
    Push {
        /// The transaction.
        transaction: TransactionId,
        /// What comes in.
        weights: Payload,
    },
    /// Makes what arrived current. The transaction is over, whatever the answer.
    Commit {
        /// The transaction.
        transaction: TransactionId,
    },
    /// Drops what arrived. The transaction is over.
    Abandon {
        /// The transaction.
        transaction: TransactionId,
    },
    /// Ends requests with the tokens they have. When it is answered, they have ended and hold no blocks.
    Abort(AbortTarget),
    /// Forgets cached prefixes.
    ResetPrefixCache {
        /// Whether it is done while requests are in flight: these keep their own blocks. Otherwise it is
        /// refused.
        with_requests: bool,
    },
    /// Asks for the state.
    Status,
    /// Reads the resident weights back and compares them with what came in.
    Verify,
    /// Reads a tensor back.
    ReadTensor {
        /// Its Hugging Face name.
        name: String,
    },
    /// FastDeploy's legacy call: aborts what is in flight, drops the KV cache and discards the weights; the same
    /// as a [`Sleep`](Operation::Sleep) of all that says so.
    ClearLoadWeight,
    /// FastDeploy's legacy call: wakes the weights, loads a complete set, and wakes the KV cache. After
    /// [`ClearLoadWeight`](Operation::ClearLoadWeight) or any sleep.
    UpdateModelWeight {
        /// What comes in; `None`: [`ControllerOptions::reload`](super::ControllerOptions::reload) gives it.
        weights: Option<Payload>,
        /// What is accepted and checked.
        options: LoadOptions,
    },
}

impl Operation {
    /// Its name in messages, spans and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Pause(_) => "pause",
            Self::Resume => "resume",
            Self::Sleep(_) => "sleep",
            Self::WakeUp { .. } => "wakeup",
            Self::LoadWeights { .. } => "load_weights",
            Self::UpdateWeights { .. } => "update_weights",
            Self::Begin { .. } => "begin",
            Self::Push { .. } => "push",
            Self::Commit { .. } => "commit",
            Self::Abandon { .. } => "abandon",
            Self::Abort(_) => "abort",
            Self::ResetPrefixCache { .. } => "reset_prefix_cache",
            Self::Status => "status",
            Self::Verify => "verify",
            Self::ReadTensor { .. } => "read_tensor",
            Self::ClearLoadWeight => "clear_load_weight",
            Self::UpdateModelWeight { .. } => "update_model_weight",
        }
    }
}

impl fmt::Debug for Operation {
    /// The name and what is short.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut f = f.debug_struct(self.name());
        match self {
            Self::Pause(mode) => f.field("mode", mode),
            Self::Sleep(plan) => f.field("plan", plan),
            Self::WakeUp { tags } => f.field("tags", tags),
            Self::Push { transaction, weights } => {
                f.field("transaction", transaction).field("weights", weights)
            }
            Self::Commit { transaction } | Self::Abandon { transaction } => {
                f.field("transaction", transaction)
            }
            Self::LoadWeights { weights, .. } | Self::UpdateWeights { weights, .. } => {
                f.field("weights", weights)
            }
            Self::Abort(target) => f.field("target", target),
            _ => &mut f,
        };
        f.finish()
    }
}

/// What a pause does with requests in flight. Requests that wait for a reader, or for the next wake, count as
/// in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PauseMode {
    /// They end, with the tokens they have.
    #[default]
    Abort,
    /// They run to their end. If the request's deadline passes before that, `on_deadline` says what happens to
    /// those that are left.
    Wait {
        /// What then.
        on_deadline: PauseDeadline,
    },
    /// They stay where they are, their KV too, and go on at the resume. A sleep in between settles them.
    Keep,
}

/// What a pause does when its deadline passes while requests run to their end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PauseDeadline {
    /// The pause is undone: they go on, and requests are accepted again.
    #[default]
    Undo,
    /// They end, with the tokens they have.
    Abort,
    /// They stay where they are.
    Keep,
}

/// How parts of an engine are put to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SleepPlan {
    /// Which parts. The weights of an awake engine don't sleep without its KV cache.
    pub tags: Tags,
    /// What becomes of the weights, if they are among them.
    pub weights: SleepWeights,
    /// What becomes of requests in flight. A drain ends at the request's deadline, too.
    pub in_flight: InFlight,
}

impl Default for SleepPlan {
    fn default() -> Self {
        Self { tags: Tags::ALL, weights: SleepWeights::Park, in_flight: InFlight::Refuse }
    }
}

/// What becomes of weights that sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SleepWeights {
    /// They are copied to host memory.
    #[default]
    Park,
    /// They are dropped: only a complete load leads on. Parked ones are dropped, too.
    Discard,
}

/// Which requests an abort ends.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum AbortTarget {
    /// All.
    All,
    /// Those with these numbers ([`Generation::id`](super::Generation::id)) or names
    /// ([`Request::id`](crate::Request::id)). Others have ended, or never were: that is no error.
    These {
        /// Numbers.
        requests: Vec<RequestId>,
        /// Names.
        names: Vec<String>,
    },
}

/// Weights on their way to a controller.
#[non_exhaustive]
pub enum Payload {
    /// Every tensor of a source: files, tensors in memory, another process, a framework's own.
    Source(Box<dyn WeightSource + Send>),
    /// A flattened [bucket](crate::Bucket).
    Bucket(Vec<u8>),
    /// A [bucket on the engine's GPU](crate::GpuBucket). The answer tells that its memory may be overwritten.
    #[cfg(feature = "cuda")]
    GpuBucket(crate::GpuBucket),
    /// What an adapter changes, merged into the current weights. An update in one go is then partial to these
    /// tensors.
    Adapter(Box<LoraAdapter>),
}

impl Payload {
    /// The tensors of a source.
    pub fn source(source: impl WeightSource + Send + 'static) -> Self {
        Self::Source(Box::new(source))
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(_) => f.write_str("source"),
            Self::Bucket(bytes) => write!(f, "bucket of {} bytes", bytes.len()),
            #[cfg(feature = "cuda")]
            Self::GpuBucket(bucket) => write!(f, "GPU bucket of {} bytes", bucket.memory().bytes()),
            Self::Adapter(_) => f.write_str("adapter"),
        }
    }
}

/// Names a transaction of a controller; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransactionId(u64);

impl TransactionId {
    /// The transaction with this number, as a client named it.
    pub const fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// Gives the number.
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for TransactionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
