//! The arithmetic of a change, row block by row block.

use super::{Delta, SparseOp};
use crate::weights::convert::{narrow, widen};
use crate::weights::{DType, TensorSpec};

/// Columns whose sums are held in registers at a time.
const TILE: usize = 32;
/// Rows that use a tile of `a` while it is in the first cache.
const BLOCK_ROWS: usize = 8;
/// Elements of a sparse change that are converted at a time.
const SPARSE_BLOCK: usize = 64;

/// A checked change of one tensor. Any number of threads may merge disjoint rows with it.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    /// Element type of the tensor.
    dtype: DType,
    rows: usize,
    /// Elements of a row.
    row_len: usize,
    change: Change<'a>,
}

#[derive(Debug)]
enum Change<'a> {
    Sparse {
        indices: &'a [u64],
        values: &'a [u8],
        dtype: DType,
        op: SparseOp,
    },
    LowRank {
        /// `[columns / TILE][rank][TILE]`, the last tile filled up with zeros.
        a: Vec<[f32; TILE]>,
        /// `[rows][rank]`
        b: Vec<f32>,
        rank: usize,
        scale: f32,
    },
}

impl<'a> Prepared<'a> {
    /// Prepares a change that was checked against this tensor.
    pub(super) fn new(delta: &Delta<'a>, tensor: &TensorSpec) -> Self {
        // By division, since the rest of an empty tensor's shape may be beyond counting.
        let elements = tensor.checked_bytes().map_or(0, |bytes| bytes / tensor.dtype.size());
        let rows = tensor.shape.first().copied().unwrap_or(1);
        let row_len = elements.checked_div(rows).unwrap_or(0);
        let change = match *delta {
            Delta::Sparse { indices, values, dtype, op } => Change::Sparse { indices, values, dtype, op },
            Delta::LowRank { a, b, rank, dtype, scale } => {
                let mut wide = vec![0.0; b.len() / dtype.size()];
                widen(dtype, b, &mut wide);
                Change::LowRank { a: tiles(a, rank, row_len, dtype), b: wide, rank, scale }
            }
        };
        Self { dtype: tensor.dtype, rows, row_len, change }
    }

    /// Merges the change into whole rows of the tensor, in its own dtype, of which `first_row` is the first.
    /// The rows of a vector are its elements. How a tensor is divided makes no difference to any bit.
    pub(crate) fn merge_rows(&self, first_row: usize, rows: &mut [u8]) {
        let row_bytes = self.row_len * self.dtype.size();
        if row_bytes == 0 {
            return;
        }
        debug_assert!(rows.len().is_multiple_of(row_bytes), "{} bytes in rows of {row_bytes}", rows.len());
        debug_assert!(first_row <= self.rows && rows.len() / row_bytes <= self.rows - first_row);
        match &self.change {
            &Change::Sparse { indices, values, dtype, op } => {
                let first = first_row as u64 * self.row_len as u64;
                let end = first + (rows.len() / self.dtype.size()) as u64;
                let begin = indices.partition_point(|&index| index < first);
                let inside = indices[begin..].partition_point(|&index| index < end);
                let values = &values[begin * dtype.size()..][..inside * dtype.size()];
                let blocks = indices[begin..][..inside].chunks(SPARSE_BLOCK);
                for (indices, values) in blocks.zip(values.chunks(SPARSE_BLOCK * dtype.size())) {
                    merge_elements(self.dtype, rows, (first, indices), (dtype, values), op);
                }
            }
            Change::LowRank { a, b, rank, scale } => {
                let blocks = rows.chunks_mut(BLOCK_ROWS * row_bytes);
                let b = b.get(first_row * rank..).unwrap_or_default();
                for (rows, b) in blocks.zip(b.chunks(BLOCK_ROWS * rank)) {
                    for (tile, a) in a.chunks_exact(*rank).enumerate() {
                        let begin = tile * TILE * self.dtype.size();
                        let end = row_bytes.min(begin + TILE * self.dtype.size());
                        for (row, b) in rows.chunks_exact_mut(row_bytes).zip(b.chunks_exact(*rank)) {
                            merge_tile(self.dtype, &mut row[begin..end], a, b, *scale);
                        }
                    }
                }
            }
        }
    }
}

/// `a`, `[rank, columns]`, as f32 in tiles of columns.
fn tiles(a: &[u8], rank: usize, columns: usize, dtype: DType) -> Vec<[f32; TILE]> {
    let mut tiles = Vec::with_capacity(columns.div_ceil(TILE) * rank);
    for begin in (0..columns).step_by(TILE) {
        let width = TILE.min(columns - begin);
        for k in 0..rank {
            let mut tile = [0.0; TILE];
            let from = (k * columns + begin) * dtype.size();
            widen(dtype, &a[from..][..width * dtype.size()], &mut tile[..width]);
            tiles.push(tile);
        }
    }
    tiles
}

/// Merges up to [`TILE`] columns of one row: `a` holds them for each k, `b` one factor for each k.
#[inline]
fn merge_tile(dtype: DType, weights: &mut [u8], a: &[[f32; TILE]], b: &[f32], scale: f32) {
    let sums = products(a, b);
    let mut wide = [0.0; TILE];
    let width = weights.len() / dtype.size();
    widen(dtype, weights, &mut wide[..width]);
    for (weight, &sum) in wide.iter_mut().zip(&sums) {
        *weight += scale * sum;
    }
    narrow(&wide[..width], dtype, weights);
}

/// The sums over k, each in order. A function of its own, so that the sums have all registers.
#[inline(never)]
fn products(a: &[[f32; TILE]], b: &[f32]) -> [f32; TILE] {
    let mut sums = [0.0; TILE];
    for (a, &b) in a.iter().zip(b) {
        for (sum, &a) in sums.iter_mut().zip(a) {
            *sum += b * a;
        }
    }
    sums
}

/// Merges up to [`SPARSE_BLOCK`] elements; `first` is the flat position at which `rows` begin.
fn merge_elements(
    dtype: DType,
    rows: &mut [u8],
    (first, indices): (u64, &[u64]),
    (values_dtype, values): (DType, &[u8]),
    op: SparseOp,
) {
    let mut wide = [0.0; SPARSE_BLOCK];
    let wide = &mut wide[..indices.len()];
    widen(values_dtype, values, wide);
    match dtype {
        DType::F32 => scatter::<4>(dtype, rows.as_chunks_mut().0, (first, indices), wide, op),
        DType::F16 | DType::Bf16 => scatter::<2>(dtype, rows.as_chunks_mut().0, (first, indices), wide, op),
    }
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the positions lie in `weights`")]
fn scatter<const N: usize>(
    dtype: DType,
    weights: &mut [[u8; N]],
    (first, indices): (u64, &[u64]),
    values: &mut [f32],
    op: SparseOp,
) {
    let mut narrowed = [[0; N]; SPARSE_BLOCK];
    let narrowed = &mut narrowed[..indices.len()];
    let place = |index: u64| (index - first) as usize;
    if op == SparseOp::Add {
        let mut old = [0.0; SPARSE_BLOCK];
        for (old, &index) in narrowed.iter_mut().zip(indices) {
            *old = weights[place(index)];
        }
        widen(dtype, narrowed.as_flattened(), &mut old[..indices.len()]);
        values.iter_mut().zip(&old).for_each(|(value, old)| *value += old);
    }
    narrow(values, dtype, narrowed.as_flattened_mut());
    for (new, &index) in narrowed.iter().zip(indices) {
        weights[place(index)] = *new;
    }
}
