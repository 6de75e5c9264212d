//! The exponential and what is made of it.

use super::simd::{Kernel, LANES, Lanes, Simd, SimdPath};

/// `e^x`, within 2 ulp, and exact at 0. Below about -103.97 it is 0, above about 88.72 infinity; a NaN stays
/// one.
///
/// Cody & Waite range reduction and the polynomial of Moshier's Cephes `expf`, with fused multiply-adds.
#[inline(always)]
pub(super) fn exp<L: Lanes>(x: L) -> L {
    // 1.5 * 2^23: adding it rounds to an integer, which stays in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first short enough for exact products.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const POLYNOMIAL: [f32; 6] =
        [1.987_569_2e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    // The order of the operands keeps a NaN. Both limits are beyond where the result is 0 or infinite.
    let x = L::splat(89.0).min(L::splat(-105.0).max(x));
    let rounded = x.mul_add(L::splat(std::f32::consts::LOG2_E), L::splat(ROUND));
    let n = rounded.sub(L::splat(ROUND));
    let r = n.mul_add(L::splat(-LN2_HIGH), x);
    let r = n.mul_add(L::splat(-LN2_LOW), r);
    let mut sum = L::splat(POLYNOMIAL[0]);
    for &coefficient in &POLYNOMIAL[1..] {
        sum = sum.mul_add(r, L::splat(coefficient));
    }
    let power = sum.mul_add(r.mul(r), r).add(L::splat(1.0));
    // 2^n in two factors: n runs from -152 to 128, further than the exponents of normal numbers.
    let half = n.mul_add(L::splat(0.5), L::splat(ROUND)).sub(L::splat(ROUND));
    power.mul(power_of_two(half)).mul(power_of_two(n.sub(half)))
}

/// `2^n` for an integer `n` from -126 to 127.
#[inline(always)]
fn power_of_two<L: Lanes>(n: L) -> L {
    // The biased exponent, as the low bits of a float of 2^23 and more.
    n.add(L::splat(8_388_608.0 + 127.0)).shift_to_exponent()
}

/// `ln Σ e^x` of all elements, the same bits on every machine and path. Not finite if an element is NaN or
/// `+inf`, or if none is above `-inf`.
///
/// Source: Blanchard, Higham & Higham 2021, "Accurately computing the log-sum-exp and softmax functions"
/// (shift by the maximum).
pub(crate) fn log_sum_exp(x: &[f32]) -> f32 {
    log_sum_exp_on(Simd::detect(SimdPath::Auto), x)
}

/// [`log_sum_exp`] on the given path.
pub(super) fn log_sum_exp_on(simd: Simd, x: &[f32]) -> f32 {
    struct SumExp<'a>(&'a [f32]);
    impl Kernel for SumExp<'_> {
        type Output = (f32, f32);
        #[inline(always)]
        fn run<L: Lanes>(self) -> (f32, f32) {
            let most = greatest::<L>(self.0);
            let shift = L::splat(most);
            let mut sum = L::splat(0.0);
            let (groups, rest) = self.0.as_chunks::<LANES>();
            for group in groups {
                sum = sum.add(exp(L::load(group).sub(shift)));
            }
            if !rest.is_empty() {
                sum = sum.add(exp(L::load_first(rest, f32::NEG_INFINITY).sub(shift)));
            }
            (most, sum.sum())
        }
    }
    let (most, sum) = simd.run(SumExp(x));
    log_of_sum(most, sum)
}

/// `ln Σ e^x`, given the greatest `x` and `Σ e^(x - greatest)`.
pub(crate) fn log_of_sum(most: f32, sum: f32) -> f32 {
    if most == f32::NEG_INFINITY && !sum.is_nan() {
        most
    } else {
        (f64::from(most) + f64::from(sum).ln()) as f32
    }
}

/// The greatest element; `-inf` if there is none. Meaningless, but not a panic, if there are NaNs.
#[inline(always)]
pub(super) fn greatest<L: Lanes>(x: &[f32]) -> f32 {
    let mut most = L::splat(f32::NEG_INFINITY);
    let (groups, rest) = x.as_chunks::<LANES>();
    for group in groups {
        most = most.max(L::load(group));
    }
    most.max(L::load_first(rest, f32::NEG_INFINITY)).greatest()
}

/// The sum of squares: lane `i % 16` for element `i`, then a fixed tree.
#[inline(always)]
pub(super) fn sum_of_squares<L: Lanes>(x: &[f32]) -> f32 {
    let mut sum = L::splat(0.0);
    let (groups, rest) = x.as_chunks::<LANES>();
    for group in groups {
        let group = L::load(group);
        sum = group.mul_add(group, sum);
    }
    let rest = L::load_first(rest, 0.0);
    rest.mul_add(rest, sum).sum()
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(super) fn silu<L: Lanes>(x: L) -> L {
    let one = L::splat(1.0);
    x.div(one.add(exp(L::splat(0.0).sub(x))))
}
