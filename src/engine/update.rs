//! Updates of loaded weights: transactions that commit whole or leave the weights as they were.

use std::time::Instant;

use tracing::info_span;

use super::core::Parts;
use super::report::UpdateReport;
use super::state::WeightsLoaded;
use super::transaction::{Transaction, forward_pushes};
use super::{BeginError, CommitError, Engine, UpdateError};
use crate::device::{Arena, share_chunks};
use crate::weights::{
    Delta, Intake, LoadedWeights, LoraAdapter, Memory, PreparedDelta, PushError, TransferError, UpdateMode,
    UpdateOptions, WeightSource, copy_unwanted, read_rows,
};

/// Bytes of resident weights that a change is merged into at a time.
const MERGE_BYTES: usize = 2 << 20;
/// Bytes of them that one thread merges at a time.
const MERGE_PART_BYTES: usize = 64 << 10;

impl Engine<WeightsLoaded> {
    /// Replaces all weights by those of `source`: [`Engine::begin_update`], [`Update::push_all`] and
    /// [`Update::commit`] in one.
    ///
    /// # Errors
    /// [`UpdateError`], with the weights as they were.
    pub fn update(&mut self, source: impl WeightSource) -> Result<UpdateReport, UpdateError> {
        self.update_with(source, UpdateOptions::default())
    }

    /// [`Engine::update`] with options.
    ///
    /// # Errors
    /// [`UpdateError`], with the weights as they were, or torn if the update was in place and had begun.
    pub fn update_with(
        &mut self,
        mut source: impl WeightSource,
        options: impl Into<UpdateOptions>,
    ) -> Result<UpdateReport, UpdateError> {
        let mut update = self.begin_update(options)?;
        let memory = memory(&mut update.staged, &mut update.engine.state.weights);
        update.transaction.push(|intake| intake.push_all(memory, &mut source, true))?;
        Ok(update.commit()?)
    }

    /// Begins an update: a transaction that brings new weights, tensor by tensor, and makes them current all at
    /// once. The engine can't wake while it is open, and a second one can't be begun:
    ///
    /// ```compile_fail,E0505
    /// # fn f(mut loaded: dormouse::Engine<dormouse::WeightsLoaded>) -> Result<(), Box<dyn std::error::Error>> {
    /// let update = loaded.begin_update(dormouse::UpdateOptions::default())?;
    /// loaded.wake_up()?; // cannot move out of `loaded` because it is borrowed
    /// update.commit()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`BeginError`]; nothing has changed.
    pub fn begin_update(&mut self, options: impl Into<UpdateOptions>) -> Result<Update<'_>, BeginError> {
        let UpdateOptions { load, mode, partial } = options.into();
        BeginError::check(&load)?;
        let shape = self.core.parts.intake_shape();
        let label = load.label.clone();
        let weights = &self.state.weights;
        let has_base = weights.identity().is_ok();
        let wanted = match &partial {
            None => None,
            Some(names) => {
                let identity =
                    weights.identity().map_err(|torn| BeginError::Torn { last: torn.last.clone() })?;
                Some((self.wanted(names)?, identity.digests.clone()))
            }
        };
        let staged = match mode {
            UpdateMode::InPlace => None,
            UpdateMode::Staged => {
                let mut staged = self.core.stage(&load).map_err(BeginError::beside_current)?;
                if let Some((wanted, _)) = &wanted {
                    let parts = &self.core.parts;
                    copy_unwanted(&*parts.device, &parts.layout, wanted, weights.arena(), &mut staged)?;
                }
                Some(staged)
            }
        };
        let intake = match wanted {
            None => Intake::complete(shape, load),
            Some((wanted, kept)) => Intake::partial(shape, load, wanted, kept),
        };
        let transaction = Transaction::new(&self.core, intake, label);
        tracing::debug!(?mode, ?partial, "update begun");
        Ok(Update { engine: self, staged, transaction, has_base })
    }

    /// By position in the manifest: whether a partial update brings it.
    fn wanted(&self, names: &[String]) -> Result<Vec<bool>, BeginError> {
        let manifest = &self.core.parts.manifest;
        let mut wanted = vec![false; manifest.tensors().len()];
        let mut unknown = Vec::new();
        for name in names {
            match manifest.position_read(name) {
                Some(position) => wanted[position] = true,
                None => unknown.push(name.clone()),
            }
        }
        match (unknown.is_empty(), names.is_empty()) {
            (false, _) => Err(BeginError::UnknownTensors { unknown }),
            (true, true) => Err(BeginError::NoTensors),
            (true, false) => Ok(wanted),
        }
    }
}

/// New weights on their way in. [`commit`](Update::commit) makes them current; dropping the update, or a panic
/// of the code that feeds it, leaves the weights as they were, bit for bit (or torn, if it is in place and a
/// tensor was pushed).
///
/// While it is open the engine is borrowed: it can't wake, nor begin a second update, nor can its weights be
/// read as current.
#[derive(Debug)]
#[must_use = "dropping an update abandons it"]
pub struct Update<'e> {
    engine: &'e mut Engine<WeightsLoaded>,
    /// `None`: in place.
    staged: Option<Arena>,
    transaction: Transaction,
    /// Whether the weights were whole at the begin, so that they can be changed and not only replaced.
    has_base: bool,
}

/// Where an update writes.
fn memory<'a>(staged: &'a mut Option<Arena>, weights: &'a mut LoadedWeights) -> &'a mut dyn Memory {
    match staged {
        Some(staged) => staged,
        None => weights,
    }
}

forward_pushes!(['e] Update<'e>, |update| memory(&mut update.staged, &mut update.engine.state.weights));

/// Merges a block on the device's threads.
fn merge_shared(
    parts: &Parts,
    delta: &PreparedDelta<'_>,
    first_row: usize,
    row_bytes: usize,
    block: &mut [u8],
) {
    let part_rows = (MERGE_PART_BYTES / row_bytes).max(1);
    share_chunks(&*parts.device, block, part_rows * row_bytes, &|part, rows| {
        delta.merge_rows(first_row + part * part_rows, rows);
    });
}

impl Update<'_> {
    /// Brings a tensor as a change to its current value. The name is the model's: options map only what is sent
    /// whole.
    ///
    /// # Errors
    /// [`PushError`]; the transaction is over.
    pub fn push_delta(&mut self, name: &str, delta: &Delta<'_>) -> Result<(), PushError> {
        self.change(&[(name, *delta)])
    }

    /// Brings every tensor that a low-rank adapter changes, merged into its current value. What the adapter
    /// doesn't change must come otherwise, or the update be
    /// [partial](UpdateOptions::partial) to [`LoraAdapter::tensor_names`]. The whole adapter is checked before
    /// the first tensor is changed.
    ///
    /// # Errors
    /// [`PushError`]; the transaction is over.
    pub fn push_adapter(&mut self, adapter: &LoraAdapter) -> Result<(), PushError> {
        self.change(&adapter.deltas().collect::<Vec<_>>())
    }

    /// Checks changes of different tensors, then merges them.
    fn change(&mut self, changes: &[(&str, Delta<'_>)]) -> Result<(), PushError> {
        let (begin, receiving) = (Instant::now(), self.transaction.receiving);
        let changed = self
            .check(changes)
            .and_then(|()| changes.iter().try_for_each(|(name, delta)| self.merge(name, delta)));
        // The pushes of the blocks are in it.
        self.transaction.receiving = receiving + begin.elapsed();
        if let Err(error) = &changed {
            tracing::warn!(%error, "a change refused");
            self.transaction.intake.fail();
        }
        changed
    }

    fn check(&self, changes: &[(&str, Delta<'_>)]) -> Result<(), PushError> {
        self.transaction.intake.check_whole(changes.iter().map(|(name, _)| *name))?;
        let manifest = &self.engine.core.parts.manifest;
        changes.iter().try_for_each(|(name, delta)| {
            let tensor = || (*name).to_owned();
            if !self.has_base {
                return Err(PushError::NoBase { tensor: tensor() });
            }
            let position = manifest.position(name).expect("the name was checked");
            delta
                .check(&manifest.tensors()[position])
                .map_err(|source| PushError::Delta { tensor: tensor(), source })
        })
    }

    /// Merges a change that was checked block by block and pushes the blocks like any pieces.
    fn merge(&mut self, name: &str, delta: &Delta<'_>) -> Result<(), PushError> {
        let parts = self.engine.core.parts.clone();
        let position = parts.manifest.position(name).expect("the name was checked");
        let tensor = &parts.manifest.tensors()[position];
        let delta =
            delta.prepare(tensor).map_err(|source| PushError::Delta { tensor: name.to_owned(), source })?;
        let row_bytes = tensor.row_bytes();
        let block_rows = (MERGE_BYTES / row_bytes).max(1);
        let mut block = vec![0; block_rows.min(tensor.shape[0]) * row_bytes];
        for first_row in (0..tensor.shape[0]).step_by(block_rows) {
            let rows = block_rows.min(tensor.shape[0] - first_row);
            let block = &mut block[..rows * row_bytes];
            let arena = self.engine.state.weights.arena();
            let place = parts.layout.places[position];
            let read = read_rows(&*parts.device, &parts.layout, arena, place, first_row, block);
            self.transaction.push(|intake| {
                read.map_err(|error| {
                    intake.fail();
                    TransferError::from(error).into()
                })
            })?;
            merge_shared(&parts, &delta, first_row, row_bytes, block);
            let memory = memory(&mut self.staged, &mut self.engine.state.weights);
            let offset = first_row * row_bytes;
            self.transaction.push(|intake| intake.push_resident(memory, position, offset, block))?;
        }
        Ok(())
    }

    /// Makes what arrived the current weights, all at once, at the addresses that the old ones had.
    ///
    /// # Errors
    /// [`CommitError`], with the weights as they were (or torn, if the update is in place and a tensor was
    /// pushed).
    pub fn commit(self) -> Result<UpdateReport, CommitError> {
        let _span = info_span!("commit_update").entered();
        let Self { engine, staged, transaction, .. } = self;
        let arrived = transaction.finish()?;
        let begin = Instant::now();
        let weights = &mut engine.state.weights;
        let previous = weights.last_version().clone();
        let version = arrived.identity.version.clone();
        let bytes = weights.bytes() as u64;
        let (mode, peak_weights_bytes) = match staged {
            Some(staged) => {
                weights.replace(staged, arrived.identity)?;
                (UpdateMode::Staged, 2 * bytes)
            }
            None => {
                weights.mend(arrived.identity);
                (UpdateMode::InPlace, bytes)
            }
        };
        engine.core.version_counter = version.counter;
        let report = UpdateReport {
            version,
            previous,
            mode,
            tensors: arrived.received.tensors,
            received_bytes: arrived.received.received_bytes,
            peak_weights_bytes,
            peak_waiting_bytes: arrived.received.peak_waiting_bytes,
            open: arrived.open,
            receiving: arrived.receiving,
            commit: begin.elapsed(),
            device: engine.core.parts.device.memory(),
        };
        tracing::info!(?report, "weights updated");
        Ok(report)
    }
}
