//! The CUDA device, its driver and its kernels on the CPU: against the CPU device, and bit for bit against itself.

mod attention;
mod matmul;
mod memory;
mod open;
mod packed;
mod rows;
mod sampling;
mod tiers;

use super::emulated::{Emulated, EmulatedDevice};
use super::{CudaDevice, CudaOptions};
use crate::device::cpu::tests::rig;
use crate::device::cpu::{CpuDevice, SimdPath};
use crate::weights::DType;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// What a test of operations runs on.
#[derive(Clone, Copy)]
enum Gpu {
    Emulated(EmulatedDevice),
    /// The one that `DORMOUSE_TEST_GPU` names; see `tests/device_check`.
    Real,
}

impl Gpu {
    #[track_caller]
    fn assert_clean(self) {
        match self {
            Self::Emulated(emulated) => emulated.assert_clean(),
            Self::Real => {}
        }
    }
}

/// An emulated GPU of the test's own, with small pages, memory full of NaNs and a mix of orders in which work runs; or
/// the real one.
fn gpu() -> (Gpu, CudaDevice) {
    if let Ok(ordinal) = std::env::var("DORMOUSE_TEST_GPU") {
        let ordinal = ordinal.parse().expect("the number of a GPU");
        let options = CudaOptions { ordinal, memory_limit_bytes: None, keep_parking_memory: true };
        return (Gpu::Real, CudaDevice::open(options, cpu()).unwrap());
    }
    let (emulated, device) = emulated_gpu();
    (Gpu::Emulated(emulated), device)
}

/// An emulated GPU, for tests that ask it things.
fn emulated_gpu() -> (EmulatedDevice, CudaDevice) {
    let emulated = new_emulated();
    (emulated, open(emulated, None))
}

fn new_emulated() -> EmulatedDevice {
    Emulated::load().adverse_device()
}

fn options(emulated: EmulatedDevice) -> CudaOptions {
    let ordinal = emulated.ordinal.unsigned_abs();
    CudaOptions { ordinal, memory_limit_bytes: None, keep_parking_memory: true }
}

fn open(emulated: EmulatedDevice, memory_limit_bytes: Option<u64>) -> CudaDevice {
    CudaDevice::open(CudaOptions { memory_limit_bytes, ..options(emulated) }, cpu()).unwrap()
}

fn cpu() -> CpuDevice {
    rig::device(1, SimdPath::Auto)
}
