//! An engine in whatever state, for hosts that can't carry a type parameter.

use super::{Awake, Discarded, Engine, Kept, MemoryReport, Sleeping, State, WeightsLoaded};

/// An engine in whatever state. There is nothing to do with it but to look which.
#[derive(Debug)]
#[must_use = "dropping an engine frees it"]
#[expect(clippy::large_enum_variant, reason = "there is one of it, and it seldom moves")]
pub enum AnyEngine {
    /// Serving.
    Awake(Engine<Awake>),
    /// Asleep, the weights kept.
    SleepingKept(Engine<Sleeping<Kept>>),
    /// Asleep, no weights.
    SleepingDiscarded(Engine<Sleeping<Discarded>>),
    /// Weights, no KV cache.
    WeightsLoaded(Engine<WeightsLoaded>),
}

impl AnyEngine {
    /// Device memory that the engine holds now, by part.
    pub fn memory(&self) -> MemoryReport {
        match self {
            Self::Awake(engine) => engine.memory(),
            Self::SleepingKept(engine) => engine.memory(),
            Self::SleepingDiscarded(engine) => engine.memory(),
            Self::WeightsLoaded(engine) => engine.memory(),
        }
    }

    /// The state's name.
    pub fn state_name(&self) -> &'static str {
        match self {
            Self::Awake(_) => Awake::NAME,
            Self::SleepingKept(_) => Sleeping::<Kept>::NAME,
            Self::SleepingDiscarded(_) => Sleeping::<Discarded>::NAME,
            Self::WeightsLoaded(_) => WeightsLoaded::NAME,
        }
    }
}

macro_rules! any {
    ($state:ty, $variant:ident) => {
        impl From<Engine<$state>> for AnyEngine {
            fn from(engine: Engine<$state>) -> Self {
                Self::$variant(engine)
            }
        }
    };
}
any!(Awake, Awake);
any!(Sleeping<Kept>, SleepingKept);
any!(Sleeping<Discarded>, SleepingDiscarded);
any!(WeightsLoaded, WeightsLoaded);
