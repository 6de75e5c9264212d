//! Memory that another process allocated.

use std::mem;

use cudarc::driver::sys::{CUipcMemHandle, CUresult};

use crate::emulated_cuda::Emulated;
use crate::session::{Outcome, PAGE, Session, call, child_order, run_child};

fn export(memory: u64) -> Outcome<CUipcMemHandle> {
    // SAFETY: an array of bytes.
    let mut handle: CUipcMemHandle = unsafe { mem::zeroed() };
    call!(cuIpcGetMemHandle(&mut handle, memory)).map(|()| handle)
}

fn open(handle: CUipcMemHandle) -> Outcome<u64> {
    let mut memory = 0;
    call!(cuIpcOpenMemHandle_v2(&mut memory, handle, 1)).map(|()| memory)
}

/// Runs `reads_what_another_process_exported` in a process of its own.
fn run_importer(device: i32, handle: CUipcMemHandle, freed: bool) {
    let bytes: Vec<_> = handle.reserved.iter().map(|byte| byte.to_string()).collect();
    let order = format!("{device} {freed} {}", bytes.join(" "));
    let output = run_child("ipc::reads_what_another_process_exported", &order);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// The importing process; as a test of its own it does nothing.
#[test]
fn reads_what_another_process_exported() {
    let Some(order) = child_order() else { return };
    let mut words = order.split(' ');
    let ordinal = words.next().unwrap().parse().unwrap();
    let freed: bool = words.next().unwrap().parse().unwrap();
    let reserved: Vec<_> = words.map(|word| word.parse().unwrap()).collect();
    let handle = CUipcMemHandle { reserved: reserved.try_into().unwrap() };
    let session = Session::on(Emulated::load().device_at(ordinal));
    if freed {
        assert_eq!(open(handle), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
        return session.end();
    }
    let memory = open(handle).unwrap();
    assert_eq!(open(handle), Ok(memory), "opened twice: the same memory");
    let stream = session.stream().unwrap();
    let mut read = [0u32; 4];
    session.read(&mut read, memory, stream).unwrap();
    assert_eq!(read, [1, 2, 3, 4]);
    session.write(memory + 4, &[20u32], stream).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(export(memory).err(), Some(CUresult::CUDA_ERROR_INVALID_VALUE), "exported again");
    assert_eq!(call!(cuMemFree_v2(memory)), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    call!(cuIpcCloseMemHandle(memory)).unwrap();
    session.read(&mut read, memory, stream).expect("open once more");
    call!(cuIpcCloseMemHandle(memory)).unwrap();
    assert_eq!(session.read(&mut read, memory, stream), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(call!(cuIpcCloseMemHandle(memory)), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    call!(cuStreamDestroy_v2(stream)).unwrap();
    session.end();
}

#[test]
fn another_process_opens_an_allocation() {
    let session = Session::new();
    let (other, memory) = (session.alloc(PAGE).unwrap(), session.alloc(64).unwrap());
    let stream = session.stream().unwrap();
    session.write(memory, &[1u32, 2, 3, 4], stream).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    let handle = export(memory).unwrap();
    assert_eq!(open(handle), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT), "a process opens its own");
    run_importer(session.device.ordinal, handle, false);
    let mut read = [0u32; 4];
    session.read(&mut read, memory, stream).unwrap();
    assert_eq!(read, [1, 20, 3, 4], "both see the same memory");
    call!(cuMemFree_v2(memory)).unwrap();
    run_importer(session.device.ordinal, handle, true);
    call!(cuMemFree_v2(other)).unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    session.end();
}

#[test]
fn only_allocations_are_exported() {
    let session = Session::new();
    let start = session.reserve(PAGE).unwrap();
    let handle = session.create(PAGE).unwrap();
    call!(cuMemMap(start, PAGE, 0, handle, 0)).unwrap();
    session.grant(start, PAGE).unwrap();
    assert_eq!(export(start).err(), Some(CUresult::CUDA_ERROR_INVALID_VALUE));
    call!(cuMemUnmap(start, PAGE)).unwrap();
    call!(cuMemRelease(handle)).unwrap();
    call!(cuMemAddressFree(start, PAGE)).unwrap();
    // SAFETY: an array of bytes.
    assert_eq!(open(unsafe { mem::zeroed() }), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    session.end();
}
