//! What each transition did, in numbers.

use std::time::Duration;

use crate::completion::RequestId;
use crate::device::DeviceMemory;
use crate::weights::{UpdateMode, WeightVersion};

/// Memory by part, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryReport {
    /// Resident weights.
    pub weights_bytes: u64,
    /// Host copy of parked weights.
    pub parked_bytes: u64,
    /// KV cache blocks; address space with memory behind it, of which the system counts what was written.
    pub kv_cache_bytes: u64,
    /// Activations and logits.
    pub workspace_bytes: u64,
    /// Host memory that a GPU's engine keeps pinned: buffers for copies, and what parked weights took at the last
    /// sleep. Other engines have none.
    pub staging_bytes: u64,
    /// GPU memory for rows of weights on their way in or out; none while an engine sleeps. Other engines have none.
    pub device_bytes: u64,
}

impl MemoryReport {
    /// Sum of all parts.
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes
            + self.parked_bytes
            + self.kv_cache_bytes
            + self.workspace_bytes
            + self.staging_bytes
            + self.device_bytes
    }
}

/// Requests in flight when the engine went to sleep, by how they were settled.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settled {
    /// Ran to their own end while draining.
    pub drained: Vec<RequestId>,
    /// Ended with the tokens they had.
    pub aborted: Vec<RequestId>,
    /// Kept their tokens; they go on after the wake.
    pub retracted: Vec<RequestId>,
}

/// What a sleep did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SleepReport {
    /// Version of the weights that were resident (of the last whole ones, if they were torn); `None` if the engine
    /// was built asleep.
    pub version: Option<WeightVersion>,
    /// Requests in flight and what became of them.
    pub settled: Settled,
    /// KV blocks that held something and were dropped.
    pub blocks_dropped: usize,
    /// Given back to the system, by part.
    pub freed: MemoryReport,
    /// Host memory taken for parked weights.
    pub parked_bytes: u64,
    /// Time to settle the requests in flight.
    pub settle: Duration,
    /// Time to copy the weights aside.
    pub park: Duration,
    /// Time to give the memory back.
    pub free: Duration,
    /// The device's memory after it, as the device counts; nothing if it is the host's.
    pub device: Option<DeviceMemory>,
}

/// What a load or a restore did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadReport {
    /// Version of the weights that are resident now.
    pub version: WeightVersion,
    /// The version before them, if there was one.
    pub previous: Option<WeightVersion>,
    /// Tensors received; 0 for a restore.
    pub tensors: usize,
    /// Bytes received, in the source's layout; 0 for a restore.
    pub received_bytes: u64,
    /// Device memory taken.
    pub taken_bytes: u64,
    /// Most memory that weights took at any moment; twice the weights if they replaced resident ones.
    pub peak_weights_bytes: u64,
    /// Most host memory that pieces took which had come before those in front of them.
    pub peak_waiting_bytes: u64,
    /// Time from the begin to the commit.
    pub open: Duration,
    /// Time of it within pushes: reading, converting, checking, digesting, packing.
    pub receiving: Duration,
    /// Time to make the weights current (or to copy parked ones back).
    pub commit: Duration,
    /// The device's memory after it, as the device counts; nothing if it is the host's.
    pub device: Option<DeviceMemory>,
}

/// What an update did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdateReport {
    /// Version of the weights that are resident now.
    pub version: WeightVersion,
    /// The version before them; of the last whole weights, if they were torn.
    pub previous: WeightVersion,
    /// Where the new weights were built.
    pub mode: UpdateMode,
    /// Tensors that came in.
    pub tensors: usize,
    /// Bytes received, in the layout they were sent in; of a change, the tensor's.
    pub received_bytes: u64,
    /// Most memory that weights took at any moment: twice the weights if staged, once if in place. The KV cache
    /// takes none meanwhile.
    pub peak_weights_bytes: u64,
    /// Most host memory that pieces took which had come before those in front of them.
    pub peak_waiting_bytes: u64,
    /// Time from the begin to the commit.
    pub open: Duration,
    /// Time of it within pushes: reading, merging, converting, checking, digesting, packing.
    pub receiving: Duration,
    /// Time to make the weights current.
    pub commit: Duration,
    /// The device's memory after it, as the device counts; nothing if it is the host's.
    pub device: Option<DeviceMemory>,
}

/// What a wake did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WakeReport {
    /// Version of the weights that serve from now on.
    pub version: WeightVersion,
    /// Blocks of the new KV cache, all free.
    pub blocks: usize,
    /// Device memory taken, by part.
    pub taken: MemoryReport,
    /// Retracted requests that go on.
    pub resumed: Vec<RequestId>,
    /// Time to take the memory and build the scheduler.
    pub wake: Duration,
    /// The device's memory after it, as the device counts; nothing if it is the host's.
    pub device: Option<DeviceMemory>,
}

/// A snapshot of an awake engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Requests that have not ended.
    pub live_requests: usize,
    /// Sequences that wait for admission.
    pub waiting: usize,
    /// Sequences that hold blocks and are computed in each step.
    pub running: usize,
    /// Blocks in all; `free + cached + owned`.
    pub blocks: usize,
    /// Blocks that hold nothing.
    pub blocks_free: usize,
    /// Blocks that only the prefix cache knows.
    pub blocks_cached: usize,
    /// Blocks of running sequences and sessions.
    pub blocks_owned: usize,
    /// Steps since the wake.
    pub steps: u64,
    /// Tokens computed since the wake, prompt tokens among them.
    pub computed_tokens: u64,
    /// Tokens sampled since the wake.
    pub sampled_tokens: u64,
    /// Prompt tokens of samples that began to run since the wake: each sample counts its prompt.
    pub prompt_tokens: u64,
    /// Of them, those whose keys and values were found: in the prefix cache, or made by the group's prefill.
    pub cached_tokens: u64,
    /// Times a sequence lost its blocks to another, since the wake.
    pub preemptions: u64,
    /// Requests that ended by themselves since the wake.
    pub finished: u64,
    /// Requests that were aborted since the wake.
    pub aborted: u64,
}
