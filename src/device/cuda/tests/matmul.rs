//! Matrix products: as exact as f32 ones, and the same bits whatever the batch.

use super::rig::*;
use super::{DTYPES, gpu};
use crate::device::MatrixShape;
use crate::weights::DType;

/// Shapes that hit partial tiles, chunks of columns that are empty, and many blocks.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (16, 8), (35, 7), (130, 33), (5, 300), (144, 576), (257, 129), (16, 2051), (300, 16)];

/// Errors are at most so many of the sum of the terms' magnitudes.
const TOLERANCE: f64 = 2e-6;

/// `start + (x · wᵀ + bias)` and the sum of all magnitudes, in f64.
fn expected(
    x: &[f32],
    w: &[f32],
    (rows, cols): (usize, usize),
    bias: Option<&[f32]>,
    start: Option<&[f32]>,
) -> Vec<(f64, f64)> {
    let one = |(m, n): (usize, usize)| {
        let product = |k: usize| f64::from(x[m * cols + k]) * f64::from(w[n * cols + k]);
        let extra = [bias.map(|bias| bias[n]), start.map(|start| start[m * rows + n])];
        let terms = || (0..cols).map(product).chain(extra.iter().flatten().map(|&x| f64::from(x)));
        (terms().sum(), terms().map(f64::abs).sum())
    };
    let batch = x.len() / cols;
    (0..batch).flat_map(|m| (0..rows).map(move |n| (m, n))).map(one).collect()
}

fn assert_near(what: &str, got: &[f32], expected: &[(f64, f64)]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (&got, &(value, magnitude))) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - value).abs() / magnitude.max(f64::MIN_POSITIVE);
        assert!(error <= TOLERANCE, "{what}[{i}]: {got} for {value}, error {error:e}");
    }
}

#[test]
fn products_are_as_exact_as_those_of_f32() {
    let mut noise = Noise::new(1);
    let (emulated, gpu) = gpu();
    for dtype in DTYPES {
        for (rows, cols) in SHAPES {
            let shape = MatrixShape { rows, cols, dtype };
            // Magnitudes that differ, so that a part that is left out shows.
            let scaled = |x: Vec<f32>| -> Vec<f32> {
                x.iter().enumerate().map(|(i, x)| x * [1.0, 8.0, 0.01][i % 3]).collect()
            };
            let w = scaled(noise.vec(rows * cols));
            let (bias, exact) = (noise.vec(rows), rounded(dtype, &w));
            let packed = packed_arena(&gpu, shape, &encode(dtype, &w));
            for batch in [1, 7, 33] {
                let x = scaled(noise.vec(batch * cols));
                let start = noise.vec(batch * rows);
                for bias_dtype in [None, Some(dtype), Some(DType::Bf16)] {
                    let bias = bias_dtype.map(|dtype| (rounded(dtype, &bias), dtype));
                    let given = bias.as_ref().map(|(bias, dtype)| (&bias[..], *dtype));
                    for start in [None, Some(&start[..])] {
                        let got = matmul_biased(&gpu, &x, matrix(&packed, shape), given, start);
                        let bias = given.map(|(bias, _)| bias);
                        let expected = expected(&x, &exact, (rows, cols), bias, start);
                        assert_near(&format!("{shape:?}, {batch} rows"), &got, &expected);
                    }
                }
            }
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    let mut noise = Noise::new(2);
    let (emulated, gpu) = gpu();
    for dtype in DTYPES {
        for (rows, cols) in [(130, 33), (45, 700)] {
            let shape = MatrixShape { rows, cols, dtype };
            let (w, x) = (encode(dtype, &noise.vec(rows * cols)), noise.vec(131 * cols));
            let (bias, start) = (noise.vec(rows), noise.vec(131 * rows));
            let packed = packed_arena(&gpu, shape, &w);
            let product = |first: usize, count: usize| {
                let (x, start) = (&x[first * cols..][..count * cols], &start[first * rows..][..count * rows]);
                bits(&matmul(&gpu, x, matrix(&packed, shape), Some(&bias), Some(start)))
            };
            let alone: Vec<u32> = (0..131).flat_map(|row| product(row, 1)).collect();
            // Around the tiles of 8 rows, the border of the two kernels at 32, the blocks of 64.
            for count in [2, 7, 8, 9, 16, 31, 32, 33, 34, 63, 64, 65, 128, 131] {
                // The last rows: a row's place in the batch differs from count to count.
                let first = 131 - count;
                assert!(product(first, count) == alone[first * rows..], "{shape:?}, {count} rows");
                assert!(product(0, count) == alone[..count * rows], "{shape:?}, {count} rows");
            }
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn every_half_is_widened_exactly() {
    // A product with 1 copies the weight, so all 65,536 patterns come out: in both kernels.
    let patterns: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let (emulated, gpu) = gpu();
    for dtype in [DType::F16, DType::Bf16] {
        let shape = MatrixShape { rows: 1 << 16, cols: 1, dtype };
        let packed = packed_arena(&gpu, shape, &patterns);
        for batch in [1, 33] {
            let got = matmul(&gpu, &vec![1.0; batch], matrix(&packed, shape), None, None);
            for (pattern, got) in (0..=u16::MAX).cycle().zip(got) {
                let expected = match dtype {
                    DType::F16 => half::f16::from_bits(pattern).to_f32(),
                    _ => half::bf16::from_bits(pattern).to_f32(),
                };
                let same = got == expected || (got.is_nan() && !expected.is_finite());
                assert!(same, "{dtype} {pattern:#06x}: {got} for {expected}");
            }
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn what_is_not_a_number_stays_in_its_row_and_column() {
    let mut noise = Noise::new(3);
    let (emulated, gpu) = gpu();
    for dtype in DTYPES {
        let shape = MatrixShape { rows: 40, cols: 70, dtype };
        let (mut w, mut x) = (noise.vec(40 * 70), noise.vec(37 * 70));
        let packed = packed_arena(&gpu, shape, &encode(dtype, &w));
        let clean = matmul(&gpu, &x, matrix(&packed, shape), None, None);
        w[17 * 70 + 69] = f32::NAN;
        x[5 * 70 + 3] = f32::NAN;
        x[36 * 70] = f32::INFINITY;
        let packed = packed_arena(&gpu, shape, &encode(dtype, &w));
        let got = matmul(&gpu, &x, matrix(&packed, shape), None, None);
        for (i, (got, clean)) in got.iter().zip(&clean).enumerate() {
            let (row, out) = (i / 40, i % 40);
            match row == 5 || row == 36 || out == 17 {
                true => assert!(!got.is_finite(), "{dtype}: row {row}, output {out}: {got}"),
                false => assert_eq!(got.to_bits(), clean.to_bits(), "{dtype}: row {row}, output {out}"),
            }
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

/// What a large or a tiny number is cut into must not overflow or vanish.
#[test]
fn products_of_extreme_numbers_are_near() {
    let (emulated, gpu) = gpu();
    for (large, dtype) in
        [(1e30_f32, DType::F32), (1e-30, DType::F32), (3e38, DType::F32), (60_000.0, DType::F16)]
    {
        let shape = MatrixShape { rows: 3, cols: 20, dtype };
        let w: Vec<f32> = Noise::new(4).vec(60).iter().map(|w| w * large).collect();
        let packed = packed_arena(&gpu, shape, &encode(dtype, &w));
        let w = rounded(dtype, &w);
        let x: Vec<f32> = Noise::new(5).vec(40).iter().map(|x| x * 0.01).collect();
        let got = matmul(&gpu, &x, matrix(&packed, shape), None, None);
        assert_near(&format!("{large} in {dtype}"), &got, &expected(&x, &w, (3, 20), None, None));
    }
    let shape = MatrixShape { rows: 2, cols: 3, dtype: DType::Bf16 };
    let packed = packed_arena(&gpu, shape, &encode(DType::Bf16, &[1.0, -1.0, 0.5, 0.0, 0.0, 2.0]));
    let got = matmul(&gpu, &[3e38, 1e38, 1e38], matrix(&packed, shape), None, None);
    assert_near("large activations", &got, &[(2.5e38, 4.5e38), (2e38, 2e38)]);
    drop((packed, gpu));
    emulated.assert_clean();
}
