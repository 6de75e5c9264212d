//! Host memory for large copies.

use std::sync::Arc;

use super::budget::Budget;
use super::host::{slice, slice_mut};
use super::memory::CpuPages;
use crate::device::{Arena, DeviceError};

/// Host memory with pages of its own: dropping it gives them back to the system. (An allocator may keep tens
/// of megabytes of what is freed.) It counts towards no device's limit.
#[derive(Debug)]
pub(crate) struct HostBuffer {
    arena: Arena,
}

#[cfg(test)]
thread_local! {
    /// Whether the system lacks the memory for the next buffer of this thread.
    pub(crate) static REFUSE_NEXT: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

impl HostBuffer {
    /// Makes a buffer of `bytes` zeros, if the system has the memory; it is taken when first written.
    pub(crate) fn new(label: &'static str, bytes: usize) -> Result<Self, DeviceError> {
        let budget = Arc::new(Budget::new(None));
        #[cfg(test)]
        budget.fail_nth(u64::from(REFUSE_NEXT.take()));
        let mut arena = Arena::new(Box::new(CpuPages::reserve(label, bytes, &budget)?), bytes);
        arena.commit(bytes)?;
        Ok(Self { arena })
    }

    pub(crate) fn len(&self) -> usize {
        self.arena.committed()
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        slice(&self.arena.view(0, self.len()))
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.len();
        slice_mut(self.arena.view_mut(0, len))
    }
}
