//! Bytes between the host and the GPU.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::any::Any;
use std::ops::Range;

use parking_lot::MutexGuard;

use super::error::CallError;
use super::kernels::{Arguments, Kernel, Shape};
use super::memory::CudaPages;
use super::pinned::Pinned;
use super::{CudaDevice, packed_bytes};
use crate::device::{Arena, DeviceError, MatrixShape, View, ViewMut, commit_and_write, share_chunks};
use crate::weights::DType;

/// Bytes that one of the host's threads copies at a time.
const HOST_COPY_BYTES: usize = 512 << 10;
/// Threads of a block that packs, its warps, and blocks at most. A warp takes a tile after another.
const PACK_BLOCK: u32 = 256;
const PACK_WARPS: usize = 8;
const PACK_MAX_BLOCKS: usize = 4096;

/// Room on the GPU for rows as they are outside.
struct PlainRows<'a>(MutexGuard<'a, Arena>);

impl PlainRows<'_> {
    /// Where the rows of a buffer lie.
    fn address(&self, slot: usize) -> Option<usize> {
        let part = self.0.committed() / super::RING_SLOTS;
        (part > 0).then(|| self.0.address() + slot * part)
    }
}

impl CudaDevice {
    /// Copies within host memory on the host's threads.
    fn copy_host(&self, from: &[u8], to: &mut [u8]) {
        let from = &from[..to.len()];
        share_chunks(&self.host, to, HOST_COPY_BYTES, &|chunk, to| {
            to.copy_from_slice(&from[chunk * HOST_COPY_BYTES..][..to.len()]);
        });
    }

    pub(super) fn write(&self, dst: ViewMut<'_, u8>, src: &[u8]) -> Result<(), DeviceError> {
        assert_eq!(dst.len(), src.len(), "a copy has the size of the original");
        if let Some(parts) = self.parking.parts(src) {
            return self.write_pinned(dst, src, &parts).map_err(|error| error.during("write_bytes"));
        }
        let mut ring = self.ring.lock();
        let piece_bytes = ring.bytes();
        let mut write = || {
            let _bound = self.context.bind()?;
            let _running = self.recording.read();
            for (piece, src) in src.chunks(piece_bytes).enumerate() {
                let to = (dst.address() + piece * piece_bytes) as u64;
                ring.send(
                    &self.stream,
                    |pinned| self.copy_host(src, &mut pinned[..src.len()]),
                    |_, from| {
                        let from = std::ptr::with_exposed_provenance(from);
                        // SAFETY: the piece lies within `dst`, which nobody else uses; the ring keeps the pinned
                        // memory as it is until the copy is done.
                        unsafe {
                            self.context.driver.cuMemcpyHtoDAsync_v2(to, from, src.len(), self.stream.raw())
                        }
                    },
                )?;
            }
            Ok(())
        };
        write().map_err(|error: CallError| error.during("write_bytes"))
    }

    pub(super) fn read(&self, src: View<'_, u8>, out: &mut [u8]) -> Result<(), DeviceError> {
        assert_eq!(src.len(), out.len(), "a copy has the size of the original");
        // SAFETY: a view of this device of that length.
        unsafe { self.read_at(src.address(), out) }
    }

    /// Copies what is at an address to the host.
    ///
    /// # Safety
    /// As many bytes there are memory of this GPU, and stay so until the stream is done.
    pub(super) unsafe fn read_at(&self, address: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        if let Some(parts) = self.parking.parts(out) {
            // SAFETY: the caller's promise.
            return unsafe { self.read_pinned(address, out, &parts) }
                .map_err(|error| error.during("read_bytes"));
        }
        let mut ring = self.ring.lock();
        let piece_bytes = ring.bytes();
        let whole = out.len();
        let of = |piece: usize| piece * piece_bytes..whole.min((piece + 1) * piece_bytes);
        let mut read = || {
            let _bound = self.context.bind()?;
            let _running = self.recording.read();
            ring.receive(
                &self.stream,
                whole.div_ceil(piece_bytes),
                |piece, (_, to)| {
                    let from = (address + of(piece).start) as u64;
                    let to = std::ptr::with_exposed_provenance_mut(to);
                    // SAFETY: the piece lies within the caller's range; the ring leaves the pinned memory alone until
                    // the copy is done.
                    unsafe {
                        self.context.driver.cuMemcpyDtoHAsync_v2(to, from, of(piece).len(), self.stream.raw())
                    }
                },
                |piece, pinned| self.copy_host(pinned, &mut out[of(piece)]),
            )
        };
        read().map_err(|error| error.during("read_bytes"))
    }

    fn write_pinned(
        &self,
        dst: ViewMut<'_, u8>,
        src: &[u8],
        parts: &[Range<usize>],
    ) -> Result<(), CallError> {
        let _bound = self.context.bind()?;
        let _running = self.recording.read();
        let copied = parts
            .iter()
            .try_for_each(|part| self.send_pinned(dst.address() + part.start, &src[part.clone()]));
        // Also if one failed: those before it still read the source.
        copied.and(self.stream.synchronize())
    }

    /// Puts a copy on the stream. The context is bound; both are as long, and stay until the stream is done.
    fn send_pinned(&self, to: usize, from: &[u8]) -> Result<(), CallError> {
        // SAFETY: the callers have memory of this device there, exclusively; the source is pinned, in one part.
        unsafe {
            let from_address = from.as_ptr().cast();
            self.context.driver.cuMemcpyHtoDAsync_v2(to as u64, from_address, from.len(), self.stream.raw())
        }
    }

    /// # Safety
    /// As for [`CudaDevice::read_at`].
    unsafe fn read_pinned(
        &self,
        address: usize,
        out: &mut [u8],
        parts: &[Range<usize>],
    ) -> Result<(), CallError> {
        let _bound = self.context.bind()?;
        let _running = self.recording.read();
        let copied = parts.iter().try_for_each(|part| {
            let (from, to) = ((address + part.start) as u64, out[part.clone()].as_mut_ptr().cast());
            // SAFETY: the caller's promise; nobody else uses the target, pinned in one part, until the stream is done,
            // also if a copy fails.
            unsafe { self.context.driver.cuMemcpyDtoHAsync_v2(to, from, part.len(), self.stream.raw()) }
        });
        copied.and(self.stream.synchronize())
    }

    /// Commits an arena with these contents: each piece of memory is filled while the next is being mapped.
    pub(super) fn restore(&self, arena: &mut Arena, contents: &[u8]) -> Result<(), DeviceError> {
        let Some(parts) = self.parking.parts(contents) else {
            return commit_and_write(self, arena, contents);
        };
        let mut done = 0;
        // Committing waits for the stream before it returns, and before it unmaps what it mapped.
        let mut fill = |address: u64, bytes: usize| {
            let piece = done..contents.len().min(done + bytes);
            done = piece.end;
            let within = |part: &Range<usize>| part.start.max(piece.start)..part.end.min(piece.end);
            parts.iter().map(within).filter(|part| !part.is_empty()).try_for_each(|part| {
                self.send_pinned(address as usize + part.start - piece.start, &contents[part])
            })
        };
        arena.commit_by(contents.len(), |pages| {
            let pages: &mut dyn Any = pages;
            let pages = pages.downcast_mut::<CudaPages>().expect("an arena of this device");
            pages.commit_filled(contents.len(), &mut fill)
        })
    }

    pub(super) fn copy(&self, dst: ViewMut<'_, u8>, src: View<'_, u8>) -> Result<(), DeviceError> {
        assert_eq!(dst.len(), src.len(), "a copy has the size of the original");
        if src.len() == 0 {
            return Ok(());
        }
        let copy = || {
            let _bound = self.context.bind()?;
            let _running = self.recording.read();
            let (to, from) = (dst.address() as u64, src.address() as u64);
            // SAFETY: both are views of this device of that length, one of them exclusive. Arenas wait for the
            // stream before their memory goes.
            unsafe { self.context.driver.cuMemcpyDtoDAsync_v2(to, from, src.len(), self.stream.raw()) }
        };
        copy().map_err(|error: CallError| error.during("copy_bytes"))
    }

    /// Rows that go through a buffer at a time.
    fn rows_at_a_time(&self, row_bytes: usize, operation: &'static str) -> Result<usize, DeviceError> {
        match super::RING_BYTES / row_bytes.max(1) {
            0 => {
                let detail = format!("a row of {row_bytes} bytes, {} at most", super::RING_BYTES);
                Err(DeviceError::Operation { operation, detail })
            }
            rows => Ok(rows),
        }
    }

    /// GPU memory for plain rows, a part of at least `bytes` for each buffer of the ring, if there is any: without it
    /// the kernels reach over the bus for the rows, which is slower.
    fn plain_rows(&self, bytes: usize) -> Result<PlainRows<'_>, DeviceError> {
        let mut rows = self.rows.lock();
        let bytes = super::RING_SLOTS * bytes.next_multiple_of(super::ALIGNMENT);
        if rows.committed() < bytes {
            rows.decommit();
            match rows.commit(bytes) {
                Err(error @ DeviceError::OutOfMemory { .. }) => {
                    tracing::debug!(%error, "rows stay in host memory")
                }
                committed => committed?,
            }
        }
        Ok(PlainRows(rows))
    }

    /// Launches a kernel that packs or unpacks `rows` rows from `first_row` on.
    ///
    /// # Safety
    /// `to` and `from` are, one of them, a packed matrix with room for these rows, the other `rows` plain rows of
    /// `cols` elements; both stay until the launch has run.
    pub(super) unsafe fn pack(
        &self,
        kernel: Kernel,
        (to, from): (usize, usize),
        cols: usize,
        (first_row, rows): (usize, usize),
    ) -> Result<(), CallError> {
        let tiles = (rows.div_ceil(16) + 1) * cols.div_ceil(16);
        let blocks = tiles.div_ceil(PACK_WARPS).min(PACK_MAX_BLOCKS);
        let arguments = Arguments::new().address(to).address(from).int(cols).int(first_row).int(rows);
        let shape = Shape::new([blocks, 1, 1], PACK_BLOCK);
        // SAFETY: the arguments are `pack_rows`' and `unpack_rows`'; the rest is the caller's promise.
        unsafe { kernel.launch(&self.context, &self.stream, shape, arguments) }
    }

    pub(super) fn pack_rows(
        &self,
        dst: ViewMut<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        src: &[u8],
    ) -> Result<(), DeviceError> {
        let row_bytes = shape.cols * shape.dtype.size();
        let rows = src.len() / row_bytes;
        assert_eq!(src.len(), rows * row_bytes, "whole rows are written");
        assert!(first_row + rows <= shape.rows, "the matrix has these rows");
        assert_eq!(dst.len(), packed_bytes(shape), "the packed matrix has the size of its shape");
        let rows_at_a_time = self.rows_at_a_time(row_bytes, "write_rows")?;
        let kernel = match shape.dtype {
            DType::F32 => self.kernels.pack_rows_32,
            DType::F16 | DType::Bf16 => self.kernels.pack_rows_16,
        };
        let _bound = self.context.bind().map_err(|error| error.during("write_rows"))?;
        let mut ring = self.ring.lock();
        let _running = self.recording.read();
        let plain_rows = self.plain_rows(src.len().min(rows_at_a_time * row_bytes))?;
        for (piece, src) in src.chunks(rows_at_a_time * row_bytes).enumerate() {
            let first_row = first_row + piece * rows_at_a_time;
            let sent = ring.send(
                &self.stream,
                |pinned| self.copy_host(src, &mut pinned[..src.len()]),
                |slot, from| {
                    let plain = plain_rows.address(slot).unwrap_or(from);
                    if plain != from {
                        let (from, raw) = (std::ptr::with_exposed_provenance(from), self.stream.raw());
                        // SAFETY: the slot's part of `rows` has room for what a buffer holds, and is used again only
                        // when the stream has come past this; the ring keeps the pinned memory until then, too.
                        unsafe {
                            self.context.driver.cuMemcpyHtoDAsync_v2(plain as u64, from, src.len(), raw)
                        }?;
                    }
                    let rows = (first_row, src.len() / row_bytes);
                    // SAFETY: `dst` is a packed matrix of this shape with these rows, exclusive.
                    unsafe { self.pack(kernel, (dst.address(), plain), shape.cols, rows) }
                },
            );
            sent.map_err(|error| error.during("write_rows"))?;
        }
        Ok(())
    }

    pub(super) fn unpack_rows(
        &self,
        src: View<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        let row_bytes = shape.cols * shape.dtype.size();
        let rows = out.len() / row_bytes;
        assert_eq!(out.len(), rows * row_bytes, "whole rows are read");
        assert!(first_row + rows <= shape.rows, "the matrix has these rows");
        assert_eq!(src.len(), packed_bytes(shape), "the packed matrix has the size of its shape");
        let rows_at_a_time = self.rows_at_a_time(row_bytes, "read_rows")?;
        let kernel = match shape.dtype {
            DType::F32 => self.kernels.unpack_rows_32,
            DType::F16 | DType::Bf16 => self.kernels.unpack_rows_16,
        };
        let of = |piece: usize| piece * rows_at_a_time..rows.min((piece + 1) * rows_at_a_time);
        let _bound = self.context.bind().map_err(|error| error.during("read_rows"))?;
        let mut ring = self.ring.lock();
        let _running = self.recording.read();
        let plain_rows = self.plain_rows(out.len().min(rows_at_a_time * row_bytes))?;
        let received = ring.receive(
            &self.stream,
            rows.div_ceil(rows_at_a_time),
            |piece, (slot, to)| {
                let rows = (first_row + of(piece).start, of(piece).len());
                let plain = plain_rows.address(slot).unwrap_or(to);
                // SAFETY: `src` is a packed matrix of this shape with these rows; the slot's part of `rows` has room
                // for them, and is used again only when the stream has come past this; the ring leaves the pinned
                // memory alone until then, too.
                unsafe { self.pack(kernel, (plain, src.address()), shape.cols, rows) }?;
                if plain != to {
                    let (bytes, raw) = (rows.1 * row_bytes, self.stream.raw());
                    let to = std::ptr::with_exposed_provenance_mut(to);
                    // SAFETY: as above.
                    unsafe { self.context.driver.cuMemcpyDtoHAsync_v2(to, plain as u64, bytes, raw) }?;
                }
                Ok(())
            },
            |piece, pinned| {
                let range = of(piece).start * row_bytes..of(piece).end * row_bytes;
                self.copy_host(pinned, &mut out[range]);
            },
        );
        received.map_err(|error| error.during("read_rows"))
    }

    /// Runs `f` on the elements in host memory.
    pub(super) fn show(&self, view: View<'_, f32>, f: &mut dyn FnMut(&[f32])) -> Result<(), DeviceError> {
        let mut show = |bytes: &[u8]| {
            // SAFETY: the driver gives pinned memory aligned to pages, and every bit pattern is an f32.
            f(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), view.len()) });
        };
        // SAFETY: a view of this device of that length.
        unsafe { self.show_bytes(view.address(), view.len() * size_of::<f32>(), &mut show) }
            .map_err(|error: CallError| error.during("with_host"))
    }

    /// Runs `f` on bytes in pinned host memory, after everything on the stream is done.
    ///
    /// # Safety
    /// As many bytes at the address are memory of this GPU, and stay so until the stream is done.
    pub(super) unsafe fn show_bytes(
        &self,
        address: usize,
        bytes: usize,
        f: &mut dyn FnMut(&[u8]),
    ) -> Result<(), CallError> {
        let mut results = self.results.lock();
        let _bound = self.context.bind()?;
        let _running = self.recording.read();
        if results.as_ref().is_none_or(|pinned| pinned.len() < bytes) {
            *results = None;
            *results = Some(Pinned::new(&self.context, bytes)?);
        }
        let pinned = results.as_mut().expect("made just now");
        let to = std::ptr::with_exposed_provenance_mut(pinned.address());
        if bytes > 0 {
            // SAFETY: the caller's promise; the pinned memory has room and nobody else uses it, as the lock is held
            // until the copy is done.
            unsafe {
                self.context.driver.cuMemcpyDtoHAsync_v2(to, address as u64, bytes, self.stream.raw())
            }?;
        }
        self.stream.synchronize()?;
        // SAFETY: the stream is done with it.
        f(unsafe { &pinned.bytes()[..bytes] });
        Ok(())
    }
}
