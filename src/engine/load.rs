//! Sleeping → WeightsLoaded: a complete load from a source, or a restore of kept weights.

use std::time::Instant;

use tracing::info_span;

use super::core::Core;
use super::report::{LoadReport, MemoryReport};
use super::state::{Discarded, Kept, KeptWeights, Retention, Sleeping, WeightsLoaded, sealed};
use super::{Engine, Failed, LoadError, RestoreError};
use crate::device::Arena;
use crate::weights::{self, Manifest, Match, ResidentWeights, WeightSource, WeightVersion};

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
        mut source: impl WeightSource,
    ) -> Result<Engine<WeightsLoaded>, Failed<Sleeping<W>, LoadError>> {
        let _span = info_span!("load_weights").entered();
        let (mut core, state) = self.into_parts();
        let Sleeping { weights, reservations, carried, report: slept } = state;
        let begin = Instant::now();
        let loaded = match check(&core.parts.manifest, &mut source) {
            Ok(matched) => {
                let check = begin.elapsed();
                weights.receive(&core, &matched, &mut source).map(|received| (received, check))
            }
            Err(error) => Err((weights, error)),
        };
        let ((weights, mut report), check) = match loaded {
            Ok(loaded) => loaded,
            Err((weights, error)) => {
                let state = Sleeping { weights, reservations, carried, report: slept };
                return Err(Failed::new(Engine { core, state }, error));
            }
        };
        report.check = check;
        core.version_counter = report.version.counter;
        tracing::info!(?report, "weights loaded");
        Ok(Engine { core, state: WeightsLoaded { weights, reservations, carried, report } })
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
            KeptWeights::Parked { bytes, mut reserved, version } => {
                if let Err(error) = reserved.commit(bytes.len()) {
                    let kept = Kept(KeptWeights::Parked { bytes, reserved, version });
                    let state = Sleeping { weights: kept, reservations, carried, report: slept };
                    return Err(Failed::new(Engine { core, state }, error.into()));
                }
                core.parts.device.write_bytes(reserved.view_mut(0, bytes.len()), bytes.as_slice());
                let layout = core.parts.layout.clone();
                (ResidentWeights::new(reserved, layout, version), bytes.len() as u64)
            }
        };
        let report = LoadReport {
            version: weights.version(),
            previous: Some(weights.version()),
            tensors: 0,
            received_bytes: 0,
            taken_bytes,
            peak_weights_bytes: weights.bytes() as u64,
            check: std::time::Duration::ZERO,
            transfer: begin.elapsed(),
        };
        tracing::info!(?report, "weights restored");
        Ok(Engine { core, state: WeightsLoaded { weights, reservations, carried, report } })
    }
}

impl Engine<WeightsLoaded> {
    /// What the load or restore did.
    pub fn report(&self) -> &LoadReport {
        &self.state.report
    }

    /// Version of the weights that are resident.
    pub fn version(&self) -> WeightVersion {
        self.state.weights.version()
    }
}

/// Compares the source's index with the manifest.
fn check(manifest: &Manifest, source: &mut dyn WeightSource) -> Result<Match, LoadError> {
    let offered = source.index()?;
    Ok(manifest.check_all(&offered, source.unsupported())?)
}

impl sealed::Retention for Discarded {
    const SLEEPING: &'static str = "sleeping, weights discarded";

    fn memory(&self) -> MemoryReport {
        MemoryReport::default()
    }

    #[expect(private_interfaces, reason = "sealed: nobody else can call it")]
    fn receive(
        self,
        core: &Core,
        matched: &Match,
        source: &mut dyn WeightSource,
    ) -> Result<(ResidentWeights, LoadReport), (Self, LoadError)> {
        let Discarded { reserved, last } = self;
        load_into(core, reserved, last, matched, source)
            .map_err(|(reserved, error)| (Discarded { reserved, last }, error))
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

    #[expect(private_interfaces, reason = "sealed: nobody else can call it")]
    fn receive(
        self,
        core: &Core,
        matched: &Match,
        source: &mut dyn WeightSource,
    ) -> Result<(ResidentWeights, LoadReport), (Self, LoadError)> {
        let previous = Some(self.0.version());
        match self.0 {
            KeptWeights::Parked { bytes, reserved, version } => {
                load_into(core, reserved, previous, matched, source).map_err(|(reserved, error)| {
                    (Kept(KeptWeights::Parked { bytes, reserved, version }), error)
                })
            }
            KeptWeights::Resident(mut current) => match replace(core, &mut current, matched, source) {
                Ok(report) => Ok((current, report)),
                Err(error) => Err((Kept(KeptWeights::Resident(current)), error)),
            },
        }
    }
}

/// Loads into a range that holds nothing; on an error it comes back so.
fn load_into(
    core: &Core,
    mut reserved: Arena,
    previous: Option<WeightVersion>,
    matched: &Match,
    source: &mut dyn WeightSource,
) -> Result<(ResidentWeights, LoadReport), (Arena, LoadError)> {
    match fill(core, &mut reserved, previous, matched, source) {
        Ok(report) => Ok((ResidentWeights::new(reserved, core.parts.layout.clone(), report.version), report)),
        Err(error) => Err((reserved, error)),
    }
}

/// Builds the new weights beside the resident ones, then puts their pages in place.
fn replace(
    core: &Core,
    current: &mut ResidentWeights,
    matched: &Match,
    source: &mut dyn WeightSource,
) -> Result<LoadReport, LoadError> {
    let mut staged = core.parts.device.reserve("staged weights", core.parts.layout.bytes)?;
    let mut report = fill(core, &mut staged, Some(current.version()), matched, source)?;
    report.peak_weights_bytes *= 2;
    report.taken_bytes = 0;
    current.replace(staged, report.version)?;
    Ok(report)
}

/// Commits `arena` and streams the weights in; on an error it is given back.
fn fill(
    core: &Core,
    arena: &mut Arena,
    previous: Option<WeightVersion>,
    matched: &Match,
    source: &mut dyn WeightSource,
) -> Result<LoadReport, LoadError> {
    let begin = Instant::now();
    let parts = &*core.parts;
    arena.commit(parts.layout.bytes)?;
    let digest =
        match weights::transfer(&*parts.device, arena, &parts.layout, &parts.manifest, matched, source) {
            Ok(digest) => digest,
            Err(error) => {
                arena.decommit();
                return Err(error.into());
            }
        };
    Ok(LoadReport {
        version: WeightVersion { counter: core.version_counter + 1, digest },
        previous,
        tensors: parts.manifest.tensors().len(),
        received_bytes: parts.manifest.bytes(),
        taken_bytes: arena.committed() as u64,
        peak_weights_bytes: arena.committed() as u64,
        check: std::time::Duration::ZERO,
        transfer: begin.elapsed(),
    })
}
