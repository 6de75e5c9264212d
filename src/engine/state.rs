//! The states of an engine. Each owns exactly the resources that exist in it.

use std::fmt::Debug;

use super::report::{LoadReport, MemoryReport, SleepReport, WakeReport};
use super::requests::LiveRequest;
use super::serving::Shared;
use crate::completion::RequestOutput;
use crate::device::Arena;
use crate::device::cpu::HostBuffer;
use crate::weights::{ResidentWeights, WeightVersion};

/// What makes a state or a retention, out of other crates' reach.
pub(super) mod sealed {
    use crate::engine::core::Core;
    use crate::engine::{LoadError, LoadReport, MemoryReport};
    use crate::weights::{Match, ResidentWeights, WeightSource};

    #[expect(unnameable_types, reason = "this is what seals the states")]
    pub trait State {
        /// Device memory that the state holds.
        fn memory(&self) -> MemoryReport;
    }

    #[expect(unnameable_types, reason = "this is what seals the retentions")]
    pub trait Retention: Sized {
        /// Name of the state of sleeping so.
        const SLEEPING: &'static str;

        /// Memory that the weights hold, parked ones included.
        fn memory(&self) -> MemoryReport;

        /// Takes in new weights. On an error it comes back as it was.
        #[expect(private_interfaces, reason = "sealed: nobody else can call it")]
        fn receive(
            self,
            core: &Core,
            matched: &Match,
            source: &mut dyn WeightSource,
        ) -> Result<(ResidentWeights, LoadReport), (Self, LoadError)>;
    }
}

/// A state of [`Engine`](crate::Engine): [`Awake`], [`Sleeping`] or [`WeightsLoaded`]. Sealed: no other crate
/// can add a state or build one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a state of an engine",
    note = "the states are `Awake`, `Sleeping<Kept>`, `Sleeping<Discarded>` and `WeightsLoaded`"
)]
pub trait State: sealed::State + Debug + Send {
    /// The state's name, as messages give it.
    const NAME: &'static str;
}

/// What became of the weights at sleep: [`Kept`] or [`Discarded`]. Sealed.
pub trait Retention: sealed::Retention + Debug + Send {}

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

impl sealed::State for Awake {
    fn memory(&self) -> MemoryReport {
        MemoryReport { weights_bytes: self.weights.bytes() as u64, ..self.shared.memory() }
    }
}

impl State for Awake {
    const NAME: &'static str = "awake";
}

impl<W: Retention> sealed::State for Sleeping<W> {
    fn memory(&self) -> MemoryReport {
        self.weights.memory()
    }
}

impl<W: Retention> State for Sleeping<W> {
    const NAME: &'static str = W::SLEEPING;
}

impl sealed::State for WeightsLoaded {
    fn memory(&self) -> MemoryReport {
        MemoryReport { weights_bytes: self.weights.bytes() as u64, ..MemoryReport::default() }
    }
}

impl State for WeightsLoaded {
    const NAME: &'static str = "weights loaded";
}

impl Retention for Kept {}
impl Retention for Discarded {}
