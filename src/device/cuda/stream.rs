//! Streams, events, and what is put on a stream.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ptr::null_mut;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::context::Context;
use super::driver::{CUevent, CUgraph, CUgraphNode, CUstream};
use super::error::CallError;

/// `CU_STREAM_NON_BLOCKING`: work of others on the default stream is none of ours.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: events order work, nothing else.
const DISABLE_TIMING: u32 = 2;

/// Work in order.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    stream: CUstream,
    /// Where launches go instead, while a step is recorded.
    recording: Mutex<Option<Recording>>,
}

/// A graph in the making: launches one after another.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) graph: CUgraph,
    pub(super) last: CUgraphNode,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CallError> {
        let _bound = context.bind()?;
        let mut stream = null_mut();
        // SAFETY: `stream` is ours to write; `Drop` destroys it.
        unsafe { context.driver.cuStreamCreate(&raw mut stream, NON_BLOCKING) }?;
        Ok(Self { context: Arc::clone(context), stream, recording: Mutex::default() })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.stream
    }

    pub(super) fn recording(&self) -> MutexGuard<'_, Option<Recording>> {
        self.recording.lock()
    }

    /// Waits until all work is done. After an error nothing runs either, unless the GPU itself is lost.
    pub(super) fn synchronize(&self) -> Result<(), CallError> {
        let _bound = self.context.bind_to_end()?;
        // SAFETY: the stream is alive.
        let wait = || unsafe { self.context.driver.cuStreamSynchronize(self.stream) };
        // The error may be one of earlier work, without a wait for the rest.
        wait().inspect_err(|_| _ = wait())
    }

    /// Sets bytes to zero. The context is bound; the range is mapped until this has run.
    pub(super) fn zero(&self, context: &Context, address: u64, bytes: usize) -> Result<(), CallError> {
        // SAFETY: only `CudaPages` and the device call this, with ranges that they hold exclusively.
        unsafe { context.driver.cuMemsetD8Async(address, 0, bytes, self.stream) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let destroy = || {
            let _bound = self.context.bind_to_end()?;
            // SAFETY: created by `new`, destroyed once; the driver finishes what is on it.
            unsafe { self.context.driver.cuStreamDestroy_v2(self.stream) }
        };
        if let Err(error) = destroy() {
            tracing::warn!(%error, "a stream was not destroyed");
        }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    event: CUevent,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CallError> {
        let _bound = context.bind()?;
        let mut event = null_mut();
        // SAFETY: `event` is ours to write; `Drop` destroys it.
        unsafe { context.driver.cuEventCreate(&raw mut event, DISABLE_TIMING) }?;
        Ok(Self { context: Arc::clone(context), event })
    }

    /// Comes when what is on the stream now is done.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), CallError> {
        let _bound = self.context.bind()?;
        // SAFETY: both are alive.
        unsafe { self.context.driver.cuEventRecord(self.event, stream.stream) }
    }

    /// Waits until it has come; at once if it was never recorded.
    pub(super) fn synchronize(&self) -> Result<(), CallError> {
        let _bound = self.context.bind()?;
        // SAFETY: the event is alive.
        unsafe { self.context.driver.cuEventSynchronize(self.event) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy = || {
            let _bound = self.context.bind_to_end()?;
            // SAFETY: created by `new`, destroyed once.
            unsafe { self.context.driver.cuEventDestroy_v2(self.event) }
        };
        if let Err(error) = destroy() {
            tracing::warn!(%error, "an event was not destroyed");
        }
    }
}
