//! Memory that another process maps too, passed to it as a descriptor.
//!
//! It is a memfd whose size is sealed before anybody else has it: no peer can cut it while it is mapped, so no
//! access ends in SIGBUS. What the other process may write at any time is never lent out as a slice; bytes
//! are copied in and out.
#![allow(unsafe_code, reason = "memory mapping, and copies to and from memory that has no slices")]

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

/// A descriptor that is no memory of the agreed kind, or the system's refusal to map it.
#[derive(Debug)]
pub(crate) enum AdoptError {
    /// What is wrong with the descriptor.
    Unfit(String),
    Device(DeviceError),
}

/// A memfd of a sealed size and its mapping; unmapped and closed when dropped.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    descriptor: OwnedFd,
    address: usize,
    bytes: usize,
    writable: bool,
}

impl SharedMemory {
    /// Makes memory of `bytes` zeros, all of it allocated now: a system that is short of memory refuses here
    /// and not at some later access. This process only reads it.
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
        let descriptor =
            rustix::fs::memfd_create("dormouse-weights", flags).map_err(|e| failed("memfd_create", e))?;
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
        Self::map(descriptor, bytes, false)
    }

    /// Maps what another process made by [`create`](Self::create), to write it, after checking that it is
    /// what it should be.
    pub(crate) fn adopt(descriptor: OwnedFd, bytes: usize) -> Result<Self, AdoptError> {
        let unfit = |fault: String| Err(AdoptError::Unfit(fault));
        match rustix::fs::fcntl_get_seals(&descriptor) {
            Err(Errno::INVAL) => return unfit("it is no memory file".into()),
            Err(errno) => return Err(AdoptError::Device(failed("fcntl", errno))),
            Ok(seals) if !seals.contains(SIZE_SEALS) => return unfit("its size is not sealed".into()),
            Ok(seals) if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) => {
                return unfit("it is sealed against writing".into());
            }
            Ok(_) => {}
        }
        let stat = rustix::fs::fstat(&descriptor).map_err(|e| AdoptError::Device(failed("fstat", e)))?;
        if u64::try_from(stat.st_size) != Ok(bytes as u64) {
            return unfit(format!("it has {} bytes instead of {bytes}", stat.st_size));
        }
        Self::map(descriptor, bytes, true).map_err(AdoptError::Device)
    }

    /// `descriptor` is a memory file of `bytes`, its size sealed.
    fn map(descriptor: OwnedFd, bytes: usize, writable: bool) -> Result<Self, DeviceError> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: without an address hint of ours, the kernel picks a range that nothing else uses.
        let mapped = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &descriptor, 0)
        };
        match mapped {
            Ok(start) => Ok(Self { descriptor, address: start.expose_provenance(), bytes, writable }),
            Err(Errno::NOMEM) => Err(DeviceError::AddressSpace { label: LABEL, bytes: bytes as u64 }),
            Err(errno) => Err(failed("mmap", errno)),
        }
    }

    /// What the other process maps.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Copies `out.len()` bytes at `offset` out.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        let start: *const u8 = std::ptr::with_exposed_provenance(self.range(offset, out.len()));
        // SAFETY: the range is within a mapping that this value keeps and that can't shrink; `out` is memory
        // of this process alone. The other process may write meanwhile: then the copy is some mix of bytes,
        // and nothing here has a reference into what changes.
        unsafe { std::ptr::copy_nonoverlapping(start, out.as_mut_ptr(), out.len()) }
    }

    /// Copies `bytes` in at `offset`.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(self.writable, "only adopted memory is written");
        let start: *mut u8 = std::ptr::with_exposed_provenance_mut(self.range(offset, bytes.len()));
        // SAFETY: as in `read`, and the mapping is writable by the assertion; no slice of it exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) }
    }

    /// Address of `len` bytes at `offset`.
    fn range(&self, offset: usize, len: usize) -> usize {
        assert!(offset <= self.bytes && len <= self.bytes - offset, "copies stay within the memory");
        self.address + offset
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let start: *mut c_void = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the range is mapped and owned by this value, and no references into it exist.
        let unmapped = unsafe { rustix::mm::munmap(start, self.bytes) };
        if let Err(errno) = unmapped {
            tracing::error!(address = self.address, bytes = self.bytes, %errno, "memory was not unmapped");
        }
    }
}

fn failed(call: &'static str, errno: Errno) -> DeviceError {
    DeviceError::System { label: LABEL, call, source: errno.into() }
}
