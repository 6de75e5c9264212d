//! Views as slices: this device's memory is the host's.
#![allow(unsafe_code, reason = "views of arenas become slices; threads share one output")]

use std::marker::PhantomData;

use super::pool::Pool;
use crate::device::arena::Element;
use crate::device::{Vector, View, ViewMut};
use crate::weights::DType;

/// The elements of a view.
pub(super) fn slice<'a, T: Element>(view: &View<'a, T>) -> &'a [T] {
    assert!(view.address().is_multiple_of(align_of::<T>()), "the elements of a view are aligned");
    // SAFETY: views are made by `Arena` only, within committed memory that it borrows for 'a, so nothing
    // decommits or writes it meanwhile; the arena is this device's (kept by the engine, which has one device
    // per arena). Arena memory is zeroed or written, and every bit pattern is an `Element`.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(view.address()), view.len()) }
}

/// The elements of an exclusive view.
pub(super) fn slice_mut<T: Element>(view: ViewMut<'_, T>) -> &mut [T] {
    assert!(view.address().is_multiple_of(align_of::<T>()), "the elements of a view are aligned");
    let start = std::ptr::with_exposed_provenance_mut(view.address());
    // SAFETY: as in `slice`; the view is consumed and was exclusive.
    unsafe { std::slice::from_raw_parts_mut(start, view.len()) }
}

/// The elements of a vector as f32, padded with zeros to a multiple of 16.
pub(super) fn widen(vector: &Vector<'_>) -> Vec<f32> {
    let bytes = slice(&vector.bytes);
    assert_eq!(bytes.len(), vector.len * vector.dtype.size(), "a vector's bytes are its elements");
    let mut elements: Vec<f32> = match vector.dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)).collect(),
        DType::F16 => {
            bytes.as_chunks::<2>().0.iter().map(|&word| half::f16::from_le_bytes(word).to_f32()).collect()
        }
        DType::Bf16 => {
            let halves = bytes.as_chunks::<2>().0.iter();
            halves.map(|&word| f32::from_bits(u32::from(u16::from_le_bytes(word)) << 16)).collect()
        }
    };
    elements.resize(vector.len.next_multiple_of(super::simd::LANES), 0.0);
    elements
}

/// Bytes that a thread copies at a time. Memory that the system has yet to give costs more than the copy, and
/// comes in huge pages of this size.
const COPY_BYTES: usize = 2 << 20;

/// Copies on several threads if that pays.
pub(super) fn copy(pool: &Pool, from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "a copy has the size of the original");
    let to = SharedMut::new(to);
    pool.for_each(from.len().div_ceil(COPY_BYTES), &|task| {
        let from = &from[task * COPY_BYTES..from.len().min((task + 1) * COPY_BYTES)];
        // SAFETY: each task is another part.
        unsafe { to.part(task * COPY_BYTES, from.len()) }.copy_from_slice(from);
    });
}

/// An exclusive slice of which several threads write disjoint parts.
#[derive(Debug)]
pub(super) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are reached through `part` only, whose callers keep those of different threads disjoint.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Lends out `all`.
    pub(super) fn new(all: &'a mut [T]) -> Self {
        Self { start: all.as_mut_ptr(), len: all.len(), lifetime: PhantomData }
    }

    /// Elements `[offset, offset + len)`.
    ///
    /// # Safety
    /// No other part that is alive contains any of them.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the parts disjoint")]
    pub(super) unsafe fn part(&self, offset: usize, len: usize) -> &mut [T] {
        assert!(offset <= self.len && len <= self.len - offset, "part out of range");
        // SAFETY: in range by the assertion; exclusive by the caller's promise and by 'a.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(offset), len) }
    }
}
