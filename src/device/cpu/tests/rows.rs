//! Norm, rotary embedding, SwiGLU, gather.

use super::rig::*;
use crate::device::cpu::SimdPath;
use crate::device::{Device, HeadShape, StepInputs};
use crate::weights::DType;

/// `f` gives the same bits on every device for all rows at once as portably for one at a time.
fn assert_invariant(
    x: &[f32],
    width: usize,
    f: impl Fn(&crate::device::cpu::CpuDevice, std::ops::Range<usize>, &[f32]) -> Vec<f32>,
) -> Vec<f32> {
    let reference = device(1, SimdPath::Portable);
    let rows = x.len() / width;
    let apart: Vec<f32> =
        (0..rows).flat_map(|row| f(&reference, row..row + 1, &x[row * width..][..width])).collect();
    for device in devices() {
        assert_eq!(bits(&f(&device, 0..rows, x)), bits(&apart), "{}", device.simd_name());
    }
    apart
}

#[test]
fn norms() {
    let mut noise = Noise::new(7);
    for (width, dtype) in
        [(1, DType::F32), (5, DType::Bf16), (16, DType::F16), (576, DType::F32), (601, DType::Bf16)]
    {
        let (x, weight) = (noise.vec(70 * width), noise.vec(width));
        let got = assert_invariant(&x, width, |device, _, x| rms_norm(device, x, &weight, dtype, 1e-5));
        let weight = rounded(dtype, &weight);
        let expected: Vec<f64> = x
            .chunks(width)
            .flat_map(|x| {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
                let factor = 1.0 / (mean + 1e-5).sqrt();
                x.iter()
                    .zip(&weight)
                    .map(move |(&x, &w)| f64::from(x) * factor * f64::from(w))
                    .collect::<Vec<_>>()
            })
            .collect();
        assert_close("norm", &got, &expected, 1e-6);
    }
}

#[test]
fn swiglu() {
    let mut noise = Noise::new(8);
    for width in [1, 15, 48, 700] {
        let x: Vec<f32> = noise.vec(60 * 2 * width).iter().map(|x| x * 30.0).collect();
        let got = assert_invariant(&x, 2 * width, |device, _, x| silu_mul(device, x, width));
        let expected: Vec<f64> = x
            .chunks(2 * width)
            .flat_map(|x| (0..width).map(|i| (f64::from(x[i]), f64::from(x[width + i]))).collect::<Vec<_>>())
            .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
            .collect();
        assert_close("swiglu", &got, &expected, 1e-6);
    }
}

#[test]
fn rotary_embedding_with_and_without_norms() {
    let mut noise = Noise::new(9);
    for (q_heads, kv_heads, head_dim) in [(1, 1, 2), (4, 2, 6), (3, 1, 64)] {
        let shape = HeadShape { q_heads, kv_heads, head_dim };
        let (width, half) = (shape.width(), head_dim / 2);
        let qkv = noise.vec(130 * width);
        let angle: Vec<f32> = noise.vec(130 * half).iter().map(|x| x * 3.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angle.iter().map(|x| (x.cos(), x.sin())).unzip();
        let (q, k) = (noise.vec(head_dim), noise.vec(head_dim));
        for norms in [None, Some((&q[..], &k[..], 1e-6_f32))] {
            let got = assert_invariant(&qkv, width, |device, rows, x| {
                let angles = rows.start * half..rows.end * half;
                rope(device, x, shape, norms, (&cos[angles.clone()], &sin[angles]))
            });
            let mut expected: Vec<f64> = qkv.iter().map(|&x| f64::from(x)).collect();
            for (row, x) in expected.chunks_mut(width).enumerate() {
                for (head, x) in x.chunks_mut(head_dim).take(q_heads + kv_heads).enumerate() {
                    if let Some((q, k, eps)) = norms {
                        let mean = x.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
                        let weight = if head < q_heads { q } else { k };
                        for (x, &weight) in x.iter_mut().zip(weight) {
                            *x *= f64::from(weight) / (mean + f64::from(eps)).sqrt();
                        }
                    }
                    for i in 0..half {
                        let (cos, sin) = (f64::from(cos[row * half + i]), f64::from(sin[row * half + i]));
                        (x[i], x[i + half]) =
                            (x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin);
                    }
                }
            }
            assert_close("rope", &got, &expected, 2e-6);
        }
    }
}

#[test]
fn gathered_rows() {
    let x = Noise::new(10).vec(9 * 5);
    for device in devices() {
        let input = f32_arena(&device, &x);
        let mut out = f32_arena(&device, &[0.0; 20]);
        with_step(&device, StepInputs { logit_rows: &[7, 8, 0, 0, 3], ..StepInputs::default() }, |step| {
            device.gather_rows(step, input.view(0, 45), 5, 1..5, out.view_mut(0, 20)).unwrap();
        });
        let expected: Vec<f32> = [8, 0, 0, 3].iter().flat_map(|row| x[row * 5..][..5].to_vec()).collect();
        assert_eq!(read_f32(&device, &out, 20), expected);
    }
}
