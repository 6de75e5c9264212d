//! Lanes as two AVX2 registers.
#![allow(unsafe_code, reason = "vector intrinsics")]

use std::arch::x86_64::*;

use super::{LANES, Lanes};

/// Lanes 0..8 and 8..16.
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

impl Lanes for Avx2 {
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: features as above; the reference covers all bytes read, at any alignment.
        unsafe { Self(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))) }
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: features as above; the reference covers all bytes written, at any alignment.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
        }
    }

    #[inline(always)]
    fn load_bytes(from: &[u8; 64]) -> Self {
        // SAFETY: features as above; the reference covers all bytes read, at any alignment.
        unsafe { Self(_mm256_loadu_ps(from.as_ptr().cast()), _mm256_loadu_ps(from.as_ptr().add(32).cast())) }
    }

    #[inline(always)]
    fn widen_f16(from: &[u8; 32]) -> Self {
        // SAFETY: features as above; the reference covers all bytes read, at any alignment.
        unsafe {
            let low = _mm_loadu_si128(from.as_ptr().cast());
            let high = _mm_loadu_si128(from.as_ptr().add(16).cast());
            Self(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
        }
    }

    #[inline(always)]
    fn widen_bf16_pairs(from: &[u8; 32]) -> Self {
        // SAFETY: features as above; the reference covers all bytes read, at any alignment.
        unsafe {
            let pairs = _mm256_loadu_si256(from.as_ptr().cast());
            let low = _mm256_slli_epi32::<16>(pairs);
            let high = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            Self(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe {
            Self(_mm256_fmadd_ps(self.0, factor.0, addend.0), _mm256_fmadd_ps(self.1, factor.1, addend.1))
        }
    }

    #[inline(always)]
    fn shift_to_exponent(self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe {
            let low = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0));
            let high = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.1));
            Self(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: `Simd` detected the features before it named this type.
        unsafe { Self(_mm256_min_ps(self.0, other.0), _mm256_min_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch reads nothing and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}
