//! The micro-kernel behind matrix products, attention scores and attention outputs: a tile of chains of fused
//! multiply-adds, each over `k` in order.
//!
//! A tile is `R` rows by `P` vectors of 16 columns. Which tiles cover a product never shows in the result, as
//! each element is one chain whatever its neighbours are.
#![allow(unsafe_code, reason = "the innermost loops read through pointers that their launchers checked")]

use super::simd::{LANES, Lanes};

/// How 16 neighbouring columns of one `k` are stored.
pub(super) trait Stored {
    /// Bytes of 16 columns.
    const BYTES: usize;
    /// The 16 columns at `from`.
    ///
    /// # Safety
    /// [`Self::BYTES`] bytes at `from` can be read.
    unsafe fn load<L: Lanes>(from: *const u8) -> L;
}

/// 16 f32.
pub(super) struct StoredF32;
/// 16 f16.
pub(super) struct StoredF16;
/// 16 bf16, lane `i` beside lane `i + 8`.
pub(super) struct StoredBf16;

impl Stored for StoredF32 {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L {
        // SAFETY: the caller's promise; bytes need no alignment.
        L::load_bytes(unsafe { &*from.cast() })
    }
}

impl Stored for StoredF16 {
    const BYTES: usize = 32;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L {
        // SAFETY: as above.
        L::widen_f16(unsafe { &*from.cast() })
    }
}

impl Stored for StoredBf16 {
    const BYTES: usize = 32;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L {
        // SAFETY: as above.
        L::widen_bf16_pairs(unsafe { &*from.cast() })
    }
}

/// Rows of the left factor: row `r` starts `r * stride` elements after `start`.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) start: *const f32,
    pub(super) stride: usize,
}

/// How far ahead of its use memory is asked for, in bytes, where few rows share what is loaded.
const PREFETCH_BYTES: usize = 2048;

/// Rows from which on arithmetic takes longer than loading.
const PREFETCH_ROWS: usize = 4;

/// Continues the chains of `tile` over `k` steps: `tile[r][p] += x[r][k] * w[p][k]`, where step `k` of `w[p]`
/// lies `k * step` bytes after `w[p]`.
///
/// # Safety
/// `x` has `R` rows of `k` elements, and [`Stored::BYTES`] can be read at each step of each `w`.
#[inline(always)]
pub(super) unsafe fn extend<L: Lanes, S: Stored, const R: usize, const P: usize>(
    tile: &mut [[L; P]; R],
    x: Rows,
    w: [*const u8; P],
    step: usize,
    k: usize,
) {
    let mut from = w;
    let mut elements = x.start;
    for _ in 0..k {
        let mut columns = [L::splat(0.0); P];
        for p in 0..P {
            if P > 1 && R <= PREFETCH_ROWS {
                L::prefetch(from[p].wrapping_add(PREFETCH_BYTES));
            }
            // SAFETY: this step of `w[p]`, the caller's promise.
            columns[p] = unsafe { S::load::<L>(from[p]) };
            from[p] = from[p].wrapping_add(step);
        }
        for (r, sums) in tile.iter_mut().enumerate() {
            // SAFETY: this step's element of row `r < R`, the caller's promise.
            let element = unsafe { elements.wrapping_add(r.wrapping_mul(x.stride)).read_unaligned() };
            let element = L::splat(element);
            for p in 0..P {
                sums[p] = element.mul_add(columns[p], sums[p]);
            }
        }
        elements = elements.wrapping_add(1);
    }
}

/// Rows of the tallest tile.
pub(super) const fn tile_rows<L: Lanes>() -> usize {
    match L::REGISTERS {
        32 => 12,
        _ => 6,
    }
}

/// The height of the next tile when `rows` are left: one of those of [`for_tile`], as even as can be.
pub(super) fn next_tile<L: Lanes>(rows: usize) -> usize {
    const HEIGHTS: [usize; 7] = [1, 2, 3, 4, 6, 8, 12];
    let even = rows.div_ceil(rows.div_ceil(tile_rows::<L>()));
    let above = HEIGHTS.iter().find(|&&height| height >= even && height <= rows);
    let below = HEIGHTS.iter().rfind(|&&height| height <= even);
    above.or(below).copied().unwrap_or(1)
}

/// Calls a function that is generic over a tile's rows and vectors for a number of rows known at run time:
/// `for_tile!(L, rows, f::<A, B>(arguments))` calls `f::<A, B, R, P>(arguments)`. The vectors of a tile fill
/// the register file. Each height is compiled for each kernel and instruction set, so there are few of them.
macro_rules! for_tile {
    ($lanes:ty, $rows:expr, $f:ident::<$($generic:ty),*>($($argument:expr),* $(,)?)) => {
        if const { <$lanes>::REGISTERS == 32 } {
            match $rows {
                1 => $f::<$($generic,)* 1, 4>($($argument),*),
                2 => $f::<$($generic,)* 2, 4>($($argument),*),
                3 => $f::<$($generic,)* 3, 4>($($argument),*),
                4 => $f::<$($generic,)* 4, 4>($($argument),*),
                6 => $f::<$($generic,)* 6, 4>($($argument),*),
                8 => $f::<$($generic,)* 8, 2>($($argument),*),
                12 => $f::<$($generic,)* 12, 2>($($argument),*),
                rows => unreachable!("a tile of {rows} rows"),
            }
        } else {
            match $rows {
                1 => $f::<$($generic,)* 1, 4>($($argument),*),
                2 => $f::<$($generic,)* 2, 2>($($argument),*),
                3 => $f::<$($generic,)* 3, 2>($($argument),*),
                4 => $f::<$($generic,)* 4, 1>($($argument),*),
                6 => $f::<$($generic,)* 6, 1>($($argument),*),
                rows => unreachable!("a tile of {rows} rows"),
            }
        }
    };
}
pub(super) use for_tile;

const _: () = assert!(StoredF32::BYTES == LANES * size_of::<f32>());
