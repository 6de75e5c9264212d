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
mod layout;
mod shared_memory;

use parking_lot::Mutex;

pub use arena::DeviceError;
pub(crate) use arena::{Arena, Pages, View, ViewMut};
pub(crate) use layout::{
    AttentionBatch, AttentionSpan, HeadShape, KvLayer, KvLayerMut, KvShape, Matrix, MatrixShape, QkNorm,
    RopeAngles, Vector,
};
pub(crate) use shared_memory::{AdoptError, SharedMapping, SharedMemory};

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

    /// Bytes that a matrix takes in this device's packed layout; a multiple of 64.
    fn matrix_bytes(&self, shape: MatrixShape) -> usize;

    /// Rows that are packed together: writing multiples of them, from a multiple on, is fastest.
    fn packed_rows(&self) -> usize;

    /// Packs `src` (row-major, `shape.dtype`, a whole number of rows of `shape.cols`) into rows
    /// `first_row..` of the packed matrix `dst`. `dst` was all zero bytes before its first write.
    fn write_rows(&self, dst: ViewMut<'_, u8>, shape: MatrixShape, first_row: usize, src: &[u8]);

    /// The inverse of [`Device::write_rows`]: unpacks whole rows, starting at `first_row`, into `out`.
    fn read_rows(&self, src: View<'_, u8>, shape: MatrixShape, first_row: usize, out: &mut [u8]);

    /// Copies bytes from one place in the device's memory to another.
    fn copy_bytes(&self, dst: ViewMut<'_, u8>, src: View<'_, u8>);

    /// Copies bytes in.
    fn write_bytes(&self, dst: ViewMut<'_, u8>, src: &[u8]);

    /// Copies bytes out.
    fn read_bytes(&self, src: View<'_, u8>, out: &mut [u8]);

    /// `out[i] = table[tokens[i]]`, `out`: `[tokens.len(), table.cols]`.
    fn embed(&self, table: Matrix<'_>, tokens: &[u32], out: ViewMut<'_, f32>) -> Result<(), DeviceError>;

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
        x: View<'_, f32>,
        w: Matrix<'_>,
        bias: Option<Vector<'_>>,
        output: Output,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError>;

    /// In place on the query and key heads of `qkv`: `[rows, shape.width()]`: the per-head norm (Qwen3)
    /// if there is one, then the rotary embedding in the half-split ("rotate half") form.
    ///
    /// Source: Su et al. 2021, "RoFormer", §3.4.2; halves as in Hugging Face `rotate_half`.
    fn rope(
        &self,
        qkv: ViewMut<'_, f32>,
        shape: HeadShape,
        norm: Option<QkNorm<'_>>,
        angles: RopeAngles<'_>,
    ) -> Result<(), DeviceError>;

    /// Writes the key and value heads of row `i` of `qkv` into slot `slots[i]`
    /// (`block * block_size + offset`).
    fn store_kv(
        &self,
        qkv: View<'_, f32>,
        shape: HeadShape,
        slots: &[u32],
        cache: KvLayerMut<'_>,
    ) -> Result<(), DeviceError>;

    /// Causal attention of the query heads of `qkv` over the paged cache (which already holds this step's
    /// keys and values); `out`: `[rows, q_heads * head_dim]`.
    ///
    /// Source: Vaswani et al. 2017, §3.2; block tables: Kwon et al. 2023 (PagedAttention), §4.
    fn attention(
        &self,
        qkv: View<'_, f32>,
        shape: HeadShape,
        batch: &AttentionBatch<'_>,
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

    /// `out[i] = x[rows[i]]`, rows of `dim` elements.
    fn gather_rows(
        &self,
        x: View<'_, f32>,
        dim: usize,
        rows: &[u32],
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError>;

    /// Copies whole blocks `(from, to)` of one layer's cache, in order.
    fn copy_blocks(&self, cache: KvLayerMut<'_>, copies: &[(u32, u32)]) -> Result<(), DeviceError>;

    /// Runs `f` on the elements as host memory, after everything that writes them is done.
    fn with_host(&self, view: View<'_, f32>, f: &mut dyn FnMut(&[f32])) -> Result<(), DeviceError>;

    /// Calls `work` once for each of `0..count`, on as many of the host's threads as the device has for that.
    fn share_out(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(work);
    }
}
