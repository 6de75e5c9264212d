//! Steps that are recorded once and repeated: CUDA graphs.
//!
//! A decode step of a large model is hundreds of launches, and the host takes longer to put them on a stream than a
//! GPU to run them at small batches. What they do depends on the number of rows, on a bound on the sequences'
//! lengths, and on addresses, which are the same for the engine's life: a graph stays valid over sleeps, updates and
//! wakes. They are made node by node, not by capturing the stream: while a capture is under way, a synchronisation of
//! the whole context by another thread, a trainer's say, would fail.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ptr::null_mut;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::context::Context;
use super::driver::{CUgraph, CUgraphExec};
use super::error::CallError;
use super::step::decode_shape;
use super::stream::{Recording, Stream};
use crate::device::{DeviceError, Recorder, Step};

/// Graphs that are kept. A rollout's batch shrinks slowly: a few sizes are in use at a time.
const MAX_GRAPHS: usize = 16;

/// What graphs of a model differ in: rows, and chunks of attention at most.
pub(super) type DecodeShape = (usize, usize);

/// The graphs of one model.
#[derive(Debug)]
pub(super) struct Graphs {
    context: Arc<Context>,
    stream: Arc<Stream>,
    /// Held while launches are recorded instead of run; whoever else uses the stream waits.
    recording: Arc<RwLock<()>>,
    /// Of the shapes seen, the last one used at the end.
    seen: Mutex<Vec<Seen>>,
}

#[derive(Debug)]
struct Seen {
    shape: DecodeShape,
    graph: Recorded,
}

#[derive(Debug)]
enum Recorded {
    /// It came once, and ran as it is: many shapes don't come again.
    NotYet,
    Graph(Graph),
    /// It could not be: it runs as it is.
    Never,
}

impl Graphs {
    pub(super) fn new(context: &Arc<Context>, stream: &Arc<Stream>, recording: &Arc<RwLock<()>>) -> Self {
        let (context, stream, recording) = (Arc::clone(context), Arc::clone(stream), Arc::clone(recording));
        Self { context, stream, recording, seen: Mutex::default() }
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<(), DeviceError>) -> Result<Graph, DeviceError> {
        let failed = |error: CallError| error.during("recording a step");
        let _bound = self.context.bind().map_err(failed)?;
        let _alone = self.recording.write();
        let mut graph = null_mut();
        // SAFETY: `graph` is ours to write; `Unfinished` destroys it.
        unsafe { self.context.driver.cuGraphCreate(&raw mut graph, 0) }.map_err(failed)?;
        let graph = Unfinished { graphs: self, graph };
        *self.stream.recording() = Some(Recording { graph: graph.graph, last: null_mut() });
        work()?;
        let mut executable = null_mut();
        // SAFETY: the graph is whole; `Graph` destroys what is made of it, which does not need the graph.
        unsafe { self.context.driver.cuGraphInstantiateWithFlags(&raw mut executable, graph.graph, 0) }
            .map_err(failed)?;
        Ok(Graph { context: Arc::clone(&self.context), executable })
    }
}

/// A graph while it is recorded; when this goes, by a panic too, the stream runs again what it is given.
struct Unfinished<'a> {
    graphs: &'a Graphs,
    graph: CUgraph,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        *self.graphs.stream.recording() = None;
        let destroy = || {
            let _bound = self.graphs.context.bind_to_end()?;
            // SAFETY: created by `record`, destroyed once.
            unsafe { self.graphs.context.driver.cuGraphDestroy(self.graph) }
        };
        if let Err(error) = destroy() {
            tracing::warn!(%error, "a graph was not destroyed");
        }
    }
}

impl Recorder for Graphs {
    fn run(
        &self,
        step: &mut Step<'_>,
        work: &mut dyn FnMut(&mut Step<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Some(shape) = decode_shape(&step.inputs) else { return work(step) };
        let mut seen = self.seen.lock();
        let Some(at) = seen.iter().position(|seen| seen.shape == shape) else {
            if seen.len() == MAX_GRAPHS {
                seen.remove(0);
            }
            seen.push(Seen { shape, graph: Recorded::NotYet });
            return work(step);
        };
        let mut this = seen.remove(at);
        if matches!(this.graph, Recorded::NotYet) {
            this.graph = match self.record(&mut || work(step)) {
                Ok(graph) => Recorded::Graph(graph),
                Err(error) => {
                    tracing::warn!(%error, ?shape, "a step was not recorded");
                    Recorded::Never
                }
            };
        }
        let result = match &this.graph {
            Recorded::Graph(graph) => {
                graph.launch(&self.stream).map_err(|error| error.during("repeating a step"))
            }
            // Nothing of what was to be recorded has run.
            _ => work(step),
        };
        seen.push(this);
        result
    }
}

/// A recorded step that can be launched.
#[derive(Debug)]
struct Graph {
    context: Arc<Context>,
    executable: CUgraphExec,
}

// SAFETY: a graph may be launched and destroyed from any thread, one at a time, which `Graphs` sees to.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    fn launch(&self, stream: &Stream) -> Result<(), CallError> {
        let _bound = self.context.bind()?;
        // SAFETY: the graph is alive, and so is the memory it names: it belongs to an awake engine, as when it was
        // recorded, at the same addresses.
        unsafe { self.context.driver.cuGraphLaunch(self.executable, stream.raw()) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let destroy = || {
            let _bound = self.context.bind_to_end()?;
            // SAFETY: made by `record`, destroyed once; the driver finishes a launch that is under way.
            unsafe { self.context.driver.cuGraphExecDestroy(self.executable) }
        };
        if let Err(error) = destroy() {
            tracing::warn!(%error, "a graph was not destroyed");
        }
    }
}
