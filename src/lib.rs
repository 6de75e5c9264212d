//! dormouse: an embeddable LLM rollout engine for reinforcement learning.
//!
//! It generates rollouts, goes to sleep so that the trainer has the memory, takes the new weights, and wakes.
//! **Mixing KV of old weights with new ones does not compile**: the order is the type.
//!
//! ```text
//!           sleep(..) / sleep_discarding(..)         restore_weights() / load_weights(source)
//!   Awake ──────────────────────────────▶ Sleeping ─────────────────────────────────▶ WeightsLoaded
//!     ▲    KV dropped, prefix index gone,           weights resident again,                │
//!     │    weights kept or discarded                no KV exists                           │
//!     └──────────────────────────────────── wake_up() ─────────────────────────────────────┘
//! ```
//!
//! ```no_run
//! use dormouse::{Checkpoint, Engine, KvCapacity, Request, SleepOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut engine = Engine::builder("path/to/model").kv_cache(KvCapacity::Bytes(1 << 30)).build()?;
//! for step in 0..100 {
//!     let groups = engine.generate(&[Request::new(vec![1, 2, 3]).samples(8).max_new_tokens(256)])?;
//!     let asleep = engine.sleep_discarding(SleepOptions::default())?; // the memory is the trainer's
//!     // ... the trainer turns `groups` into new weights ...
//!     let loaded = asleep.load_weights(Checkpoint::at("path/to/new/weights"))?; // all tensors or none
//!     engine = loaded.wake_up()?; // an empty KV cache, a prefix index keyed by the new weights
//! }
//! # Ok(())
//! # }
//! ```
//!
//! What it promises, and tests:
//!
//! - **No stale KV.** After any sequence of operations output equals that of a fresh engine, bit for bit.
//! - **Bitwise reproducible.** Tokens and logprobs depend on weights, prompt, sampling parameters and seed
//!   only: not on the batch, chunked prefill, prefix hits, preemption, sleeping, threads or the CPU's
//!   instruction set. [`Engine::score`] returns the very logprobs that generation returned.
//! - **All or nothing.** A load that fails leaves what was there, and its error lists every fault.
//! - **Memory really goes.** What a report says was freed is back with the system.
//! - **Nothing lost.** Every request ends with an output that says how.
//! - **Bad input is an error**, never a panic.
//!
//! Token ids in, token ids out: tokenisation is the caller's business.

#![warn(missing_docs, missing_debug_implementations, unreachable_pub, unnameable_types)]
#![warn(clippy::print_stdout, clippy::unwrap_used)]

mod completion;
pub mod control;
mod device;
mod engine;
mod kv;
mod model;
mod request;
mod sampling;
mod scheduler;
mod weights;

pub use completion::{
    Completion, CompletionError, FinishReason, RequestId, RequestOutput, StopCause, TokenLogprob, VersionSpan,
};
#[cfg(feature = "cuda")]
pub use device::cuda::{CallError, CudaError, CudaVersion, GpuMemory, GpuMemoryError};
pub use device::{DeviceError, DeviceMemory};
pub use engine::{
    Aborted, AnyEngine, Awake, BeginError, BuildError, CommitError, Discarded, Engine, EngineBuilder,
    EngineStats, Error, Failed, GenerateError, InFlight, KeepWeights, Kept, KvCapacity, Load, LoadError,
    LoadReport, MemoryReport, OnDeadline, ParkError, Resident, RestoreError, Retention, Session, Settled,
    SimdPath, SleepError, SleepOptions, SleepReport, Sleeping, State, StepError, StepOutput, StepToken,
    TensorError, Update, UpdateError, UpdateReport, VerifyError, VerifyReport, WakeError, WakeReport,
    WeightsLoaded,
};
pub use model::{ConfigError, ModelConfig, ModelFamily, RopeScaling};
pub use request::{Request, RequestError, RequestLimits, SamplingParams, TokenId, TokenList};
pub use weights::{
    Bucket, BucketEntry, BucketError, BucketWriter, Checkpoint, DType, Delta, DeltaError, Incomplete,
    LoadOptions, LoraAdapter, LoraError, LoraMismatch, LoraShapes, Manifest, Match, MixedDTypes, NameMap,
    ParseDigestError, PieceError, ProtocolViolation, PushError, SafetensorsBytes, SafetensorsError,
    SafetensorsFile, SharedMemoryClient, SharedMemoryError, SharedMemoryOptions, SharedMemorySource,
    SourceError, SparseOp, TensorDigest, TensorReader, TensorSet, TensorSpec, TiedHead, TransferError,
    UnsupportedTensor, UpdateMode, UpdateOptions, WeightSource, WeightTensor, WeightVersion, WeightsDigest,
    WeightsMismatch, WrongDType, WrongShape,
};
#[cfg(feature = "cuda")]
pub use weights::{GpuBucket, GpuTensors};
