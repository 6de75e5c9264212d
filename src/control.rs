//! The lifecycle at run time, for hosts that decide at run time: servers and controllers.
//!
//! A [`Controller`] owns an engine. What the types forbid it can't do either: it is written against the typed
//! engine, and an operation out of order is a [`ControlError::Conflict`] that names the missing step. Each
//! [`ControlRequest`] has an id and is answered exactly once, with the state before and after.
//!
//! ```text
//!                 sleep(weights)                      sleep(kv_cache)
//!   sleeping ◀───────────────────── weights loaded ◀──────────────────── awake
//!      │  wakeup(weights)            ▲     │                               ▲
//!      │   kept: restored            │     └───────── wakeup(kv_cache) ────┘
//!      │   discarded: awaited        │
//!      └── update_weights ───────────┘  ↺ update_weights, or begin, push, commit
//! ```
//!
//! `sleep` and `wakeup` of everything go the whole way; a pause is a switch of its own, in every state. Requests are
//! accepted while the engine is awake and not paused. Those in flight at a sleep are settled by its policy; what
//! was retracted waits here, where it can be aborted, and goes on after the wake.
//!
//! Two threads: one owns the engine and carries operations out, one runs its steps. Neither async runtimes nor
//! callbacks: a [`Ticket`] is a future and can be waited for, a [`Generation`] is a stream and can be read blocking.

mod board;
mod caught;
mod error;
mod generation;
mod handle;
mod kind;
mod machine;
mod metrics;
mod operation;
mod options;
mod owner;
mod payload;
mod prometheus;
mod reply;
mod response;
mod shared;
mod state;
mod stepper;
mod sync;
mod tags;
mod transaction;

pub use error::{ControlError, GenerationError, MissingStep, SubmitError};
pub use generation::{Generation, GenerationEvent, GenerationToken, TimedOut};
pub use handle::Handle;
pub use kind::ErrorKind;
pub use metrics::{Metrics, PhaseTime};
pub use operation::{
    AbortTarget, ControlRequest, Operation, PauseDeadline, PauseMode, Payload, SleepPlan, SleepWeights,
    TransactionId,
};
pub use options::{Controller, ControllerOptions, Reload, WhileNotServing};
pub use reply::Ticket;
pub use response::{Busy, ControlResponse, Outcome, Report, SettledReport, Status};
pub use state::{ControlState, Lifecycle};
pub use tags::{TagError, Tags};
