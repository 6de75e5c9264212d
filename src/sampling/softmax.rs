//! Exponentials of logits, the same bits on every machine.

use crate::request::TokenId;

/// Fixed-point weight of the likeliest token.
///
/// Sums of weights stay below 2^63 for vocabularies of up to 2^23 tokens.
pub(super) const WEIGHT_ONE: u64 = 1 << 40;

/// Scaled logits below this have weight 0: `exp(-28.5)` is less than half a unit.
pub(super) const LEAST_SCALED: f32 = -28.5;

/// Finds the largest logit, or `None` if the logits are not a distribution: NaN or positive infinity among
/// them, or nothing above negative infinity.
pub(super) fn checked_max(logits: &[f32]) -> Option<f32> {
    const LANES: usize = 16;
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut sound = [true; LANES];
    let mut chunks = logits.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            let logit = chunk[lane];
            // False for NaN, too.
            sound[lane] &= logit < f32::INFINITY;
            max[lane] = if logit > max[lane] { logit } else { max[lane] };
        }
    }
    for (lane, &logit) in chunks.remainder().iter().enumerate() {
        sound[lane] &= logit < f32::INFINITY;
        max[lane] = if logit > max[lane] { logit } else { max[lane] };
    }
    let largest = max.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    // Adding 0 makes the two zeros one, of which `max` may give either.
    (sound.iter().all(|&lane| lane) && largest > f32::NEG_INFINITY).then_some(largest + 0.0)
}

/// Computes `exp(x)` for `x <= 0` to about 2 ulp; 0 below -87.
///
/// Written out so that it vectorises and does not depend on the platform's `libm`.
///
/// # Source
/// Cephes `expf`: reduction by `ln 2` in two parts, polynomial of degree 5.
#[expect(clippy::excessive_precision, reason = "the constants are written as published")]
#[inline]
fn exp(x: f32) -> f32 {
    /// Adding it rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_375 - n * -2.121_944_4e-4;
    let p = 1.987_569_15e-4_f32;
    let p = p * r + 1.398_199_95e-3;
    let p = p * r + 8.333_451_9e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_55e-1;
    let p = p * r + 5.000_000_1e-1;
    let mantissa = p * (r * r) + r + 1.0;
    // The exponent is at least -126: the scale is a normal number.
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let scale = f32::from_bits((exponent.wrapping_add(127) << 23) as u32);
    if x > -87.0 { mantissa * scale } else { 0.0 }
}

/// Calls `block` with up to 64 values of `exp(argument(logit))` at a time, which vectorise apart from their
/// use.
#[inline]
fn for_each_block(logits: &[f32], argument: impl Fn(f32) -> f32, mut block: impl FnMut(&[f32])) {
    const BLOCK: usize = 64;
    let mut values = [0.0; BLOCK];
    let mut chunks = logits.chunks_exact(BLOCK);
    for chunk in &mut chunks {
        for i in 0..BLOCK {
            values[i] = exp(argument(chunk[i]));
        }
        block(&values);
    }
    let rest = chunks.remainder();
    for (value, &logit) in values.iter_mut().zip(rest) {
        *value = exp(argument(logit));
    }
    block(&values[..rest.len()]);
}

/// Gives the fixed-point form of `exp` of a scaled logit.
#[inline]
fn fixed_point(exp: f32) -> u64 {
    /// 2^52: the sum's last mantissa bit stands for 1, so the mantissa is the rounded integer.
    const ROUND: f64 = 4_503_599_627_370_496.0;
    (f64::from(exp) * WEIGHT_ONE as f64 + ROUND).to_bits() - ROUND.to_bits()
}

/// Fills in the weight of each logit and gives their sum.
///
/// `scaled` maps the largest logit to 0 and the others below.
pub(super) fn fill_weights(logits: &[f32], scaled: impl Fn(f32) -> f32, weights: &mut Vec<u64>) -> u64 {
    weights.clear();
    for_each_block(logits, scaled, |block| weights.extend(block.iter().map(|&exp| fixed_point(exp))));
    weights.iter().sum()
}

/// Computes the logprob of one token from the logits and their [`log_sum_exp`].
///
/// # Panics
/// If the token is outside the vocabulary, which validation excludes.
pub(crate) fn logprob(logits: &[f32], lse: f32, token: TokenId) -> f32 {
    logits[token as usize] - lse
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::log_sum_exp;

    #[test]
    fn exp_is_accurate_and_ends_at_zero() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::MIN), 0.0);
        assert!(fixed_point(exp(LEAST_SCALED)) == 0 && fixed_point(1.0) == WEIGHT_ONE);
        for step in 0..870_000 {
            let x = -(step as f32) * 1e-4;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2.5e-7, "exp({x})");
        }
    }

    #[test]
    fn log_sum_exp_never_falls_below_the_maximum() {
        assert_eq!(log_sum_exp(&[3.5]), 3.5);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY, -7.0]), -7.0);
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1000) as f32 * 0.02 - 10.0).collect();
        let exact = logits.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
        assert!((f64::from(log_sum_exp(&logits)) - exact).abs() < 1e-6);
        assert!(log_sum_exp(&[f32::MIN, f32::MAX]).is_finite());
    }

    #[test]
    fn checked_max_refuses_what_is_no_distribution() {
        for position in [0, 15, 16, 36] {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                let mut logits = vec![1.0; 37];
                logits[position] = bad;
                assert_eq!(checked_max(&logits), None);
            }
        }
        assert_eq!(checked_max(&[]), None);
        assert_eq!(checked_max(&[f32::NEG_INFINITY; 20]), None);
        assert_eq!(checked_max(&[f32::NEG_INFINITY, f32::MIN]), Some(f32::MIN));
    }
}
