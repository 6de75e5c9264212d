//! Matrix products with packed weights.
#![allow(unsafe_code, reason = "threads write disjoint columns of one output; tiles read through pointers")]

use super::chain::{Rows, Stored, StoredBf16, StoredF16, StoredF32, extend, for_tile, next_tile};
use super::host::SharedMut;
use super::pool::Pool;
use super::simd::{Kernel, LANES, Lanes, Simd};
use crate::weights::DType;

/// Bytes of left-factor rows that stay in the second-level cache while panels pass by.
const ROW_BLOCK_BYTES: usize = 512 << 10;

/// Panels that a thread takes at a time, at least: those of the widest tile.
const CHUNK_PANELS: usize = 4;

/// Products of fewer multiplications run on the caller's thread.
const PARALLEL_FROM: usize = 64 << 10;

/// One product, its shapes checked.
pub(super) struct Product<'a> {
    x: &'a [f32],
    rows: usize,
    cols: usize,
    weights: &'a [u8],
    dtype: DType,
    out_cols: usize,
    /// Padded to whole panels.
    bias: Option<&'a [f32]>,
    add: bool,
    out: SharedMut<'a, f32>,
}

/// Rows and panels that one task computes.
#[derive(Clone, Copy)]
struct Part {
    first_row: usize,
    rows: usize,
    first_panel: usize,
    panels: usize,
}

impl<'a> Product<'a> {
    /// `out[r][c] (+)= Σ_k x[r][k] * weights[c][k] (+ bias[c])`.
    ///
    /// # Shapes
    /// `x`: `[rows, cols]`; `weights`: `[out_cols, cols]`, packed; `bias`: `[out_cols]`, padded to whole
    /// panels; `out`: `[rows, out_cols]`.
    #[expect(clippy::too_many_arguments, reason = "the one place where they are checked")]
    pub(super) fn new(
        x: &'a [f32],
        cols: usize,
        weights: &'a [u8],
        dtype: DType,
        out_cols: usize,
        bias: Option<&'a [f32]>,
        add: bool,
        out: &'a mut [f32],
    ) -> Self {
        assert!(cols > 0 && out_cols > 0, "a matrix has rows and columns");
        let rows = x.len() / cols;
        assert_eq!(x.len(), rows * cols, "the input has whole rows");
        assert_eq!(out.len(), rows * out_cols, "the output has a row for each row of input");
        let padded = out_cols.next_multiple_of(LANES);
        assert!(weights.len() >= padded * cols * dtype.size(), "the packed matrix has all its panels");
        assert!(bias.is_none_or(|bias| bias.len() == padded), "the bias is padded to whole panels");
        Self { x, rows, cols, weights, dtype, out_cols, bias, add, out: SharedMut::new(out) }
    }

    /// Computes it, on several threads if that pays.
    pub(super) fn compute(&self, simd: Simd, pool: &Pool) {
        if self.rows == 0 {
            return;
        }
        let panels = self.out_cols.div_ceil(LANES);
        let tile = simd.tile_rows();
        let block_rows = (ROW_BLOCK_BYTES / (self.cols * size_of::<f32>()) / tile * tile).max(tile);
        let blocks = self.rows.div_ceil(block_rows);
        if self.rows * self.cols * self.out_cols < PARALLEL_FROM {
            let part = Part { first_row: 0, rows: self.rows, first_panel: 0, panels };
            return simd.run(PartOf(self, part));
        }
        let chunk = panels.div_ceil(pool.threads() * 8).next_multiple_of(CHUNK_PANELS);
        let chunks = panels.div_ceil(chunk);
        pool.for_each(blocks * chunks, &|task| {
            let (first_row, first_panel) = (task / chunks * block_rows, task % chunks * chunk);
            let rows = block_rows.min(self.rows - first_row);
            let part = Part { first_row, rows, first_panel, panels: chunk.min(panels - first_panel) };
            simd.run(PartOf(self, part));
        });
    }
}

struct PartOf<'a>(&'a Product<'a>, Part);

impl Kernel for PartOf<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        match self.0.dtype {
            DType::F32 => compute_part::<L, StoredF32>(self.0, self.1),
            DType::F16 => compute_part::<L, StoredF16>(self.0, self.1),
            DType::Bf16 => compute_part::<L, StoredBf16>(self.0, self.1),
        }
    }
}

/// Panel after panel, so that each comes from memory once and serves all rows of the part.
#[inline(always)]
fn compute_part<L: Lanes, S: Stored>(product: &Product<'_>, part: Part) {
    let end_panel = part.first_panel + part.panels;
    let end_row = part.first_row + part.rows;
    let mut panel = part.first_panel;
    while panel < end_panel {
        let panels = CHUNK_PANELS.min(end_panel - panel);
        let mut row = part.first_row;
        while row < end_row {
            let rows = next_tile::<L>(end_row - row);
            for_tile!(L, rows, compute_tiles::<L, S>(product, row, panel, panels));
            row += rows;
        }
        panel += panels;
    }
}

/// Rows `row..row + R` of `panels` panels.
#[inline(always)]
fn compute_tiles<L: Lanes, S: Stored, const R: usize, const P: usize>(
    product: &Product<'_>,
    row: usize,
    panel: usize,
    panels: usize,
) {
    let mut done = 0;
    while done + P <= panels {
        compute_tile::<L, S, R, P>(product, row, panel + done);
        done += P;
    }
    while done < panels {
        compute_tile::<L, S, R, 1>(product, row, panel + done);
        done += 1;
    }
}

#[inline(always)]
fn compute_tile<L: Lanes, S: Stored, const R: usize, const P: usize>(
    product: &Product<'_>,
    row: usize,
    panel: usize,
) {
    let x = Rows { start: product.x[row * product.cols..].as_ptr(), stride: product.cols };
    let panel_bytes = product.cols * S::BYTES;
    let w: [*const u8; P] = std::array::from_fn(|p| product.weights[(panel + p) * panel_bytes..].as_ptr());
    let mut tile = [[L::splat(0.0); P]; R];
    // SAFETY: `Product::new` checked that `x` has all rows and `weights` all panels of `cols` steps; the
    // part lies within both.
    unsafe { extend::<L, S, R, P>(&mut tile, x, w, S::BYTES, product.cols) };
    for (r, columns) in tile.iter().enumerate() {
        for (p, &sum) in columns.iter().enumerate() {
            let column = (panel + p) * LANES;
            let width = LANES.min(product.out_cols - column);
            // SAFETY: parts of different tasks differ in row or panel.
            let out = unsafe { product.out.part((row + r) * product.out_cols + column, width) };
            let mut value = sum;
            if let Some(bias) = product.bias {
                value = value.add(L::load_first(&bias[column..column + LANES], 0.0));
            }
            if product.add {
                value = L::load_first(out, 0.0).add(value);
            }
            value.store_first(out);
        }
    }
}
