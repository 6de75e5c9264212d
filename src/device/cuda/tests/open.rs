//! GPUs that can't be used, and opening that fails half-way.

use super::{CudaDevice, CudaOptions, cpu, new_emulated, options};
use crate::device::cuda::CudaError;
use crate::device::cuda::emulated::{Emulated, OUT_OF_MEMORY, UNKNOWN};

#[test]
fn a_gpu_that_is_not_there_is_named() {
    Emulated::load();
    let options = CudaOptions { ordinal: 5000, memory_limit_bytes: None, keep_parking_memory: true };
    let error = CudaDevice::open(options, cpu()).unwrap_err();
    assert!(matches!(error, CudaError::NoDevice { ordinal: 5000, .. }), "{error}");
    assert!(error.to_string().starts_with("there is no GPU 5000: the driver sees "), "{error}");
}

/// The n-th call fails, with each n until opening succeeds: nothing is left but what the failed call should have ended.
#[test]
fn c13_every_call_of_opening_fails_once_and_nothing_is_left() {
    let emulated = new_emulated();
    for code in [OUT_OF_MEMORY, UNKNOWN] {
        let mut failures = 0;
        for n in 1..1000 {
            let before = emulated.calls();
            emulated.fail_call(n, code);
            let opened = CudaDevice::open(options(emulated), cpu());
            let over = emulated.take_pending_failure();
            let name = emulated.call_names(before).get(n as usize - 1).copied();
            let failed = opened.as_ref().is_err_and(|error| {
                let of_call = matches!(error, CudaError::Call(call) if call.code == code);
                assert!(of_call || matches!(error, CudaError::Memory(_)), "{error}");
                true
            });
            failures += u64::from(failed);
            drop(opened);
            assert_eq!((emulated.live(), emulated.used()), (String::new(), 0), "call {n}, {name:?}");
            if over {
                break;
            }
        }
        assert!(failures > 20, "{failures} calls that can fail");
    }
    emulated.assert_clean();
}
