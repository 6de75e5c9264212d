//! Memory shared with another process, which gets it as a descriptor.
//!
//! It is a memfd whose size is sealed before anybody else has it. Its owner copies out of it with `pread`,
//! which can only fail: a mapping could end in SIGBUS, since whoever has the descriptor can free pages that
//! a system short of memory then doesn't give again. The other process maps it.
#![allow(unsafe_code, reason = "memory mapping, and copies into memory that has no slices")]

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::DeviceError;
use super::cpu::system_available_bytes;

/// What errors call this memory.
const LABEL: &str = "shared memory";

/// The size can't change any more, whoever has the descriptor.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Memory of this process that another one writes. Its pages are given back when this is dropped, whatever
/// the other process does.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    descriptor: OwnedFd,
    bytes: usize,
}

impl SharedMemory {
    /// Makes memory of `bytes` zeros, all of it allocated now: a system that is short of memory refuses here
    /// and not at some later access.
    pub(crate) fn create(bytes: usize) -> Result<Self, DeviceError> {
        let too_large = || DeviceError::AddressSpace { label: LABEL, bytes: bytes as u64 };
        if bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(too_large());
        }
        let available_bytes = system_available_bytes();
        let out_of_memory =
            || DeviceError::OutOfMemory { label: LABEL, needed_bytes: bytes as u64, available_bytes };
        if bytes as u64 > available_bytes {
            return Err(out_of_memory());
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = rustix::fs::memfd_create("dormouse-weights", flags)
            .map_err(|errno| failed("memfd_create", errno))?;
        let fits = |call, result: Result<(), Errno>| match result {
            Err(Errno::NOMEM | Errno::NOSPC) => Err(out_of_memory()),
            Err(Errno::FBIG | Errno::INVAL) => Err(too_large()),
            other => other.map_err(|errno| failed(call, errno)),
        };
        fits("ftruncate", rustix::fs::ftruncate(&descriptor, bytes as u64))?;
        let allocated = rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&descriptor, FallocateFlags::empty(), 0, bytes as u64)
        });
        fits("fallocate", allocated)?;
        rustix::fs::fcntl_add_seals(&descriptor, SIZE_SEALS | SealFlags::SEAL)
            .map_err(|errno| failed("fcntl", errno))?;
        Ok(Self { descriptor, bytes })
    }

    /// What the other process gets.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Copies `out.len()` bytes at `offset` out. If the other process writes them meanwhile, the copy is some
    /// mix; it doesn't change any more.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        assert_within(offset, out.len(), self.bytes);
        let mut done = 0;
        while done < out.len() {
            match rustix::io::pread(&self.descriptor, &mut out[done..], (offset + done) as u64) {
                // The sealed size rules the end of the file out.
                Ok(0) => return Err(failed("pread", Errno::IO)),
                Ok(read) => done += read,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed("pread", errno)),
            }
        }
        Ok(())
    }
}

impl Drop for SharedMemory {
    /// Frees the pages: closing the descriptor alone would not while the other process has it or a mapping,
    /// and the memory counts as this process's.
    fn drop(&mut self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let freed = rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&self.descriptor, flags, 0, self.bytes as u64)
        });
        if let Err(errno) = freed {
            tracing::warn!(bytes = self.bytes, %errno, "shared memory goes when the other process does");
        }
    }
}

/// Why memory of another process can't be used.
#[derive(Debug)]
pub(crate) enum AdoptError {
    /// What is wrong with the descriptor.
    Unfit(String),
    /// The system refused.
    Device(DeviceError),
}

/// Memory of another process, mapped to be written; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct SharedMapping {
    address: usize,
    bytes: usize,
}

impl SharedMapping {
    /// Maps what another process made by [`SharedMemory::create`], after checking that it is what it should
    /// be. The descriptor is not needed any more then.
    pub(crate) fn adopt(descriptor: OwnedFd, bytes: usize) -> Result<Self, AdoptError> {
        let unfit = |fault: String| Err(AdoptError::Unfit(fault));
        let refused = |call, errno| AdoptError::Device(failed(call, errno));
        match rustix::fs::fcntl_get_seals(&descriptor) {
            Err(Errno::INVAL) => return unfit("it is no memory file".into()),
            Err(errno) => return Err(refused("fcntl", errno)),
            Ok(seals) if !seals.contains(SIZE_SEALS) => return unfit("its size is not sealed".into()),
            Ok(seals) if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) => {
                return unfit("it is sealed against writing".into());
            }
            Ok(_) => {}
        }
        let stat = rustix::fs::fstat(&descriptor).map_err(|errno| refused("fstat", errno))?;
        if u64::try_from(stat.st_size) != Ok(bytes as u64) {
            return unfit(format!("it has {} bytes instead of {bytes}", stat.st_size));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without an address hint of ours, the kernel picks a range that nothing else uses.
        let mapped = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &descriptor, 0)
        };
        match mapped {
            Ok(start) => Ok(Self { address: start.expose_provenance(), bytes }),
            Err(errno) => Err(refused("mmap", errno)),
        }
    }

    /// Copies `bytes` in at `offset`.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert_within(offset, bytes.len(), self.bytes);
        let start: *mut u8 = std::ptr::with_exposed_provenance_mut(self.address + offset);
        // SAFETY: the range is within a writable mapping that this value keeps and whose file can't shrink.
        // Nothing ever has a reference into it, whatever the other process does with it; `bytes` are
        // elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        let start: *mut c_void = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the range is mapped and owned by this value, and no references into it exist.
        let unmapped = unsafe { rustix::mm::munmap(start, self.bytes) };
        if let Err(errno) = unmapped {
            tracing::error!(address = self.address, bytes = self.bytes, %errno, "memory was not unmapped");
        }
    }
}

fn assert_within(offset: usize, len: usize, bytes: usize) {
    assert!(offset <= bytes && len <= bytes - offset, "copies stay within the memory");
}

fn failed(call: &'static str, errno: Errno) -> DeviceError {
    DeviceError::System { label: LABEL, call, source: errno.into() }
}
