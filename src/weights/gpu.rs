//! Weights that are on the engine's GPU already: tensors, buckets, and the resident ones.

use super::digest::TensorHasher;
use super::resident::origin_of;
use super::{
    Bucket, BucketEntry, BucketError, Manifest, SourceError, TensorDigest, TensorSpec, WeightLayout,
    WeightSource,
};
use crate::device::cuda::{GpuMemory, GpuMemoryError};
use crate::device::{Arena, Device, DeviceError, Window};

/// Memory of the GPU that weights pass through on their way, at most: as much as a few rows of a matrix take, if that
/// is more.
const WORKSPACE_BYTES: usize = 64 << 20;
#[cfg(test)]
thread_local! {
    /// Fewer bytes, for tests of how tensors are cut.
    pub(crate) static TEST_WORKSPACE_BYTES: std::cell::Cell<usize> = const { std::cell::Cell::new(WORKSPACE_BYTES) };
}

/// [`WORKSPACE_BYTES`].
pub(super) fn workspace_bytes() -> usize {
    #[cfg(test)]
    return TEST_WORKSPACE_BYTES.get();
    #[cfg(not(test))]
    WORKSPACE_BYTES
}

/// Windows that are looked at together.
pub(super) const MAX_WINDOWS: usize = 4096;

/// Tensors on the engine's GPU, a source like any other. The bytes never pass through the host, and the digests are the
/// ones that they would have had if they did.
///
/// ```no_run
/// use dormouse::{DType, Engine, GpuMemory, GpuTensors, TensorSpec, WeightsLoaded};
///
/// # fn trainer_tensors() -> Vec<(String, Vec<usize>, u64)> { vec![] }
/// # fn f(mut engine: Engine<WeightsLoaded>) -> Result<(), Box<dyn std::error::Error>> {
/// // What the trainer in this process has written is complete: it has synchronised its stream.
/// let tensors = trainer_tensors().into_iter().map(|(name, shape, address)| {
///     let spec = TensorSpec { name, dtype: DType::Bf16, shape };
///     let bytes = spec.checked_bytes().expect("a size that fits");
///     // SAFETY: the trainer's tensors stay as they are until the update is done.
///     (spec, unsafe { GpuMemory::at(address, bytes) })
/// });
/// engine.update(GpuTensors::new(tensors))?;
/// // Now the trainer may go on.
/// # Ok(())
/// # }
/// ```
///
/// An engine elsewhere than on the tensors' GPU refuses them: [`GpuMemoryError`].
#[derive(Debug, Clone)]
pub struct GpuTensors {
    tensors: Vec<(TensorSpec, GpuMemory)>,
}

impl GpuTensors {
    /// The tensors of an iterator, each row-major and as long as its shape says; it is checked by
    /// [`index`](WeightSource::index), not here.
    pub fn new(tensors: impl IntoIterator<Item = (TensorSpec, GpuMemory)>) -> Self {
        Self { tensors: tensors.into_iter().collect() }
    }

    fn get(&self, tensor: usize) -> Result<&(TensorSpec, GpuMemory), SourceError> {
        let no_such_tensor = SourceError::NoSuchTensor { tensor, count: self.tensors.len() };
        self.tensors.get(tensor).ok_or(no_such_tensor)
    }
}

impl FromIterator<(TensorSpec, GpuMemory)> for GpuTensors {
    fn from_iter<I: IntoIterator<Item = (TensorSpec, GpuMemory)>>(tensors: I) -> Self {
        Self::new(tensors)
    }
}

impl WeightSource for GpuTensors {
    /// # Errors
    /// [`SourceError::WrongLength`].
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        let spec = |(spec, memory): &(TensorSpec, GpuMemory)| match spec.checked_bytes() {
            Some(bytes) if bytes == memory.bytes() => Ok(spec.clone()),
            _ => Err(SourceError::wrong_length(spec, memory.bytes())),
        };
        self.tensors.iter().map(spec).collect()
    }

    /// # Errors
    /// [`SourceError::Gpu`]: the host can't read them.
    fn read(&mut self, tensor: usize, _sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        Err(SourceError::gpu(&self.get(tensor)?.0, GpuMemoryError::NotOnGpu))
    }

    fn gpu_memory(&mut self, tensor: usize) -> Result<Option<GpuMemory>, SourceError> {
        Ok(Some(self.get(tensor)?.1.clone()))
    }
}

/// A part of a model in one piece of memory on the engine's GPU, with a table of what is in it: what a trainer process
/// on the same GPU fills, exports by an IPC handle, and fills again once `push_gpu_bucket` of
/// [`Update`](crate::Update) or [`Load`](crate::Load) has returned.
///
/// It is a [`Bucket`] whose bytes are elsewhere. Tensors may begin at any byte, and between them may be bytes that
/// nobody looks at. Two names may share bytes, as tied weights do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuBucket {
    entries: Vec<BucketEntry>,
    memory: GpuMemory,
}

impl GpuBucket {
    /// Makes a bucket of a table and the memory that the entries' ranges are in.
    ///
    /// # Errors
    /// A [`BucketError`] that says what the table gets wrong. The memory itself is not looked at.
    pub fn new(entries: Vec<BucketEntry>, memory: GpuMemory) -> Result<Self, BucketError> {
        Bucket::check(&entries, memory.bytes())?;
        Ok(Self { entries, memory })
    }

    /// The table.
    pub fn entries(&self) -> &[BucketEntry] {
        &self.entries
    }

    /// The memory.
    pub fn memory(&self) -> &GpuMemory {
        &self.memory
    }
}

/// The digests of all resident tensors, computed on the device. `None`: it can't, or there is no memory for it.
pub(crate) fn resident_digests(
    device: &dyn Device,
    manifest: &Manifest,
    layout: &WeightLayout,
    arena: &Arena,
) -> Result<Option<Vec<TensorDigest>>, DeviceError> {
    let windows = |room: usize| {
        let tensors = manifest.tensors().iter().enumerate();
        tensors.flat_map(move |(position, tensor)| {
            let row_bytes = tensor.row_bytes();
            let granule = device.packed_rows();
            // Half of the room, so that the copy of one window leaves some for the next.
            let most = (room / 2 / row_bytes / granule).max(1) * granule;
            (0..tensor.shape[0]).step_by(most).map(move |first_row| {
                let rows = most.min(tensor.shape[0] - first_row);
                let window = Window {
                    origin: origin_of(layout, arena, layout.places[position], first_row, rows),
                    elements: rows * row_bytes / tensor.dtype.size(),
                    from: tensor.dtype,
                    to: tensor.dtype,
                    bytes_before: first_row * row_bytes,
                    ends: first_row + rows == tensor.shape[0],
                    find_non_finite: false,
                };
                (position, window)
            })
        })
    };
    let most = workspace_bytes();
    let all = windows(most).map(|(_, window)| window.room()).sum::<usize>();
    let largest = windows(most).map(|(_, window)| window.room()).max().unwrap_or(0);
    let mut workspace = match device.weight_workspace(all.min(most).max(largest)) {
        Ok(Some(workspace)) => workspace,
        Ok(None) => return Ok(None),
        Err(error @ DeviceError::OutOfMemory { .. }) => {
            tracing::debug!(%error, "the weights are digested on the host");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let mut hashers: Vec<TensorHasher> = manifest.tensors().iter().map(TensorHasher::new).collect();
    let (positions, windows): (Vec<usize>, Vec<Window<'_>>) = windows(most).unzip();
    let mut done = 0;
    while done < windows.len() {
        let end = windows.len().min(done + MAX_WINDOWS);
        for seen in workspace.take(&windows[done..end])? {
            hashers[positions[done]].update_hashed(&seen.head, &seen.leaves, &seen.tail);
            done += 1;
        }
    }
    Ok(Some(hashers.into_iter().map(TensorHasher::finish).collect()))
}
