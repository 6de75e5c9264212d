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
    /// `None` for a moment, while it is dropped.
    arena: Option<Arena>,
    len: usize,
    home: Option<Arc<dyn Home>>,
}

/// Who takes a buffer's memory back instead of the system.
pub(crate) trait Home: Send + Sync + std::fmt::Debug {
    fn take_back(&self, memory: Arena);
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
        Ok(Self { arena: Some(arena), len: bytes, home: None })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        slice(&self.arena.as_ref().expect("it is not dropped").view(0, self.len))
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        slice_mut(self.arena.as_mut().expect("it is not dropped").view_mut(0, self.len))
    }
}

#[cfg(feature = "cuda")]
impl HostBuffer {
    /// A buffer in the first `bytes` of this memory, which goes back to `home`.
    pub(crate) fn lent(memory: Arena, bytes: usize, home: Arc<dyn Home>) -> Self {
        assert!(bytes <= memory.committed(), "a buffer lies within its memory");
        Self { arena: Some(memory), len: bytes, home: Some(home) }
    }

    /// The memory itself.
    pub(crate) fn into_memory(mut self) -> Arena {
        self.arena.take().expect("it is not dropped")
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let (Some(arena), Some(home)) = (self.arena.take(), &self.home) {
            home.take_back(arena);
        }
    }
}
