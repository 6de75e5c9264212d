//! Elements of one dtype into another, and the search for values that are no numbers.
//!
//! Everything works on little-endian bytes of any alignment, one element at a time without a branch, so that
//! the compiler turns the loops into vector code. A narrowing rounds to nearest even and overflows to
//! infinity, as IEEE 754 says; a widening is exact; NaN stays NaN.

#[cfg(test)]
mod tests;

use std::ops::BitOr;

use super::DType;

/// Bytes that are searched before the result is looked at.
const SEARCH_BYTES: usize = 4096;

/// Converts whole elements; `input` and `out` hold equally many. Between f16 and bf16 it goes through f32,
/// which holds either exactly, so every conversion rounds once.
pub(crate) fn convert(from: DType, input: &[u8], to: DType, out: &mut [u8]) {
    debug_assert!(input.len().is_multiple_of(from.size()) && out.len().is_multiple_of(to.size()));
    debug_assert_eq!(input.len() / from.size(), out.len() / to.size());
    match (from, to) {
        (DType::F32, DType::F16) => each(input, out, |x| f16_bits(f32::from_le_bytes(x)).to_le_bytes()),
        (DType::F32, DType::Bf16) => each(input, out, |x| bf16_bits(f32::from_le_bytes(x)).to_le_bytes()),
        (DType::F16, DType::F32) => each(input, out, |x| f32_of_f16(u16::from_le_bytes(x)).to_le_bytes()),
        (DType::Bf16, DType::F32) => each(input, out, |x| f32_of_bf16(u16::from_le_bytes(x)).to_le_bytes()),
        (DType::F16, DType::Bf16) => {
            each(input, out, |x| bf16_bits(f32_of_f16(u16::from_le_bytes(x))).to_le_bytes());
        }
        (DType::Bf16, DType::F16) => {
            each(input, out, |x| f16_bits(f32_of_bf16(u16::from_le_bytes(x))).to_le_bytes());
        }
        (DType::F32, DType::F32) => each::<4, 4>(input, out, |x| x),
        (DType::F16, DType::F16) | (DType::Bf16, DType::Bf16) => each::<2, 2>(input, out, |x| x),
    }
}

/// The elements as f32, which holds each exactly.
#[inline]
pub(crate) fn widen(from: DType, input: &[u8], out: &mut [f32]) {
    debug_assert_eq!(input.len(), out.len() * from.size());
    match from {
        DType::F32 => each_into(input, out, f32::from_le_bytes),
        DType::F16 => each_into(input, out, |x| f32_of_f16(u16::from_le_bytes(x))),
        DType::Bf16 => each_into(input, out, |x| f32_of_bf16(u16::from_le_bytes(x))),
    }
}

/// The elements rounded once to `to`.
#[inline]
pub(crate) fn narrow(input: &[f32], to: DType, out: &mut [u8]) {
    debug_assert_eq!(out.len(), input.len() * to.size());
    match to {
        DType::F32 => each_from(input, out, f32::to_le_bytes),
        DType::F16 => each_from(input, out, |x| f16_bits(x).to_le_bytes()),
        DType::Bf16 => each_from(input, out, |x| bf16_bits(x).to_le_bytes()),
    }
}

/// Position of the first element that is NaN or infinite.
#[cfg_attr(not(test), expect(dead_code, reason = "loads check with it once they are wired to"))]
pub(crate) fn first_non_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    debug_assert!(bytes.len().is_multiple_of(dtype.size()));
    // An exponent of ones only, plus one, carries into the sign's place; no other does.
    match dtype {
        DType::F32 => first_flagged(bytes, |x| {
            (u32::from_le_bytes(x) & 0x7f80_0000).wrapping_add(0x0080_0000) & 0x8000_0000
        }),
        DType::F16 => {
            first_flagged(bytes, |x| (u16::from_le_bytes(x) & 0x7c00).wrapping_add(0x0400) & 0x8000)
        }
        DType::Bf16 => {
            first_flagged(bytes, |x| (u16::from_le_bytes(x) & 0x7f80).wrapping_add(0x0080) & 0x8000)
        }
    }
}

/// Position of the first element for which `flag` is not zero. Its flags are as wide as an element, so that
/// as many of them fit a vector.
#[inline(always)]
fn first_flagged<const N: usize, F>(bytes: &[u8], flag: impl Fn([u8; N]) -> F) -> Option<usize>
where
    F: Copy + Default + PartialEq + BitOr<Output = F>,
{
    for (block, bytes) in bytes.chunks(SEARCH_BYTES).enumerate() {
        let elements = bytes.as_chunks::<N>().0;
        if elements.iter().fold(F::default(), |any, &x| any | flag(x)) != F::default() {
            let place = elements.iter().position(|&x| flag(x) != F::default())?;
            return Some(block * (SEARCH_BYTES / N) + place);
        }
    }
    None
}

#[inline(always)]
fn each<const I: usize, const O: usize>(input: &[u8], out: &mut [u8], f: impl Fn([u8; I]) -> [u8; O]) {
    let elements = input.as_chunks::<I>().0.iter();
    elements.zip(out.as_chunks_mut::<O>().0).for_each(|(&x, out)| *out = f(x));
}

#[inline(always)]
fn each_into<const I: usize>(input: &[u8], out: &mut [f32], f: impl Fn([u8; I]) -> f32) {
    input.as_chunks::<I>().0.iter().zip(out).for_each(|(&x, out)| *out = f(x));
}

#[inline(always)]
fn each_from<const O: usize>(input: &[f32], out: &mut [u8], f: impl Fn(f32) -> [u8; O]) {
    input.iter().zip(out.as_chunks_mut::<O>().0).for_each(|(&x, out)| *out = f(x));
}

#[inline(always)]
fn f32_of_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper half was shifted down")]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    // Half of the last place kept, less one if that place is even: a tie then carries only when it is odd.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding may carry a NaN into infinity or cut its payload to nothing: make it quiet instead.
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

#[inline(always)]
fn f32_of_f16(bits: u16) -> f32 {
    /// What an f32's exponent is biased by beyond an f16's.
    const BIAS: u32 = (127 - 15) << 23;
    /// 2^-14, the smallest normal f16.
    const SMALLEST_NORMAL: f32 = f32::from_bits(113 << 23);
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let normal = magnitude + BIAS;
    // A subnormal is a multiple of 2^-24: put below the one of 2^-14, which is then taken away. No operand is
    // an f32 subnormal, so a host that flushes those to zero gets the same.
    let subnormal = (f32::from_bits(normal + (1 << 23)) - SMALLEST_NORMAL).to_bits();
    let special = normal + BIAS;
    let widened = if magnitude < 0x0400 << 13 {
        subnormal
    } else if magnitude >= 0x7c00 << 13 {
        special
    } else {
        normal
    };
    f32::from_bits(widened | u32::from(bits & 0x8000) << 16)
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "each case leaves the lower half only")]
fn f16_bits(value: f32) -> u16 {
    /// 0.5, whose last place is the smallest subnormal f16, 2^-24.
    const ALIGN: f32 = 0.5;
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // As for bf16, with 13 places cut, and the exponent biased anew. Beyond the largest f16 this carries into
    // infinity by itself, up to the exponents that f16 doesn't have.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + odd) >> 13;
    // The addition rounds to a multiple of 2^-24, to nearest even.
    let subnormal = (f32::from_bits(magnitude) + ALIGN).to_bits().wrapping_sub(ALIGN.to_bits());
    let special = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    let narrowed = if magnitude < 113 << 23 {
        subnormal
    } else if magnitude >= 143 << 23 {
        special
    } else {
        normal
    };
    narrowed as u16 | (bits >> 16) as u16 & 0x8000
}
