//! The packed layout of weight matrices.
//!
//! Panels of 16 output rows, padded with zero rows; in a panel, for each `k` the 16 elements side by side:
//! f32 and f16 in natural order, bf16 with row `i` beside row `i + 8`, so that two integer operations widen
//! 16 of them.
#![allow(unsafe_code, reason = "threads pack disjoint panels and unpack disjoint rows")]

use super::host::SharedMut;
use super::pool::Pool;
use super::simd::LANES;
use super::transpose::{STRIP_BYTES, columns, rows};
use crate::device::MatrixShape;
use crate::weights::DType;

/// Copies of fewer bytes run on the caller's thread.
const PARALLEL_FROM_BYTES: usize = 256 << 10;

/// Bytes of a packed matrix, a multiple of 64.
pub(super) fn packed_bytes(shape: MatrixShape) -> usize {
    (shape.rows.next_multiple_of(LANES) * shape.cols * shape.dtype.size()).next_multiple_of(64)
}

/// Place of row `lane` of a panel among the 16 elements of one `k`.
fn slot(dtype: DType, lane: usize) -> usize {
    match dtype {
        DType::F32 | DType::F16 => lane,
        DType::Bf16 => lane % 8 * 2 + lane / 8,
    }
}

/// Rows of a panel that a copy covers.
#[derive(Debug, Clone, Copy)]
struct PanelRows {
    panel: usize,
    first_lane: usize,
    lanes: usize,
    /// The first of them, counted from the first row of the copy.
    source_row: usize,
}

/// Part number `part` of the rows `first_row..first_row + rows`, cut at panels.
fn panel_rows(first_row: usize, rows: usize, part: usize) -> PanelRows {
    let panel = first_row / LANES + part;
    let start = first_row.max(panel * LANES);
    let end = (first_row + rows).min((panel + 1) * LANES);
    PanelRows { panel, first_lane: start - panel * LANES, lanes: end - start, source_row: start - first_row }
}

fn parts(first_row: usize, rows: usize) -> usize {
    if rows == 0 { 0 } else { (first_row + rows).div_ceil(LANES) - first_row / LANES }
}

fn check(shape: MatrixShape, packed: &[u8], first_row: usize, plain: &[u8]) -> usize {
    let row_bytes = shape.cols * shape.dtype.size();
    assert_eq!(packed.len(), packed_bytes(shape), "the packed matrix has the size of its shape");
    let rows = plain.len() / row_bytes;
    assert_eq!(plain.len(), rows * row_bytes, "whole rows are packed");
    assert!(first_row + rows <= shape.rows, "rows {first_row}..+{rows} of {}", shape.rows);
    rows
}

/// Packs the rows `plain` into rows `first_row..`.
pub(super) fn write(pool: &Pool, packed: &mut [u8], shape: MatrixShape, first_row: usize, plain: &[u8]) {
    let rows = check(shape, packed, first_row, plain);
    let panel_bytes = shape.cols * LANES * shape.dtype.size();
    let row_bytes = shape.cols * shape.dtype.size();
    let packed = SharedMut::new(packed);
    let work = |part: usize| {
        let place = panel_rows(first_row, rows, part);
        // SAFETY: each part is another panel.
        let panel = unsafe { packed.part(place.panel * panel_bytes, panel_bytes) };
        let source = &plain[place.source_row * row_bytes..][..place.lanes * row_bytes];
        match shape.dtype {
            DType::F32 => write_panel::<4>(shape.dtype, panel, source, place),
            DType::F16 | DType::Bf16 => write_panel::<2>(shape.dtype, panel, source, place),
        }
    };
    for_each_part(pool, parts(first_row, rows), plain.len(), &work);
}

/// Unpacks rows `first_row..` into `plain`.
pub(super) fn read(pool: &Pool, packed: &[u8], shape: MatrixShape, first_row: usize, plain: &mut [u8]) {
    let rows = check(shape, packed, first_row, plain);
    let panel_bytes = shape.cols * LANES * shape.dtype.size();
    let row_bytes = shape.cols * shape.dtype.size();
    let bytes = plain.len();
    let plain = SharedMut::new(plain);
    let work = |part: usize| {
        let place = panel_rows(first_row, rows, part);
        let panel = &packed[place.panel * panel_bytes..][..panel_bytes];
        // SAFETY: each part is other rows.
        let target = unsafe { plain.part(place.source_row * row_bytes, place.lanes * row_bytes) };
        match shape.dtype {
            DType::F32 => read_panel::<4>(shape.dtype, panel, target, place),
            DType::F16 | DType::Bf16 => read_panel::<2>(shape.dtype, panel, target, place),
        }
    };
    for_each_part(pool, parts(first_row, rows), bytes, &work);
}

/// Unpacks row `row` as f32.
pub(super) fn widen_row(packed: &[u8], shape: MatrixShape, row: usize, out: &mut [f32]) {
    let size = shape.dtype.size();
    let panel = &packed[row / LANES * LANES * shape.cols * size..];
    let start = slot(shape.dtype, row % LANES) * size;
    for (group, out) in panel.chunks_exact(LANES * size).zip(out) {
        let bytes = &group[start..start + size];
        *out = match shape.dtype {
            DType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            DType::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            DType::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16),
        };
    }
}

fn for_each_part(pool: &Pool, parts: usize, bytes: usize, work: &(dyn Fn(usize) + Sync)) {
    if bytes < PARALLEL_FROM_BYTES {
        (0..parts).for_each(work);
    } else {
        pool.for_each(parts, work);
    }
}

/// Packs `SIZE`-byte elements of some rows of a panel.
fn write_panel<const SIZE: usize>(dtype: DType, panel: &mut [u8], source: &[u8], place: PanelRows) {
    let groups = panel.as_chunks_mut::<SIZE>().0.as_chunks_mut::<LANES>().0;
    let cols = groups.len();
    let source = source.as_chunks::<SIZE>().0;
    let mut done = 0;
    if place.lanes == LANES {
        let rows_of = source.chunks_exact(cols);
        let strips = in_slots(dtype, rows_of.map(|row| row.as_flattened().as_chunks::<STRIP_BYTES>().0));
        let bytes = groups.as_flattened_mut().as_flattened_mut();
        let blocks = bytes.as_chunks_mut::<STRIP_BYTES>().0.as_chunks_mut::<LANES>().0;
        for (strip, block) in blocks.iter_mut().enumerate() {
            *block = columns::<SIZE>(std::array::from_fn(|slot| strips[slot][strip]));
        }
        done = blocks.len() * STRIP_BYTES / SIZE;
    }
    for (lane, row) in source.chunks_exact(cols).enumerate() {
        let slot = slot(dtype, place.first_lane + lane);
        for (group, element) in groups[done..].iter_mut().zip(&row[done..]) {
            group[slot] = *element;
        }
    }
}

/// Unpacks `SIZE`-byte elements of some rows of a panel.
fn read_panel<const SIZE: usize>(dtype: DType, panel: &[u8], target: &mut [u8], place: PanelRows) {
    let groups = panel.as_chunks::<SIZE>().0.as_chunks::<LANES>().0;
    let cols = groups.len();
    let target = target.as_chunks_mut::<SIZE>().0;
    let mut done = 0;
    if place.lanes == LANES {
        let rows_of = target.chunks_exact_mut(cols);
        let mut strips = in_slots(dtype, rows_of.map(|row| row.as_flattened_mut().as_chunks_mut().0));
        let blocks = panel.as_chunks::<STRIP_BYTES>().0.as_chunks::<LANES>().0;
        for (strip, block) in blocks.iter().enumerate() {
            for (row, bytes) in strips.iter_mut().zip(rows::<SIZE>(*block)) {
                row[strip] = bytes;
            }
        }
        done = blocks.len() * STRIP_BYTES / SIZE;
    }
    for (lane, row) in target.chunks_exact_mut(cols).enumerate() {
        let slot = slot(dtype, place.first_lane + lane);
        for (group, element) in groups[done..].iter().zip(&mut row[done..]) {
            *element = group[slot];
        }
    }
}

/// Something of each row of a panel, at the row's place in a group.
fn in_slots<T: Default>(dtype: DType, rows: impl Iterator<Item = T>) -> [T; LANES] {
    let mut slots: [T; LANES] = Default::default();
    for (lane, row) in rows.enumerate() {
        slots[slot(dtype, lane)] = row;
    }
    slots
}
