//! Operations on rows, each row by itself.
#![allow(unsafe_code, reason = "threads write disjoint rows")]

use std::ops::Range;

use super::host::SharedMut;
use super::math::{silu, sum_of_squares};
use super::pool::Pool;
use super::simd::{Kernel, LANES, Lanes, Simd};
use crate::device::HeadShape;

/// Operations on fewer elements run on the caller's thread.
const PARALLEL_FROM: usize = 32 << 10;

/// Calls `work` for ranges that together are `0..rows`, on several threads if the `rows * width` elements
/// are worth it.
pub(super) fn for_each_range(pool: &Pool, rows: usize, width: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
    if rows == 0 {
        return;
    }
    if rows * width < PARALLEL_FROM || pool.threads() == 1 {
        return work(0..rows);
    }
    let chunk = rows.div_ceil(pool.threads() * 4);
    pool.for_each(rows.div_ceil(chunk), &|task| work(task * chunk..rows.min((task + 1) * chunk)));
}

/// `out[i] = f(i)` for rows of `width`, on several threads if that pays.
pub(super) fn fill_rows(pool: &Pool, out: &mut [f32], width: usize, f: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    let rows = out.len() / width;
    let out = SharedMut::new(out);
    for_each_range(pool, rows, width, &|range| {
        for row in range {
            // SAFETY: ranges don't overlap, so each row is written by one thread.
            f(row, unsafe { out.part(row * width, width) });
        }
    });
}

/// Norm of rows of `width`; `weight` is padded.
pub(super) fn rms_norm(
    (simd, pool): (Simd, &Pool),
    x: &[f32],
    width: usize,
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    assert!(width > 0 && x.len().is_multiple_of(width), "the input has whole rows");
    assert_eq!(x.len(), out.len(), "a norm keeps the shape");
    fill_rows(pool, out, width, &|row, out| {
        out.copy_from_slice(&x[row * width..][..width]);
        simd.run(Normalize { x: out, weight, eps });
    });
}

/// The norm of one row, in place.
struct Normalize<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for Normalize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let mean = sum_of_squares::<L>(self.x) / self.x.len() as f32;
        let factor = 1.0 / (mean + self.eps).sqrt();
        for (x, weight) in self.x.iter_mut().zip(self.weight) {
            *x = *x * factor * weight;
        }
    }
}

/// Per-head norms, padded weights.
#[derive(Debug)]
pub(super) struct HeadNorms {
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) eps: f32,
}

/// Norms (if any) and rotary embedding of the query and key heads of fused rows, in place.
pub(super) fn rope(
    (simd, pool): (Simd, &Pool),
    qkv: &mut [f32],
    shape: HeadShape,
    norms: Option<&HeadNorms>,
    cos: &[f32],
    sin: &[f32],
) {
    assert!(shape.head_dim.is_multiple_of(2), "a head rotates pairs");
    let (width, half) = (shape.width(), shape.head_dim / 2);
    let rows = qkv.len() / width;
    assert_eq!(qkv.len(), rows * width, "the input has whole rows");
    assert_eq!((cos.len(), sin.len()), (rows * half, rows * half), "angles for each row");
    fill_rows(pool, qkv, width, &|row, qkv| {
        let angles = row * half..(row + 1) * half;
        let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
        simd.run(RopeRow { qkv, shape, norms, cos, sin });
    });
}

struct RopeRow<'a> {
    qkv: &'a mut [f32],
    shape: HeadShape,
    norms: Option<&'a HeadNorms>,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for RopeRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let rotated = self.shape.q_heads + self.shape.kv_heads;
        for (index, head) in self.qkv.chunks_exact_mut(self.shape.head_dim).take(rotated).enumerate() {
            if let Some(norms) = self.norms {
                let weight = if index < self.shape.q_heads { &norms.q } else { &norms.k };
                Normalize { x: head, weight, eps: norms.eps }.run::<L>();
            }
            let (low, high) = head.split_at_mut(self.shape.head_dim / 2);
            for (((low, high), &cos), &sin) in low.iter_mut().zip(high).zip(self.cos).zip(self.sin) {
                (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
            }
        }
    }
}

/// `out = silu(gate) * up` for rows of `gate | up`.
pub(super) fn silu_mul((simd, pool): (Simd, &Pool), gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(width > 0 && out.len().is_multiple_of(width), "the output has whole rows");
    assert_eq!(gate_up.len(), 2 * out.len(), "a gate and an up for each output");
    fill_rows(pool, out, width, &|row, out| {
        let (gate, up) = gate_up[row * 2 * width..][..2 * width].split_at(width);
        simd.run(SiluMul { gate, up, out });
    });
}

struct SiluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let parts = self.gate.chunks(LANES).zip(self.up.chunks(LANES)).zip(self.out.chunks_mut(LANES));
        for ((gate, up), out) in parts {
            silu(L::load_first(gate, 0.0)).mul(L::load_first(up, 0.0)).store_first(out);
        }
    }
}
