//! Lanes as one AVX-512 register.
#![allow(unsafe_code, reason = "vector intrinsics")]

use std::arch::x86_64::*;

use super::{LANES, Lanes};

/// Sixteen f32.
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

impl Lanes for Avx512 {
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm512_set1_ps(value)) }
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: features as above; the reference covers all bytes read, at any alignment.
        unsafe { Self(_mm512_loadu_ps(from.as_ptr())) }
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: features as above; the reference covers all bytes written, at any alignment.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn load_bytes(from: &[u8; 64]) -> Self {
        // SAFETY: features as above; the reference covers all bytes read, at any alignment.
        unsafe { Self(_mm512_loadu_ps(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn widen_f16(from: &[u8; 32]) -> Self {
        // SAFETY: features as above; the reference covers all bytes read, at any alignment.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn widen_bf16_pairs(from: &[u8; 32]) -> Self {
        // Word 2i goes to the high half of lane i, word 2i + 1 to that of lane i + 8; low halves are zeroed.
        // SAFETY: features as above; the reference covers all bytes read, at any alignment.
        unsafe {
            let pairs = _mm512_castsi256_si512(_mm256_loadu_si256(from.as_ptr().cast()));
            let sources = _mm512_set_epi32(
                15 << 16,
                13 << 16,
                11 << 16,
                9 << 16,
                7 << 16,
                5 << 16,
                3 << 16,
                1 << 16,
                14 << 16,
                12 << 16,
                10 << 16,
                8 << 16,
                6 << 16,
                4 << 16,
                2 << 16,
                0,
            );
            Self(_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaa_aaaa, sources, pairs)))
        }
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
    }

    #[inline(always)]
    fn shift_to_exponent(self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(self.0)))) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm512_div_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm512_max_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm512_min_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch reads nothing and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}
