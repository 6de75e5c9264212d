//! Lanes as an array: the baseline of every target, and the reference of the others.

use super::{LANES, Lanes};

/// Sixteen f32.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|lane| f(self.0[lane], other.0[lane])))
    }
}

impl Lanes for Portable {
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        Self(*from)
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }

    #[inline(always)]
    fn load_bytes(from: &[u8; 64]) -> Self {
        let (words, _) = from.as_chunks::<4>();
        Self(std::array::from_fn(|lane| f32::from_le_bytes(words[lane])))
    }

    #[inline(always)]
    fn widen_f16(from: &[u8; 32]) -> Self {
        let (halves, _) = from.as_chunks::<2>();
        Self(std::array::from_fn(|lane| half::f16::from_le_bytes(halves[lane]).to_f32_const()))
    }

    #[inline(always)]
    fn widen_bf16_pairs(from: &[u8; 32]) -> Self {
        let (pairs, _) = from.as_chunks::<4>();
        Self(std::array::from_fn(|lane| {
            let pair = u32::from_le_bytes(pairs[lane % 8]);
            f32::from_bits(if lane < 8 { pair << 16 } else { pair & 0xffff_0000 })
        }))
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        Self(std::array::from_fn(|lane| self.0[lane].mul_add(factor.0[lane], addend.0[lane])))
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn shift_to_exponent(self) -> Self {
        Self(self.0.map(|lane| f32::from_bits(lane.to_bits() << 23)))
    }

    #[inline(always)]
    fn prefetch(_address: *const u8) {}
}
