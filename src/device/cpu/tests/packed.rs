//! Packing and unpacking.

use proptest::prelude::*;

use super::rig::*;
use crate::device::cpu::SimdPath;
use crate::device::{Device, MatrixShape, StepInputs};
use crate::weights::DType;

pub(in crate::device) fn round_trip(
    device: &dyn Device,
    shape: MatrixShape,
    cuts: &[usize],
    misalign: usize,
) {
    let row_bytes = shape.cols * shape.dtype.size();
    let plain = Noise::new(cuts.len() as u64).bytes(shape.rows * row_bytes);
    let bytes = device.matrix_bytes(shape);
    assert!(bytes.is_multiple_of(64));
    let mut arena = device.reserve("matrix", bytes).unwrap();
    arena.commit(bytes).unwrap();
    // In pieces, from buffers of any alignment.
    let mut edges: Vec<usize> = cuts.iter().map(|cut| cut % (shape.rows + 1)).collect();
    edges.extend([0, shape.rows]);
    edges.sort_unstable();
    for edge in edges.windows(2) {
        let mut piece = vec![0; misalign];
        piece.extend_from_slice(&plain[edge[0] * row_bytes..edge[1] * row_bytes]);
        device.write_rows(arena.view_mut(0, bytes), shape, edge[0], &piece[misalign..]).unwrap();
    }
    for edge in edges.windows(2) {
        let mut piece = vec![0; misalign + (edge[1] - edge[0]) * row_bytes];
        device.read_rows(arena.view(0, bytes), shape, edge[0], &mut piece[misalign..]).unwrap();
        assert_eq!(piece[misalign..], plain[edge[0] * row_bytes..edge[1] * row_bytes]);
    }
    let whole = packed_arena(device, shape, &plain);
    let (mut pieces, mut at_once) = (vec![0; bytes], vec![0; bytes]);
    device.read_bytes(arena.view(0, bytes), &mut pieces).unwrap();
    device.read_bytes(whole.view(0, bytes), &mut at_once).unwrap();
    assert_eq!(pieces, at_once);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn unpacking_inverts_packing(
        rows in 1_usize..70,
        cols in 1_usize..40,
        dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]),
        cuts in prop::collection::vec(0_usize..1000, 0..5),
        misalign in 0_usize..4,
    ) {
        round_trip(&device(1, SimdPath::Auto), MatrixShape { rows, cols, dtype }, &cuts, misalign);
    }
}

/// The layout that the module describes, element by element: whole strips of columns and what is left of them.
#[test]
fn elements_are_where_the_layout_says() {
    let device = device(1, SimdPath::Auto);
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let (shape, size) = (MatrixShape { rows: 37, cols: 29, dtype }, dtype.size());
        let plain = Noise::new(9).bytes(shape.rows * shape.cols * size);
        let arena = packed_arena(&device, shape, &plain);
        let mut packed = vec![0; device.matrix_bytes(shape)];
        device.read_bytes(arena.view(0, packed.len()), &mut packed).unwrap();
        for (index, element) in plain.chunks_exact(size).enumerate() {
            let (row, col) = (index / shape.cols, index % shape.cols);
            let (panel, lane) = (row / 16, row % 16);
            let place = if dtype == DType::Bf16 { lane % 8 * 2 + lane / 8 } else { lane };
            let at = ((panel * shape.cols + col) * 16 + place) * size;
            assert_eq!(packed[at..at + size], *element, "{dtype}, row {row}, column {col}");
        }
    }
}

#[test]
fn large_matrices_are_packed_by_several_threads() {
    let device = device(3, SimdPath::Auto);
    for dtype in [DType::F32, DType::Bf16] {
        round_trip(&device, MatrixShape { rows: 531, cols: 577, dtype }, &[100, 107], 1);
    }
}

#[test]
fn embedding_rows_are_those_of_the_table() {
    let mut noise = Noise::new(5);
    let device = device(2, SimdPath::Auto);
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let shape = MatrixShape { rows: 37, cols: 19, dtype };
        let table = noise.vec(37 * 19);
        let packed = packed_arena(&device, shape, &encode(dtype, &table));
        let tokens = [36, 0, 7, 7, 16];
        let mut out = f32_arena(&device, &[f32::NAN; 5 * 19]);
        with_step(&device, StepInputs { tokens: &tokens, ..StepInputs::default() }, |step| {
            device.embed(step, matrix(&packed, shape), out.view_mut(0, 5 * 19)).unwrap();
        });
        let table = rounded(dtype, &table);
        let expected: Vec<f32> =
            tokens.iter().flat_map(|&token| table[token as usize * 19..][..19].to_vec()).collect();
        assert_eq!(read_f32(&device, &out, 5 * 19), expected);
    }
}
