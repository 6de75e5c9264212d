//! Awake → Sleeping: settle the requests, drop KV and prefix index, keep or discard the weights.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::info_span;

use super::core::Core;
use super::report::{MemoryReport, Settled, SleepReport};
use super::serving::{Serving, Shared};
use super::state::{Awake, Carried, Discarded, Kept, KeptWeights, Reservations, Sleeping, WeightsLoaded};
use super::{Engine, Failed, ParkError, Retention, SleepError};
use crate::completion::RequestOutput;
use crate::device::cpu::HostBuffer;
use crate::device::{Device, DeviceError};
use crate::weights::ResidentWeights;

/// Where kept weights are while the engine sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeepWeights {
    /// Copied to host memory; the device's memory is given back.
    #[default]
    Parked,
    /// Where they are: only the KV cache and the activations go.
    Resident,
}

/// What happens to requests that are in flight at sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InFlight {
    /// The sleep is refused.
    #[default]
    Refuse,
    /// They end now, with the tokens they have ([`Engine::take_settled`] hands them out).
    Abort,
    /// Steps go on until all have ended or the deadline has passed. A step in progress is finished first.
    Drain {
        /// How long, from the call.
        deadline: Duration,
        /// What happens to those that are left.
        then: OnDeadline,
    },
    /// They keep their tokens, lose their KV, and go on after the wake, under the weights of then.
    /// [`Completion::versions`](crate::Completion::versions) says which tokens came from which. Dropping the
    /// engine before that drops them; [`Engine::abort_retracted`] hands them out instead.
    Retract,
}

/// What happens to requests that have not ended when a drain's deadline passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDeadline {
    /// The sleep is refused; the engine goes on serving them.
    Refuse,
    /// They are aborted, with the tokens they have.
    Abort,
    /// They are retracted.
    Retract,
}

/// Options of [`Engine::sleep`] and [`Engine::sleep_discarding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SleepOptions {
    /// Where the weights are meanwhile; [`Engine::sleep_discarding`] has no use for it.
    pub weights: KeepWeights,
    /// What happens to requests in flight.
    pub in_flight: InFlight,
}

impl SleepOptions {
    /// Keeps the weights resident.
    #[must_use]
    pub fn resident(mut self) -> Self {
        self.weights = KeepWeights::Resident;
        self
    }

    /// Settles requests in flight so.
    #[must_use]
    pub fn in_flight(mut self, policy: InFlight) -> Self {
        self.in_flight = policy;
        self
    }
}

impl Engine<Awake> {
    /// Goes to sleep with the weights kept. When this returns, the memory that the report gives as freed is
    /// back with the system.
    ///
    /// Because it takes the engine, no call can be in progress and no [`Session`](super::Session) alive.
    /// Behind an `Arc`, the last owner sleeps (`Arc::into_inner`).
    ///
    /// # Errors
    /// [`SleepError`], with the engine awake and serving.
    pub fn sleep(self, options: SleepOptions) -> Result<Engine<Sleeping<Kept>>, Failed<Awake, SleepError>> {
        self.sleep_handing_over(options, |_| {})
    }

    /// [`Engine::sleep`] that lets `take` have the requests as soon as they are settled, before weights are copied.
    pub(crate) fn sleep_handing_over(
        self,
        options: SleepOptions,
        take: impl FnOnce(&mut Carried),
    ) -> Result<Engine<Sleeping<Kept>>, Failed<Awake, SleepError>> {
        let _span = info_span!("sleep", weights = ?options.weights, in_flight = ?options.in_flight).entered();
        // What can fail comes before anything is undone. A copy within host memory can't, so it waits until the
        // KV cache is gone: its pages are touched by then only.
        let mut parked = match options.weights {
            KeepWeights::Resident => None,
            KeepWeights::Parked => match reserve_host(&self.core, &self.state.weights) {
                Ok(bytes) => Some(bytes),
                Err(needed_bytes) => return Err(Failed::new(self, SleepError::Park { needed_bytes })),
            },
        };
        let device = Arc::clone(&self.core.parts.device);
        let mut copied = Duration::ZERO;
        let (core, parts) = self.fall_asleep(options.in_flight, |weights| match &mut parked {
            Some(bytes) if !device.shares_host_memory() => {
                copied = copy(&*device, weights, bytes)?;
                Ok(())
            }
            _ => Ok(()),
        })?;
        let FellAsleep { weights, reservations, mut carried, mut report } = parts;
        take(&mut carried);
        let kept = match parked {
            None => KeptWeights::Resident(weights),
            Some(mut bytes) => {
                if device.shares_host_memory() {
                    copied = copy(&*device, &weights, &mut bytes).expect("the copy is within host memory");
                }
                report.park = copied;
                park(weights, bytes, &mut report)
            }
        };
        report.device = core.parts.device.memory();
        tracing::info!(?report, "asleep");
        let state = Sleeping { weights: Kept(kept), reservations, carried, report };
        Ok(Engine { core, state })
    }

    /// Goes to sleep and discards the weights: only a complete load leads on. When this returns, the memory
    /// that the report gives as freed is back with the system.
    ///
    /// # Errors
    /// [`SleepError`], with the engine awake and serving.
    pub fn sleep_discarding(
        self,
        options: SleepOptions,
    ) -> Result<Engine<Sleeping<Discarded>>, Failed<Awake, SleepError>> {
        self.sleep_discarding_handing_over(options, |_| {})
    }

    /// As [`Engine::sleep_handing_over`].
    pub(crate) fn sleep_discarding_handing_over(
        self,
        options: SleepOptions,
        take: impl FnOnce(&mut Carried),
    ) -> Result<Engine<Sleeping<Discarded>>, Failed<Awake, SleepError>> {
        let _span = info_span!("sleep_discarding", in_flight = ?options.in_flight).entered();
        let (core, FellAsleep { weights, reservations, mut carried, mut report }) =
            self.fall_asleep(options.in_flight, |_| Ok(()))?;
        take(&mut carried);
        let begin = Instant::now();
        let last = Some(weights.version().clone());
        let (reserved, freed) = weights.release();
        report.freed.weights_bytes = freed as u64;
        report.free += begin.elapsed();
        report.device = core.parts.device.memory();
        tracing::info!(?report, "asleep");
        let state = Sleeping { weights: Discarded { reserved, last }, reservations, carried, report };
        Ok(Engine { core, state })
    }

    /// Settles the requests, does what has to be done while all is there, and frees what only an awake engine
    /// has.
    fn fall_asleep(
        self,
        in_flight: InFlight,
        before: impl FnOnce(&ResidentWeights) -> Result<(), DeviceError>,
    ) -> Result<(Core, FellAsleep), Failed<Awake, SleepError>> {
        let begin = Instant::now();
        let (mut core, state) = self.into_parts();
        let Awake { weights, shared, report } = state;
        let (mut mailbox, mut executor) = shared.into_parts();
        let mut serving = Serving { mailbox: &mut mailbox, executor: &mut executor };
        let settled = settle(&mut serving, &weights, in_flight, begin)
            .and_then(|settled| Ok(before(&weights).map(|()| settled)?));
        let settled = match settled {
            Ok(settled) => settled,
            Err(error) => {
                let shared = Shared::new(mailbox, executor);
                return Err(Failed::new(Engine { core, state: Awake { weights, shared, report } }, error));
            }
        };
        let settle = begin.elapsed();
        tracing::debug!(?settled, "requests settled");
        let begin = Instant::now();
        core.next_request = mailbox.next_request();
        let closed = executor.close();
        let (kv, kv_freed) = closed.kv.release();
        let (workspace, workspace_freed) = closed.workspace.release();
        let report = SleepReport {
            version: Some(weights.version().clone()),
            settled,
            blocks_dropped: closed.blocks_dropped,
            freed: MemoryReport {
                kv_cache_bytes: kv_freed as u64,
                workspace_bytes: workspace_freed as u64,
                ..MemoryReport::default()
            },
            settle,
            free: begin.elapsed(),
            ..SleepReport::default()
        };
        let carried = Carried {
            retracted: closed.retracted,
            settled: mailbox.take_finished(),
            streamed: mailbox.take_streamed(),
        };
        let reservations = Reservations { kv, workspace };
        Ok((core, FellAsleep { weights, reservations, carried, report }))
    }
}

impl Engine<WeightsLoaded> {
    /// Goes back to sleep with the weights kept: copied to host memory, as [`KeepWeights::Parked`] does. When
    /// this returns, the device's memory is back with the system. Requests that were retracted go on being
    /// carried.
    ///
    /// # Errors
    /// [`ParkError`], with the weights loaded as before.
    pub fn park_weights(self) -> Result<Engine<Sleeping<Kept>>, Failed<WeightsLoaded, ParkError>> {
        let _span = info_span!("park_weights").entered();
        let (core, WeightsLoaded { weights, reservations, carried, report: loaded }) = self.into_parts();
        let weights = match weights.into_resident() {
            Ok(weights) => weights,
            Err(torn) => {
                let last = torn.last_version().clone();
                let state = WeightsLoaded { weights: torn, reservations, carried, report: loaded };
                return Err(Failed::new(Engine { core, state }, ParkError::Torn { last }));
            }
        };
        let device = &*core.parts.device;
        let copied = reserve_host(&core, &weights)
            .map_err(|needed_bytes| ParkError::NoHostMemory { needed_bytes })
            .and_then(|mut bytes| Ok((copy(device, &weights, &mut bytes)?, bytes)));
        let (park_time, bytes) = match copied {
            Ok(copied) => copied,
            Err(error) => {
                let engine = Engine::loaded(core, weights, reservations, carried, loaded);
                return Err(Failed::new(engine, error));
            }
        };
        let version = Some(weights.version().clone());
        let mut report = SleepReport { version, park: park_time, ..SleepReport::default() };
        let kept = Kept(park(weights, bytes, &mut report));
        report.device = core.parts.device.memory();
        tracing::info!(?report, "asleep");
        Ok(Engine { core, state: Sleeping { weights: kept, reservations, carried, report } })
    }

    /// Goes back to sleep and discards the weights, whole or torn: only a complete load leads on. When this
    /// returns, their memory is back with the system.
    pub fn discard_weights(self) -> Engine<Sleeping<Discarded>> {
        let _span = info_span!("discard_weights").entered();
        let begin = Instant::now();
        let (core, WeightsLoaded { weights, reservations, carried, .. }) = self.into_parts();
        let last = weights.last_version().clone();
        let (reserved, freed) = weights.release();
        let mut report = SleepReport {
            version: Some(last.clone()),
            freed: MemoryReport { weights_bytes: freed as u64, ..MemoryReport::default() },
            free: begin.elapsed(),
            ..SleepReport::default()
        };
        report.device = core.parts.device.memory();
        tracing::info!(?report, "asleep");
        let weights = Discarded { reserved, last: Some(last) };
        Engine { core, state: Sleeping { weights, reservations, carried, report } }
    }
}

impl Engine<Sleeping<Kept>> {
    /// Discards the kept weights, resident or parked: only a complete load leads on. When this returns, their
    /// memory is back with the system. Requests that were retracted go on being carried; the report is of this
    /// alone, no longer of the sleep before.
    pub fn discard_weights(self) -> Engine<Sleeping<Discarded>> {
        let _span = info_span!("discard_weights").entered();
        let begin = Instant::now();
        let (core, Sleeping { weights: Kept(kept), reservations, carried, .. }) = self.into_parts();
        let last = kept.version().clone();
        let mut freed = MemoryReport::default();
        let reserved = match kept {
            KeptWeights::Resident(weights) => {
                let (reserved, bytes) = weights.release();
                freed.weights_bytes = bytes as u64;
                reserved
            }
            KeptWeights::Parked { bytes, reserved, .. } => {
                freed.parked_bytes = bytes.len() as u64;
                reserved
            }
        };
        let mut report = SleepReport {
            version: Some(last.clone()),
            freed,
            free: begin.elapsed(),
            ..SleepReport::default()
        };
        report.device = core.parts.device.memory();
        tracing::info!(?report, "weights discarded");
        let weights = Discarded { reserved, last: Some(last) };
        Engine { core, state: Sleeping { weights, reservations, carried, report } }
    }
}

struct FellAsleep {
    weights: ResidentWeights,
    reservations: Reservations,
    carried: Carried,
    report: SleepReport,
}

/// Reserves host memory for a copy of the weights; nothing is touched yet. An error is the bytes it takes.
fn reserve_host(core: &Core, weights: &ResidentWeights) -> Result<HostBuffer, u64> {
    let needed = weights.bytes();
    core.parts.device.host_buffer("parked weights", needed).map_err(|_| needed as u64)
}

/// Copies the weights into the host memory reserved for them; returns the time it took.
fn copy(
    device: &dyn Device,
    weights: &ResidentWeights,
    bytes: &mut HostBuffer,
) -> Result<Duration, DeviceError> {
    let begin = Instant::now();
    weights.read(device, bytes.as_mut_slice())?;
    Ok(begin.elapsed())
}

/// Gives the device's memory back, of which there is a copy.
fn park(weights: ResidentWeights, bytes: HostBuffer, report: &mut SleepReport) -> KeptWeights {
    let begin = Instant::now();
    let identity = weights.identity().clone();
    let (reserved, freed) = weights.release();
    report.freed.weights_bytes = freed as u64;
    report.parked_bytes = bytes.len() as u64;
    report.free += begin.elapsed();
    KeptWeights::Parked { bytes, reserved, identity }
}

/// Ends, drains or marks as retracted every request in flight. On an error nothing was ended that had not
/// ended by itself.
fn settle(
    serving: &mut Serving<'_>,
    weights: &ResidentWeights,
    in_flight: InFlight,
    begin: Instant,
) -> Result<Settled, SleepError> {
    serving.collect();
    let mut settled = Settled::default();
    let rest = match in_flight {
        InFlight::Refuse => OnDeadline::Refuse,
        InFlight::Abort => OnDeadline::Abort,
        InFlight::Retract => OnDeadline::Retract,
        InFlight::Drain { deadline, then } => {
            let before = serving.executor.live_requests();
            while serving.executor.has_live() && begin.elapsed() < deadline {
                serving.step(weights)?;
            }
            let left = serving.executor.live_requests();
            if !left.is_empty() && then == OnDeadline::Refuse {
                let waited = begin.elapsed();
                return Err(SleepError::DrainDeadline { live_requests: left.len(), waited });
            }
            settled.drained = before.into_iter().filter(|id| !left.contains(id)).collect();
            then
        }
    };
    let live = serving.executor.live_requests();
    match rest {
        OnDeadline::Refuse if live.is_empty() => {}
        OnDeadline::Refuse => return Err(SleepError::InFlight { live_requests: live.len() }),
        OnDeadline::Abort => {
            serving.abort(&live);
            settled.aborted = live;
        }
        OnDeadline::Retract => settled.retracted = live,
    }
    Ok(settled)
}

impl<W: Retention> Engine<Sleeping<W>> {
    /// What going to sleep did.
    pub fn report(&self) -> &SleepReport {
        &self.state.report
    }

    /// Ends the requests that were retracted at the sleep and hands them out with the tokens they have: they
    /// do not go on after the wake.
    pub fn abort_retracted(&mut self) -> Vec<RequestOutput> {
        self.state.carried.abort_retracted()
    }

    /// Takes the outputs of requests that had ended by the time the engine slept and were not handed out
    /// yet: those aborted or drained at the sleep, and those that no step had returned. What is not taken
    /// here is returned by the first step after the wake.
    pub fn take_settled(&mut self) -> Vec<RequestOutput> {
        self.state.carried.take_settled()
    }
}

impl Engine<WeightsLoaded> {
    /// As on a sleeping engine: ends the requests that were retracted at the sleep and hands them out.
    pub fn abort_retracted(&mut self) -> Vec<RequestOutput> {
        self.state.carried.abort_retracted()
    }

    /// As on a sleeping engine: takes the outputs of requests that had ended by the time it slept.
    pub fn take_settled(&mut self) -> Vec<RequestOutput> {
        self.state.carried.take_settled()
    }
}
