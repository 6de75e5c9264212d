//! The CUDA device: NVIDIA GPUs from compute capability 8.0 on.
//!
//! One stream runs everything in order; the host waits for it only where it needs a result. Products are made on
//! tensor cores from activations that are split in three bf16 parts, so they are about as exact as f32 ones; all else
//! is f32. Each output element is reduced in one order, whatever the batch: the kernels are the project's own, since a
//! library's choice of algorithm may depend on the batch.
//!
//! Architecture invariant: no type of cudarc is seen outside this module, and no call of the driver outside it.

mod context;
mod driver;
#[cfg(test)]
#[path = "../../tests/emulated_cuda/mod.rs"]
pub(crate) mod emulated;
mod error;
mod gpu_memory;
mod graphs;
mod ingest;
mod kernels;
mod memory;
mod operations;
mod parking;
mod pinned;
mod sampling;
mod step;
mod stream;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod trainer;
mod transfer;

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

pub use self::error::{CallError, CudaError, CudaVersion};
pub use self::gpu_memory::{GpuMemory, GpuMemoryError};

use self::context::Context;
use self::kernels::Kernels;
#[cfg(test)]
pub(crate) use self::memory::read_emulated;
use self::memory::{Account, CudaPages};
use self::parking::Parking;
use self::pinned::{Pinned, Ring};
use self::stream::Stream;
use super::cpu::CpuDevice;
use super::{Arena, DeviceError, MatrixShape};

/// Parts of scratch memory begin at multiples of so many bytes.
const ALIGNMENT: usize = 256;
/// Buffers for pageable memory on its way, and the bytes of each.
const RING_SLOTS: usize = 4;
const RING_BYTES: usize = 2 << 20;

/// Which GPU, and what it may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CudaOptions {
    /// Number of the GPU, as the driver counts.
    pub(crate) ordinal: u32,
    /// Most bytes committed by all arenas together; the GPU's memory if `None`.
    pub(crate) memory_limit_bytes: Option<u64>,
    /// Whether the pinned host memory of parked weights is kept for the next sleep.
    pub(crate) keep_parking_memory: bool,
}

/// A GPU, and the host's threads that work for it.
#[derive(Debug)]
pub(crate) struct CudaDevice {
    host: CpuDevice,
    kernels: Kernels,
    parking: Arc<Parking>,
    /// Memory on its way in and out.
    ring: Mutex<Ring>,
    /// GPU memory as large as the ring, while rows are on their way: here they lie as they are outside, before and
    /// after packing.
    rows: Mutex<Arena>,
    /// What the host looks at.
    results: Mutex<Option<Pinned>>,
    /// Held for reading by whoever puts something on the stream that is to run now; see `Graphs`.
    recording: Arc<RwLock<()>>,
    account: Arc<Account>,
    /// Memory of other processes that is to be closed.
    unclosed: Mutex<Vec<u64>>,
    stream: Arc<Stream>,
    context: Arc<Context>,
}

impl CudaDevice {
    /// Opens a GPU. Sampling and conversions run on `host`'s threads.
    ///
    /// # Errors
    /// [`CudaError`]; nothing is left behind.
    pub(crate) fn open(options: CudaOptions, host: CpuDevice) -> Result<Self, CudaError> {
        let context = Arc::new(Context::open(options.ordinal)?);
        tracing::info!(ordinal = options.ordinal, name = context.name, "a GPU is opened");
        let stream = Arc::new(Stream::new(&context)?);
        let account = Arc::new(Account::new(options.memory_limit_bytes));
        let staging = RING_SLOTS * RING_BYTES;
        let pages = CudaPages::reserve("rows on their way", staging, &context, &stream, &account)?;
        Ok(Self {
            rows: Mutex::new(Arena::new(Box::new(pages), staging)),
            host,
            kernels: Kernels::load(&context)?,
            parking: Arc::new(Parking::new(&context, options.keep_parking_memory)),
            ring: Mutex::new(Ring::new(&context, RING_SLOTS, RING_BYTES)?),
            results: Mutex::new(None),
            recording: Arc::default(),
            account,
            unclosed: Mutex::default(),
            stream,
            context,
        })
    }

    fn reserve_pages(&self, label: &'static str, bytes: usize) -> Result<Arena, DeviceError> {
        let pages = CudaPages::reserve(label, bytes, &self.context, &self.stream, &self.account)?;
        Ok(Arena::new(Box::new(pages), bytes))
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "the GPU failed before its device was closed");
        }
        self.close_imports();
    }
}

/// Bytes of a packed matrix: tiles of 16 rows by 16 columns, as tensor cores read them (`kernels/pack.cu`).
fn packed_bytes(shape: MatrixShape) -> usize {
    shape.rows.div_ceil(16) * shape.cols.div_ceil(16) * 256 * shape.dtype.size()
}
