//! Temporary memory of a device in which weights are worked on without passing through the host.

use super::cuda::{GpuMemory, GpuMemoryError};
use super::{DeviceError, MatrixShape, View, ViewMut};
use crate::weights::{DType, LEAF_BYTES};

/// Parts of a workspace begin at multiples of so many bytes.
pub(crate) const WORKSPACE_ALIGNMENT: usize = 256;

/// Memory that [`WeightWorkspace::open`] has opened, or a part of it; it stays open as long as the workspace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opened {
    /// Its number in the workspace.
    pub(super) index: usize,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

impl Opened {
    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }

    /// `bytes` bytes of it from `offset` on.
    pub(crate) fn slice(self, offset: usize, bytes: usize) -> Self {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "slice out of range");
        Self { index: self.index, offset: self.offset + offset, bytes }
    }
}

/// Where a window's elements are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// In memory that was opened.
    Opened(Opened),
    /// Whole rows of a packed matrix.
    Packed { src: View<'a, u8>, shape: MatrixShape, first_row: usize },
    /// In an arena of the device.
    Plain(View<'a, u8>),
}

/// Elements of one tensor that follow each other, and what is to be done with them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window<'a> {
    pub(crate) origin: Origin<'a>,
    pub(crate) elements: usize,
    /// As they are.
    pub(crate) from: DType,
    /// As they are to be.
    pub(crate) to: DType,
    /// Bytes of the tensor in front of it, which say where leaves of the digest begin.
    pub(crate) bytes_before: usize,
    /// Whether the tensor ends here, so that its last leaf does.
    pub(crate) ends: bool,
    /// Whether infinities and NaNs are looked for.
    pub(crate) find_non_finite: bool,
}

/// A window's bytes, cut for the digest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LeafCut {
    /// Bytes that go on with a leaf that an earlier window began.
    pub(crate) head: usize,
    /// Bytes of leaves that are all here, and how many these are.
    pub(crate) hashed: usize,
    pub(crate) leaves: usize,
    /// Bytes that begin a leaf which a later window ends.
    pub(crate) tail: usize,
}

impl Window<'_> {
    /// Bytes as they are.
    pub(crate) fn bytes_from(&self) -> usize {
        self.elements * self.from.size()
    }

    /// Bytes as they are to be.
    pub(crate) fn bytes_to(&self) -> usize {
        self.elements * self.to.size()
    }

    pub(crate) fn leaf_cut(&self) -> LeafCut {
        let bytes = self.bytes_to();
        let head = (LEAF_BYTES - self.bytes_before % LEAF_BYTES) % LEAF_BYTES;
        let head = head.min(bytes);
        let tail = if self.ends { 0 } else { (bytes - head) % LEAF_BYTES };
        let hashed = bytes - head - tail;
        LeafCut { head, hashed, leaves: hashed.div_ceil(LEAF_BYTES), tail }
    }

    /// Bytes of a workspace that it takes, with the results.
    pub(crate) fn room(&self) -> usize {
        let cut = self.leaf_cut();
        let aligned = |bytes: usize| bytes.next_multiple_of(WORKSPACE_ALIGNMENT);
        let converted = if self.from == self.to { 0 } else { aligned(self.bytes_to()) };
        let results = size_of::<u64>() + cut.leaves * size_of::<u128>() + cut.head + cut.tail;
        aligned(self.bytes_from()) + converted + aligned(results)
    }
}

/// An element that is infinite or no number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NonFinite {
    /// Its place in the window.
    pub(crate) element: usize,
    /// Its bytes, the first of these.
    pub(crate) value: [u8; 4],
}

/// What the host gets to see of a window.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The first one, if that was asked.
    pub(crate) non_finite: Option<NonFinite>,
    /// As [`Window::leaf_cut`] says.
    pub(crate) head: Vec<u8>,
    pub(crate) leaves: Vec<u128>,
    pub(crate) tail: Vec<u8>,
}

/// Temporary memory of a device. Each window is copied into it before it is looked at: what is hashed is what is
/// stored, whatever others write meanwhile.
pub(crate) trait WeightWorkspace {
    /// Bytes that the windows of one [`WeightWorkspace::take`] may take.
    fn room(&self) -> usize;

    /// Opens memory that somebody else has, until the workspace is dropped.
    fn open(&mut self, memory: &GpuMemory) -> Result<Opened, GpuMemoryError>;

    /// Copies opened memory to the host.
    fn read(&mut self, from: Opened, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Takes in the first of these windows, as many as there is room for and at least one: copies, converts and
    /// hashes them. When it returns, their origins may be overwritten.
    fn take(&mut self, windows: &[Window<'_>]) -> Result<Vec<Seen>, DeviceError>;

    /// Packs a window of the last [`WeightWorkspace::take`], which has whole rows, as [`Device::write_rows`] does.
    ///
    /// [`Device::write_rows`]: super::Device::write_rows
    fn pack(
        &mut self,
        window: usize,
        dst: ViewMut<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
    ) -> Result<(), DeviceError>;

    /// Copies a window of the last [`WeightWorkspace::take`].
    fn copy(&mut self, window: usize, dst: ViewMut<'_, u8>) -> Result<(), DeviceError>;
}
