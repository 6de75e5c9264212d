//! Sleeping → WeightsLoaded: a complete load, from a source or piece by piece, or a restore of kept weights.

use std::time::Instant;

use tracing::info_span;

use super::core::Core;
use super::report::{LoadReport, MemoryReport};
use super::state::{Discarded, Kept, KeptWeights, Retention, Sleeping, WeightsLoaded, sealed};
use super::transaction::{Transaction, forward_pushes};
use super::{BeginError, CommitError, Engine, Failed, LoadError, RestoreError};
use crate::device::{Arena, DeviceError};
use crate::weights::{
    Identity, Intake, LoadOptions, LoadedWeights, ResidentWeights, WeightSource, WeightVersion,
};

impl<W: Retention> Engine<Sleeping<W>> {
    /// Loads a complete set of weights from `source` and gives it a new version. All tensors or none: the
    /// source's index is compared with the manifest before anything is read, and what is kept stays until
    /// all has arrived.
    ///
    /// Where weights were kept resident, the new ones are built beside them (twice the memory for a moment;
    /// no KV cache exists that could want it) and their pages then put in place of the old ones.
    ///
    /// # Errors
    /// [`LoadError`], with the engine asleep as before; kept weights are still kept, bit for bit.
    pub fn load_weights(
        self,
        source: impl WeightSource,
    ) -> Result<Engine<WeightsLoaded>, Failed<Sleeping<W>, LoadError>> {
        self.load_weights_with(source, LoadOptions::default())
    }

    /// [`Engine::load_weights`] with names mapped, dtypes converted, values checked or a label.
    ///
    /// # Errors
    /// [`LoadError`], with the engine asleep as before; kept weights are still kept, bit for bit.
    pub fn load_weights_with(
        self,
        mut source: impl WeightSource,
        options: LoadOptions,
    ) -> Result<Engine<WeightsLoaded>, Failed<Sleeping<W>, LoadError>> {
        let _span = info_span!("load_weights").entered();
        let mut load = self.begin_load(options).map_err(|failed| failed.map(LoadError::from))?;
        match load.transaction.push(|intake| intake.push_all(&mut load.staged, &mut source, true)) {
            Ok(()) => load.commit().map_err(|failed| failed.map(LoadError::of_commit)),
            Err(error) => Err(Failed::new(load.abandon(), LoadError::of_push(error))),
        }
    }

    /// Begins a load that brings the weights piece by piece; they are complete or nothing.
    ///
    /// # Errors
    /// [`BeginError`], with the engine asleep as before.
    pub fn begin_load(self, options: LoadOptions) -> Result<Load<W>, Failed<Sleeping<W>, BeginError>> {
        match self.core.stage(&options) {
            Ok(staged) => {
                let label = options.label.clone();
                let intake = Intake::complete(self.core.parts.intake_shape(), options);
                let transaction = Transaction::new(&self.core, intake, label);
                Ok(Load { engine: self, staged, transaction })
            }
            Err(error) => Err(Failed::new(self, error)),
        }
    }
}

/// A load of a sleeping engine that brings the weights piece by piece, see [`Engine::begin_load`].
///
/// It holds the engine, and gives it back: loaded by [`commit`](Load::commit), asleep as it was by
/// [`abandon`](Load::abandon). Dropping it drops the engine.
#[derive(Debug)]
#[must_use = "dropping a load drops its engine"]
pub struct Load<W: Retention> {
    engine: Engine<Sleeping<W>>,
    staged: Arena,
    transaction: Transaction,
}

forward_pushes!([W: Retention] Load<W>, |load| &mut load.staged);

impl<W: Retention> Load<W> {
    /// Makes what arrived the engine's weights, under a new version.
    ///
    /// # Errors
    /// [`CommitError`], with the engine asleep as before; kept weights are still kept, bit for bit.
    pub fn commit(self) -> Result<Engine<WeightsLoaded>, Failed<Sleeping<W>, CommitError>> {
        let Self { engine, staged, transaction } = self;
        let arrived = match transaction.finish() {
            Ok(arrived) => arrived,
            Err(error) => return Err(Failed::new(engine, error)),
        };
        let begin = Instant::now();
        let (mut core, state) = engine.into_parts();
        let Sleeping { weights, reservations, carried, report: slept } = state;
        let (previous, resident_bytes) = (weights.previous(), weights.memory().weights_bytes);
        let weights = match weights.replace(&core, staged, arrived.identity) {
            Ok(weights) => weights,
            Err((weights, error)) => {
                let state = Sleeping { weights, reservations, carried, report: slept };
                return Err(Failed::new(Engine { core, state }, error.into()));
            }
        };
        let bytes = weights.bytes() as u64;
        let report = LoadReport {
            version: weights.version().clone(),
            previous,
            tensors: arrived.received.tensors,
            received_bytes: arrived.received.received_bytes,
            taken_bytes: bytes - resident_bytes,
            peak_weights_bytes: bytes + resident_bytes,
            peak_waiting_bytes: arrived.received.peak_waiting_bytes,
            open: arrived.open,
            receiving: arrived.receiving,
            commit: begin.elapsed(),
            device: core.parts.device.memory(),
        };
        core.version_counter = report.version.counter;
        tracing::info!(?report, "weights loaded");
        Ok(Engine::loaded(core, weights, reservations, carried, report))
    }

    /// Gives the engine back, asleep as it was.
    pub fn abandon(self) -> Engine<Sleeping<W>> {
        self.engine
    }
}

impl Engine<Sleeping<Kept>> {
    /// Makes the kept weights resident again, unchanged, under the version they had.
    ///
    /// # Errors
    /// [`RestoreError`], with the engine asleep as before and the weights kept.
    pub fn restore_weights(self) -> Result<Engine<WeightsLoaded>, Failed<Sleeping<Kept>, RestoreError>> {
        let _span = info_span!("restore_weights").entered();
        let begin = Instant::now();
        let (core, state) = self.into_parts();
        let Sleeping { weights: Kept(kept), reservations, carried, report: slept } = state;
        let (weights, taken_bytes) = match kept {
            KeptWeights::Resident(weights) => (weights, 0),
            KeptWeights::Parked { bytes, mut reserved, identity } => {
                if let Err(error) = core.parts.device.commit_with(&mut reserved, bytes.as_slice()) {
                    let kept = Kept(KeptWeights::Parked { bytes, reserved, identity });
                    let state = Sleeping { weights: kept, reservations, carried, report: slept };
                    return Err(Failed::new(Engine { core, state }, error.into()));
                }
                let layout = core.parts.layout.clone();
                (ResidentWeights::new(reserved, layout, identity), bytes.len() as u64)
            }
        };
        let report = LoadReport {
            version: weights.version().clone(),
            previous: Some(weights.version().clone()),
            tensors: 0,
            received_bytes: 0,
            taken_bytes,
            peak_weights_bytes: weights.bytes() as u64,
            peak_waiting_bytes: 0,
            open: std::time::Duration::ZERO,
            receiving: std::time::Duration::ZERO,
            commit: begin.elapsed(),
            device: core.parts.device.memory(),
        };
        tracing::info!(?report, "weights restored");
        Ok(Engine::loaded(core, weights, reservations, carried, report))
    }
}

impl Engine<WeightsLoaded> {
    pub(super) fn loaded(
        core: Core,
        weights: ResidentWeights,
        reservations: super::state::Reservations,
        carried: super::state::Carried,
        report: LoadReport,
    ) -> Self {
        let weights = LoadedWeights::new(weights, core.parts.layout.clone());
        Engine { core, state: WeightsLoaded { weights, reservations, carried, report } }
    }

    /// What the load or restore did.
    pub fn report(&self) -> &LoadReport {
        &self.state.report
    }

    /// Version of the weights; `None` if an update in place has torn them.
    pub fn version(&self) -> Option<WeightVersion> {
        self.state.weights.identity().ok().map(|identity| identity.version.clone())
    }
}

impl Core {
    /// Takes memory beside the current weights for new ones.
    pub(super) fn stage(&self, options: &LoadOptions) -> Result<Arena, BeginError> {
        BeginError::check(options)?;
        let mut staged = self.parts.device.reserve("staged weights", self.parts.layout.bytes)?;
        staged.commit(self.parts.layout.bytes)?;
        Ok(staged)
    }
}

impl sealed::Retention for Discarded {
    const SLEEPING: &'static str = "sleeping, weights discarded";

    fn memory(&self) -> MemoryReport {
        MemoryReport::default()
    }

    fn previous(&self) -> Option<WeightVersion> {
        self.last.clone()
    }

    #[expect(private_interfaces, reason = "sealed: nobody else can call it")]
    fn replace(
        mut self,
        core: &Core,
        staged: Arena,
        identity: Identity,
    ) -> Result<ResidentWeights, (Self, DeviceError)> {
        match self.reserved.adopt(staged) {
            Ok(()) => Ok(ResidentWeights::new(self.reserved, core.parts.layout.clone(), identity)),
            Err(error) => Err((self, error)),
        }
    }
}

impl sealed::Retention for Kept {
    const SLEEPING: &'static str = "sleeping, weights kept";

    fn memory(&self) -> MemoryReport {
        match &self.0 {
            KeptWeights::Resident(weights) => {
                MemoryReport { weights_bytes: weights.bytes() as u64, ..MemoryReport::default() }
            }
            KeptWeights::Parked { bytes, .. } => {
                MemoryReport { parked_bytes: bytes.len() as u64, ..MemoryReport::default() }
            }
        }
    }

    fn previous(&self) -> Option<WeightVersion> {
        Some(self.0.version().clone())
    }

    #[expect(private_interfaces, reason = "sealed: nobody else can call it")]
    fn replace(
        self,
        core: &Core,
        staged: Arena,
        identity: Identity,
    ) -> Result<ResidentWeights, (Self, DeviceError)> {
        match self.0 {
            KeptWeights::Parked { bytes, mut reserved, identity: parked } => match reserved.adopt(staged) {
                Ok(()) => Ok(ResidentWeights::new(reserved, core.parts.layout.clone(), identity)),
                Err(error) => Err((Kept(KeptWeights::Parked { bytes, reserved, identity: parked }), error)),
            },
            KeptWeights::Resident(mut current) => match current.replace(staged, identity) {
                Ok(()) => Ok(current),
                Err(error) => Err((Kept(KeptWeights::Resident(current)), error)),
            },
        }
    }
}
