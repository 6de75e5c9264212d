//! WeightsLoaded → Awake: a new KV cache, an empty prefix index keyed by the weights' digest, a scheduler.

use std::time::Instant;

use tracing::info_span;

use super::core::Core;
use super::executor::Executor;
use super::report::WakeReport;
use super::serving::{Mailbox, Serving, Shared};
use super::state::{Awake, Reservations, WeightsLoaded};
use super::{Engine, Failed, WakeError};
use crate::device::DeviceError;
use crate::model::{KvMemory, Workspace};
use crate::weights::LoadedWeights;

impl Engine<WeightsLoaded> {
    /// Wakes with an empty KV cache, at the addresses it had. Retracted requests are queued again, first.
    ///
    /// # Errors
    /// [`WakeError`], with the weights loaded as before; nothing was taken. Waking may be tried again, or, if
    /// memory stays short, [`Engine::discard_weights`] gives the trainer the rest.
    pub fn wake_up(self) -> Result<Engine<Awake>, Failed<WeightsLoaded, WakeError>> {
        let _span = info_span!("wake_up").entered();
        let begin = Instant::now();
        let (core, state) = self.into_parts();
        let WeightsLoaded { weights, reservations, carried, report: loaded } = state;
        let weights = match weights.into_resident() {
            Ok(weights) => weights,
            Err(torn) => {
                let last = torn.last_version().clone();
                let state = WeightsLoaded { weights: torn, reservations, carried, report: loaded };
                return Err(Failed::new(Engine { core, state }, WakeError::Torn { last }));
            }
        };
        let (kv, workspace) = match commit(&core, reservations) {
            Ok(memory) => memory,
            Err((reservations, error)) => {
                let weights = LoadedWeights::new(weights, core.parts.layout.clone());
                let state = WeightsLoaded { weights, reservations, carried, report: loaded };
                return Err(Failed::new(Engine { core, state }, error.into()));
            }
        };
        let mut mailbox = Mailbox::new(core.next_request);
        let mut executor = Executor::new(&core, weights.version().clone(), kv, workspace);
        Serving { mailbox: &mut mailbox, executor: &mut executor }.carry(carried);
        let report = WakeReport {
            version: weights.version().clone(),
            blocks: core.parts.limits.kv.num_blocks,
            taken: executor.memory(),
            resumed: executor.live_requests(),
            wake: begin.elapsed(),
            device: core.parts.device.memory(),
        };
        tracing::info!(?report, "awake");
        Ok(Engine { core, state: Awake { weights, shared: Shared::new(mailbox, executor), report } })
    }
}

/// Takes the memory: all of it or none.
fn commit(
    core: &Core,
    reservations: Reservations,
) -> Result<(KvMemory, Workspace), (Reservations, DeviceError)> {
    let Reservations { kv, workspace } = reservations;
    let parts = &*core.parts;
    let kv = match KvMemory::commit(kv, parts.limits.kv, parts.config.num_layers) {
        Ok(kv) => kv,
        Err((kv, error)) => return Err((Reservations { kv, workspace }, error)),
    };
    match Workspace::commit(workspace, parts.workspace) {
        Ok(workspace) => Ok((kv, workspace)),
        Err((workspace, error)) => Err((Reservations { kv: kv.release().0, workspace }, error)),
    }
}
