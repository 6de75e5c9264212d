//! A device of one's own with a context, and the calls of the driver as functions that say what they do.
//!
//! All calls take plain numbers; the emulated driver checks them, so a wrong one is an error, not a crash.

use std::ffi::{CString, c_void};
use std::ptr;

use cudarc::driver::sys::{self, CUcontext, CUevent, CUfunction, CUmodule, CUresult, CUstream};

use crate::emulated_cuda::{Emulated, EmulatedDevice};

pub type Outcome<T = ()> = Result<T, CUresult>;

/// The start of a fat binary, all that the emulated driver looks at.
pub static IMAGE: [u32; 4] = [0xBA55_ED50, 0, 0, 0];
pub const PAGE: usize = 4096;

/// Calls a function of the driver.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::session::outcome(unsafe { cudarc::driver::sys::$function($($argument),*) })
    };
}
pub(crate) use call;

pub fn outcome(result: CUresult) -> Outcome {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(result) }
}

/// A device with 4 KiB granularity whose context is current in this thread.
pub struct Session {
    pub device: EmulatedDevice,
    pub context: CUcontext,
}

impl Session {
    pub fn new() -> Self {
        Self::on(Emulated::load().device())
    }

    pub fn on(device: EmulatedDevice) -> Self {
        device.set_granularity(PAGE as u64);
        call!(cuInit(0)).expect("the driver");
        let mut context = ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut context, device.ordinal)).expect("a context");
        call!(cuCtxSetCurrent(context)).expect("a context of the device");
        Self { device, context }
    }

    /// Like `new`, with a seed for the order of work.
    pub fn seeded(seed: u64) -> Self {
        let session = Self::new();
        session.device.set_seed(seed);
        session
    }

    /// Releases the context and asserts that nothing is left.
    #[track_caller]
    pub fn end(self) {
        call!(cuDevicePrimaryCtxRelease_v2(self.device.ordinal)).expect("a context to release");
        self.device.assert_clean();
    }

    pub fn properties(&self) -> sys::CUmemAllocationProp {
        // All zeros is a value of each field.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = self.location();
        properties
    }

    fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.device.ordinal,
        }
    }

    pub fn reserve(&self, size: usize) -> Outcome<u64> {
        let mut start = 0;
        call!(cuMemAddressReserve(&mut start, size, 0, 0, 0))?;
        Ok(start)
    }

    pub fn create(&self, size: usize) -> Outcome<u64> {
        let mut handle = 0;
        call!(cuMemCreate(&mut handle, size, &self.properties(), 0))?;
        Ok(handle)
    }

    pub fn grant(&self, start: u64, size: usize) -> Outcome {
        let access = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let description = sys::CUmemAccessDesc { location: self.location(), flags: access };
        call!(cuMemSetAccess(start, size, &description, 1))
    }

    pub fn alloc(&self, size: usize) -> Outcome<u64> {
        let mut start = 0;
        call!(cuMemAlloc_v2(&mut start, size))?;
        Ok(start)
    }

    pub fn info(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&mut free, &mut total)).expect("a context");
        (free, total)
    }

    pub fn stream(&self) -> Outcome<CUstream> {
        let mut stream = ptr::null_mut();
        call!(cuStreamCreate(&mut stream, 1))?;
        Ok(stream)
    }

    pub fn event(&self) -> Outcome<CUevent> {
        let mut event = ptr::null_mut();
        call!(cuEventCreate(&mut event, 0))?;
        Ok(event)
    }

    pub fn module(&self) -> Outcome<CUmodule> {
        let mut module = ptr::null_mut();
        call!(cuModuleLoadData(&mut module, IMAGE.as_ptr().cast()))?;
        Ok(module)
    }

    pub fn function(&self, module: CUmodule, name: &str) -> Outcome<CUfunction> {
        let name = CString::new(name).expect("a name without zeros");
        let mut function = ptr::null_mut();
        call!(cuModuleGetFunction(&mut function, module, name.as_ptr()))?;
        Ok(function)
    }

    /// Queues a copy from host memory.
    pub fn write<T: Copy>(&self, to: u64, from: &[T], stream: CUstream) -> Outcome {
        call!(cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), size_of_val(from), stream))
    }

    /// Queues a copy to host memory.
    pub fn read<T: Copy>(&self, to: &mut [T], from: u64, stream: CUstream) -> Outcome {
        call!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, size_of_val(to), stream))
    }
}

/// Registers host memory.
pub fn register<T>(memory: &mut [T]) -> Outcome {
    call!(cuMemHostRegister_v2(memory.as_mut_ptr().cast(), size_of_val(memory), 0))
}

pub fn unregister<T>(memory: &mut [T]) -> Outcome {
    call!(cuMemHostUnregister(memory.as_mut_ptr().cast()))
}

/// `y = a * x + y` on the device.
pub struct Saxpy {
    module: CUmodule,
    function: CUfunction,
}

impl Saxpy {
    pub fn new(session: &Session) -> Self {
        let module = session.module().expect("a module");
        Self { module, function: session.function(module, "probe_saxpy").expect("a kernel of probe.cu") }
    }

    pub fn launch(&self, a: f32, x: u64, y: u64, count: u32, stream: CUstream) -> Outcome {
        let mut parameters = [
            ptr::from_ref(&a).cast_mut().cast::<c_void>(),
            ptr::from_ref(&x).cast_mut().cast(),
            ptr::from_ref(&y).cast_mut().cast(),
            ptr::from_ref(&count).cast_mut().cast(),
        ];
        let grid = count.div_ceil(64);
        let parameters = parameters.as_mut_ptr();
        call!(cuLaunchKernel(self.function, grid, 1, 1, 64, 1, 1, 0, stream, parameters, ptr::null_mut()))
    }

    pub fn unload(self) -> Outcome {
        call!(cuModuleUnload(self.module))
    }
}

/// Runs a test of this program in a process of its own, with an order in its environment.
pub fn run_child(test: &str, order: &str) -> std::process::Output {
    std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, order)
        .output()
        .expect("a child process")
}

/// What the parent ordered, in a child.
pub fn child_order() -> Option<String> {
    std::env::var(CHILD).ok()
}

const CHILD: &str = "EMULATED_DRIVER_CHILD";
