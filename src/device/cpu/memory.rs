//! Arenas on anonymous mappings: addresses are reserved once, pages come and go behind them.
#![allow(unsafe_code, reason = "memory mapping system calls on ranges that a `Range` owns")]

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use super::budget::{Budget, system_available_bytes};
use crate::device::{DeviceError, Pages};

/// Alignment of arenas, the size of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Arenas of at least this size ask for huge pages.
const HUGE_FROM_BYTES: usize = 32 << 20;

/// Address of an arena of no bytes: never dereferenced, aligned for any element.
const EMPTY_ADDRESS: usize = HUGE_PAGE;

/// A mapped range of addresses, aligned to huge pages; unmapped when dropped.
#[derive(Debug)]
struct Range {
    address: usize,
    /// A multiple of the page size; nothing is mapped if it is 0.
    bytes: usize,
}

impl Range {
    /// Maps `bytes` (of whole pages) that can't be touched.
    fn map(label: &'static str, bytes: usize) -> Result<Self, DeviceError> {
        if bytes == 0 {
            return Ok(Self { address: EMPTY_ADDRESS, bytes });
        }
        let too_large = DeviceError::AddressSpace { label, bytes: bytes as u64 };
        let Some(padded) = bytes.checked_add(HUGE_PAGE) else {
            return Err(too_large);
        };
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without an address hint of ours, the kernel picks a range that nothing else uses.
        let mapped =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), padded, ProtFlags::empty(), flags) };
        let start = match mapped {
            Ok(start) => start.expose_provenance(),
            Err(Errno::NOMEM | Errno::INVAL) => return Err(too_large),
            Err(errno) => return Err(system_error(label, "mmap", errno)),
        };
        // The kernel aligns to pages only: cut off what lies before and after.
        let address = start.next_multiple_of(HUGE_PAGE);
        drop(Self { address: start, bytes: address - start });
        drop(Self { address: address + bytes, bytes: start + padded - (address + bytes) });
        Ok(Self { address, bytes })
    }

    fn pointer(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.address)
    }

    /// Moves the pages of the first `bytes` of `from` to the start of this range, and unmaps the rest of
    /// `from`. On an error this range holds what it held.
    fn take_pages(&mut self, mut from: Range, bytes: usize) -> Result<(), Errno> {
        assert!(bytes <= self.bytes && bytes <= from.bytes, "pages move within both ranges");
        // SAFETY: both ranges are mapped and owned by us, and `&mut self` and the owned `from` show that no
        // view of either is alive.
        let moved = unsafe {
            rustix::mm::mremap_fixed(from.pointer(), bytes, bytes, MremapFlags::MAYMOVE, self.pointer())
        };
        if let Err(errno) = moved {
            // Linux checks everything that fails in practice before it unmaps the target; if it did unmap
            // it, addresses that the engine believes its own are anybody's, and nothing can go on.
            // SAFETY: advice to read ahead as usual changes no contents; it fails on an unmapped range.
            let intact = unsafe { rustix::mm::madvise(self.pointer(), bytes, Advice::Normal) };
            if intact.is_err() {
                std::process::abort();
            }
            return Err(errno);
        }
        // The moved part of `from` is unmapped now and must not be unmapped again: it may be reused by now.
        from.address += bytes;
        from.bytes -= bytes;
        Ok(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        // SAFETY: the range is mapped and owned by this value, and whoever drops it has no views of it.
        let unmapped = unsafe { rustix::mm::munmap(self.pointer(), self.bytes) };
        if let Err(errno) = unmapped {
            tracing::error!(address = self.address, bytes = self.bytes, %errno, "memory was not unmapped");
        }
    }
}

/// The pages of one arena of the CPU device.
#[derive(Debug)]
pub(super) struct CpuPages {
    label: &'static str,
    range: Range,
    /// Whole pages that can be touched.
    committed: usize,
    budget: Arc<Budget>,
}

impl CpuPages {
    /// Reserves at least `bytes`.
    pub(super) fn reserve(
        label: &'static str,
        bytes: usize,
        budget: &Arc<Budget>,
    ) -> Result<Self, DeviceError> {
        let pages = bytes.checked_next_multiple_of(rustix::param::page_size());
        let bytes = pages.ok_or(DeviceError::AddressSpace { label, bytes: bytes as u64 })?;
        let range = Range::map(label, bytes)?;
        Ok(Self { label, range, committed: 0, budget: Arc::clone(budget) })
    }

    fn protect(&self, bytes: usize, flags: MprotectFlags) -> Result<(), Errno> {
        assert!(bytes <= self.range.bytes, "protection changes within the reservation");
        // SAFETY: the pages are ours; callers hold the arena exclusively, so no view of them is alive.
        unsafe { rustix::mm::mprotect(self.range.pointer(), bytes, flags) }
    }

    fn advise(&self, bytes: usize, advice: Advice) -> Result<(), Errno> {
        assert!(bytes <= self.range.bytes, "advice is given within the reservation");
        // SAFETY: the pages are ours. Advice that drops contents is given by `decommit` only, whose caller
        // holds the arena exclusively.
        unsafe { rustix::mm::madvise(self.range.pointer(), bytes, advice) }
    }
}

impl Pages for CpuPages {
    fn address(&self) -> usize {
        self.range.address
    }

    fn commit(&mut self, bytes: usize) -> Result<(), DeviceError> {
        let bytes = bytes.next_multiple_of(rustix::param::page_size());
        self.budget.take(self.label, bytes as u64)?;
        if bytes > 0
            && let Err(errno) = self.protect(bytes, MprotectFlags::READ | MprotectFlags::WRITE)
        {
            self.budget.give_back(bytes as u64);
            return Err(match errno {
                Errno::NOMEM => DeviceError::OutOfMemory {
                    label: self.label,
                    needed_bytes: bytes as u64,
                    available_bytes: system_available_bytes(),
                },
                errno => system_error(self.label, "mprotect", errno),
            });
        }
        if bytes >= HUGE_FROM_BYTES
            && let Err(errno) = self.advise(bytes, Advice::LinuxHugepage)
        {
            // A kernel without huge pages: slower, not wrong.
            tracing::debug!(label = self.label, %errno, "no huge pages");
        }
        self.committed = bytes;
        Ok(())
    }

    fn decommit(&mut self) -> usize {
        let bytes = std::mem::take(&mut self.committed);
        if bytes == 0 {
            return 0;
        }
        // MADV_DONTNEED frees before it returns (MADV_FREE is lazy). It fails only on locked pages or a
        // range that isn't ours: a bug, and going on would break the promise that memory is back.
        self.advise(bytes, Advice::LinuxDontNeed).expect("our own unlocked pages can be dropped");
        // Restoring the one protection of the whole reservation merges mappings, so it needs no memory.
        if let Err(errno) = self.protect(bytes, MprotectFlags::empty()) {
            tracing::warn!(label = self.label, %errno, "decommitted memory stays accessible");
        }
        self.budget.give_back(bytes as u64);
        0
    }

    fn adopt(&mut self, staged: Box<dyn Pages>) -> Result<(), DeviceError> {
        let staged: Box<dyn Any> = staged;
        let mut staged = staged.downcast::<Self>().expect("an arena adopts one of the same device");
        assert!(Arc::ptr_eq(&self.budget, &staged.budget), "an arena adopts one of the same device");
        assert!([0, staged.committed].contains(&self.committed), "an arena adopts one of the same size");
        self.budget.check_fault(self.label, staged.committed as u64)?;
        let bytes = std::mem::take(&mut staged.committed);
        if bytes == 0 {
            return Ok(());
        }
        let range = std::mem::replace(&mut staged.range, Range { address: EMPTY_ADDRESS, bytes: 0 });
        let moved = self.range.take_pages(range, bytes);
        // One of the two sets of pages is gone now.
        match moved {
            Ok(()) => {
                self.budget.give_back(self.committed as u64);
                self.committed = bytes;
                Ok(())
            }
            Err(errno) => {
                self.budget.give_back(bytes as u64);
                Err(system_error(self.label, "mremap", errno))
            }
        }
    }
}

impl Drop for CpuPages {
    fn drop(&mut self) {
        // The range unmaps itself.
        self.budget.give_back(self.committed as u64);
    }
}

fn system_error(label: &'static str, call: &'static str, errno: Errno) -> DeviceError {
    DeviceError::System { label, call, source: errno.into() }
}
