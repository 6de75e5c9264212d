//! Packing and unpacking.

use proptest::prelude::*;

use super::rig::*;
use super::{DTYPES, gpu};
use crate::device::cpu::tests::packed::round_trip;
use crate::device::{Device, DeviceError, MatrixShape};
use crate::weights::DType;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn unpacking_inverts_packing(
        rows in 1_usize..70,
        cols in 1_usize..40,
        dtype in prop::sample::select(DTYPES.to_vec()),
        cuts in prop::collection::vec(0_usize..1000, 0..5),
        misalign in 0_usize..8,
    ) {
        let (emulated, gpu) = gpu();
        round_trip(&gpu, MatrixShape { rows, cols, dtype }, &cuts, misalign);
        drop(gpu);
        emulated.assert_clean();
    }
}

/// Rows that take more than one buffer on their way, and more than all of them.
#[test]
fn large_matrices_go_in_pieces() {
    let (emulated, gpu) = gpu();
    round_trip(&gpu, MatrixShape { rows: 1031, cols: 5003, dtype: DType::F32 }, &[100, 107], 1);
    round_trip(&gpu, MatrixShape { rows: 3, cols: 450_001, dtype: DType::Bf16 }, &[1], 3);
    let shape = MatrixShape { rows: 2, cols: 1 << 19, dtype: DType::F32 };
    round_trip(&gpu, shape, &[1], 2);
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn a_row_that_fits_no_buffer_is_refused() {
    let (emulated, gpu) = gpu();
    let shape = MatrixShape { rows: 1, cols: (1 << 19) + 1, dtype: DType::F32 };
    let bytes = gpu.matrix_bytes(shape);
    let mut arena = gpu.reserve("matrix", bytes).unwrap();
    arena.commit(bytes).unwrap();
    let mut row = vec![0; shape.cols * 4];
    let refused = gpu.write_rows(arena.view_mut(0, bytes), shape, 0, &row).unwrap_err();
    assert!(matches!(refused, DeviceError::Operation { operation: "write_rows", .. }), "{refused}");
    let refused = gpu.read_rows(arena.view(0, bytes), shape, 0, &mut row).unwrap_err();
    assert!(matches!(refused, DeviceError::Operation { operation: "read_rows", .. }), "{refused}");
    drop((arena, gpu));
    emulated.assert_clean();
}

/// The tensor cores' layout: tiles of 16 by 16, in each the elements that a lane multiplies side by side.
#[test]
fn elements_are_where_the_layout_says() {
    let (emulated, gpu) = gpu();
    for dtype in DTYPES {
        let (shape, size) = (MatrixShape { rows: 37, cols: 29, dtype }, dtype.size());
        let plain = Noise::new(9).bytes(shape.rows * shape.cols * size);
        let arena = packed_arena(&gpu, shape, &plain);
        let mut packed = vec![0xff; gpu.matrix_bytes(shape)];
        gpu.read_bytes(arena.view(0, packed.len()), &mut packed).unwrap();
        for (index, element) in plain.chunks_exact(size).enumerate() {
            let (row, col) = (index / shape.cols, index % shape.cols);
            let tile = row / 16 * shape.cols.div_ceil(16) + col / 16;
            let (row_in, col_in) = (row % 16, col % 16);
            let lane = row_in % 8 * 4 + col_in % 8 / 2;
            let place = col_in / 8 * 4 + row_in / 8 * 2 + col_in % 2;
            let at = (tile * 256 + lane * 8 + place) * size;
            assert_eq!(packed[at..at + size], *element, "{dtype}, row {row}, column {col}");
            packed[at..at + size].fill(0);
        }
        assert!(packed.iter().all(|&byte| byte == 0), "what pads a matrix is zero");
        drop(arena);
    }
    drop(gpu);
    emulated.assert_clean();
}
