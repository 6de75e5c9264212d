//! The exponential and log-sum-exp.

use super::rig::*;
use crate::device::cpu::SimdPath;
use crate::device::cpu::math::{exp, log_sum_exp, log_sum_exp_on};
use crate::device::cpu::simd::{Kernel, Lanes, Simd};

struct Exp<'a>(&'a mut [f32]);

impl Kernel for Exp<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for chunk in self.0.chunks_mut(16) {
            exp(L::load_first(chunk, 0.0)).store_first(chunk);
        }
    }
}

fn paths() -> [Simd; 3] {
    [SimdPath::Auto, SimdPath::Avx2, SimdPath::Portable].map(Simd::detect)
}

fn exponentials(simd: Simd, x: &[f32]) -> Vec<f32> {
    let mut x = x.to_vec();
    simd.run(Exp(&mut x));
    x
}

#[test]
fn exponentials_are_within_two_ulp() {
    let x: Vec<f32> = (0..400_000).map(|i| -104.0 + i as f32 * (193.0 / 400_000.0)).collect();
    let reference = exponentials(paths()[2], &x);
    for simd in paths() {
        assert_eq!(bits(&exponentials(simd, &x)), bits(&reference), "{}", simd.name());
    }
    let mut worst: f64 = 0.0;
    for (&x, &got) in x.iter().zip(&reference) {
        let exact = f64::from(x).exp();
        if exact > f64::from(f32::MAX) {
            assert!(got == f32::INFINITY || got == f32::MAX, "e^{x} = {got}");
            continue;
        }
        let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
        worst = worst.max((f64::from(got) - exact).abs() / ulp.min(f64::from(f32::MAX)));
    }
    assert!(worst < 2.0, "{worst} ulp");
}

#[test]
fn exponentials_of_special_values() {
    for simd in paths() {
        let x = [f32::NEG_INFINITY, -1e30, -104.0, -0.0, 0.0, 89.0, f32::INFINITY, f32::NAN];
        let got = exponentials(simd, &x);
        assert_eq!(got[..7], [0.0, 0.0, 0.0, 1.0, 1.0, f32::INFINITY, f32::INFINITY]);
        assert!(got[7].is_nan());
    }
}

#[test]
fn log_sum_exp_is_close_to_f64_and_the_same_on_every_path() {
    let mut noise = Noise::new(6);
    for len in [1, 15, 16, 17, 1000, 49_152] {
        let x: Vec<f32> = noise.vec(len).iter().map(|x| x * 20.0).collect();
        let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = x.iter().map(|&x| f64::from(x - most).exp()).sum();
        let got = log_sum_exp(&x);
        assert_close("log-sum-exp", &[got], &[f64::from(most) + sum.ln()], 1e-6);
        for simd in paths() {
            assert_eq!(log_sum_exp_on(simd, &x).to_bits(), got.to_bits());
        }
    }
}

#[test]
fn log_sum_exp_shows_bad_input() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    for place in [0, 7, 16, 39] {
        for bad in [nan, infinity] {
            let mut x = vec![1.0; 40];
            x[place] = bad;
            assert!(!log_sum_exp(&x).is_finite(), "{bad} at {place}");
        }
    }
    assert_eq!(log_sum_exp(&[]), -infinity);
    assert!(!log_sum_exp(&[-infinity; 20]).is_finite());
    assert_eq!(log_sum_exp(&[-infinity, 3.0, -infinity]), 3.0);
}
