//! Host memory that the GPU reads and writes by itself.
#![allow(unsafe_code, reason = "calls of the CUDA driver; memory that the driver gives")]

use std::ptr::null_mut;
use std::sync::Arc;

use super::context::Context;
use super::error::CallError;
use super::stream::{Event, Stream};

/// Host memory of the driver's, pinned. The GPU knows it by the same address.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    len: usize,
}

// SAFETY: the memory is owned by this value and is plain bytes.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeroed memory of so many bytes, at least one.
    pub(super) fn new(context: &Arc<Context>, len: usize) -> Result<Self, CallError> {
        let len = len.max(1);
        let _bound = context.bind()?;
        let mut start = null_mut();
        // SAFETY: `start` is ours to write; `Drop` frees the memory.
        unsafe { context.driver.cuMemHostAlloc(&raw mut start, len, 0) }?;
        let start = start.cast::<u8>();
        // SAFETY: the driver gave `len` bytes there.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { context: Arc::clone(context), start, len })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn address(&self) -> usize {
        self.start.addr()
    }

    /// The memory, which no work of the GPU uses any more.
    ///
    /// # Safety
    /// The work that used it is done: its event has come or its stream was synchronised.
    pub(super) unsafe fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated and zeroed by `new`; exclusive by `&mut self` and by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let free = || {
            let _bound = self.context.bind_to_end()?;
            // SAFETY: allocated by `new`, freed once; owners wait for the work that uses it first.
            unsafe { self.context.driver.cuMemFreeHost(self.start.cast()) }
        };
        if let Err(error) = free() {
            tracing::warn!(bytes = self.len, %error, "pinned memory was not freed");
        }
    }
}

/// Buffers through which pageable memory goes to and from the GPU, used one after another.
#[derive(Debug)]
pub(super) struct Ring {
    slots: Vec<Slot>,
    next: usize,
}

#[derive(Debug)]
struct Slot {
    memory: Pinned,
    /// When the work that uses it is done.
    done: Event,
}

impl Ring {
    pub(super) fn new(context: &Arc<Context>, slots: usize, bytes: usize) -> Result<Self, CallError> {
        let slot = || Ok(Slot { memory: Pinned::new(context, bytes)?, done: Event::new(context)? });
        Ok(Self { slots: (0..slots).map(|_| slot()).collect::<Result<_, _>>()?, next: 0 })
    }

    /// Bytes of a buffer.
    pub(super) fn bytes(&self) -> usize {
        self.slots[0].memory.len()
    }

    /// Bytes of all buffers.
    pub(super) fn all_bytes(&self) -> usize {
        self.slots.len() * self.bytes()
    }

    /// Waits for the next buffer, has it filled, and puts the work on the stream that uses it, given its number and
    /// address.
    pub(super) fn send(
        &mut self,
        stream: &Stream,
        fill: impl FnOnce(&mut [u8]),
        work: impl FnOnce(usize, usize) -> Result<(), CallError>,
    ) -> Result<(), CallError> {
        let slot = &mut self.slots[self.next];
        slot.done.synchronize()?;
        // SAFETY: the event of the work that used it has come.
        fill(unsafe { slot.memory.bytes() });
        let worked = work(self.next, slot.memory.address());
        // Whatever of the work was put on the stream is waited for: at once if the event can't tell.
        let recorded = slot.done.record(stream).inspect_err(|_| _ = stream.synchronize());
        self.next = (self.next + 1) % self.slots.len();
        worked.and(recorded)
    }

    /// Brings `pieces` pieces, each by work on the stream that fills a buffer, of which number and address are given;
    /// the copy out of one overlaps with the work for the next.
    pub(super) fn receive(
        &mut self,
        stream: &Stream,
        pieces: usize,
        mut work: impl FnMut(usize, (usize, usize)) -> Result<(), CallError>,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<(), CallError> {
        let count = self.slots.len();
        for step in 0..pieces + count - 1 {
            if step < pieces {
                let slot = &mut self.slots[step % count];
                slot.done.synchronize()?;
                let worked = work(step, (step % count, slot.memory.address()));
                let recorded = slot.done.record(stream).inspect_err(|_| _ = stream.synchronize());
                worked.and(recorded)?;
            }
            if let Some(piece) = (step + 1).checked_sub(count)
                && piece < pieces
            {
                let slot = &mut self.slots[piece % count];
                slot.done.synchronize()?;
                // SAFETY: the event of the work that filled it has come.
                take(piece, unsafe { slot.memory.bytes() });
            }
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for slot in &self.slots {
            if let Err(error) = slot.done.synchronize() {
                tracing::warn!(%error, "the GPU failed before pinned memory was freed");
            }
        }
    }
}
