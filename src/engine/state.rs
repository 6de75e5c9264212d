//! The states of an engine. Each owns exactly the resources that exist in it.

use std::collections::BTreeSet;
use std::fmt::Debug;

use super::StepToken;
use super::report::{LoadReport, MemoryReport, SleepReport, WakeReport};
use super::requests::LiveRequest;
use super::serving::Shared;
use crate::completion::{RequestId, RequestOutput};
use crate::device::Arena;
use crate::device::cpu::HostBuffer;
use crate::weights::{Identity, LoadedWeights, ResidentWeights, Torn, WeightVersion};

/// What makes a state or a retention, out of other crates' reach.
pub(super) mod sealed {
    use crate::device::{Arena, DeviceError};
    use crate::engine::MemoryReport;
    use crate::engine::core::Core;
    use crate::weights::{Identity, ResidentWeights, Torn, WeightVersion};

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

        /// Version of the weights before.
        fn previous(&self) -> Option<WeightVersion>;

        /// Puts new weights in place of what is kept. On an error it comes back as it was.
        #[expect(private_interfaces, reason = "sealed: nobody else can call it")]
        fn replace(
            self,
            core: &Core,
            staged: Arena,
            identity: Identity,
        ) -> Result<ResidentWeights, (Self, DeviceError)>;
    }

    #[expect(unnameable_types, reason = "this is what seals the states with weights")]
    pub trait Resident: State {
        /// The weights' memory, and what they are if they are whole.
        #[expect(private_interfaces, reason = "sealed: nobody else can call it")]
        fn resident(&self) -> Result<(&Arena, &Identity), &Torn>;
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

/// A state in which weights are resident, so that they can be read: [`Awake`] or [`WeightsLoaded`]. Sealed.
pub trait Resident: State + sealed::Resident {}

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
    Parked { bytes: HostBuffer, reserved: Arena, identity: Identity },
}

impl KeptWeights {
    pub(crate) fn version(&self) -> &WeightVersion {
        match self {
            KeptWeights::Resident(weights) => weights.version(),
            KeptWeights::Parked { identity, .. } => &identity.version,
        }
    }
}

/// Weights are resident; no KV cache exists yet. They are whole, unless an update in place began and did not
/// commit: then they are torn, and the engine does not wake.
#[derive(Debug)]
pub struct WeightsLoaded {
    pub(crate) weights: LoadedWeights,
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
    /// Sampled, but not handed out yet.
    pub(crate) streamed: Vec<StepToken>,
}

impl Carried {
    /// Ends what was retracted, with the tokens it has.
    pub(crate) fn abort_retracted(&mut self) -> Vec<RequestOutput> {
        let retracted = std::mem::take(&mut self.retracted);
        self.forget_tokens(retracted.iter().map(|request| request.id));
        retracted.into_iter().map(LiveRequest::into_output).collect()
    }

    pub(crate) fn take_settled(&mut self) -> Vec<RequestOutput> {
        let settled = std::mem::take(&mut self.settled);
        self.forget_tokens(settled.iter().map(|output| output.request));
        settled
    }

    /// Drops the tokens of requests whose outputs are handed out.
    fn forget_tokens(&mut self, requests: impl Iterator<Item = RequestId>) {
        let ended: BTreeSet<RequestId> = requests.collect();
        self.streamed.retain(|token| !ended.contains(&token.request));
    }
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

impl sealed::Resident for Awake {
    #[expect(private_interfaces, reason = "sealed: nobody else can call it")]
    fn resident(&self) -> Result<(&Arena, &Identity), &Torn> {
        Ok((self.weights.arena(), self.weights.identity()))
    }
}

impl sealed::Resident for WeightsLoaded {
    #[expect(private_interfaces, reason = "sealed: nobody else can call it")]
    fn resident(&self) -> Result<(&Arena, &Identity), &Torn> {
        self.weights.identity().map(|identity| (self.weights.arena(), identity))
    }
}

impl Resident for Awake {}
impl Resident for WeightsLoaded {}
