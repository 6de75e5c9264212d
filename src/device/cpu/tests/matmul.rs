//! Matrix products against f64, and bit for bit against themselves.

use super::rig::*;
use crate::device::MatrixShape;
use crate::device::cpu::SimdPath;
use crate::weights::DType;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// Shapes that hit partial panels, odd chains and more than one part.
const SHAPES: [(usize, usize); 6] = [(1, 1), (16, 8), (35, 7), (130, 33), (5, 300), (144, 576)];

#[test]
fn products_are_close_to_f64() {
    let mut noise = Noise::new(1);
    let device = device(2, SimdPath::Auto);
    for dtype in DTYPES {
        for (rows, cols) in SHAPES {
            let shape = MatrixShape { rows, cols, dtype };
            let (w, x, bias) = (noise.vec(rows * cols), noise.vec(7 * cols), noise.vec(rows));
            let start = noise.vec(7 * rows);
            let packed = packed_arena(&device, shape, &encode(dtype, &w));
            let got = matmul(&device, &x, matrix(&packed, shape), Some(&bias), Some(&start));
            let w = rounded(dtype, &w);
            let expected: Vec<f64> = (0..7 * rows)
                .map(|i| {
                    let (m, n) = (i / rows, i % rows);
                    let dot = |k: usize| f64::from(x[m * cols + k]) * f64::from(w[n * cols + k]);
                    (0..cols).map(dot).sum::<f64>() + f64::from(bias[n]) + f64::from(start[i])
                })
                .collect();
            // A chain of `cols` additions of terms below 1.
            assert_close("product", &got, &expected, 1e-7 * (cols as f64).max(8.0));
        }
    }
}

#[test]
fn a_product_is_one_chain_in_order() {
    let mut noise = Noise::new(2);
    let (rows, cols) = (19, 41);
    let shape = MatrixShape { rows, cols, dtype: DType::Bf16 };
    let (w, x) = (noise.vec(rows * cols), noise.vec(cols));
    let w = rounded(DType::Bf16, &w);
    let (bias, start) = (noise.vec(rows), noise.vec(rows));
    let chain = |n: usize| (0..cols).fold(0.0_f32, |sum, k| x[k].mul_add(w[n * cols + k], sum));
    let plain: Vec<f32> = (0..rows).map(chain).collect();
    let all: Vec<f32> = (0..rows).map(|n| start[n] + (chain(n) + bias[n])).collect();
    for device in devices() {
        let packed = packed_arena(&device, shape, &encode(DType::Bf16, &w));
        let matrix = matrix(&packed, shape);
        assert_eq!(bits(&matmul(&device, &x, matrix, None, None)), bits(&plain));
        assert_eq!(bits(&matmul(&device, &x, matrix, Some(&bias), Some(&start))), bits(&all));
    }
}

#[test]
fn bits_depend_neither_on_the_batch_nor_on_threads_nor_on_the_instruction_set() {
    let mut noise = Noise::new(3);
    for dtype in DTYPES {
        for (rows, cols) in [(130, 33), (300, 96)] {
            let shape = MatrixShape { rows, cols, dtype };
            let (w, x) = (encode(dtype, &noise.vec(rows * cols)), noise.vec(64 * cols));
            let reference = device(1, SimdPath::Portable);
            let packed = packed_arena(&reference, shape, &w);
            let one_by_one: Vec<f32> = x
                .chunks(cols)
                .flat_map(|x| matmul(&reference, x, matrix(&packed, shape), None, None))
                .collect();
            let mut others = vec![device(4, SimdPath::Portable)];
            others.extend([1, 2, 3, 4].map(|threads| device(threads, SimdPath::Auto)));
            others.extend([1, 2].map(|threads| device(threads, SimdPath::Avx2)));
            for device in others {
                let packed = packed_arena(&device, shape, &w);
                let counts = if device.simd_name() == "portable" { vec![13] } else { (1..=64).collect() };
                for count in counts {
                    // The last rows: a row's place in the batch differs from count to count.
                    let first = 64 - count;
                    let got = matmul(&device, &x[first * cols..], matrix(&packed, shape), None, None);
                    let expected = &one_by_one[first * rows..];
                    assert_eq!(bits(&got), bits(expected), "{dtype} {count} rows, {}", device.simd_name());
                }
            }
        }
    }
}

#[test]
fn long_rows_and_many_of_them_are_cut_into_blocks() {
    let mut noise = Noise::new(4);
    let (rows, cols) = (40, 3000);
    let shape = MatrixShape { rows, cols, dtype: DType::Bf16 };
    let (w, x) = (encode(DType::Bf16, &noise.vec(rows * cols)), noise.vec(101 * cols));
    let device = device(2, SimdPath::Auto);
    let packed = packed_arena(&device, shape, &w);
    let together = matmul(&device, &x, matrix(&packed, shape), None, None);
    let apart: Vec<f32> =
        x.chunks(cols).flat_map(|x| matmul(&device, x, matrix(&packed, shape), None, None)).collect();
    assert_eq!(bits(&together), bits(&apart));
}

#[test]
fn every_half_is_widened_exactly() {
    // A product with 1 copies the weight, so all 65,536 patterns come out.
    let patterns: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for device in devices() {
        for dtype in [DType::F16, DType::Bf16] {
            let shape = MatrixShape { rows: 1 << 16, cols: 1, dtype };
            let packed = packed_arena(&device, shape, &patterns);
            let got = matmul(&device, &[1.0], matrix(&packed, shape), None, None);
            for (pattern, got) in (0..=u16::MAX).zip(got) {
                let expected = match dtype {
                    DType::F16 => half::f16::from_bits(pattern).to_f32(),
                    _ => half::bf16::from_bits(pattern).to_f32(),
                };
                // `1 * -0 + 0` is 0.
                let same = got == expected || (got.is_nan() && expected.is_nan());
                assert!(same, "{dtype} {pattern:#06x}: {got} for {expected} on {}", device.simd_name());
            }
        }
    }
}
