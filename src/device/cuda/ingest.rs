//! Weights that are on the GPU already: copied, converted, checked, hashed and packed without passing through the host.
#![allow(unsafe_code, reason = "calls of the CUDA driver, launches of kernels")]

use super::gpu_memory::{GpuMemory, GpuMemoryError, Openings};
use super::kernels::{Arguments, Shape};
use super::operations::dtype_code;
use super::{CallError, CudaDevice, packed_bytes};
use crate::device::{
    Arena, DeviceError, LeafCut, MatrixShape, NonFinite, Opened, Origin, Seen, View, ViewMut,
    WORKSPACE_ALIGNMENT, WeightWorkspace, Window,
};
use crate::weights::DType;

/// What errors say that the memory is for, and the work.
const LABEL: &str = "weight workspace";
/// Threads of a block that converts or searches, and blocks at most. A thread takes an element after another.
const ELEMENTS_BLOCK: u32 = 256;
const ELEMENTS_MAX_BLOCKS: usize = 4096;
/// Threads of a block that hashes a leaf.
const LEAF_BLOCK: u32 = 256;

/// Temporary memory, and what is open while it is used.
#[derive(Debug)]
pub(super) struct CudaWorkspace<'d> {
    device: &'d CudaDevice,
    /// `None` once it was given back.
    arena: Option<Arena>,
    openings: Option<Openings<'d>>,
    /// Memory that was opened: address and bytes.
    opened: Vec<(u64, usize)>,
    /// Windows of the last batch.
    placed: Vec<Placed>,
}

/// Where a window is in the workspace.
#[derive(Debug, Clone, Copy)]
struct Placed {
    /// As it was.
    copied: usize,
    /// As it is to be.
    converted: usize,
    bytes: usize,
    to: DType,
}

/// Where a window's results are, in bytes from the first.
#[derive(Debug, Clone, Copy)]
struct Results {
    cut: LeafCut,
    left: usize,
    leaves: usize,
    head: usize,
    tail: usize,
}

impl CudaDevice {
    /// Takes so many bytes of this GPU's memory until the workspace is dropped.
    pub(super) fn open_workspace(&self, bytes: usize) -> Result<Box<CudaWorkspace<'_>>, DeviceError> {
        let _running = self.recording.read();
        let mut arena = self.reserve_pages(LABEL, bytes)?;
        arena.commit(bytes)?;
        let openings = Some(Openings::new(self));
        let (opened, placed) = (Vec::new(), Vec::new());
        Ok(Box::new(CudaWorkspace { device: self, arena: Some(arena), openings, opened, placed }))
    }
}

impl CudaWorkspace<'_> {
    fn arena(&self) -> &Arena {
        self.arena.as_ref().expect("the workspace is in use")
    }

    /// Address of opened memory.
    fn address(&self, from: Opened) -> u64 {
        let (address, bytes) = self.opened[from.index];
        assert!(from.offset + from.bytes <= bytes, "a part of what was opened");
        address + from.offset as u64
    }

    /// Places windows one behind the other, and their results behind them all; returns these results' begin and length.
    fn place(&mut self, windows: &[Window<'_>]) -> (Vec<Results>, usize, usize) {
        let base = self.arena().address();
        let mut next = 0;
        let mut take = |bytes: usize| {
            let begin = next;
            next += bytes.next_multiple_of(WORKSPACE_ALIGNMENT);
            base + begin
        };
        let place = |window: &Window<'_>| {
            let copied = take(window.bytes_from());
            let converted = if window.from == window.to { copied } else { take(window.bytes_to()) };
            Placed { copied, converted, bytes: window.bytes_to(), to: window.to }
        };
        self.placed = windows.iter().map(place).collect();
        // The numbers of the search are next to each other, so that one call sets them to zero; numbers come before
        // bytes, so that all are aligned.
        let cuts = || windows.iter().map(Window::leaf_cut);
        let mut leaves = windows.len() * size_of::<u64>();
        let mut bytes = leaves + cuts().map(|cut| cut.leaves * size_of::<u128>()).sum::<usize>();
        let results = cuts().enumerate().map(|(index, cut)| {
            let (head, tail) = (bytes, bytes + cut.head);
            let results = Results { cut, left: index * size_of::<u64>(), leaves, head, tail };
            leaves += cut.leaves * size_of::<u128>();
            bytes += cut.head + cut.tail;
            results
        });
        let results = results.collect();
        assert!(next + bytes <= self.arena().committed(), "windows and results have room");
        (results, base + next, bytes)
    }

    /// Puts copies of bytes within this GPU on the stream.
    ///
    /// # Safety
    /// `from` are bytes of this GPU's memory that stay until the stream is done; `to` are bytes of the workspace.
    unsafe fn copy_in(&self, to: usize, from: u64, bytes: usize) -> Result<(), CallError> {
        if bytes == 0 {
            return Ok(());
        }
        let device = self.device;
        // SAFETY: the caller's promise.
        unsafe { device.context.driver.cuMemcpyDtoDAsync_v2(to as u64, from, bytes, device.stream.raw()) }
    }

    /// Puts everything that is done with a window on the stream.
    fn launch(
        &self,
        window: &Window<'_>,
        placed: Placed,
        results: &Results,
        results_at: usize,
    ) -> Result<(), CallError> {
        let device = self.device;
        self.bring(window, placed.copied)?;
        let elements = Shape::new(
            [window.elements.div_ceil(ELEMENTS_BLOCK as usize).min(ELEMENTS_MAX_BLOCKS), 1, 1],
            ELEMENTS_BLOCK,
        );
        if window.from != window.to {
            let arguments = Arguments::new()
                .address(placed.copied)
                .int(dtype_code(window.from))
                .address(placed.converted)
                .int(dtype_code(window.to))
                .long(window.elements);
            // SAFETY: `convert`'s arguments; both sides have room for the elements.
            unsafe { device.kernels.convert.launch(&device.context, &device.stream, elements, arguments) }?;
        }
        if window.find_non_finite {
            let arguments = Arguments::new()
                .address(placed.converted)
                .int(dtype_code(window.to))
                .long(window.elements)
                .address(results_at + results.left);
            let kernel = device.kernels.first_non_finite;
            // SAFETY: `first_non_finite`'s arguments; the elements are there, and the result was set to zero.
            unsafe { kernel.launch(&device.context, &device.stream, elements, arguments) }?;
        }
        let cut = &results.cut;
        let (head, hashed) = (placed.converted, placed.converted + cut.head);
        let arguments =
            Arguments::new().address(hashed).long(cut.hashed).address(results_at + results.leaves);
        let shape = Shape::new([cut.leaves, 1, 1], LEAF_BLOCK);
        // SAFETY: `xxh3_leaves`' arguments; the bytes are in the window, and there is room for the leaves' hashes.
        unsafe { device.kernels.xxh3_leaves.launch(&device.context, &device.stream, shape, arguments) }?;
        // SAFETY: both are parts of the window, and there is room for them among the results.
        unsafe { self.copy_in(results_at + results.head, head as u64, cut.head) }?;
        // SAFETY: as above.
        unsafe { self.copy_in(results_at + results.tail, (hashed + cut.hashed) as u64, cut.tail) }
    }

    /// Puts the copy of a window's elements as they are on the stream.
    fn bring(&self, window: &Window<'_>, to: usize) -> Result<(), CallError> {
        let bytes = window.bytes_from();
        match window.origin {
            Origin::Opened(from) => {
                assert_eq!(from.bytes, bytes, "a window is all of its origin");
                // SAFETY: memory that was found to be this GPU's; it stays open until the workspace has waited for the
                // stream, and whoever owns it keeps it that long.
                unsafe { self.copy_in(to, self.address(from), bytes) }
            }
            Origin::Plain(from) => {
                assert_eq!(from.len(), bytes, "a window is all of its origin");
                // SAFETY: a view of this device, borrowed until the batch is done.
                unsafe { self.copy_in(to, from.address() as u64, bytes) }
            }
            Origin::Packed { src, shape, first_row } => {
                let rows = window.elements / shape.cols;
                assert_eq!((rows * shape.cols, window.from), (window.elements, shape.dtype), "whole rows");
                assert!(first_row + rows <= shape.rows, "the matrix has these rows");
                assert_eq!(src.len(), packed_bytes(shape), "the packed matrix has the size of its shape");
                let kernel = match shape.dtype {
                    DType::F32 => self.device.kernels.unpack_rows_32,
                    DType::F16 | DType::Bf16 => self.device.kernels.unpack_rows_16,
                };
                // SAFETY: a packed matrix of this shape with these rows; the workspace has room for them.
                unsafe { self.device.pack(kernel, (to, src.address()), shape.cols, (first_row, rows)) }
            }
        }
    }

    fn launch_all(
        &self,
        windows: &[Window<'_>],
        results: &[Results],
        results_at: usize,
    ) -> Result<(), CallError> {
        let device = self.device;
        let _bound = device.context.bind()?;
        let _running = device.recording.read();
        if windows.iter().any(|window| window.find_non_finite) {
            let bytes = windows.len() * size_of::<u64>();
            device.stream.zero(&device.context, results_at as u64, bytes)?;
        }
        let all = windows.iter().zip(&self.placed).zip(results);
        all.into_iter()
            .try_for_each(|((window, &placed), results)| self.launch(window, placed, results, results_at))
    }

    /// The element that a search has found.
    fn found(&self, window: &Window<'_>, placed: Placed, left: u64) -> Result<NonFinite, DeviceError> {
        let element = usize::try_from(left).ok().and_then(|left| window.elements.checked_sub(left));
        let element = element.expect("a place in the window");
        let mut value = [0; 4];
        let size = window.to.size();
        let offset = placed.converted - self.arena().address() + element * size;
        self.device.read(self.arena().view(offset, size), &mut value[..size])?;
        Ok(NonFinite { element, value })
    }

    /// A window of the last batch.
    fn window(&self, window: usize) -> (View<'_, u8>, DType) {
        let placed = self.placed[window];
        (self.arena().view(placed.converted - self.arena().address(), placed.bytes), placed.to)
    }
}

/// Reads the results of a window from those of all.
fn seen(bytes: &[u8], results: &Results) -> (Seen, u64) {
    let LeafCut { head, leaves, tail, .. } = results.cut;
    let part = |begin: usize, len: usize| &bytes[begin..begin + len];
    let hashes = part(results.leaves, leaves * size_of::<u128>()).as_chunks().0;
    let left = part(results.left, size_of::<u64>()).as_chunks().0[0];
    let seen = Seen {
        non_finite: None,
        head: part(results.head, head).to_vec(),
        leaves: hashes.iter().map(|&hash| u128::from_le_bytes(hash)).collect(),
        tail: part(results.tail, tail).to_vec(),
    };
    (seen, u64::from_le_bytes(left))
}

impl WeightWorkspace for CudaWorkspace<'_> {
    fn room(&self) -> usize {
        self.arena().committed()
    }

    fn open(&mut self, memory: &GpuMemory) -> Result<Opened, GpuMemoryError> {
        let openings = self.openings.as_mut().expect("the workspace is in use");
        let address = openings.open(memory)?;
        let (index, bytes) = (self.opened.len(), memory.bytes());
        self.opened.push((address, bytes));
        Ok(Opened { index, offset: 0, bytes })
    }

    fn read(&mut self, from: Opened, out: &mut [u8]) -> Result<(), DeviceError> {
        assert_eq!(from.bytes, out.len(), "a copy has the size of the original");
        let address = usize::try_from(self.address(from)).expect("an address");
        // SAFETY: memory that was found to be this GPU's; it is open until the workspace has waited for the stream, and
        // whoever owns it keeps it that long.
        unsafe { self.device.read_at(address, out) }
    }

    fn take(&mut self, windows: &[Window<'_>]) -> Result<Vec<Seen>, DeviceError> {
        let mut room = self.room();
        let fits = |window: &&Window<'_>| match room.checked_sub(window.room()) {
            Some(left) => {
                room = left;
                true
            }
            None => false,
        };
        let fitting = windows.iter().take_while(fits).count();
        if let (0, Some(first)) = (fitting, windows.first()) {
            let (needed_bytes, available_bytes) = (first.room() as u64, self.room() as u64);
            return Err(DeviceError::OutOfMemory { label: LABEL, needed_bytes, available_bytes });
        }
        let windows = &windows[..fitting];
        let (results, results_at, results_bytes) = self.place(windows);
        let mut all = Vec::with_capacity(windows.len());
        let mut see = |bytes: &[u8]| all.extend(results.iter().map(|results| seen(bytes, results)));
        let device = self.device;
        self.launch_all(windows, &results, results_at)
            // SAFETY: the results are in the workspace, which waits for the stream before it goes.
            .and_then(|()| unsafe { device.show_bytes(results_at, results_bytes, &mut see) })
            .map_err(|error| error.during(LABEL))?;
        let mut seen = Vec::with_capacity(all.len());
        for ((window, &placed), (mut one, left)) in windows.iter().zip(&self.placed).zip(all) {
            if window.find_non_finite && left > 0 {
                one.non_finite = Some(self.found(window, placed, left)?);
            }
            seen.push(one);
        }
        Ok(seen)
    }

    fn pack(
        &mut self,
        window: usize,
        dst: ViewMut<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
    ) -> Result<(), DeviceError> {
        let (rows, dtype) = self.window(window);
        let row_bytes = shape.cols * shape.dtype.size();
        let count = rows.len() / row_bytes;
        assert_eq!((count * row_bytes, dtype), (rows.len(), shape.dtype), "whole rows are packed");
        assert!(first_row + count <= shape.rows, "the matrix has these rows");
        assert_eq!(dst.len(), packed_bytes(shape), "the packed matrix has the size of its shape");
        let kernel = match shape.dtype {
            DType::F32 => self.device.kernels.pack_rows_32,
            DType::F16 | DType::Bf16 => self.device.kernels.pack_rows_16,
        };
        let _running = self.device.recording.read();
        let addresses = (dst.address(), rows.address());
        // SAFETY: `dst` is a packed matrix of this shape with these rows, exclusive; the rows are in the workspace,
        // which the next batch overwrites in the stream's order.
        unsafe { self.device.pack(kernel, addresses, shape.cols, (first_row, count)) }
            .map_err(|error| error.during(LABEL))
    }

    fn copy(&mut self, window: usize, dst: ViewMut<'_, u8>) -> Result<(), DeviceError> {
        self.device.copy(dst, self.window(window).0)
    }
}

impl Drop for CudaWorkspace<'_> {
    fn drop(&mut self) {
        // While a step is being recorded nobody may wait for the stream.
        let _running = self.device.recording.read();
        self.openings = None;
        self.arena = None;
    }
}
