//! Work runs late, in an order that only streams and events restrict.

use std::ptr;

use cudarc::driver::sys::{CUresult, CUstream};

use crate::session::{PAGE, Saxpy, Session, call, child_order, register, run_child, unregister};

const COUNT: usize = 100;
const BYTES: usize = COUNT * 4;

#[test]
fn a_result_is_there_when_somebody_waited() {
    for seed in 0..20 {
        let session = Session::seeded(seed);
        let (saxpy, stream) = (Saxpy::new(&session), session.stream().unwrap());
        let (x, y) = (session.alloc(BYTES).unwrap(), session.alloc(BYTES).unwrap());
        let mut out = vec![0f32; COUNT];
        session.write(x, &[2f32; COUNT], stream).unwrap();
        session.write(y, &[1f32; COUNT], stream).unwrap();
        saxpy.launch(3.0, x, y, COUNT as u32, stream).unwrap();
        register(&mut out).unwrap();
        session.read(&mut out, y, stream).unwrap();
        if seed == 0 {
            assert_eq!((out[0], session.device.queued()), (0.0, 4), "nothing ran yet");
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        assert!(out.iter().all(|&value| value == 7.0));
        unregister(&mut out).unwrap();
        saxpy.unload().unwrap();
        call!(cuMemFree_v2(x)).unwrap();
        call!(cuMemFree_v2(y)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
        session.end();
    }
}

/// Writes on one stream, reads on another; what was read.
fn read_on_another_stream(seed: u64, with_event: bool, wait_for: fn(CUstream, CUstream)) -> f32 {
    let session = Session::seeded(seed);
    let (saxpy, event) = (Saxpy::new(&session), session.event().unwrap());
    let (writer, reader) = (session.stream().unwrap(), session.stream().unwrap());
    let (x, y) = (session.alloc(4).unwrap(), session.alloc(4).unwrap());
    session.write(x, &[5f32], writer).unwrap();
    session.write(y, &[0f32], writer).unwrap();
    saxpy.launch(1.0, x, y, 1, writer).unwrap();
    if with_event {
        call!(cuEventRecord(event, writer)).unwrap();
        call!(cuStreamWaitEvent(reader, event, 0)).unwrap();
    }
    let mut out = [0f32];
    register(&mut out).unwrap();
    session.read(&mut out, y, reader).unwrap();
    wait_for(writer, reader);
    call!(cuCtxSynchronize()).unwrap();
    unregister(&mut out).unwrap();
    saxpy.unload().unwrap();
    call!(cuEventDestroy_v2(event)).unwrap();
    for stream in [writer, reader] {
        call!(cuStreamDestroy_v2(stream)).unwrap();
    }
    for memory in [x, y] {
        call!(cuMemFree_v2(memory)).unwrap();
    }
    session.end();
    out[0]
}

#[test]
fn a_missing_wait_shows() {
    let reader_only = |_, reader| call!(cuStreamSynchronize(reader)).unwrap();
    assert_ne!(read_on_another_stream(0, false, reader_only), 5.0, "the laziest order runs the reader alone");
    let wrong = (1..40).filter(|&seed| read_on_another_stream(seed, false, reader_only) != 5.0).count();
    assert!((5..39).contains(&wrong), "{wrong} of 39 orders show it");
    for seed in 0..40 {
        assert_eq!(read_on_another_stream(seed, true, reader_only), 5.0);
        let writer_first = |writer, _| call!(cuStreamSynchronize(writer)).unwrap();
        assert_eq!(read_on_another_stream(seed, true, writer_first), 5.0);
    }
}

/// Whether a buffer that is written again right after its copy was queued is copied as it was.
fn reused_buffer_is_seen(seed: u64, pinned: bool) -> bool {
    let session = Session::seeded(seed);
    let (stream, memory) = (session.stream().unwrap(), session.alloc(4).unwrap());
    let mut buffer = [1u32];
    if pinned {
        register(&mut buffer).unwrap();
    }
    session.write(memory, &buffer, stream).unwrap();
    // Through the pointer, since the driver may still read it.
    let first = ptr::from_mut(&mut buffer[0]);
    // SAFETY: a pointer to a local.
    unsafe { first.write_volatile(2) };
    let mut out = [0u32];
    session.read(&mut out, memory, stream).unwrap();
    if pinned {
        unregister(&mut buffer).unwrap();
    }
    call!(cuMemFree_v2(memory)).unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    session.end();
    out[0] == 1
}

#[test]
fn pinned_memory_is_read_late_and_pageable_memory_at_once() {
    assert!(!reused_buffer_is_seen(0, true));
    let early = (1..60).filter(|&seed| reused_buffer_is_seen(seed, true)).count();
    assert!((1..30).contains(&early), "{early} of 59 copies were quick");
    assert!((0..20).all(|seed| reused_buffer_is_seen(seed, false)));
}

#[test]
fn events_tell_when_work_is_done() {
    for seed in 0..10 {
        let session = Session::seeded(seed);
        let (start, end) = (session.event().unwrap(), session.event().unwrap());
        let (stream, memory) = (session.stream().unwrap(), session.alloc(BYTES).unwrap());
        call!(cuEventQuery(end)).expect("never recorded: nothing to wait for");
        call!(cuEventRecord(start, stream)).unwrap();
        call!(cuMemsetD8Async(memory, 3, BYTES, stream)).unwrap();
        call!(cuEventRecord(end, stream)).unwrap();
        let mut polls = 0;
        while let Err(error) = call!(cuEventQuery(end)) {
            assert_eq!(error, CUresult::CUDA_ERROR_NOT_READY);
            polls += 1;
        }
        assert!(polls < 100);
        let mut milliseconds = -1.0;
        call!(cuEventElapsedTime_v2(&mut milliseconds, start, end)).unwrap();
        assert!(milliseconds >= 0.0);
        for event in [start, end] {
            call!(cuEventSynchronize(event)).unwrap();
            call!(cuEventDestroy_v2(event)).unwrap();
        }
        call!(cuMemFree_v2(memory)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
        session.end();
    }
}

#[test]
fn memory_must_not_go_while_work_may_use_it() {
    let session = Session::seeded(0);
    let (saxpy, stream) = (Saxpy::new(&session), session.stream().unwrap());
    let (x, y) = (session.alloc(BYTES).unwrap(), session.alloc(BYTES).unwrap());
    let other = session.alloc(BYTES).unwrap();
    saxpy.launch(1.0, x, y, COUNT as u32, stream).unwrap();
    call!(cuMemFree_v2(other)).unwrap();
    assert!(session.device.violations().is_empty());
    call!(cuMemFree_v2(x)).unwrap();
    let kernel = format!("kernel probe_saxpy on device {}", session.device.ordinal);
    assert_eq!(session.device.violations(), [format!("cuMemFree while {kernel} is queued that may use it")]);

    session.read(&mut [0u8; 4], y, stream).expect("the work ran before the memory went");
    call!(cuMemsetD8Async(y, 3, BYTES, stream)).unwrap();
    call!(cuMemFree_v2(y)).unwrap();
    assert_eq!(session.device.violations().len(), 2);
}

#[test]
fn kernels_go_on_into_the_mappings_that_follow() {
    let session = Session::seeded(0);
    let page = PAGE;
    let (saxpy, stream) = (Saxpy::new(&session), session.stream().unwrap());
    let (start, other) = (session.reserve(4 * page).unwrap(), session.alloc(BYTES).unwrap());
    let handles = [0, 1, 3].map(|at| {
        let handle = session.create(page).unwrap();
        call!(cuMemMap(start + (at * page) as u64, page, 0, handle, 0)).unwrap();
        session.grant(start + (at * page) as u64, page).unwrap();
        handle
    });
    saxpy.launch(1.0, other, start, COUNT as u32, stream).unwrap();
    call!(cuMemUnmap(start + 3 * page as u64, page)).unwrap();
    assert!(session.device.violations().is_empty(), "there is a hole between");
    call!(cuMemUnmap(start + page as u64, page)).unwrap();
    assert_eq!(session.device.violations().len(), 1);
    for handle in handles {
        call!(cuMemRelease(handle)).unwrap();
    }
}

#[test]
fn launches_are_checked() {
    let session = Session::new();
    let (module, stream) = (session.module().unwrap(), session.stream().unwrap());
    let x = session.alloc(4096).unwrap();
    let sum = session.function(module, "probe_block_sum").unwrap();
    assert_eq!(session.function(module, "nothing"), Err(CUresult::CUDA_ERROR_NOT_FOUND));
    let mut parameters = [ptr::from_ref(&x).cast_mut().cast(), ptr::from_ref(&x).cast_mut().cast()];
    let mut launch = |grid: [u32; 3], block: u32, shared| {
        let ([x, y, z], parameters) = (grid, parameters.as_mut_ptr());
        call!(cuLaunchKernel(sum, x, y, z, block, 1, 1, shared, stream, parameters, ptr::null_mut()))
    };
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch([1, 1, 1], 1025, 0), invalid);
    assert_eq!(launch([1, 65536, 1], 32, 0), invalid);
    assert_eq!(launch([1, 0, 1], 32, 0), invalid);
    assert_eq!(launch([1, 1, 1], 32, (48 << 10) + 4), invalid);
    let attribute =
        cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    assert_eq!(call!(cuFuncSetAttribute(sum, attribute, (227 << 10) + 1)), invalid);
    call!(cuFuncSetAttribute(sum, attribute, 100 << 10)).unwrap();
    launch([1, 1, 1], 32, 100 << 10).unwrap();
    assert_eq!(launch([1, 1, 1], 32, (100 << 10) + 4), invalid);
    assert_eq!(call!(cuStreamSynchronize(ptr::null_mut())), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    call!(cuStreamSynchronize(stream)).unwrap();
    let mut wrong = ptr::null_mut();
    let image = [0u32; 4];
    let load = call!(cuModuleLoadData(&mut wrong, image.as_ptr().cast()));
    assert_eq!(load, Err(CUresult::CUDA_ERROR_INVALID_IMAGE));
    call!(cuModuleUnload(module)).unwrap();
    call!(cuMemFree_v2(x)).unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    session.end();
}

/// Each thread has a stream of its own on one device.
#[test]
fn threads_share_a_device() {
    let session = Session::seeded(7);
    let (saxpy, context) = (Saxpy::new(&session), session.context as usize);
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let (session, saxpy) = (AnyThread(&session), AnyThread(&saxpy));
            scope.spawn(move || {
                let (session, saxpy) = (session.get(), saxpy.get());
                call!(cuCtxSetCurrent(context as _)).unwrap();
                let stream = session.stream().unwrap();
                let (x, y) = (session.alloc(BYTES).unwrap(), session.alloc(BYTES).unwrap());
                for round in 0..50 {
                    let mut out = [0f32; COUNT];
                    session.write(x, &[f32::from(thread); COUNT], stream).unwrap();
                    session.write(y, &[round as f32; COUNT], stream).unwrap();
                    saxpy.launch(100.0, x, y, COUNT as u32, stream).unwrap();
                    session.read(&mut out, y, stream).unwrap();
                    assert_eq!(out, [f32::from(thread) * 100.0 + round as f32; COUNT]);
                }
                call!(cuMemFree_v2(x)).unwrap();
                call!(cuMemFree_v2(y)).unwrap();
                call!(cuStreamDestroy_v2(stream)).unwrap();
            });
        }
    });
    saxpy.unload().unwrap();
    session.end();
}

/// Handles of the driver, which any thread may use.
struct AnyThread<'a, T>(&'a T);
unsafe impl<T> Send for AnyThread<'_, T> {}
impl<'a, T> AnyThread<'a, T> {
    fn get(&self) -> &'a T {
        self.0
    }
}

/// The process ends as its test says; as a test of its own this does nothing.
#[test]
fn a_kernel_reads_memory_that_is_not_there() {
    if child_order().is_none() {
        return;
    }
    let session = Session::new();
    let (saxpy, stream) = (Saxpy::new(&session), session.stream().unwrap());
    let y = session.alloc(BYTES).unwrap();
    let nothing = session.reserve(PAGE).unwrap();
    saxpy.launch(1.0, nothing, y, COUNT as u32, stream).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
}

#[test]
fn an_invalid_access_names_its_kernel() {
    let output = run_child("streams::a_kernel_reads_memory_that_is_not_there", "crash");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("kernel probe_saxpy on device 0 touches 0x"), "{text}");
}

#[test]
fn a_destroyed_handle_is_a_violation() {
    let session = Session::new();
    let stream = session.stream().unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    assert_eq!(call!(cuStreamDestroy_v2(stream)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    let violations = ["cuStreamDestroy with a handle of something that was destroyed"];
    assert_eq!(session.device.violations(), violations);
    assert_eq!(call!(cuStreamDestroy_v2(8 as _)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(session.device.violations(), violations, "never a handle");
}
