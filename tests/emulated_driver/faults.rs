//! Failures that tests inject, contexts, and what is left over.

use std::ptr;
use std::thread;

use cudarc::driver::sys::CUresult;

use crate::emulated_cuda::{Emulated, ILLEGAL_ADDRESS, UNKNOWN};
use crate::session::{PAGE, Session, call};

#[test]
fn the_nth_call_fails_once_and_does_nothing() {
    let session = Session::new();
    let before = session.device.calls();
    session.device.fail_call(2, UNKNOWN);
    let first = session.create(PAGE).unwrap();
    assert_eq!(session.create(PAGE), Err(CUresult::CUDA_ERROR_UNKNOWN));
    assert!(!session.device.take_pending_failure());
    assert_eq!(session.device.used(), PAGE as u64);
    session.device.fail_call(1, UNKNOWN);
    assert_eq!(call!(cuMemRelease(first)), Err(CUresult::CUDA_ERROR_UNKNOWN));
    assert_eq!(session.device.live(), "1 physical handles, 1 contexts");
    call!(cuMemRelease(first)).unwrap();
    assert_eq!(
        session.device.call_names(before),
        ["cuMemCreate", "cuMemCreate", "cuMemRelease", "cuMemRelease"]
    );
    session.device.fail_named("cuMemAddressReserve", 2, UNKNOWN);
    let handle = session.create(PAGE).unwrap();
    let start = session.reserve(PAGE).unwrap();
    call!(cuMemRelease(handle)).unwrap();
    assert_eq!(session.reserve(PAGE), Err(CUresult::CUDA_ERROR_UNKNOWN));
    call!(cuMemAddressFree(start, PAGE)).unwrap();
    session.device.fail_call(10, UNKNOWN);
    assert!(session.device.take_pending_failure());
    session.end();
}

#[test]
fn a_lost_device_runs_nothing_more() {
    let session = Session::seeded(0);
    let (stream, memory) = (session.stream().unwrap(), session.alloc(16).unwrap());
    call!(cuMemsetD8Async(memory, 3, 16, stream)).unwrap();
    session.device.lose(2, ILLEGAL_ADDRESS);
    call!(cuMemsetD8Async(memory, 4, 16, stream)).unwrap();
    let lost = Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(call!(cuStreamSynchronize(stream)), lost);
    assert_eq!(call!(cuMemFree_v2(memory)), lost);
    assert_eq!(call!(cuStreamDestroy_v2(stream)), lost);
    assert_eq!(session.device.live(), "1 allocations, 1 streams, 1 contexts");
    assert_eq!((session.device.queued(), session.device.violations().len()), (0, 0));
    session.device.find_again();
    let mut out = [0u8; 16];
    session.read(&mut out, memory, stream).unwrap();
    assert_eq!(out, [0xA5; 16], "neither of the queued fills ran");
    call!(cuMemFree_v2(memory)).unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    session.end();
}

#[test]
fn contexts_belong_to_threads() {
    let session = Session::new();
    let (device, context) = (session.device, session.context as usize);
    thread::spawn(move || {
        let mut stream = ptr::null_mut();
        let create = call!(cuStreamCreate(&mut stream, 1));
        assert_eq!(create, Err(CUresult::CUDA_ERROR_INVALID_CONTEXT), "none is current in this thread");
        call!(cuCtxSetCurrent(context as _)).unwrap();
        call!(cuStreamCreate(&mut stream, 1)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
    })
    .join()
    .unwrap();
    let mut again = ptr::null_mut();
    call!(cuDevicePrimaryCtxRetain(&mut again, device.ordinal)).unwrap();
    assert_eq!(again, session.context);
    call!(cuDevicePrimaryCtxRelease_v2(device.ordinal)).unwrap();
    session.stream().expect("still retained once");
    call!(cuDevicePrimaryCtxRelease_v2(device.ordinal)).unwrap();
    assert_eq!(session.stream(), Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED));
    assert_eq!(call!(cuCtxSetCurrent(session.context)), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    assert_eq!(
        call!(cuDevicePrimaryCtxRelease_v2(device.ordinal)),
        Err(CUresult::CUDA_ERROR_INVALID_CONTEXT)
    );
    assert_eq!(device.live(), "1 streams");
}

#[test]
fn devices_say_what_they_are() {
    let device = Emulated::load().device();
    call!(cuInit(0)).unwrap();
    let mut name = [0; 64];
    call!(cuDeviceGetName(name.as_mut_ptr(), 64, device.ordinal)).unwrap();
    let name: String = name.iter().map(|&byte| byte as u8 as char).take_while(|&c| c != '\0').collect();
    assert_eq!(name, format!("Emulated CUDA device {} (CPU)", device.ordinal));
    let mut major = 0;
    let attribute = cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    call!(cuDeviceGetAttribute(&mut major, attribute, device.ordinal)).unwrap();
    assert_eq!(major, 9);
    assert_eq!(device.call_names(0), ["cuDeviceGetName", "cuDeviceGetAttribute"]);
    let mut text = ptr::null();
    call!(cuGetErrorName(CUresult::CUDA_ERROR_OUT_OF_MEMORY, &mut text)).unwrap();
    // SAFETY: a string of the driver.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(text) }, c"CUDA_ERROR_OUT_OF_MEMORY");
}
