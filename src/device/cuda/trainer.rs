//! What a trainer has on the GPU, for tests: memory by `cuMemAlloc`, in a context of its own right.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ptr::null_mut;

use cudarc::driver::sys;

use super::GpuMemory;

/// Calls a function of the driver, which must succeed.
macro_rules! call {
    ($function:ident($($argument:expr),*)) => {{
        // SAFETY: a test's own memory, streams and contexts; the emulated driver checks all numbers.
        let result = unsafe { sys::$function($($argument),*) };
        assert_eq!(result, sys::CUresult::CUDA_SUCCESS, stringify!($function));
    }};
}

/// Memory of a trainer, freed when it is dropped.
#[derive(Debug)]
pub(crate) struct TrainerMemory {
    ordinal: i32,
    stream: sys::CUstream,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    owned: bool,
}

impl TrainerMemory {
    /// Memory of a GPU that holds these bytes.
    pub(crate) fn new(ordinal: i32, contents: &[u8]) -> Self {
        let mut memory = Self::borrowed(ordinal, 0, contents.len());
        call!(cuMemAlloc_v2(&raw mut memory.address, contents.len().max(1)));
        memory.owned = true;
        memory.write(contents);
        memory
    }

    /// Memory of somebody else, to spoil it.
    pub(crate) fn borrowed(ordinal: i32, address: u64, bytes: usize) -> Self {
        let (mut context, mut stream) = (null_mut(), null_mut());
        call!(cuInit(0));
        call!(cuDevicePrimaryCtxRetain(&raw mut context, ordinal));
        call!(cuCtxSetCurrent(context));
        call!(cuStreamCreate(&raw mut stream, 1));
        Self { ordinal, stream, address, bytes, owned: false }
    }

    /// All of it, as this process sees it.
    pub(crate) fn memory(&self) -> GpuMemory {
        self.claim(0, self.bytes)
    }

    /// What is said to be there.
    pub(crate) fn claim(&self, offset: u64, bytes: usize) -> GpuMemory {
        // SAFETY: tests that claim more than there is want to see it refused.
        unsafe { GpuMemory::at(self.address.wrapping_add(offset), bytes) }
    }

    /// The handle by which another process opens it.
    pub(crate) fn handle(&self) -> [u8; 64] {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        call!(cuIpcGetMemHandle(&raw mut handle, self.address));
        handle.reserved.map(|byte| byte.to_ne_bytes()[0])
    }

    pub(crate) fn write(&self, contents: &[u8]) {
        assert!(contents.len() <= self.bytes);
        call!(cuMemcpyHtoDAsync_v2(self.address, contents.as_ptr().cast(), contents.len(), self.stream));
        call!(cuStreamSynchronize(self.stream));
    }
}

impl Drop for TrainerMemory {
    fn drop(&mut self) {
        let mut context = null_mut();
        call!(cuDevicePrimaryCtxRetain(&raw mut context, self.ordinal));
        call!(cuCtxSetCurrent(context));
        if self.owned {
            call!(cuMemFree_v2(self.address));
        }
        call!(cuStreamDestroy_v2(self.stream));
        call!(cuCtxSetCurrent(null_mut()));
        call!(cuDevicePrimaryCtxRelease_v2(self.ordinal));
        call!(cuDevicePrimaryCtxRelease_v2(self.ordinal));
    }
}
