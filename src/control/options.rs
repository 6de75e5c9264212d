//! How a controller behaves.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Handle, Payload};
use crate::engine::AnyEngine;
use crate::weights::Checkpoint;

/// What happens to a request that arrives while the engine does not serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhileNotServing {
    /// It is refused at once, with the state and a hint when to ask again.
    #[default]
    Refuse,
    /// It is accepted and set aside until the engine serves; beyond the limit on live requests it is refused.
    Queue,
}

/// Where [`Operation::UpdateModelWeight`](super::Operation::UpdateModelWeight) takes weights from when it brings
/// none.
#[derive(Clone)]
pub struct Reload(Arc<dyn Fn() -> Payload + Send + Sync>);

impl Reload {
    /// Calls this for each load.
    pub fn new(payload: impl Fn() -> Payload + Send + Sync + 'static) -> Self {
        Self(Arc::new(payload))
    }

    /// Reads the checkpoint that is in this directory by then.
    pub fn checkpoint(directory: impl Into<PathBuf>) -> Self {
        let directory = directory.into();
        Self::new(move || Payload::source(Checkpoint::at(&directory)))
    }

    pub(super) fn payload(&self) -> Payload {
        Payload::made(|| (self.0)())
    }
}

impl fmt::Debug for Reload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reload")
    }
}

/// How a controller behaves.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ControllerOptions {
    /// Most requests that have not ended, running or not; default 1024.
    pub max_live_requests: usize,
    /// Most control requests that wait for their turn, at least 1; default 64.
    pub max_control_requests: usize,
    /// Tokens that a reader of a stream may be behind, of all samples together; default 1024. A request whose
    /// reader falls further behind gives its blocks back, and goes on when the reader has caught up.
    pub stream_buffer: usize,
    /// What happens to a request that arrives while the engine does not serve.
    pub while_not_serving: WhileNotServing,
    /// How long a transaction stays open without a push, if its begin says nothing; default 10 minutes.
    pub transaction_idle: Duration,
    /// Where [`Operation::UpdateModelWeight`](super::Operation::UpdateModelWeight) takes weights from.
    pub reload: Option<Reload>,
}

impl Default for ControllerOptions {
    fn default() -> Self {
        Self {
            max_live_requests: 1024,
            max_control_requests: 64,
            stream_buffer: 1024,
            while_not_serving: WhileNotServing::Refuse,
            transaction_idle: Duration::from_secs(600),
            reload: None,
        }
    }
}

/// Drives an engine at run time, with one thread that owns it and one that runs its steps.
///
/// ```no_run
/// use dormouse::control::{Controller, Operation, Payload, SleepPlan, Tags};
/// use dormouse::{Checkpoint, Engine, Request, UpdateOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let handle = Controller::spawn(Engine::builder("path/to/model").build()?);
/// let output = handle.submit(Request::new(vec![1, 2, 3]))?.wait()?;
///
/// handle.run(Operation::Sleep(SleepPlan { tags: Tags::KV_CACHE, ..SleepPlan::default() }))?;
/// let weights = Payload::source(Checkpoint::at("path/to/new/weights"));
/// handle.run(Operation::UpdateWeights { weights, options: UpdateOptions::default() })?;
/// handle.run(Operation::WakeUp { tags: Tags::KV_CACHE })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Controller {
    options: ControllerOptions,
}

impl Controller {
    /// Drives this engine, in whatever state it is, with the default options; see [`Controller::drive`].
    ///
    /// # Panics
    /// If the system has no room for two threads.
    pub fn spawn(engine: impl Into<AnyEngine>) -> Handle {
        Self::default().drive(engine)
    }

    /// A controller with options.
    pub fn with(options: ControllerOptions) -> Self {
        Self { options }
    }

    /// Drives this engine, in whatever state it is. Requests that it has in flight are aborted: take their outputs
    /// before. When the last handle is dropped what is in flight is aborted and the engine dropped, by the owner's
    /// thread in its own time; [`Handle::stop`] waits for it.
    ///
    /// # Panics
    /// If the system has no room for two threads.
    pub fn drive(self, engine: impl Into<AnyEngine>) -> Handle {
        Handle::start(engine.into(), self.options)
    }
}
