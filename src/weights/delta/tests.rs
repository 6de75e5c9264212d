use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

fn spec(dtype: DType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: "w".into(), dtype, shape: shape.to_vec() }
}

/// One element rounded to a dtype, by the `half` crate.
fn encode(dtype: DType, value: f32) -> Vec<u8> {
    match dtype {
        DType::F32 => value.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    }
}

fn encode_all(dtype: DType, values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&value| encode(dtype, value)).collect()
}

fn decode(dtype: DType, bytes: &[u8], element: usize) -> f32 {
    let at = &bytes[element * dtype.size()..][..dtype.size()];
    match dtype {
        DType::F32 => f32::from_le_bytes(at.try_into().unwrap()),
        DType::F16 => f16::from_le_bytes(at.try_into().unwrap()).to_f32(),
        DType::Bf16 => bf16::from_le_bytes(at.try_into().unwrap()).to_f32(),
    }
}

/// The documented arithmetic, element by element.
fn naive(delta: &Delta<'_>, tensor: &TensorSpec, weights: &[u8]) -> Vec<u8> {
    let mut out = weights.to_vec();
    let size = tensor.dtype.size();
    match *delta {
        Delta::Sparse { indices, values, dtype, op } => {
            for (i, &index) in indices.iter().enumerate() {
                let index = index as usize;
                let value = decode(dtype, values, i);
                let new = match op {
                    SparseOp::Set => value,
                    SparseOp::Add => decode(tensor.dtype, weights, index) + value,
                };
                out[index * size..][..size].copy_from_slice(&encode(tensor.dtype, new));
            }
        }
        Delta::LowRank { a, b, rank, dtype, scale } => {
            let columns = tensor.shape[1];
            for i in 0..tensor.shape[0] {
                for j in 0..columns {
                    let mut acc = 0.0f32;
                    for k in 0..rank {
                        let product: f32 = decode(dtype, b, i * rank + k) * decode(dtype, a, k * columns + j);
                        acc += product;
                    }
                    let scaled: f32 = scale * acc;
                    let new = decode(tensor.dtype, weights, i * columns + j) + scaled;
                    let at = (i * columns + j) * size;
                    out[at..][..size].copy_from_slice(&encode(tensor.dtype, new));
                }
            }
        }
    }
    out
}

/// Merges in blocks of the given numbers of rows, over and over, last block first.
fn merge(delta: &Delta<'_>, tensor: &TensorSpec, weights: &[u8], blocks: &[usize]) -> Vec<u8> {
    let prepared = delta.prepare(tensor).unwrap();
    let mut out = weights.to_vec();
    let (rows, row_len) = match tensor.shape.split_first() {
        Some((&rows, row)) => (rows, row.iter().product()),
        None => (1, 1),
    };
    let row_bytes = row_len * tensor.dtype.size();
    let mut parts = Vec::new();
    let (mut first, mut rest) = (0, out.as_mut_slice());
    for block in blocks.iter().cycle() {
        let count = (*block).min(rows - first);
        let (part, others) = rest.split_at_mut(count * row_bytes);
        parts.push((first, part));
        (first, rest) = (first + count, others);
        if first == rows {
            break;
        }
    }
    for (first, part) in parts.into_iter().rev() {
        prepared.merge_rows(first, part);
    }
    out
}

fn check(delta: &Delta<'_>, tensor: &TensorSpec, weights: &[u8], blocks: &[usize]) {
    let expected = naive(delta, tensor, weights);
    assert_eq!(merge(delta, tensor, weights, &[usize::MAX]), expected, "{tensor:?} at once");
    assert_eq!(merge(delta, tensor, weights, blocks), expected, "{tensor:?} in {blocks:?}");
}

/// Numbers of many magnitudes, the same for every run.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    (0..count).map(|_| (next() as f32 / 8_388_608.0 - 1.0) * 2f32.powi((next() % 12) as i32 - 8)).collect()
}

#[test]
fn low_rank_of_all_dtypes_is_the_documented_arithmetic_to_the_bit() {
    for (out, columns, rank) in [(1, 1, 1), (3, 5, 2), (9, 32, 4), (17, 33, 3), (20, 95, 16), (2, 64, 70)] {
        for resident in DTYPES {
            for dtype in DTYPES {
                let weights = encode_all(resident, &numbers(out * columns, 1));
                let a = encode_all(dtype, &numbers(rank * columns, 2));
                let b = encode_all(dtype, &numbers(out * rank, 3));
                let delta = Delta::LowRank { a: &a, b: &b, rank, dtype, scale: 0.7 };
                check(&delta, &spec(resident, &[out, columns]), &weights, &[1, 3, 8]);
            }
        }
    }
}

#[test]
fn sparse_of_all_dtypes_is_the_documented_arithmetic_to_the_bit() {
    for shape in [&[][..], &[1], &[300], &[13, 17], &[4, 3, 5]] {
        let elements: usize = shape.iter().product();
        for step in [1, 2, 7, 1000] {
            let indices: Vec<u64> = (0..elements as u64).rev().step_by(step).collect();
            let indices: Vec<u64> = indices.into_iter().rev().collect();
            for resident in DTYPES {
                for dtype in DTYPES {
                    let weights = encode_all(resident, &numbers(elements, 4));
                    let values = encode_all(dtype, &numbers(indices.len(), 5));
                    for op in [SparseOp::Set, SparseOp::Add] {
                        let delta = Delta::Sparse { indices: &indices, values: &values, dtype, op };
                        check(&delta, &spec(resident, shape), &weights, &[2, 1, 5]);
                    }
                }
            }
        }
    }
}

/// By hand, so that neither the code nor the oracle above is asked.
#[test]
fn each_operation_rounds_by_itself() {
    // 1 + 2^-24 + 2^-24 in order stays 1 (ties to even); 2^-24 + 2^-24 + 1 would not.
    let tiny = 2f32.powi(-24);
    let b = encode_all(DType::F32, &[1.0, tiny, tiny]);
    let a = encode_all(DType::F32, &[1.0, 1.0, 1.0]);
    let delta = Delta::LowRank { a: &a, b: &b, rank: 3, dtype: DType::F32, scale: 1.0 };
    let merged = merge(&delta, &spec(DType::F32, &[1, 1]), &encode(DType::F32, 0.0), &[1]);
    assert_eq!(decode(DType::F32, &merged, 0), 1.0);
    // (1 + 2^-12)^2 - 1 - 2^-11 is 2^-24 if fused, and 0 if the product is rounded.
    let factor = 1.0 + 2f32.powi(-12);
    let b = encode_all(DType::F32, &[-1.0 - 2f32.powi(-11), factor]);
    let a = encode_all(DType::F32, &[1.0, factor]);
    let delta = Delta::LowRank { a: &a, b: &b, rank: 2, dtype: DType::F32, scale: 1.0 };
    let merged = merge(&delta, &spec(DType::F32, &[1, 1]), &encode(DType::F32, 0.0), &[1]);
    assert_eq!(decode(DType::F32, &merged, 0), 0.0);
    // In bf16 257 is a tie between 256 and 258: to even. What is added is not rounded to bf16 first.
    let value = encode(DType::F32, 1.0 + 2f32.powi(-10));
    let add = |values| Delta::Sparse { indices: &[0], values, dtype: DType::F32, op: SparseOp::Add };
    let weight = encode(DType::Bf16, 256.0);
    let bf16 = spec(DType::Bf16, &[1]);
    assert_eq!(decode(DType::Bf16, &merge(&add(&value), &bf16, &weight, &[1]), 0), 258.0);
    let one = encode(DType::F32, 1.0);
    assert_eq!(decode(DType::Bf16, &merge(&add(&one), &bf16, &weight, &[1]), 0), 256.0);
    // Beyond f16's largest is infinity, which the caller may look for.
    let merged = merge(&add(&one), &spec(DType::F16, &[1]), &encode(DType::F16, 65504.0), &[1]);
    assert_eq!(decode(DType::F16, &merged, 0), 65504.0);
    let huge = encode(DType::F32, 1e30);
    let merged = merge(&add(&huge), &spec(DType::F16, &[1]), &encode(DType::F16, 1.0), &[1]);
    assert_eq!(decode(DType::F16, &merged, 0), f32::INFINITY);
}

/// What numpy 2 and `ml_dtypes` give for the lines in the documentation of [`Delta`].
#[test]
fn numpy_gives_the_same_bits() {
    const GOLDEN: [(DType, &str, &str, &str); 3] = [
        (
            DType::F32,
            "7776453eb57881beb484a83e98aeba3bdd3ad3bec0cc97bc0b54d4bd57e7013f0f910b3eaa2381be",
            "c8bbf13d1a1ab5beda4cb53e4043e4bca0aa61bf6833553eb4ee31be9a77e33e1c8d553e80aaa3be",
            "c8bbf13d00e0b7bdda4cb53e4043e4bc0080f1be6833553eb4ee31be9a77e33e00c0153e80aaa3be",
        ),
        (
            DType::F16,
            "2c320cb44435d61d9ab6bba4a2ae0f385d3009b4",
            "8e2fa9b5aa3522a70ebbaa328fb11c37ac321db5",
            "8e2fbfadaa3522a78cb7aa328fb11c37ae301db5",
        ),
        (
            DType::Bf16,
            "463e81bea83ebc3bd3be99bcd4bd023f0c3e81be",
            "f23db5beb53ee4bc62bf553e32bee33e563ea4be",
            "f23db8bdb53ee4bcf2be553e32bee33e163ea4be",
        ),
    ];
    let numbers = |count: u32, seed: u32| -> Vec<f32> {
        let number = |i: u32| ((i + seed).wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 - 0.5;
        (0..count).map(number).collect()
    };
    let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let (a, b) = (encode_all(DType::Bf16, &numbers(20, 100)), encode_all(DType::Bf16, &numbers(8, 200)));
    let values = encode_all(DType::F16, &numbers(3, 300));
    let sparse = |op| Delta::Sparse { indices: &[1, 4, 8], values: &values, dtype: DType::F16, op };
    for (resident, low_rank, add, set) in GOLDEN {
        let tensor = spec(resident, &[2, 5]);
        let weights = encode_all(resident, &numbers(10, 1));
        let delta = Delta::LowRank { a: &a, b: &b, rank: 4, dtype: DType::Bf16, scale: 0.7 };
        assert_eq!(hex(merge(&delta, &tensor, &weights, &[1])), low_rank, "{resident}");
        assert_eq!(hex(merge(&sparse(SparseOp::Add), &tensor, &weights, &[1])), add, "{resident}");
        assert_eq!(hex(merge(&sparse(SparseOp::Set), &tensor, &weights, &[1])), set, "{resident}");
    }
}

#[test]
fn empty_changes_and_empty_tensors_change_nothing() {
    let nothing = Delta::Sparse { indices: &[], values: &[], dtype: DType::F16, op: SparseOp::Set };
    let weights = encode_all(DType::Bf16, &numbers(6, 6));
    check(&nothing, &spec(DType::Bf16, &[2, 3]), &weights, &[1]);
    for shape in [&[0][..], &[0, 3], &[3, 0], &[2, 0, 2]] {
        nothing.prepare(&spec(DType::F32, shape)).unwrap().merge_rows(0, &mut []);
    }
    let factor = [0; 6];
    let no_rows = Delta::LowRank { a: &factor, b: &[], rank: 1, dtype: DType::F16, scale: 1.0 };
    no_rows.prepare(&spec(DType::F16, &[0, 3])).unwrap().merge_rows(0, &mut []);
    let no_columns = Delta::LowRank { a: &[], b: &factor, rank: 1, dtype: DType::F16, scale: 1.0 };
    no_columns.prepare(&spec(DType::F16, &[3, 0])).unwrap().merge_rows(0, &mut []);
}

#[test]
fn several_threads_merge_with_one_preparation() {
    let (out, columns, rank) = (64, 40, 5);
    let tensor = spec(DType::Bf16, &[out, columns]);
    let a = encode_all(DType::Bf16, &numbers(rank * columns, 7));
    let b = encode_all(DType::Bf16, &numbers(out * rank, 8));
    let mut weights = encode_all(DType::Bf16, &numbers(out * columns, 9));
    let delta = Delta::LowRank { a: &a, b: &b, rank, dtype: DType::Bf16, scale: -1.5 };
    let expected = naive(&delta, &tensor, &weights);
    let prepared = delta.prepare(&tensor).unwrap();
    std::thread::scope(|scope| {
        for (block, rows) in weights.chunks_mut(10 * columns * 2).enumerate() {
            let prepared = &prepared;
            scope.spawn(move || prepared.merge_rows(10 * block, rows));
        }
    });
    assert_eq!(weights, expected);
}

#[test]
fn a_sparse_change_that_does_not_fit_is_refused_with_numbers() {
    let tensor = spec(DType::Bf16, &[2, 3]);
    let fault = |indices: &[u64], bytes: usize| {
        let values = vec![0; bytes];
        let delta = Delta::Sparse { indices, values: &values, dtype: DType::F32, op: SparseOp::Set };
        assert!(delta.prepare(&tensor).is_err());
        delta.check(&tensor).unwrap_err()
    };
    for bytes in [0, 3, 7, 9, 12] {
        let expected = DeltaError::ValuesLength {
            indices: 2,
            dtype: DType::F32,
            expected_bytes: Some(8),
            received_bytes: bytes,
        };
        assert_eq!(fault(&[0, 1], bytes), expected);
    }
    assert_eq!(fault(&[0, 2, 2], 12), DeltaError::NotAscending { position: 2, previous: 2, index: 2 });
    assert_eq!(fault(&[5, 4, 9], 12), DeltaError::NotAscending { position: 1, previous: 5, index: 4 });
    assert_eq!(fault(&[5, 6, 7], 12), DeltaError::IndexPastEnd { position: 1, index: 6, elements: 6 });
    let largest = DeltaError::IndexPastEnd { position: 0, index: u64::MAX, elements: 6 };
    assert_eq!(fault(&[u64::MAX], 4), largest);
    let text = largest.to_string();
    assert_eq!(text, "index 18446744073709551615 at position 0 is past the tensor's 6 elements");
}

#[test]
fn a_low_rank_change_that_does_not_fit_is_refused_with_numbers() {
    let bytes = vec![0; 1 << 12];
    let change = |a: usize, b: usize, rank: usize, scale: f32| Delta::LowRank {
        a: &bytes[..a],
        b: &bytes[..b],
        rank,
        dtype: DType::F16,
        scale,
    };
    let tensor = spec(DType::F32, &[2, 3]);
    assert_eq!(change(12, 8, 2, 1.0).check(&tensor), Ok(()));
    for shape in [&[][..], &[6], &[1, 2, 3]] {
        let expected = DeltaError::NotAMatrix { shape: shape.to_vec() };
        assert_eq!(change(12, 8, 2, 1.0).check(&spec(DType::F32, shape)), Err(expected));
    }
    for rank in [0, 4097, usize::MAX] {
        assert_eq!(change(0, 0, rank, 1.0).check(&tensor), Err(DeltaError::Rank { rank, limit: 4096 }));
    }
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert!(matches!(change(12, 8, 2, scale).check(&tensor), Err(DeltaError::Scale { .. })));
    }
    for (a, b) in [(10, 8), (12, 6), (14, 8), (12, 10), (8, 12), (0, 0)] {
        let Err(DeltaError::FactorLength { factor, rows, columns, expected_bytes, received_bytes, .. }) =
            change(a, b, 2, 1.0).check(&tensor)
        else {
            panic!("{a} and {b} bytes are accepted");
        };
        let expected = if a == 12 { ('b', 2, 2, Some(8), b) } else { ('a', 2, 3, Some(12), a) };
        assert_eq!((factor, rows, columns, expected_bytes, received_bytes), expected);
    }
}

#[test]
fn sizes_that_overflow_are_refused() {
    let huge = spec(DType::F32, &[usize::MAX, 2]);
    let sparse = Delta::Sparse { indices: &[], values: &[], dtype: DType::F32, op: SparseOp::Add };
    let low_rank = Delta::LowRank { a: &[], b: &[], rank: 1, dtype: DType::F32, scale: 1.0 };
    for delta in [sparse, low_rank] {
        let fault = delta.check(&huge).unwrap_err();
        assert_eq!(fault, DeltaError::TensorTooLarge { shape: vec![usize::MAX, 2] });
    }
    // The tensor is empty, a factor would not be.
    let fault = low_rank.check(&spec(DType::F32, &[0, usize::MAX])).unwrap_err();
    assert!(matches!(fault, DeltaError::FactorLength { factor: 'a', expected_bytes: None, .. }), "{fault}");
    let empty = spec(DType::F32, &[0, usize::MAX, usize::MAX]);
    sparse.prepare(&empty).unwrap().merge_rows(0, &mut []);
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(DTYPES.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_low_rank_change_in_any_blocks_is_the_documented_arithmetic(
        (out, columns, rank) in (1usize..24, 1usize..80, 1usize..9),
        (resident, dtype) in (dtype(), dtype()),
        seed in any::<u32>(),
        scale in -4f32..4.0,
        blocks in prop::collection::vec(1usize..10, 1..5),
    ) {
        let weights = encode_all(resident, &numbers(out * columns, seed));
        let a = encode_all(dtype, &numbers(rank * columns, seed ^ 1));
        let b = encode_all(dtype, &numbers(out * rank, seed ^ 2));
        let delta = Delta::LowRank { a: &a, b: &b, rank, dtype, scale };
        check(&delta, &spec(resident, &[out, columns]), &weights, &blocks);
    }

    #[test]
    fn any_sparse_change_in_any_blocks_is_the_documented_arithmetic(
        (rows, columns) in (1usize..30, 1usize..30),
        (resident, dtype) in (dtype(), dtype()),
        chosen in prop::collection::vec(any::<bool>(), 900),
        add in any::<bool>(),
        seed in any::<u32>(),
        blocks in prop::collection::vec(1usize..10, 1..5),
    ) {
        let elements = rows * columns;
        let indices: Vec<u64> = (0..elements as u64).filter(|&i| chosen[i as usize]).collect();
        let weights = encode_all(resident, &numbers(elements, seed));
        let values = encode_all(dtype, &numbers(indices.len(), seed ^ 3));
        let op = if add { SparseOp::Add } else { SparseOp::Set };
        let delta = Delta::Sparse { indices: &indices, values: &values, dtype, op };
        check(&delta, &spec(resident, &[rows, columns]), &weights, &blocks);
    }

    /// Whatever is sent, it is refused or merged: never a panic, and refused exactly if it doesn't fit.
    #[test]
    fn any_indices_are_refused_or_merged(
        indices in prop::collection::vec(prop_oneof![0u64..12, any::<u64>()], 0..6),
        missing in 0usize..3,
    ) {
        let tensor = spec(DType::F32, &[3, 3]);
        let values = vec![0; (2 * indices.len()).saturating_sub(missing)];
        let (dtype, op) = (DType::F16, SparseOp::Add);
        let delta = Delta::Sparse { indices: &indices, values: &values, dtype, op };
        let fits = values.len() == 2 * indices.len()
            && indices.windows(2).all(|pair| pair[0] < pair[1])
            && indices.iter().all(|&index| index < 9);
        prop_assert_eq!(delta.check(&tensor).is_ok(), fits);
        if fits {
            check(&delta, &tensor, &encode_all(DType::F32, &numbers(9, 1)), &[1]);
        }
    }
}
