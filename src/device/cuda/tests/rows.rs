//! Norm, rotary embedding, SwiGLU, embedding, gather: the bits of the CPU device, whatever the batch.

use std::ops::Range;

use super::rig::*;
use super::{DTYPES, cpu, gpu};
use crate::device::{Device, HeadShape, MatrixShape, StepInputs};
use crate::weights::DType;

/// `f` gives the CPU's bits for all rows at once, and for some of them.
fn assert_parity(
    what: &str,
    gpu: &dyn Device,
    x: &[f32],
    width: usize,
    f: impl Fn(&dyn Device, Range<usize>, &[f32]) -> Vec<f32>,
) {
    let rows = x.len() / width;
    let expected = bits(&f(&cpu(), 0..rows, x));
    let out = expected.len() / rows;
    for range in [0..rows, 0..1, rows - 1..rows, rows / 3..rows / 2 + 1] {
        let got = bits(&f(gpu, range.clone(), &x[range.start * width..range.end * width]));
        assert!(got == expected[range.start * out..range.end * out], "{what}, rows {range:?}");
    }
}

/// As a hidden state is: ordinary numbers, some large, some tiny.
fn uneven(noise: &mut Noise, len: usize) -> Vec<f32> {
    let scale = |i: usize| [1.0, 30.0, 1e-3, 4.0][i * 7 % 4];
    noise.vec(len).iter().enumerate().map(|(i, x)| x * scale(i)).collect()
}

#[test]
fn norms_are_the_cpus_bits() {
    let mut noise = Noise::new(1);
    let (emulated, gpu) = gpu();
    for width in [1, 2, 5, 16, 31, 32, 33, 64, 100, 255, 256, 257, 576, 601, 1024, 2051, 4096] {
        for dtype in DTYPES {
            let (x, weight) = (uneven(&mut noise, 21 * width), noise.vec(width));
            let what = format!("{width} of {dtype}");
            assert_parity(&what, &gpu, &x, width, |device, _, x| rms_norm(device, x, &weight, dtype, 1e-5));
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn swiglu_is_the_cpus_bits() {
    let mut noise = Noise::new(2);
    let (emulated, gpu) = gpu();
    for width in [1, 15, 48, 255, 256, 257, 700, 1536] {
        let x: Vec<f32> = noise.vec(23 * 2 * width).iter().map(|x| x * 100.0).collect();
        let what = format!("{width}");
        assert_parity(&what, &gpu, &x, 2 * width, |device, _, x| silu_mul(device, x, width));
    }
    // Where the exponential is not a number, infinite, zero or not normal.
    let odd = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        88.8,
        -88.8,
        104.0,
        -104.0,
        1e30,
        -1e30,
        f32::MIN_POSITIVE / 2.0,
    ];
    let x: Vec<f32> = odd.iter().flat_map(|&gate| [gate, 1.5]).collect();
    let (on_gpu, on_cpu) = (silu_mul(&gpu, &x, 1), silu_mul(&cpu(), &x, 1));
    for ((gate, on_gpu), on_cpu) in odd.iter().zip(on_gpu).zip(on_cpu) {
        let same = on_gpu.to_bits() == on_cpu.to_bits() || (on_gpu.is_nan() && on_cpu.is_nan());
        assert!(same, "{gate}: {on_gpu} for {on_cpu}");
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn more_rows_than_a_grid_has_are_taken_in_turns() {
    let (emulated, gpu) = gpu();
    let x = Noise::new(3).vec(65_537 * 2 * 3);
    assert!(bits(&silu_mul(&gpu, &x, 3)) == bits(&silu_mul(&cpu(), &x, 3)));
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn rotary_embeddings_are_the_cpus_bits() {
    let mut noise = Noise::new(4);
    let (emulated, gpu) = gpu();
    for (q_heads, kv_heads, head_dim) in
        [(1, 1, 2), (4, 2, 6), (3, 1, 64), (9, 3, 64), (5, 5, 96), (16, 2, 128), (2, 1, 256), (6, 2, 20)]
    {
        let shape = HeadShape { q_heads, kv_heads, head_dim };
        let (width, half) = (shape.width(), head_dim / 2);
        let qkv = uneven(&mut noise, 19 * width);
        let angle: Vec<f32> = noise.vec(19 * half).iter().map(|x| x * 3.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angle.iter().map(|x| (x.cos(), x.sin())).unzip();
        let (q, k) = (noise.vec(head_dim), noise.vec(head_dim));
        let norms = (&q[..], &k[..], 1e-6_f32);
        let normed = [[DType::F32; 2], [DType::Bf16; 2], [DType::F16, DType::F32], [DType::Bf16, DType::F16]];
        for norms in normed.map(|dtypes| Some((norms, dtypes))).into_iter().chain([None]) {
            let what = format!("{shape:?}, {:?}", norms.map(|(_, dtypes)| dtypes));
            assert_parity(&what, &gpu, &qkv, width, |device, rows, x| {
                let angles = rows.start * half..rows.end * half;
                rope_normed(device, x, shape, norms, (&cos[angles.clone()], &sin[angles]))
            });
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn embedding_rows_are_those_of_the_table() {
    let mut noise = Noise::new(5);
    let (emulated, gpu) = gpu();
    for (rows, cols) in [(37, 19), (1, 1), (64, 64), (16, 16), (50, 257), (33, 576)] {
        for dtype in DTYPES {
            let shape = MatrixShape { rows, cols, dtype };
            let table = noise.vec(rows * cols);
            let packed = packed_arena(&gpu, shape, &encode(dtype, &table));
            let last = rows as u32 - 1;
            let tokens = [last, 0, 7 % (last + 1), 7 % (last + 1), 16 % (last + 1)];
            let mut out = f32_arena(&gpu, &vec![f32::NAN; 5 * cols]);
            with_step(&gpu, StepInputs { tokens: &tokens, ..StepInputs::default() }, |step| {
                gpu.embed(step, matrix(&packed, shape), out.view_mut(0, 5 * cols)).unwrap();
            });
            let table = rounded(dtype, &table);
            let expected: Vec<f32> =
                tokens.iter().flat_map(|&token| table[token as usize * cols..][..cols].to_vec()).collect();
            assert!(bits(&read_f32(&gpu, &out, 5 * cols)) == bits(&expected), "{shape:?}");
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn gathered_rows_are_those_asked_for() {
    let (emulated, gpu) = gpu();
    for dim in [1, 5, 64, 257, 1000] {
        let x = Noise::new(6).vec(9 * dim);
        let input = f32_arena(&gpu, &x);
        let mut out = f32_arena(&gpu, &vec![f32::NAN; 4 * dim]);
        with_step(&gpu, StepInputs { logit_rows: &[7, 8, 0, 0, 3], ..StepInputs::default() }, |step| {
            gpu.gather_rows(step, input.view(0, 9 * dim), dim, 1..5, out.view_mut(0, 4 * dim)).unwrap();
        });
        let expected: Vec<f32> = [8, 0, 0, 3].iter().flat_map(|row| x[row * dim..][..dim].to_vec()).collect();
        assert!(bits(&read_f32(&gpu, &out, 4 * dim)) == bits(&expected), "{dim}");
    }
    drop(gpu);
    emulated.assert_clean();
}
