//! Memory that exists only while the engine is awake: the KV cache's blocks and the activations.

use crate::device::{
    Arena, Device, DeviceError, KvLayer, KvLayerMut, KvShape, StepBytes, StepLimits, ViewMut,
};

use super::ModelConfig;

/// The device memory of the paged KV cache: for each layer all keys, then all values.
#[derive(Debug)]
pub(crate) struct KvMemory {
    arena: Arena,
    shape: KvShape,
}

impl KvMemory {
    /// Bytes of a cache of `num_layers` layers; `None` if they overflow.
    pub(crate) fn bytes(shape: KvShape, num_layers: usize) -> Option<usize> {
        let block = shape.block_size.checked_mul(shape.kv_heads)?.checked_mul(shape.head_dim)?;
        block.checked_mul(shape.num_blocks)?.checked_mul(2 * size_of::<f32>())?.checked_mul(num_layers)
    }

    /// Commits the cache in its reserved range; on an error the range comes back as it was.
    pub(crate) fn commit(
        mut reserved: Arena,
        shape: KvShape,
        num_layers: usize,
    ) -> Result<Self, (Arena, DeviceError)> {
        let bytes = Self::bytes(shape, num_layers).expect("checked when the range was reserved");
        match reserved.commit(bytes) {
            Ok(()) => Ok(Self { arena: reserved, shape }),
            Err(error) => Err((reserved, error)),
        }
    }

    pub(crate) fn committed(&self) -> usize {
        self.arena.committed()
    }

    #[cfg(test)]
    pub(crate) fn address(&self) -> usize {
        self.arena.address()
    }

    pub(crate) fn layer(&self, layer: usize) -> KvLayer<'_> {
        let len = self.shape.layer_elements();
        KvLayer {
            keys: self.arena.view(2 * layer * len, len),
            values: self.arena.view((2 * layer + 1) * len, len),
            shape: self.shape,
        }
    }

    pub(crate) fn layer_mut(&mut self, layer: usize) -> KvLayerMut<'_> {
        let len = self.shape.layer_elements();
        let (keys, values) = self.arena.view_mut(2 * layer * len, 2 * len).split_at(len);
        KvLayerMut { keys, values, shape: self.shape }
    }

    /// Gives the memory back and keeps the address range.
    pub(crate) fn release(mut self) -> (Arena, usize) {
        let freed = self.arena.decommit();
        (self.arena, freed)
    }
}

/// Buffers begin at multiples of so many elements: of 256 bytes.
const BUFFER_ALIGNMENT: usize = 64;

/// Sizes of the activations, in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkspaceShape {
    /// Tokens of one step.
    rows: usize,
    /// Rows of logits at a time.
    logit_rows: usize,
    hidden: usize,
    qkv: usize,
    attention: usize,
    gate_up: usize,
    vocab: usize,
    /// What the device needs beside.
    step: StepBytes,
}

impl WorkspaceShape {
    /// For steps of at most that size.
    pub(crate) fn new(
        device: &dyn Device,
        config: &ModelConfig,
        limits: &StepLimits,
        logit_rows: usize,
    ) -> Self {
        let heads = config.heads();
        Self {
            rows: limits.rows,
            logit_rows,
            hidden: config.hidden_size,
            qkv: heads.width(),
            attention: heads.q_width(),
            gate_up: 2 * config.intermediate_size,
            vocab: config.vocab_size,
            step: device.step_bytes(limits),
        }
    }

    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        self.parts().iter().sum::<usize>() * size_of::<f32>()
    }

    /// Elements of each buffer, in the order of [`Buffers`].
    fn parts(&self) -> [usize; 10] {
        let parts = [
            self.rows * self.hidden,
            self.rows * self.hidden,
            self.rows * self.qkv,
            self.rows * self.attention,
            self.rows * self.gate_up,
            self.rows * self.gate_up / 2,
            self.logit_rows * self.hidden,
            self.logit_rows * self.vocab,
            self.step.inputs.div_ceil(size_of::<f32>()),
            self.step.scratch.div_ceil(size_of::<f32>()),
        ];
        parts.map(|elements| elements.next_multiple_of(BUFFER_ALIGNMENT))
    }
}

/// The activations of one step. Contents mean nothing between steps.
#[derive(Debug)]
pub(crate) struct Workspace {
    arena: Arena,
    shape: WorkspaceShape,
}

/// Each buffer of a step, apart.
#[derive(Debug)]
pub(crate) struct Buffers<'a> {
    pub(crate) hidden: ViewMut<'a, f32>,
    pub(crate) normed: ViewMut<'a, f32>,
    pub(crate) qkv: ViewMut<'a, f32>,
    pub(crate) attention: ViewMut<'a, f32>,
    pub(crate) gate_up: ViewMut<'a, f32>,
    pub(crate) activated: ViewMut<'a, f32>,
    pub(crate) last: ViewMut<'a, f32>,
    pub(crate) logits: ViewMut<'a, f32>,
}

impl Workspace {
    /// Reserves the range.
    pub(crate) fn reserve(device: &dyn Device, shape: &WorkspaceShape) -> Result<Arena, DeviceError> {
        device.reserve("activations", shape.bytes())
    }

    /// Commits the buffers in their reserved range; on an error the range comes back as it was.
    pub(crate) fn commit(mut reserved: Arena, shape: WorkspaceShape) -> Result<Self, (Arena, DeviceError)> {
        match reserved.commit(shape.bytes()) {
            Ok(()) => Ok(Self { arena: reserved, shape }),
            Err(error) => Err((reserved, error)),
        }
    }

    pub(crate) fn committed(&self) -> usize {
        self.arena.committed()
    }

    /// Rows of logits that fit at a time.
    pub(crate) fn logit_rows(&self) -> usize {
        self.shape.logit_rows
    }

    /// The buffers, and the step's memory for its inputs and its scratch memory.
    pub(crate) fn buffers(&mut self) -> (Buffers<'_>, ViewMut<'_, u8>, ViewMut<'_, u8>) {
        let parts = self.shape.parts();
        let rest = self.arena.view_mut(0, parts.iter().sum());
        let (hidden, rest) = rest.split_at(parts[0]);
        let (normed, rest) = rest.split_at(parts[1]);
        let (qkv, rest) = rest.split_at(parts[2]);
        let (attention, rest) = rest.split_at(parts[3]);
        let (gate_up, rest) = rest.split_at(parts[4]);
        let (activated, rest) = rest.split_at(parts[5]);
        let (last, rest) = rest.split_at(parts[6]);
        let (logits, rest) = rest.split_at(parts[7]);
        let (memory, scratch) = rest.split_at(parts[8]);
        let buffers = Buffers { hidden, normed, qkv, attention, gate_up, activated, last, logits };
        (buffers, memory.into_bytes(), scratch.into_bytes())
    }

    /// Gives the memory back and keeps the address range.
    pub(crate) fn release(mut self) -> (Arena, usize) {
        let freed = self.arena.decommit();
        (self.arena, freed)
    }
}
