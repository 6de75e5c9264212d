//! Arenas: an address range reserved once, with memory committed and given back at the same addresses.

use std::marker::PhantomData;

/// A device refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is not enough memory. Nothing was committed; the call may be tried again.
    #[error("{label}: {needed_bytes} bytes needed, {available_bytes} bytes available")]
    OutOfMemory {
        /// What the memory was for.
        label: &'static str,
        /// Bytes asked for.
        needed_bytes: u64,
        /// Bytes that the limit or the system has left.
        available_bytes: u64,
    },
    /// A size does not fit the address space.
    #[error("{label}: {bytes} bytes do not fit the address space")]
    AddressSpace {
        /// What the memory was for.
        label: &'static str,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The operating system refused a memory call.
    #[error("{label}: {call} failed")]
    System {
        /// What the memory was for.
        label: &'static str,
        /// The call that failed.
        call: &'static str,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
    /// A worker thread could not be started.
    #[error("worker thread {index} could not be started")]
    Thread {
        /// Which of the threads.
        index: usize,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// An operation failed on the device; what it wrote is unspecified.
    #[error("{operation} failed: {detail}")]
    Operation {
        /// The operation.
        operation: &'static str,
        /// The device's words.
        detail: String,
    },
}

/// The device's side of an arena. Addresses never change over its life; dropping it gives everything back.
pub(crate) trait Pages: std::any::Any + Send + Sync + std::fmt::Debug {
    /// First address.
    fn address(&self) -> usize;
    /// Puts zeroed memory behind the first `bytes` of the range: all or nothing. Nothing is committed before.
    fn commit(&mut self, bytes: usize) -> Result<(), DeviceError>;
    /// Gives all memory back to the system before it returns; returns the bytes that it would not take (which it
    /// says in the log, and tries again the next time).
    fn decommit(&mut self) -> usize;
    /// Puts the memory of `staged` (same device) in place of this arena's, which holds as much or nothing,
    /// without copying, so that its contents appear at this arena's address. On an error this arena is as it
    /// was.
    fn adopt(&mut self, staged: Box<dyn Pages>) -> Result<(), DeviceError>;
}

/// An address range reserved for the engine's life, with memory behind its first [`Arena::committed`] bytes.
#[derive(Debug)]
pub(crate) struct Arena {
    pages: Box<dyn Pages>,
    reserved: usize,
    committed: usize,
}

impl Arena {
    /// Wraps a device's reservation of `reserved` bytes with nothing committed.
    pub(crate) fn new(pages: Box<dyn Pages>, reserved: usize) -> Self {
        Self { pages, reserved, committed: 0 }
    }

    /// First address; the same for the arena's life.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn address(&self) -> usize {
        self.pages.address()
    }

    /// Bytes with memory behind them.
    pub(crate) fn committed(&self) -> usize {
        self.committed
    }

    /// Commits the first `bytes`, zeroed. On an error nothing is committed.
    pub(crate) fn commit(&mut self, bytes: usize) -> Result<(), DeviceError> {
        assert!(self.committed == 0, "an arena is committed once between decommits");
        assert!(bytes <= self.reserved, "{bytes} bytes committed of {} reserved", self.reserved);
        self.pages.commit(bytes)?;
        self.committed = bytes;
        Ok(())
    }

    /// [`Arena::commit`] by another way that the device's pages have.
    #[cfg(feature = "cuda")]
    pub(crate) fn commit_by(
        &mut self,
        bytes: usize,
        commit: impl FnOnce(&mut dyn Pages) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        assert!(self.committed == 0, "an arena is committed once between decommits");
        assert!(bytes <= self.reserved, "{bytes} bytes committed of {} reserved", self.reserved);
        commit(&mut *self.pages)?;
        self.committed = bytes;
        Ok(())
    }

    /// Gives all memory back; returns the bytes that the system has again.
    pub(crate) fn decommit(&mut self) -> usize {
        let kept = self.pages.decommit();
        std::mem::take(&mut self.committed).saturating_sub(kept)
    }

    /// Takes over the memory of `staged`, at this arena's address. On an error this arena is as it was.
    pub(crate) fn adopt(&mut self, staged: Arena) -> Result<(), DeviceError> {
        let bytes = staged.committed;
        assert!(self.committed == 0 || self.committed == bytes, "staged memory replaces as much, or nothing");
        assert!(bytes <= self.reserved, "{bytes} bytes adopted of {} reserved", self.reserved);
        self.pages.adopt(staged.pages)?;
        self.committed = bytes;
        Ok(())
    }

    /// Elements `[offset, offset + len)`, `offset` in elements.
    pub(crate) fn view<T: Element>(&self, offset: usize, len: usize) -> View<'_, T> {
        View { address: self.element_address::<T>(offset, len), len, lifetime: PhantomData }
    }

    /// Elements `[offset, offset + len)`, to write.
    pub(crate) fn view_mut<T: Element>(&mut self, offset: usize, len: usize) -> ViewMut<'_, T> {
        ViewMut { address: self.element_address::<T>(offset, len), len, lifetime: PhantomData }
    }

    fn element_address<T>(&self, offset: usize, len: usize) -> usize {
        let size = size_of::<T>();
        let end = offset.checked_add(len).and_then(|end| end.checked_mul(size));
        assert!(
            end.is_some_and(|end| end <= self.committed),
            "elements {offset}..+{len} of {size} bytes lie outside the {} committed",
            self.committed
        );
        self.pages.address() + offset * size
    }
}

/// Types that arenas hold: every bit pattern is a value.
pub(crate) trait Element: Copy + Send + Sync + 'static {}
impl Element for f32 {}
impl Element for u8 {}

/// Elements in an arena, shared. The address means something on the arena's device only.
#[derive(Debug)]
pub(crate) struct View<'a, T> {
    address: usize,
    len: usize,
    lifetime: PhantomData<&'a [T]>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for View<'_, T> {}

/// Elements in an arena, exclusive.
#[derive(Debug)]
pub(crate) struct ViewMut<'a, T> {
    address: usize,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

impl<'a, T: Element> View<'a, T> {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address of the first element.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Elements `[offset, offset + len)` of this view.
    pub(crate) fn slice(&self, offset: usize, len: usize) -> View<'a, T> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "slice out of range");
        View { address: self.address + offset * size_of::<T>(), len, lifetime: PhantomData }
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address of the first element.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// The same elements, to read.
    pub(crate) fn as_view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, lifetime: PhantomData }
    }

    /// Elements `[offset, offset + len)`, borrowed anew.
    pub(crate) fn slice(&mut self, offset: usize, len: usize) -> ViewMut<'_, T> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "slice out of range");
        ViewMut { address: self.address + offset * size_of::<T>(), len, lifetime: PhantomData }
    }

    /// The same memory as bytes.
    pub(crate) fn into_bytes(self) -> ViewMut<'a, u8> {
        ViewMut { address: self.address, len: self.len * size_of::<T>(), lifetime: PhantomData }
    }

    /// Cuts in two at `mid`.
    pub(crate) fn split_at(self, mid: usize) -> (ViewMut<'a, T>, ViewMut<'a, T>) {
        assert!(mid <= self.len, "split out of range");
        let rest = self.address + mid * size_of::<T>();
        (
            ViewMut { address: self.address, len: mid, lifetime: PhantomData },
            ViewMut { address: rest, len: self.len - mid, lifetime: PhantomData },
        )
    }
}
