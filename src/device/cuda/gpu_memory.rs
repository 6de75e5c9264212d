//! GPU memory that somebody else owns: who wants it read says where it is.
#![allow(unsafe_code, reason = "an address is a promise; calls of the CUDA driver")]

use std::ffi::c_char;
use std::fmt;

use super::CudaDevice;
use super::driver::{CUdeviceptr, CUipcMemHandle, CUpointer_attribute};
use super::error::CallError;

/// Bytes of an IPC handle.
const HANDLE_BYTES: usize = 64;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the one flag that there is, and that must be given.
const LAZY_PEER_ACCESS: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE_MEMORY: u64 = 2;
/// `CUDA_ERROR_INVALID_VALUE` and `CUDA_ERROR_NOT_FOUND`: what the driver says of an address that it doesn't know.
const UNKNOWN_ADDRESS: [i32; 2] = [1, 500];

/// Bytes on a GPU that somebody else owns, such as a trainer's tensor. The engine only reads them.
///
/// It says where they are and holds nothing open: the driver is asked when they are pushed. What it can tell of a wrong
/// address, length or handle is a [`GpuMemoryError`] then.
///
/// The engine waits for nobody else's work: whatever writes the bytes must be complete (the stream or the device
/// synchronised) before they are pushed. When the push returns, successful or not, they have been copied or are no
/// longer looked at, and may be overwritten or freed. That is the acknowledgement that a trainer waits for.
#[derive(Clone, PartialEq, Eq)]
pub struct GpuMemory {
    place: Place,
    bytes: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Of this process.
    Address(u64),
    /// In an allocation of another process.
    Ipc { handle: [u8; HANDLE_BYTES], offset: usize },
}

impl GpuMemory {
    /// Memory of this process by its device address (`CUdeviceptr`), at any alignment: of the runtime's `cudaMalloc`,
    /// of `cuMemAlloc`, or mapped there. It must be memory of the engine's GPU.
    ///
    /// # Safety
    /// While a push or a load reads this value, or one sliced from it, the memory stays allocated and nothing writes
    /// it.
    pub unsafe fn at(address: u64, bytes: usize) -> Self {
        Self { place: Place::Address(address), bytes }
    }

    /// `bytes` bytes from `offset` on of an allocation of another process on the engine's GPU, by the handle that
    /// `cudaIpcGetMemHandle` or `cuIpcGetMemHandle` gives there. `offset` counts from the begin of the allocation,
    /// which an allocator that hands out parts of large ones knows. (PyTorch's `UntypedStorage._share_cuda_` gives a
    /// version, a kind and then the handle: bytes 2 to 65, if byte 1 is `c`. It keeps the memory until a consumer of
    /// PyTorch's lets it go, so share one bucket once rather than tensors at each update.) Memory of
    /// `cudaMallocAsync` and of expandable segments has no such handle.
    ///
    /// A handle is opened once in a push, however many tensors are in it, and closed before the push returns. The other
    /// process must keep the allocation and not write it until then. If it does write, the weights have the digest of
    /// what was stored, whichever bytes that were. A process can't open a handle of its own.
    pub fn ipc(handle: [u8; HANDLE_BYTES], offset: usize, bytes: usize) -> Self {
        Self { place: Place::Ipc { handle, offset }, bytes }
    }

    /// `bytes` bytes of it from `offset` on; `None` if it has fewer.
    pub fn slice(&self, offset: usize, bytes: usize) -> Option<Self> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return None;
        }
        let place = match self.place {
            Place::Address(address) => Place::Address(address.checked_add(offset as u64)?),
            Place::Ipc { handle, offset: before } => {
                Place::Ipc { handle, offset: before.checked_add(offset)? }
            }
        };
        Some(Self { place, bytes })
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("GpuMemory");
        match self.place {
            Place::Address(address) => shown.field("address", &format_args!("{address:#x}")),
            Place::Ipc { offset, .. } => shown.field("ipc_offset", &offset),
        };
        shown.field("bytes", &self.bytes).finish()
    }
}

/// Memory on a GPU that can't be read. Nothing of it is open any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuMemoryError {
    /// The engine runs on the CPU, or something other than an engine asks for the bytes.
    #[error("the bytes are on a GPU: only an engine on that GPU can read them")]
    NotOnGpu,
    /// The driver knows no GPU memory there.
    #[error("{address:#x} is not an address of GPU memory")]
    NotGpuMemory {
        /// The address.
        address: u64,
    },
    /// The memory is another GPU's.
    #[error("the bytes are on GPU {found}, the engine is on GPU {engine}")]
    OtherGpu {
        /// Where the memory is.
        found: u32,
        /// Where the engine is.
        engine: u32,
    },
    /// The memory ends earlier than it should.
    #[error("{bytes} bytes at {address:#x}: the memory there has {available_bytes}")]
    OutOfRange {
        /// The first address.
        address: u64,
        /// Bytes that should be there.
        bytes: usize,
        /// Bytes that are there.
        available_bytes: u64,
    },
    /// The driver doesn't take the IPC handle: it is none, its allocation is gone, or it is of this process.
    #[error("the IPC handle can't be opened: {source}")]
    Handle {
        /// What the driver says.
        source: CallError,
    },
    /// A call of the driver failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// What one user has opened of others' memory; closed when it is dropped.
#[derive(Debug)]
pub(super) struct Openings<'d> {
    device: &'d CudaDevice,
    /// Open handles and where they are mapped.
    imports: Vec<([u8; HANDLE_BYTES], CUdeviceptr)>,
    /// Ranges that are memory of this GPU: first address and end.
    known: Vec<(u64, u64)>,
}

impl<'d> Openings<'d> {
    pub(super) fn new(device: &'d CudaDevice) -> Self {
        Self { device, imports: Vec::new(), known: Vec::new() }
    }

    /// The address of memory that is there, whole and on this GPU.
    pub(super) fn open(&mut self, memory: &GpuMemory) -> Result<u64, GpuMemoryError> {
        let device = self.device;
        let _bound = device.context.bind()?;
        let address = match memory.place {
            Place::Address(address) => address,
            Place::Ipc { handle, offset } => {
                let begin = self.import(&handle)?;
                let available_bytes = self.range_around(begin)?.1 - begin;
                let end = offset.checked_add(memory.bytes);
                if end.is_none_or(|end| end as u64 > available_bytes) {
                    // The address of the importing side says nothing to who sent the handle.
                    let (address, bytes) = (offset as u64, memory.bytes);
                    let available_bytes = available_bytes.saturating_sub(address);
                    return Err(GpuMemoryError::OutOfRange { address, bytes, available_bytes });
                }
                begin + offset as u64
            }
        };
        self.check(address, memory.bytes)?;
        Ok(address)
    }

    fn import(&mut self, handle: &[u8; HANDLE_BYTES]) -> Result<CUdeviceptr, GpuMemoryError> {
        if let Some((_, begin)) = self.imports.iter().find(|(open, _)| open == handle) {
            return Ok(*begin);
        }
        self.device.close_imports();
        let mut begin = 0;
        let reserved = handle.map(|byte| c_char::from_ne_bytes([byte]));
        let opened = CUipcMemHandle { reserved };
        // SAFETY: `begin` is ours to write; the handle may hold any bytes, the driver checks it. It is closed when this
        // value is dropped.
        unsafe { self.device.context.driver.cuIpcOpenMemHandle_v2(&raw mut begin, opened, LAZY_PEER_ACCESS) }
            .map_err(|source| GpuMemoryError::Handle { source })?;
        self.imports.push((*handle, begin));
        Ok(begin)
    }

    /// Whether all bytes from `address` on are memory of this GPU. A range may be mapped in parts.
    fn check(&mut self, address: u64, bytes: usize) -> Result<(), GpuMemoryError> {
        let out_of_range = |available_bytes| GpuMemoryError::OutOfRange { address, bytes, available_bytes };
        let end = address.checked_add(bytes as u64).ok_or(out_of_range(u64::MAX - address))?;
        let mut next = address;
        while next < end {
            next = match self.range_around(next) {
                Ok((_, end)) => end,
                Err(GpuMemoryError::NotGpuMemory { .. }) if next > address => {
                    return Err(out_of_range(next - address));
                }
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }

    /// The range of this GPU's memory that an address is in.
    fn range_around(&mut self, address: u64) -> Result<(u64, u64), GpuMemoryError> {
        let around = |&&(begin, end): &&(u64, u64)| (begin..end).contains(&address);
        if let Some(range) = self.known.iter().rev().find(around) {
            return Ok(*range);
        }
        let device = self.device;
        let known = |error: CallError| match UNKNOWN_ADDRESS.contains(&error.code) {
            true => GpuMemoryError::NotGpuMemory { address },
            false => error.into(),
        };
        let get = |attribute| device.pointer_attribute(attribute, address).map_err(known);
        if get(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? != DEVICE_MEMORY {
            return Err(GpuMemoryError::NotGpuMemory { address });
        }
        let found = get(CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?;
        let engine = device.context.device().cast_unsigned();
        if found != u64::from(engine) {
            let found = u32::try_from(found).unwrap_or(u32::MAX);
            return Err(GpuMemoryError::OtherGpu { found, engine });
        }
        // An address may be reserved with nothing behind it, as an allocator that grows its segments does.
        if get(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPED)? == 0 {
            return Err(GpuMemoryError::NotGpuMemory { address });
        }
        let (mut begin, mut bytes) = (0, 0);
        // SAFETY: both are ours to write; the address may be any.
        unsafe { device.context.driver.cuMemGetAddressRange_v2(&raw mut begin, &raw mut bytes, address) }
            .map_err(known)?;
        let range = (begin, begin.saturating_add(bytes as u64));
        if !(range.0..range.1).contains(&address) {
            return Err(GpuMemoryError::NotGpuMemory { address });
        }
        self.known.push(range);
        Ok(range)
    }
}

impl Drop for Openings<'_> {
    fn drop(&mut self) {
        if self.imports.is_empty() {
            return;
        }
        // What was put on the stream may still read it, if a call failed in between.
        if let Err(error) = self.device.stream.synchronize() {
            tracing::error!(%error, "the GPU failed before another process' memory was closed");
        }
        self.device.unclosed.lock().extend(self.imports.drain(..).map(|(_, begin)| begin));
        self.device.close_imports();
    }
}

impl CudaDevice {
    /// A number that the driver has for an address. The context is bound.
    fn pointer_attribute(&self, attribute: CUpointer_attribute, address: u64) -> Result<u64, CallError> {
        let mut value = 0_u64;
        // SAFETY: no attribute that is asked for has more than eight bytes; the address may be any.
        unsafe { self.context.driver.cuPointerGetAttribute((&raw mut value).cast(), attribute, address) }?;
        // Of four bytes the driver writes the low ones: hosts of NVIDIA GPUs are little-endian.
        Ok(value)
    }

    /// Closes memory of other processes that nobody uses any more. What the driver doesn't take is tried again the next
    /// time.
    pub(super) fn close_imports(&self) {
        let mut unclosed = self.unclosed.lock();
        if unclosed.is_empty() {
            return;
        }
        let bound = self.context.bind_to_end();
        unclosed.retain(|&begin| {
            let closed = match &bound {
                // SAFETY: opened by `import`, closed once: it is forgotten if this succeeds. Its user has waited for
                // the stream.
                Ok(_) => unsafe { self.context.driver.cuIpcCloseMemHandle(begin) },
                Err(error) => Err(error.clone()),
            };
            if let Err(error) = &closed {
                tracing::error!(%error, "another process' memory is still open");
            }
            closed.is_err()
        });
    }
}
