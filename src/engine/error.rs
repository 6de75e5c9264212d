//! Errors, one enum for each operation.

use std::fmt;
use std::time::Duration;

use super::{BeginError, CommitError, Engine, State, TensorError, UpdateError, VerifyError};
use crate::completion::CompletionError;
use crate::device::DeviceError;
use crate::model::ConfigError;
use crate::request::RequestError;
use crate::weights::{
    BucketError, LoraError, MixedDTypes, PushError, SharedMemoryError, SourceError, TransferError,
    WeightVersion, WeightsMismatch,
};

/// A transition that failed, with the engine as it was before: usable, in the same state.
///
/// `?` into a `Box<dyn Error>` or [`Error`] drops the engine. To go on with it, match:
///
/// ```no_run
/// # use dormouse::{Engine, WeightsLoaded};
/// # fn retry(loaded: Engine<WeightsLoaded>) {
/// let engine = loaded.wake_up().or_else(|failed| {
///     eprintln!("once more: {}", failed.error);
///     failed.engine.wake_up()
/// });
/// # }
/// ```
pub struct Failed<S: State, E> {
    /// The engine, in the state it was in.
    pub engine: Box<Engine<S>>,
    /// Why the transition failed.
    pub error: E,
}

impl<S: State, E> Failed<S, E> {
    pub(crate) fn new(engine: Engine<S>, error: E) -> Self {
        Self { engine: Box::new(engine), error }
    }

    /// The same engine with another reason.
    pub(crate) fn map<T>(self, error: impl FnOnce(E) -> T) -> Failed<S, T> {
        Failed { engine: self.engine, error: error(self.error) }
    }

    /// The engine and the reason.
    pub fn into_parts(self) -> (Engine<S>, E) {
        (*self.engine, self.error)
    }
}

impl<S: State, E: fmt::Debug> fmt::Debug for Failed<S, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failed").field("error", &self.error).field("engine", &S::NAME).finish()
    }
}

impl<S: State, E: fmt::Display> fmt::Display for Failed<S, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (the engine is {})", self.error, S::NAME)
    }
}

impl<S: State, E: std::error::Error + 'static> std::error::Error for Failed<S, E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// An engine could not be built. There is no engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The model's configuration is missing, broken or not supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The checkpoint's index could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The checkpoint does not hold the model's weights.
    #[error(transparent)]
    Weights(#[from] Box<WeightsMismatch>),
    /// Parts that the engine fuses have different dtypes.
    #[error(transparent)]
    MixedDTypes(#[from] MixedDTypes),
    /// Neither the configuration nor a checkpoint nor the builder says what dtype the weights have.
    #[error("the configuration gives no weight dtype: set one with EngineBuilder::dtype")]
    UnknownDType,
    /// The builder has a configuration but no directory to read weights from.
    #[error("an engine without a checkpoint can only be built asleep: use EngineBuilder::build_asleep")]
    NoCheckpoint,
    /// An option is out of range.
    #[error("{option} is {value}, but {requirement}")]
    InvalidOption {
        /// The builder's method.
        option: &'static str,
        /// What it was given.
        value: u64,
        /// What it must be.
        requirement: &'static str,
    },
    /// The KV cache capacity does not hold one block.
    #[error(
        "the KV cache may take {capacity_bytes} bytes, one block of {block_size} tokens takes {block_bytes}"
    )]
    KvCacheTooSmall {
        /// The capacity asked for.
        capacity_bytes: u64,
        /// Bytes of one block over all layers.
        block_bytes: u64,
        /// Tokens of a block.
        block_size: usize,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The GPU can't be used.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::device::cuda::CudaError),
    /// The weights could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The engine could not wake.
    #[error(transparent)]
    Wake(#[from] WakeError),
}

/// The engine could not go to sleep. It is awake and serves.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SleepError {
    /// Requests are in flight and the options say to refuse. Nothing was done.
    #[error("{live_requests} requests are in flight: abort, drain or retract them, or wait")]
    InFlight {
        /// Requests that have not ended.
        live_requests: usize,
    },
    /// The deadline passed while draining, and the options say to refuse then. Requests that ended meanwhile
    /// are handed out by the next step; the others go on.
    #[error("{live_requests} requests are still in flight after draining for {waited:?}")]
    DrainDeadline {
        /// Requests that have not ended.
        live_requests: usize,
        /// How long the engine drained.
        waited: Duration,
    },
    /// A step failed while draining. Requests stay in flight.
    #[error("a step failed while draining")]
    Drain(#[from] StepError),
    /// The host has no memory for a copy of the weights. Nothing was done.
    #[error("no host memory for {needed_bytes} bytes of parked weights")]
    Park {
        /// Bytes of the copy.
        needed_bytes: u64,
    },
    /// The weights could not be copied from the device. Requests that the policy ended have ended, the others go
    /// on.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Loaded weights could not be parked. They are loaded as before; parking may be tried again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParkError {
    /// An update in place began and did not commit: the weights are part old, part new, and are not kept. The
    /// engine has them loaded and torn; a complete update leads out, or [`Engine::discard_weights`].
    #[error(
        "torn weights can't be parked (last whole: {last}); send a complete update or discard the weights"
    )]
    Torn {
        /// Version of the last whole weights.
        last: WeightVersion,
    },
    /// The host has no memory for a copy of the weights. The engine has them loaded; nothing was done.
    #[error("no host memory for {needed_bytes} bytes of parked weights")]
    NoHostMemory {
        /// Bytes of the copy.
        needed_bytes: u64,
    },
    /// The weights could not be copied from the device. The engine has them loaded; nothing was done.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Weights could not be loaded. The engine sleeps as before; weights that were kept are still kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The options can't be met.
    #[error(transparent)]
    Begin(BeginError),
    /// The source's index could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The source is not a complete, fitting set: every fault is listed.
    #[error(transparent)]
    Mismatch(#[from] Box<WeightsMismatch>),
    /// The contents did not arrive as the index had said, or are not acceptable.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Kept weights could not be restored. The engine sleeps as before, with the weights kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The engine could not wake. Its weights are loaded as before; waking may be tried again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WakeError {
    /// An update in place began and did not commit: the weights are part old, part new. A complete update or
    /// [`Engine::discard_weights`] and a load lead out.
    #[error(
        "the weights are torn by an update in place that did not commit (last whole: {last}); \
             send a complete update"
    )]
    Torn {
        /// Version of the last whole weights.
        last: WeightVersion,
    },
    /// The device refused the KV cache or the activations.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A step failed. The engine is awake; requests are still in flight and their next step computes what is
/// missing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The device failed. All running sequences were preempted and the prefix cache was cleared.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An earlier step panicked (a bug of this crate): what it left in the KV cache is unknown, and no step
    /// runs any more. A sleep with its requests aborted or retracted leads out, as all that the step could
    /// have spoilt is dropped then; so does dropping the engine.
    #[error("an earlier step panicked, the engine's state is unknown")]
    Poisoned,
}

/// Generation failed. The engine is awake.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// A request is not valid. None of the call's requests ran.
    #[error("request {index}: {source}")]
    Request {
        /// Index in the slice.
        index: usize,
        /// What is wrong with it.
        #[source]
        source: RequestError,
    },
    /// A sequence could not be scored. The engine and other calls are unaffected.
    #[error("sequence {index}: {source}")]
    Score {
        /// Its place in the slice.
        index: usize,
        /// What went wrong with it.
        #[source]
        source: CompletionError,
    },
    /// A step failed. The call's requests were aborted.
    #[error(transparent)]
    Step(#[from] StepError),
}

/// Any error of this crate, for callers who only want `?`. A failed transition's engine is dropped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// From [`crate::EngineBuilder`].
    #[error(transparent)]
    Build(#[from] BuildError),
    /// From a sleep.
    #[error(transparent)]
    Sleep(SleepError),
    /// From loaded weights that are parked.
    #[error(transparent)]
    Park(ParkError),
    /// From a load, or a digest of a source.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// From the begin of a load or an update.
    #[error(transparent)]
    Begin(#[from] BeginError),
    /// From a push.
    #[error(transparent)]
    Push(#[from] PushError),
    /// From a commit.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// From an update.
    #[error(transparent)]
    Update(#[from] UpdateError),
    /// From a restore.
    #[error(transparent)]
    Restore(RestoreError),
    /// From a wake.
    #[error(transparent)]
    Wake(WakeError),
    /// From a step.
    #[error(transparent)]
    Step(#[from] StepError),
    /// From generation.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// From a request.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// From a tensor that is read back.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// From a verification.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// From a model's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// From a check of a set of weights.
    #[error(transparent)]
    Mismatch(#[from] Box<WeightsMismatch>),
    /// From a source of weights.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// From a transfer from another process.
    #[error(transparent)]
    SharedMemory(#[from] SharedMemoryError),
    /// From a bucket.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// From an adapter.
    #[error(transparent)]
    Lora(#[from] LoraError),
}

macro_rules! from_failed {
    ($error:ty, $variant:ident) => {
        impl<S: State> From<Failed<S, $error>> for Error {
            fn from(failed: Failed<S, $error>) -> Self {
                Error::$variant(failed.error)
            }
        }
    };
}
from_failed!(SleepError, Sleep);
from_failed!(ParkError, Park);
from_failed!(LoadError, Load);
from_failed!(BeginError, Begin);
from_failed!(CommitError, Commit);
from_failed!(RestoreError, Restore);
from_failed!(WakeError, Wake);
