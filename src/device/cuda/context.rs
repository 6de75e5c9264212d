//! A GPU, and the right to call the driver about it.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{CStr, c_int};
use std::ptr::null_mut;

use super::driver::{
    CUcontext, CUdevice, CUdevice_attribute as Attribute, CUmemAllocationGranularity_flags, Driver, NEEDED,
};
use super::error::{CallError, CudaError, CudaVersion};
use super::memory::properties;

/// `CUDA_ERROR_STUB_LIBRARY`.
const STUB_LIBRARY: i32 = 34;
/// The compute capability that the kernels need: Ampere's.
const NEEDED_CAPABILITY: (i32, i32) = (8, 0);

/// The primary context of a GPU, which other users of the GPU in this process share.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) driver: Driver,
    device: CUdevice,
    context: CUcontext,
    /// As the driver names the GPU.
    pub(super) name: String,
    /// Streaming multiprocessors.
    pub(super) multiprocessors: u32,
    /// Physical memory comes in multiples of so many bytes.
    pub(super) granularity: usize,
}

// SAFETY: a context may be made current on any thread, and the driver may be called from any.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Finds the driver and GPU `ordinal`, and checks that both can do what is needed.
    pub(super) fn open(ordinal: u32) -> Result<Self, CudaError> {
        let driver = Driver::load()?;
        // SAFETY: the one flag that there is.
        unsafe { driver.cuInit(0) }.map_err(|error| match error.code {
            STUB_LIBRARY => CudaError::Stub,
            _ => error.into(),
        })?;
        let mut version = 0;
        // SAFETY: `version` is ours to write; so are the other locals below.
        unsafe { driver.cuDriverGetVersion(&raw mut version) }?;
        let found = CudaVersion::from_driver(version);
        if found < NEEDED {
            return Err(CudaError::DriverTooOld { found, needed: NEEDED });
        }
        let mut count = 0;
        // SAFETY: as above.
        unsafe { driver.cuDeviceGetCount(&raw mut count) }?;
        let devices = count.max(0).cast_unsigned();
        if ordinal >= devices {
            return Err(CudaError::NoDevice { ordinal, devices });
        }
        let mut device = 0;
        // SAFETY: as above.
        unsafe { driver.cuDeviceGet(&raw mut device, ordinal.cast_signed()) }?;
        let name = device_name(&driver, device)?;
        let get = |what| attribute(&driver, what, device);
        let capability = (
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let virtual_memory = get(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0;
        let unified = get(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)? != 0;
        let lacks = if capability < NEEDED_CAPABILITY {
            let ((have, minor), (need, _)) = (capability, NEEDED_CAPABILITY);
            Some(format!("has compute capability {have}.{minor}, {need}.0 (Ampere) is needed"))
        } else if !virtual_memory {
            Some("has no virtual memory management, which sleep and wake are made of".to_owned())
        } else if !unified {
            Some("does not share addresses with the host".to_owned())
        } else {
            None
        };
        if let Some(lacks) = lacks {
            return Err(CudaError::Unsupported { ordinal, name, lacks });
        }
        let multiprocessors =
            get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1).cast_unsigned();
        let mut context = null_mut();
        // SAFETY: as above; `Drop` releases what is retained here.
        unsafe { driver.cuDevicePrimaryCtxRetain(&raw mut context, device) }?;
        let mut this = Self { driver, device, context, name, multiprocessors, granularity: 0 };
        this.granularity = this.find_granularity()?;
        Ok(this)
    }

    fn find_granularity(&self) -> Result<usize, CallError> {
        let _bound = self.bind()?;
        let (mut bytes, wanted) = (0, properties(self.device));
        let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: both are ours, and outlive the call.
        unsafe { self.driver.cuMemGetAllocationGranularity(&raw mut bytes, &raw const wanted, option) }?;
        Ok(bytes.max(1))
    }

    /// Memory is made, and host memory registered, in pieces of at most so many bytes: a fragmented GPU has no larger
    /// ones, the copy into one overlaps with the mapping of the next, and a long call would keep other threads from
    /// mapping memory. With the small pages of an emulated GPU, tests have many pieces.
    pub(super) fn piece_bytes(&self) -> usize {
        if self.granularity < 2 << 20 { 64 << 10 } else { 256 << 20 }
    }

    pub(super) fn device(&self) -> CUdevice {
        self.device
    }

    /// Makes the context the calling thread's; the thread's own comes back when the result is dropped.
    pub(super) fn bind(&self) -> Result<Bound<'_>, CallError> {
        let mut before = null_mut();
        // SAFETY: `before` is ours to write; the context lives as long as `self`.
        unsafe { self.driver.cuCtxGetCurrent(&raw mut before) }?;
        if before != self.context {
            // SAFETY: the context is retained.
            unsafe { self.driver.cuCtxSetCurrent(self.context) }?;
        }
        Ok(Bound { context: self, before })
    }

    /// [`Context::bind`] for what ends something, which has no second occasion.
    pub(super) fn bind_to_end(&self) -> Result<Bound<'_>, CallError> {
        self.bind().or_else(|_| self.bind())
    }

    /// Free and total bytes of the GPU's memory, as the driver counts them for all processes.
    pub(super) fn memory(&self) -> Result<(u64, u64), CallError> {
        let _bound = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are ours to write.
        unsafe { self.driver.cuMemGetInfo_v2(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once by `open`; nothing made in it outlives `self`, which its makers hold.
        if let Err(error) = unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(self.device) } {
            tracing::warn!(%error, "a context was not released");
        }
    }
}

/// The thread works on a GPU.
#[derive(Debug)]
pub(super) struct Bound<'a> {
    context: &'a Context,
    before: CUcontext,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if self.before != self.context.context {
            // SAFETY: it was current before; whoever made it so keeps it.
            if let Err(error) = unsafe { self.context.driver.cuCtxSetCurrent(self.before) } {
                tracing::warn!(%error, "a thread's context was not put back");
            }
        }
    }
}

fn device_name(driver: &Driver, device: CUdevice) -> Result<String, CallError> {
    let mut name = [0; 256];
    // SAFETY: the driver writes at most so many bytes, the last of them zero.
    unsafe { driver.cuDeviceGetName(name.as_mut_ptr(), 255, device) }?;
    // SAFETY: the last byte was not written, so there is a zero.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

fn attribute(driver: &Driver, attribute: Attribute, device: CUdevice) -> Result<c_int, CallError> {
    let mut value = 0;
    // SAFETY: `value` is ours to write.
    unsafe { driver.cuDeviceGetAttribute(&raw mut value, attribute, device) }?;
    Ok(value)
}
