//! What state a controller's engine is in, as a value.

use std::fmt;

use super::TransactionId;
use crate::weights::WeightVersion;

/// Where a controller's engine is in its lifecycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lifecycle {
    /// Weights and KV cache are there.
    Awake,
    /// No KV cache; the weights are kept aside.
    SleepingKept,
    /// No KV cache, no weights.
    SleepingDiscarded,
    /// As [`SleepingDiscarded`](Lifecycle::SleepingDiscarded), and the weights were asked to wake: a complete
    /// update is what comes next. It takes its memory when it begins.
    AwaitingWeights,
    /// Whole weights; no KV cache.
    WeightsLoaded,
    /// Weights that an update in place has torn; no KV cache. A complete update or a sleep that discards them
    /// leads out.
    WeightsTorn,
    /// The controller has stopped.
    Stopped,
}

impl Lifecycle {
    /// Its name in messages and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::SleepingKept => "sleeping, weights kept",
            Self::SleepingDiscarded => "sleeping, weights discarded",
            Self::AwaitingWeights => "awaiting weights",
            Self::WeightsLoaded => "weights loaded",
            Self::WeightsTorn => "weights torn",
            Self::Stopped => "stopped",
        }
    }

    /// Whether there is a KV cache.
    pub fn has_kv_cache(self) -> bool {
        self == Self::Awake
    }

    /// Whether weights are resident and whole.
    pub fn has_weights(self) -> bool {
        matches!(self, Self::Awake | Self::WeightsLoaded)
    }

    /// Every state.
    pub const ALL: [Self; 7] = [
        Self::Awake,
        Self::SleepingKept,
        Self::SleepingDiscarded,
        Self::AwaitingWeights,
        Self::WeightsLoaded,
        Self::WeightsTorn,
        Self::Stopped,
    ];
}

impl fmt::Display for Lifecycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The state of a controller at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlState {
    /// Where the engine is in its lifecycle.
    pub lifecycle: Lifecycle,
    /// Whether it is paused: it neither accepts requests nor runs steps, whatever the lifecycle.
    pub paused: bool,
    /// Whether a step failed in a way that no other step can follow: the engine runs none, and accepts no
    /// requests, until it has slept with those in flight aborted or retracted.
    pub broken: bool,
    /// Whether requests are accepted now.
    pub admitting: bool,
    /// Counts the times that admission was closed. A request runs in the epoch that it was accepted in, or a
    /// later one if it was retracted.
    pub epoch: u64,
    /// Version of the weights; of the last whole ones if they are torn, kept or gone. `None` before the first.
    pub version: Option<WeightVersion>,
    /// The open transaction.
    pub transaction: Option<TransactionId>,
}

impl fmt::Display for ControlState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lifecycle.fmt(f)?;
        if self.paused {
            f.write_str(", paused")?;
        } else if self.broken {
            f.write_str(", broken by a step that failed: it must sleep")?;
        } else if self.lifecycle == Lifecycle::Awake && !self.admitting {
            f.write_str(", not accepting requests")?;
        }
        if let Some(transaction) = self.transaction {
            write!(f, ", transaction {transaction} open")?;
        }
        Ok(())
    }
}
