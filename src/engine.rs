//! The typed lifecycle.
//!
//! ```text
//!           sleep(..) / sleep_discarding(..)         restore_weights() / load_weights(source)
//!   Awake ──────────────────────────────▶ Sleeping ─────────────────────────────────▶ WeightsLoaded
//!     ▲    KV dropped, prefix index gone,           weights resident again,                │
//!     │    weights kept or discarded                no KV exists                           │
//!     └──────────────────────────────────── wake_up() ─────────────────────────────────────┘
//! ```
//!
//! Every transition takes the engine and gives back another: what the new state must not touch does not exist
//! in it. A failed transition gives back the old engine ([`Failed`]).

mod any;
mod awake;
mod builder;
mod core;
mod error;
mod executor;
mod inspect;
mod load;
mod report;
mod requests;
mod serving;
mod session;
mod sleep;
mod state;
#[cfg(test)]
mod tests;
mod transaction;
mod update;
mod update_error;
mod wake;

pub use any::AnyEngine;
pub(crate) use awake::default_seed;
pub use awake::{Aborted, StepOutput, StepToken};
pub use builder::{EngineBuilder, KvCapacity, SimdPath};
pub use error::{
    BuildError, Error, Failed, GenerateError, LoadError, ParkError, RestoreError, SleepError, StepError,
    WakeError,
};
pub use inspect::{TensorError, VerifyError, VerifyReport};
pub use load::Load;
pub use report::{EngineStats, LoadReport, MemoryReport, Settled, SleepReport, UpdateReport, WakeReport};
pub use session::Session;
pub use sleep::{InFlight, KeepWeights, OnDeadline, SleepOptions};
pub(crate) use state::Carried;
pub use state::{Awake, Discarded, Kept, Resident, Retention, Sleeping, State, WeightsLoaded};
pub use update::Update;
pub use update_error::{BeginError, CommitError, UpdateError};

use self::core::Core;
use crate::model::ModelConfig;
use crate::request::RequestLimits;
use crate::weights::{LoadOptions, Manifest, Match, TensorSpec, WeightsMismatch};

/// A rollout engine in state `S`: [`Awake`], [`Sleeping`] or [`WeightsLoaded`].
///
/// Generation exists on `Engine<Awake>` only, loading on `Engine<Sleeping<_>>` only, waking on
/// `Engine<WeightsLoaded>` only:
///
/// ```compile_fail,E0599
/// # fn f(engine: dormouse::Engine<dormouse::Awake>, source: dormouse::Checkpoint) {
/// engine.load_weights(source); // no method named `load_weights` found for struct `Engine<Awake>`
/// # }
/// ```
///
/// Dropping an engine gives back its memory and joins its threads, in every state.
#[derive(Debug)]
#[must_use = "dropping an engine frees it"]
pub struct Engine<S: State = Awake> {
    core: Core,
    state: S,
}

impl<S: State> Engine<S> {
    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.core.parts.config
    }

    /// Limits on the length of a sequence, as requests are checked against them.
    pub fn limits(&self) -> RequestLimits {
        RequestLimits {
            vocab_size: self.core.parts.config.vocab_size,
            max_model_len: self.core.parts.limits.max_model_len,
        }
    }

    /// Name, dtype and shape of every tensor that a load must bring, in Hugging Face naming and layout.
    pub fn expected_weights(&self) -> &Manifest {
        &self.core.parts.manifest
    }

    /// Checks a set of tensors against [`Engine::expected_weights`] without any data: the dry run that a
    /// trainer does before its first step.
    ///
    /// # Errors
    /// Every fault of the set in one error. Nothing changes.
    pub fn check_weights(&self, offered: &[TensorSpec]) -> Result<(), Box<WeightsMismatch>> {
        self.core.parts.manifest.check(offered).map(|_: Match| ())
    }

    /// [`Engine::check_weights`] of a set that will be sent with these options: names are mapped, dtypes that
    /// would be converted and padding that would be trimmed are no faults.
    ///
    /// # Errors
    /// Every fault of the set in one error. Nothing changes.
    pub fn check_weights_with(
        &self,
        offered: &[TensorSpec],
        options: &LoadOptions,
    ) -> Result<(), Box<WeightsMismatch>> {
        self.core.parts.manifest.check_with(offered, options)
    }

    /// Memory that the engine holds now, by part.
    pub fn memory(&self) -> MemoryReport {
        let (staging_bytes, device_bytes) = self.core.parts.device.staging_bytes();
        MemoryReport { staging_bytes, device_bytes, ..self.state.memory() }
    }

    /// Address space that is reserved for each part, in every state; of it, [`Engine::memory`] says what has memory
    /// behind it.
    pub fn reserved(&self) -> MemoryReport {
        let parts = &self.core.parts;
        let kv_cache_bytes = crate::model::KvMemory::bytes(parts.limits.kv, parts.config.num_layers);
        MemoryReport {
            weights_bytes: parts.layout.bytes as u64,
            kv_cache_bytes: kv_cache_bytes.unwrap_or_default() as u64,
            workspace_bytes: parts.workspace.bytes() as u64,
            ..MemoryReport::default()
        }
    }

    /// The state's name.
    pub fn state_name(&self) -> &'static str {
        S::NAME
    }

    pub(crate) fn parts(&self) -> &core::Parts {
        &self.core.parts
    }

    fn into_parts(self) -> (Core, S) {
        (self.core, self.state)
    }
}
