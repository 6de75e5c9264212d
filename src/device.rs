//! What the engine needs of a device: memory that can leave and come back at the same address, and the
//! operations of one transformer.
//!
//! A device is a value (`Arc<dyn Device>`), not a type parameter: a virtual call costs nothing beside the
//! work it starts. Memory is an [`Arena`]; operations take [`View`]s and [`ViewMut`]s borrowed from arenas,
//! so that the borrow checker proves that outputs don't alias inputs and that nothing is decommitted while
//! an operation uses it.
//!
//! Architecture invariant: only this module and its children contain `unsafe`.

mod arena;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod layout;
mod logits;
mod shared_memory;
mod step;
#[cfg(feature = "cuda")]
mod weight_workspace;

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use cpu::HostBuffer;

pub use arena::DeviceError;
pub(crate) use arena::{Arena, Pages, View, ViewMut};
pub(crate) use layout::{
    AttentionScores, AttentionSpan, HeadShape, KvLayer, KvLayerMut, KvShape, Matrix, MatrixShape, QkNorm,
    RopeAngles, Vector,
};
pub(crate) use logits::{DrawQuery, LogitChanges, LogitsReader, RowAnswer, RowQuery};
#[cfg(feature = "cuda")]
pub(crate) use logits::{DrawnToken, TokenLogit};
pub(crate) use shared_memory::{AdoptError, SharedMapping, SharedMemory};
pub(crate) use step::{Recorder, Step, StepBytes, StepInputs, StepLimits, Unrecorded};
#[cfg(feature = "cuda")]
pub(crate) use weight_workspace::{
    LeafCut, NonFinite, Opened, Origin, Seen, WORKSPACE_ALIGNMENT, WeightWorkspace, Window,
};

/// Calls `work` once for each chunk of `bytes`, with its number, on the device's threads.
pub(crate) fn share_chunks(
    device: &dyn Device,
    bytes: &mut [u8],
    chunk_bytes: usize,
    work: &(dyn Fn(usize, &mut [u8]) + Sync),
) {
    let chunks: Vec<_> = bytes.chunks_mut(chunk_bytes).map(Mutex::new).collect();
    device.share_out(chunks.len(), &|chunk| work(chunk, &mut chunks[chunk].lock()));
}

/// Weights are being brought in or out; when this is dropped they no longer are.
#[derive(Debug)]
pub(crate) struct Transfer(pub(crate) Arc<dyn Device>);

impl Drop for Transfer {
    fn drop(&mut self) {
        self.0.end_transfer();
    }
}

/// A device's memory as the device counts it, with that of all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that nobody has.
    pub free_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// Commits an arena, then copies these contents in. On an error nothing is committed.
pub(crate) fn commit_and_write<D: Device + ?Sized>(
    device: &D,
    arena: &mut Arena,
    contents: &[u8],
) -> Result<(), DeviceError> {
    arena.commit(contents.len())?;
    let written = device.write_bytes(arena.view_mut(0, contents.len()), contents);
    written.inspect_err(|_| _ = arena.decommit())
}

/// What a matrix product does with its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// `out = x · Wᵀ (+ bias)`
    Store,
    /// `out = out + (x · Wᵀ (+ bias))`, the residual connection; the product is finished before it is added.
    Add,
}

/// The operations of a transformer, and memory.
///
/// Every operation is *batch invariant*: each output element is reduced in one order that depends on its own
/// row and the weights only, never on how many rows there are, on the thread count or on the instruction set.
///
/// Shapes are row-major. Operations assert shapes before any work (a mismatch is a bug of this crate).
pub(crate) trait Device: Send + Sync + std::fmt::Debug {
    /// Reserves an address range of at least `bytes`, without memory behind it.
    fn reserve(&self, label: &'static str, bytes: usize) -> Result<Arena, DeviceError>;

    /// Whether the device's operations are made for such heads.
    fn check_heads(&self, _heads: HeadShape) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Rows of logits computed at a time, at most: they are the widest activation.
    fn logit_rows(&self) -> usize {
        32
    }

    /// Bytes that a matrix takes in this device's packed layout; a multiple of 64.
    fn matrix_bytes(&self, shape: MatrixShape) -> usize;

    /// Rows that are packed together: writing multiples of them, from a multiple on, is fastest.
    fn packed_rows(&self) -> usize;

    /// Packs `src` (row-major, `shape.dtype`, a whole number of rows of `shape.cols`) into rows
    /// `first_row..` of the packed matrix `dst`. `dst` was all zero bytes before its first write.
    fn write_rows(
        &self,
        dst: ViewMut<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        src: &[u8],
    ) -> Result<(), DeviceError>;

    /// The inverse of [`Device::write_rows`]: unpacks whole rows, starting at `first_row`, into `out`.
    fn read_rows(
        &self,
        src: View<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// Copies bytes from one place in the device's memory to another.
    fn copy_bytes(&self, dst: ViewMut<'_, u8>, src: View<'_, u8>) -> Result<(), DeviceError>;

    /// Copies bytes in.
    fn write_bytes(&self, dst: ViewMut<'_, u8>, src: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes out.
    fn read_bytes(&self, src: View<'_, u8>, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Commits an arena with these contents. On an error nothing is committed.
    fn commit_with(&self, arena: &mut Arena, contents: &[u8]) -> Result<(), DeviceError> {
        commit_and_write(self, arena, contents)
    }

    /// Host memory for a large copy of what is on the device.
    fn host_buffer(&self, label: &'static str, bytes: usize) -> Result<HostBuffer, DeviceError> {
        HostBuffer::new(label, bytes)
    }

    /// Bytes of host memory, and of its own, that the device keeps for itself.
    fn staging_bytes(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Gives back what the device has taken to bring weights in or out.
    fn end_transfer(&self) {}

    /// What the device says of its memory, all processes together; nothing if it is the host's.
    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// Whether arenas are memory of the host: then copies between the two can't fail, and both count as one.
    fn shares_host_memory(&self) -> bool {
        true
    }

    /// Temporary memory of so many bytes in which weights are worked on where they are; `None` if this is the host.
    #[cfg(feature = "cuda")]
    fn weight_workspace(&self, _bytes: usize) -> Result<Option<Box<dyn WeightWorkspace + '_>>, DeviceError> {
        Ok(None)
    }

    /// Memory of [`Step`] for steps of at most that size.
    fn step_bytes(&self, _limits: &StepLimits) -> StepBytes {
        StepBytes::default()
    }

    /// What runs the operations of a model's steps, or repeats them.
    fn recorder(&self) -> Box<dyn Recorder> {
        Box::new(Unrecorded)
    }

    /// Takes in a step's inputs; the operations of the step come after it.
    fn begin_step(&self, _step: &mut Step<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// `out[i] = table[tokens[i]]` of the step's tokens, `out`: `[tokens.len(), table.cols]`.
    fn embed(&self, step: &Step<'_>, table: Matrix<'_>, out: ViewMut<'_, f32>) -> Result<(), DeviceError>;

    /// Root-mean-square norm of each row of `x`: `[rows, weight.len]`.
    ///
    /// Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
    fn rms_norm(
        &self,
        x: View<'_, f32>,
        weight: Vector<'_>,
        eps: f32,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError>;

    /// `x`: `[rows, w.cols]`, `out`: `[rows, w.rows]`, `bias`: `[w.rows]`. One k-ordered chain of fused
    /// multiply-adds for each output element, from 0; then `+ bias`.
    fn matmul(
        &self,
        step: &mut Step<'_>,
        x: View<'_, f32>,
        w: Matrix<'_>,
        bias: Option<Vector<'_>>,
        output: Output,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError>;

    /// In place on the query and key heads of `qkv`: `[rows, shape.width()]`: the per-head norm (Qwen3)
    /// if there is one, then the rotary embedding by the step's angles, in the half-split ("rotate half") form.
    ///
    /// Source: Su et al. 2021, "RoFormer", §3.4.2; halves as in Hugging Face `rotate_half`.
    fn rope(
        &self,
        step: &Step<'_>,
        qkv: ViewMut<'_, f32>,
        shape: HeadShape,
        norm: Option<QkNorm<'_>>,
    ) -> Result<(), DeviceError>;

    /// Writes the key and value heads of row `i` of `qkv` into the step's slot `slots[i]`
    /// (`block * block_size + offset`).
    fn store_kv(
        &self,
        step: &Step<'_>,
        qkv: View<'_, f32>,
        shape: HeadShape,
        cache: KvLayerMut<'_>,
    ) -> Result<(), DeviceError>;

    /// Causal attention of the query heads of `qkv`, span by span, over the paged cache (which already holds
    /// this step's keys and values); `out`: `[rows, q_heads * head_dim]`.
    ///
    /// Source: Vaswani et al. 2017, §3.2; block tables: Kwon et al. 2023 (PagedAttention), §4.
    fn attention(
        &self,
        step: &mut Step<'_>,
        qkv: View<'_, f32>,
        shape: HeadShape,
        scores: AttentionScores,
        cache: KvLayer<'_>,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError>;

    /// `gate_up`: `[rows, 2 * width]` (gate first), `out`: `[rows, width]` = silu(gate) * up.
    ///
    /// Source: Shazeer 2020, "GLU Variants Improve Transformer", SwiGLU.
    fn silu_mul(
        &self,
        gate_up: View<'_, f32>,
        width: usize,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError>;

    /// `out[i] = x[logit_rows[wanted.start + i]]` of the step's `logit_rows`; rows of `dim` elements.
    fn gather_rows(
        &self,
        step: &Step<'_>,
        x: View<'_, f32>,
        dim: usize,
        wanted: Range<usize>,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError>;

    /// Copies the step's blocks `(from, to)` of one layer's cache, in order.
    fn copy_blocks(&self, step: &Step<'_>, cache: KvLayerMut<'_>) -> Result<(), DeviceError>;

    /// Runs `f` on the elements as host memory, after everything that writes them is done.
    fn with_host(&self, view: View<'_, f32>, f: &mut dyn FnMut(&[f32])) -> Result<(), DeviceError>;

    /// Has `reader` take in each row of the logits, `[rows, vocab]`, numbered from `first` on. The logits may be
    /// others afterwards.
    fn read_logits(
        &self,
        _step: &mut Step<'_>,
        logits: ViewMut<'_, f32>,
        vocab: usize,
        first: usize,
        reader: &dyn LogitsReader,
    ) -> Result<(), DeviceError> {
        self.with_host(logits.as_view(), &mut |values| {
            self.share_out(values.len() / vocab, &|row| {
                reader.take_logits(first + row, &values[row * vocab..][..vocab]);
            });
        })
    }

    /// Calls `work` once for each of `0..count`, on as many of the host's threads as the device has for that.
    fn share_out(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(work);
    }
}
