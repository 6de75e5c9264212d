//! The driver's functions, found once and called in one place.
//!
//! The types and the library come from cudarc. Its functions look a symbol up at the first call and panic if
//! it is missing, and return an enum that a newer driver may not keep to; here all symbols are looked up
//! beforehand, and a result is a number.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;

use cudarc::driver::sys;

use super::error::{CallError, CudaError, CudaVersion};

pub(super) use sys::{
    CUDA_KERNEL_NODE_PARAMS, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUgraph, CUgraphExec, CUgraphNode, CUipcMemHandle, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUmodule, CUpointer_attribute, CUstream,
};

/// What the kernels were built with, and the functions are from at the latest.
pub(super) const NEEDED: CudaVersion = CudaVersion { major: 13, minor: 0 };

/// Declares the table of functions, each with a method of the same name that checks the result.
macro_rules! driver_functions {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        #[allow(non_snake_case, reason = "the driver's names")]
        pub(super) struct Driver {
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        #[allow(non_snake_case, reason = "the driver's names")]
        #[allow(dead_code, reason = "names of errors are not asked for by way of an error")]
        #[allow(clippy::too_many_arguments, reason = "the driver's")]
        impl Driver {
            /// Loads the driver and finds every function.
            pub(super) fn load() -> Result<Self, CudaError> {
                // SAFETY: loading a library runs its initialisers; the CUDA driver's are made for that.
                if !unsafe { sys::is_culib_present() } {
                    let names = ["cuda", "nvcuda"];
                    let looked_for = names.iter().flat_map(|name| cudarc::get_lib_name_candidates(name));
                    return Err(CudaError::NoDriver { looked_for: looked_for.collect() });
                }
                // SAFETY: the library is present, and is never unloaded.
                let library = unsafe { sys::culib() };
                Ok(Self {$(
                    $name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the type is the function's of that name in CUDA 13.0's cuda.h.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> c_int>(name) };
                        *symbol.map_err(|_| CudaError::MissingFunction {
                            function: stringify!($name),
                            needed: NEEDED,
                        })?
                    },
                )*})
            }

            $(
                /// # Safety
                /// As the CUDA driver API says of this function.
                pub(super) unsafe fn $name(&self $(, $arg: $type)*) -> Result<(), CallError> {
                    // SAFETY: the caller's promise.
                    let code = unsafe { (self.$name)($($arg),*) };
                    self.check(stringify!($name), code)
                }
            )*
        }
    };
}

driver_functions! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuGetErrorName(code: c_int, name: *mut *const c_char);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxSetCurrent(context: CUcontext);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuGraphCreate(graph: *mut CUgraph, flags: c_uint);
    cuGraphAddKernelNode_v2(
        node: *mut CUgraphNode,
        graph: CUgraph,
        after: *const CUgraphNode,
        count: usize,
        parameters: *const CUDA_KERNEL_NODE_PARAMS
    );
    cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    cuGraphLaunch(executable: CUgraphExec, stream: CUstream);
    cuGraphDestroy(graph: CUgraph);
    cuGraphExecDestroy(executable: CUgraphExec);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventSynchronize(event: CUevent);
    cuMemGetAllocationGranularity(
        bytes: *mut usize,
        properties: *const CUmemAllocationProp,
        option: CUmemAllocationGranularity_flags
    );
    cuMemAddressReserve(
        address: *mut CUdeviceptr,
        bytes: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: c_ulonglong
    );
    cuMemAddressFree(address: CUdeviceptr, bytes: usize);
    cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: c_ulonglong
    );
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong
    );
    cuMemUnmap(address: CUdeviceptr, bytes: usize);
    cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(address: *mut c_void);
    cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(address: *mut c_void);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemsetD8Async(address: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
    cuMemGetAddressRange_v2(begin: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr);
    cuPointerGetAttribute(value: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr);
    cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
    cuIpcCloseMemHandle(address: CUdeviceptr);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuModuleUnload(module: CUmodule);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    );
}

impl Driver {
    /// The name of a code, as the driver has it.
    fn name_of(&self, code: c_int) -> String {
        let mut name = std::ptr::null();
        // SAFETY: `name` is ours to write.
        let known = unsafe { (self.cuGetErrorName)(code, &raw mut name) } == 0 && !name.is_null();
        if !known {
            return "an unknown error".to_owned();
        }
        // SAFETY: the driver gave a string of its own, which stays.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CallError> {
        match code {
            0 => Ok(()),
            _ => Err(CallError { call, code, name: self.name_of(code) }),
        }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}
