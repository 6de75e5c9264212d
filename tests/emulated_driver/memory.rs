//! Memory: what is free, what is mapped where, what is refused.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{CUpointer_attribute, CUresult};

use crate::session::{PAGE, Session, call, register, unregister};

const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;

#[test]
fn memory_is_mapped_kept_and_given_back() {
    let session = Session::new();
    session.device.set_memory_limit(16 * PAGE as u64);
    let stream = session.stream().unwrap();
    let start = session.reserve(8 * PAGE).unwrap();
    let handle = session.create(2 * PAGE).unwrap();
    assert_eq!(session.info(), (14 * PAGE, 16 * PAGE));

    call!(cuMemMap(start + PAGE as u64, 2 * PAGE, 0, handle, 0)).unwrap();
    assert_eq!(
        session.write(start + PAGE as u64, &[1u8], stream),
        Err(INVALID_VALUE),
        "no access was granted"
    );
    session.grant(start + PAGE as u64, 2 * PAGE).unwrap();
    let mut fresh = [0u8; 2 * PAGE];
    session.read(&mut fresh, start + PAGE as u64, stream).unwrap();
    assert!(fresh.iter().all(|&byte| byte == 0xA5), "fresh memory is garbage");
    assert_eq!(
        session.read(&mut fresh, start, stream),
        Err(INVALID_VALUE),
        "the range starts before the mapping"
    );
    session.write(start + PAGE as u64, &[7u8; PAGE], stream).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();

    // The contents are the handle's: they are there again wherever it is mapped.
    call!(cuMemUnmap(start + PAGE as u64, 2 * PAGE)).unwrap();
    call!(cuMemMap(start + 4 * PAGE as u64, 2 * PAGE, 0, handle, 0)).unwrap();
    session.grant(start + 4 * PAGE as u64, 2 * PAGE).unwrap();
    session.read(&mut fresh, start + 4 * PAGE as u64, stream).unwrap();
    assert!(fresh[..PAGE].iter().all(|&byte| byte == 7) && fresh[PAGE..].iter().all(|&byte| byte == 0xA5));

    // A released handle's memory is in use as long as it is mapped.
    call!(cuMemRelease(handle)).unwrap();
    assert_eq!(call!(cuMemRelease(handle)), Err(INVALID_VALUE));
    assert_eq!(session.info().0, 14 * PAGE);
    assert_eq!(call!(cuMemAddressFree(start, 8 * PAGE)), Err(INVALID_VALUE), "something is mapped there");
    call!(cuMemUnmap(start + 4 * PAGE as u64, 2 * PAGE)).unwrap();
    assert_eq!(session.info().0, 16 * PAGE);
    assert_eq!(call!(cuMemUnmap(start + 4 * PAGE as u64, 2 * PAGE)), Err(INVALID_VALUE));
    assert_eq!(
        call!(cuMemAddressFree(start, 4 * PAGE)),
        Err(INVALID_VALUE),
        "not the size that was reserved"
    );
    assert_eq!(session.device.live(), "1 address ranges, 1 streams, 1 contexts");
    call!(cuMemAddressFree(start, 8 * PAGE)).unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    assert_eq!(session.device.take_peak(), 2 * PAGE as u64);
    session.end();
}

#[test]
fn mappings_are_whole_and_do_not_overlap() {
    let session = Session::new();
    let start = session.reserve(8 * PAGE).unwrap();
    let (a, b) = (session.create(2 * PAGE).unwrap(), session.create(2 * PAGE).unwrap());
    let at = |page: usize| start + (page * PAGE) as u64;
    assert_eq!(call!(cuMemMap(at(7), 2 * PAGE, 0, a, 0)), Err(INVALID_VALUE), "past the end of the range");
    assert_eq!(call!(cuMemMap(at(0) + 8, 2 * PAGE, 0, a, 0)), Err(INVALID_VALUE), "between two granules");
    assert_eq!(call!(cuMemMap(at(0), 4 * PAGE, 0, a, 0)), Err(INVALID_VALUE), "more than the handle has");
    assert_eq!(call!(cuMemMap(at(0), PAGE, PAGE, a, 0)), Err(INVALID_VALUE), "an offset");
    call!(cuMemMap(at(0), 2 * PAGE, 0, a, 0)).unwrap();
    for page in [0, 1] {
        assert_eq!(call!(cuMemMap(at(page), 2 * PAGE, 0, b, 0)), Err(INVALID_VALUE), "over another mapping");
    }
    call!(cuMemMap(at(2), 2 * PAGE, 0, b, 0)).unwrap();
    assert_eq!(session.grant(at(0), PAGE), Err(INVALID_VALUE), "a part of a mapping");
    assert_eq!(session.grant(at(0), 5 * PAGE), Err(INVALID_VALUE), "more than is mapped");
    session.grant(at(0), 4 * PAGE).unwrap();
    assert_eq!(call!(cuMemUnmap(at(0), PAGE)), Err(INVALID_VALUE), "a part of a mapping");
    assert_eq!(call!(cuMemUnmap(at(1), 2 * PAGE)), Err(INVALID_VALUE), "parts of two mappings");
    call!(cuMemUnmap(at(0), 4 * PAGE)).unwrap();
    call!(cuMemRelease(a)).unwrap();
    call!(cuMemRelease(b)).unwrap();
    call!(cuMemAddressFree(start, 8 * PAGE)).unwrap();
    session.end();
}

#[test]
fn sizes_and_limits_are_checked() {
    let session = Session::new();
    let mut granularity = 0;
    let minimum = cudarc::driver::sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    call!(cuMemGetAllocationGranularity(&mut granularity, &session.properties(), minimum)).unwrap();
    assert_eq!(granularity, PAGE);
    session.device.set_memory_limit(4 * PAGE as u64);
    assert_eq!(session.create(PAGE + 1), Err(INVALID_VALUE));
    assert_eq!(session.create(0), Err(INVALID_VALUE));
    assert_eq!(session.reserve(100), Err(INVALID_VALUE));
    assert_eq!(session.create(5 * PAGE), Err(OUT_OF_MEMORY));
    let handle = session.create(3 * PAGE).unwrap();
    assert_eq!(session.alloc(2 * PAGE), Err(OUT_OF_MEMORY));
    let allocation = session.alloc(PAGE - 100).unwrap();
    assert_eq!(session.info(), (0, 4 * PAGE));
    assert_eq!(call!(cuMemFree_v2(allocation + 8)), Err(INVALID_VALUE));
    call!(cuMemFree_v2(allocation)).unwrap();
    assert_eq!(call!(cuMemFree_v2(allocation)), Err(INVALID_VALUE));
    call!(cuMemRelease(handle)).unwrap();
    session.end();
}

#[test]
fn devices_do_not_share() {
    let (first, second) = (Session::new(), Session::new());
    assert_ne!(first.device.ordinal, second.device.ordinal);
    let stream = second.stream().unwrap();
    call!(cuCtxSetCurrent(first.context)).unwrap();
    let memory = first.alloc(64).unwrap();
    assert_eq!((first.device.used(), second.device.used()), (512, 0));
    call!(cuCtxSetCurrent(second.context)).unwrap();
    assert_eq!(second.write(memory, &[1u8; 8], stream), Err(INVALID_VALUE), "memory of another device");
    call!(cuStreamDestroy_v2(stream)).unwrap();
    call!(cuCtxSetCurrent(first.context)).unwrap();
    call!(cuMemFree_v2(memory)).unwrap();
    first.end();
    second.end();
}

#[test]
fn host_memory_is_registered_once() {
    let session = Session::new();
    let mut memory = vec![0u8; 8 * PAGE];
    let (registered, rest) = memory.split_at_mut(4 * PAGE);
    register(registered).unwrap();
    assert_eq!(register(&mut registered[PAGE..]), Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED));
    register(rest).unwrap();
    assert_eq!(session.device.live(), "2 host registrations, 1 contexts");
    unregister(rest).unwrap();
    assert_eq!(unregister(rest), Err(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED));
    unregister(registered).unwrap();

    // A copy may not be pinned in part.
    register(&mut memory[..PAGE]).unwrap();
    let (stream, device) = (session.stream().unwrap(), session.alloc(2 * PAGE).unwrap());
    assert_eq!(session.write(device, &memory[..2 * PAGE], stream), Err(INVALID_VALUE));
    unregister(&mut memory[..PAGE]).unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    call!(cuMemFree_v2(device)).unwrap();
    session.end();
}

#[test]
fn addresses_are_described() {
    let session = Session::new();
    let start = session.reserve(4 * PAGE).unwrap();
    let handle = session.create(2 * PAGE).unwrap();
    call!(cuMemMap(start, 2 * PAGE, 0, handle, 0)).unwrap();
    let ask = |attribute, address: u64| {
        let mut value = 0u64;
        call!(cuPointerGetAttribute(ptr::from_mut(&mut value).cast(), attribute, address)).map(|()| value)
    };
    use CUpointer_attribute as A;
    assert_eq!(ask(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, start + 5), Ok(2));
    assert_eq!(ask(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, start), Ok(session.device.ordinal as u64));
    assert_eq!(ask(A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, start + PAGE as u64), Ok(start));
    // The range is the reservation; the mapping is another question.
    assert_eq!(ask(A::CU_POINTER_ATTRIBUTE_RANGE_SIZE, start), Ok(4 * PAGE as u64));
    assert_eq!(ask(A::CU_POINTER_ATTRIBUTE_MAPPED, start), Ok(1));
    let (mut begin, mut bytes) = (0, 0);
    call!(cuMemGetAddressRange_v2(&mut begin, &mut bytes, start + PAGE as u64)).unwrap();
    assert_eq!((begin, bytes), (start, 2 * PAGE));
    let unmapped = call!(cuMemGetAddressRange_v2(&mut begin, &mut bytes, start + 3 * PAGE as u64));
    assert_eq!(unmapped, Err(CUresult::CUDA_ERROR_NOT_FOUND));
    assert_eq!(ask(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, start + 3 * PAGE as u64), Err(INVALID_VALUE));
    let mut pinned: *mut c_void = ptr::null_mut();
    call!(cuMemHostAlloc(&mut pinned, 100, 0)).unwrap();
    assert_eq!(ask(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pinned as u64), Ok(1));
    call!(cuMemFreeHost(pinned)).unwrap();
    call!(cuMemUnmap(start, 2 * PAGE)).unwrap();
    call!(cuMemRelease(handle)).unwrap();
    call!(cuMemAddressFree(start, 4 * PAGE)).unwrap();
    session.end();
}
