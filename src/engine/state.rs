//! The states of an engine. Each owns exactly the resources that exist in it.

use std::fmt::Debug;

use super::report::{LoadReport, SleepReport, WakeReport};
use super::requests::LiveRequest;
use super::serving::Shared;
use crate::completion::RequestOutput;
use crate::device::Arena;
use crate::device::cpu::HostBuffer;
use crate::weights::{ResidentWeights, WeightVersion};

mod sealed {
    pub trait Sealed {}
}

/// A state of [`Engine`](crate::Engine): [`Awake`], [`Sleeping`] or [`WeightsLoaded`]. Sealed: no other crate
/// can add a state or build one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a state of an engine",
    note = "the states are `Awake`, `Sleeping<Kept>`, `Sleeping<Discarded>` and `WeightsLoaded`"
)]
pub trait State: sealed::Sealed + Debug + Send {
    /// The state's name, as messages give it.
    const NAME: &'static str;

    #[doc(hidden)]
    fn parts(&self) -> Parts;
}

/// What became of the weights at sleep: [`Kept`] or [`Discarded`]. Sealed.
pub trait Retention: sealed::Sealed + Debug + Send {
    #[doc(hidden)]
    const SLEEPING: &'static str;

    #[doc(hidden)]
    fn resident_bytes(&self) -> (u64, u64);
}

/// Device bytes that a state holds, by part.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Parts {
    pub(crate) weights: u64,
    pub(crate) parked: u64,
    pub(crate) kv_cache: u64,
    pub(crate) workspace: u64,
}

/// Address ranges that hold no memory, kept so that what comes back comes back at the same addresses.
#[derive(Debug)]
pub(crate) struct Reservations {
    pub(crate) kv: Arena,
    pub(crate) workspace: Arena,
}

/// Serving: weights, KV cache, prefix index and scheduler exist.
#[derive(Debug)]
pub struct Awake {
    pub(crate) weights: ResidentWeights,
    pub(crate) shared: Shared,
    pub(crate) report: WakeReport,
}

/// Asleep: no KV cache, no prefix index, no scheduler. `W` says whether the weights were kept.
#[derive(Debug)]
pub struct Sleeping<W: Retention = Kept> {
    pub(crate) weights: W,
    pub(crate) reservations: Reservations,
    pub(crate) carried: Carried,
    pub(crate) report: SleepReport,
}

/// The weights were kept at sleep, resident or parked on the host: they may be restored.
#[derive(Debug)]
pub struct Kept(pub(crate) KeptWeights);

/// There are no weights: only a complete load leads on.
#[derive(Debug)]
pub struct Discarded {
    pub(crate) reserved: Arena,
    /// Version of the last weights, if there were any.
    pub(crate) last: Option<WeightVersion>,
}

#[derive(Debug)]
pub(crate) enum KeptWeights {
    /// Where they were.
    Resident(ResidentWeights),
    /// Copied to host memory, the device's memory given back.
    Parked { bytes: HostBuffer, reserved: Arena, version: WeightVersion },
}

impl KeptWeights {
    pub(crate) fn version(&self) -> WeightVersion {
        match self {
            KeptWeights::Resident(weights) => weights.version(),
            KeptWeights::Parked { version, .. } => *version,
        }
    }
}

/// Weights are resident and whole; no KV cache exists yet.
#[derive(Debug)]
pub struct WeightsLoaded {
    pub(crate) weights: ResidentWeights,
    pub(crate) reservations: Reservations,
    pub(crate) carried: Carried,
    pub(crate) report: LoadReport,
}

/// Requests on their way through a sleep.
#[derive(Debug, Default)]
pub(crate) struct Carried {
    /// Retracted: they go on after the wake.
    pub(crate) retracted: Vec<LiveRequest>,
    /// Ended, but not handed out yet.
    pub(crate) settled: Vec<RequestOutput>,
}

impl sealed::Sealed for Awake {}
impl State for Awake {
    const NAME: &'static str = "awake";

    fn parts(&self) -> Parts {
        let (kv_cache, workspace) = self.shared.memory();
        Parts { weights: self.weights.bytes() as u64, parked: 0, kv_cache, workspace }
    }
}

impl<W: Retention> sealed::Sealed for Sleeping<W> {}
impl<W: Retention> State for Sleeping<W> {
    const NAME: &'static str = W::SLEEPING;

    fn parts(&self) -> Parts {
        let (weights, parked) = self.weights.resident_bytes();
        Parts { weights, parked, ..Parts::default() }
    }
}

impl sealed::Sealed for WeightsLoaded {}
impl State for WeightsLoaded {
    const NAME: &'static str = "weights loaded";

    fn parts(&self) -> Parts {
        Parts { weights: self.weights.bytes() as u64, ..Parts::default() }
    }
}

impl sealed::Sealed for Kept {}
impl Retention for Kept {
    const SLEEPING: &'static str = "sleeping, weights kept";

    fn resident_bytes(&self) -> (u64, u64) {
        match &self.0 {
            KeptWeights::Resident(weights) => (weights.bytes() as u64, 0),
            KeptWeights::Parked { bytes, .. } => (0, bytes.len() as u64),
        }
    }
}

impl sealed::Sealed for Discarded {}
impl Retention for Discarded {
    const SLEEPING: &'static str = "sleeping, weights discarded";

    fn resident_bytes(&self) -> (u64, u64) {
        (0, 0)
    }
}
