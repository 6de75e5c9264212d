//! Transposition of sixteen rows, which is what packing and unpacking are.
#![allow(unsafe_code, reason = "vector intrinsics of the baseline")]

use super::simd::LANES;

/// Bytes of a row that are transposed at a time.
pub(super) const STRIP_BYTES: usize = 16;

/// Sixteen strips: of sixteen rows, or of the columns that they hold, each of sixteen elements.
pub(super) type Block = [[u8; STRIP_BYTES]; LANES];

/// From strips of rows to columns. Elements have `SIZE` bytes, 2 or 4.
#[inline(always)]
pub(super) fn columns<const SIZE: usize>(rows: Block) -> Block {
    shuffle::<SIZE>(rows, LANES.ilog2())
}

/// The inverse of [`columns`].
#[inline(always)]
pub(super) fn rows<const SIZE: usize>(columns: Block) -> Block {
    shuffle::<SIZE>(columns, (STRIP_BYTES / SIZE).ilog2())
}

/// Puts the elements of the second half between those of the first, `rounds` times. As the number of elements
/// is a power of two, a round rotates the bits of each element's index, row and column, by one.
#[inline(always)]
fn shuffle<const SIZE: usize>(mut block: Block, rounds: u32) -> Block {
    for _ in 0..rounds {
        let halves = block;
        for i in 0..LANES / 2 {
            let [low, high] = interleave::<SIZE>(halves[i], halves[i + LANES / 2]);
            (block[2 * i], block[2 * i + 1]) = (low, high);
        }
    }
    block
}

/// `a[0] b[0] a[1] b[1] …`
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn interleave<const SIZE: usize>(a: [u8; STRIP_BYTES], b: [u8; STRIP_BYTES]) -> [[u8; STRIP_BYTES]; 2] {
    use std::arch::x86_64::*;
    // SAFETY: SSE2 is part of x86-64, and a vector is its 16 bytes.
    unsafe {
        let [a, b] = std::mem::transmute::<[[u8; STRIP_BYTES]; 2], [__m128i; 2]>([a, b]);
        std::mem::transmute::<[__m128i; 2], [[u8; STRIP_BYTES]; 2]>(match SIZE {
            2 => [_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)],
            4 => [_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b)],
            _ => unreachable!("elements have 2 or 4 bytes"),
        })
    }
}

#[cfg(not(target_arch = "x86_64"))]
use portable as interleave;

/// `a[0] b[0] a[1] b[1] …`
#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline(always)]
fn portable<const SIZE: usize>(a: [u8; STRIP_BYTES], b: [u8; STRIP_BYTES]) -> [[u8; STRIP_BYTES]; 2] {
    let byte = |i: usize| [a, b][i / SIZE % 2][i / (2 * SIZE) * SIZE + i % SIZE];
    [std::array::from_fn(byte), std::array::from_fn(|i| byte(STRIP_BYTES + i))]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<const SIZE: usize>() {
        let block: Block = std::array::from_fn(|row| std::array::from_fn(|i| (row * STRIP_BYTES + i) as u8));
        assert_eq!(interleave::<SIZE>(block[0], block[1]), portable::<SIZE>(block[0], block[1]));
        let transposed = columns::<SIZE>(block);
        for (index, element) in transposed.as_flattened().chunks_exact(SIZE).enumerate() {
            let (col, row) = (index / LANES, index % LANES);
            assert_eq!(*element, block[row][col * SIZE..][..SIZE]);
        }
        assert_eq!(rows::<SIZE>(transposed), block);
    }

    #[test]
    fn elements_of_a_row_come_to_their_columns_and_back() {
        check::<2>();
        check::<4>();
    }
}
