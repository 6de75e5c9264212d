//! Shapes of what operations work on, and how it lies in memory.

use super::{View, ViewMut};
use crate::weights::DType;

/// A weight matrix: `rows` output features by `cols` input features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MatrixShape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) dtype: DType,
}

/// A resident weight matrix in the device's packed layout.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) bytes: View<'a, u8>,
    pub(crate) shape: MatrixShape,
}

/// A resident vector (norm weight, bias) in its own dtype, in natural order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Vector<'a> {
    pub(crate) bytes: View<'a, u8>,
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

/// The columns of a fused `qkv` row: `q_heads`, then `kv_heads` keys, then `kv_heads` values, each of
/// `head_dim`. `q_heads` is a multiple of `kv_heads` (GQA, Ainslie et al. 2023).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct HeadShape {
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl HeadShape {
    /// Elements of a fused row.
    pub(crate) fn width(&self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Elements of the query part, and of a row of attention output.
    pub(crate) fn q_width(&self) -> usize {
        self.q_heads * self.head_dim
    }
}

/// Per-head norms of queries and keys (Qwen3), each of `head_dim`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QkNorm<'a> {
    pub(crate) q: Vector<'a>,
    pub(crate) k: Vector<'a>,
    pub(crate) eps: f32,
}

/// Cosines and sines of a step's rows, each `[rows, head_dim / 2]`; attention scaling included.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RopeAngles<'a> {
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
}

/// Shape of the KV cache of one layer.
///
/// - keys: `[num_blocks, kv_heads, head_dim, block_size]` (positions innermost: a score is one chain over
///   `head_dim`, many positions side by side);
/// - values: `[num_blocks, kv_heads, block_size, head_dim]` (an output element is one chain over positions).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl KvShape {
    /// Elements of the keys (or of the values) of one block in one layer.
    pub(crate) fn block_elements(&self) -> usize {
        self.block_size * self.kv_heads * self.head_dim
    }

    /// Elements of the keys (or of the values) of one layer.
    pub(crate) fn layer_elements(&self) -> usize {
        self.num_blocks * self.block_elements()
    }
}

/// The cache of one layer, to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvLayer<'a> {
    pub(crate) keys: View<'a, f32>,
    pub(crate) values: View<'a, f32>,
    pub(crate) shape: KvShape,
}

/// The cache of one layer, to write.
#[derive(Debug)]
pub(crate) struct KvLayerMut<'a> {
    pub(crate) keys: ViewMut<'a, f32>,
    pub(crate) values: ViewMut<'a, f32>,
    pub(crate) shape: KvShape,
}

/// Rows `first_row..first_row + rows` are consecutive positions of one sequence, from `first_position`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionSpan<'a> {
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) first_position: usize,
    /// Block of each `block_size` positions, from position 0.
    pub(crate) block_table: &'a [u32],
}

/// How scores are made, and which keys a query sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionScores {
    /// Multiplies the scores, usually `1 / sqrt(head_dim)`.
    pub(crate) scale: f32,
    /// Sliding window: a query at position `p` sees keys in `p - window < k <= p`.
    pub(crate) window: Option<usize>,
}
