//! Where parked weights lie: host memory that the GPU copies to and from by itself.
//!
//! Registering memory with the driver takes longer than a copy, so what one sleep used is kept for the next.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::context::Context;
use super::error::CallError;
use crate::device::cpu::{Home, HostBuffer};
use crate::device::{Arena, DeviceError};

/// Host memory registered with the driver, at most one buffer of it unused.
#[derive(Debug)]
pub(super) struct Parking {
    context: Arc<Context>,
    /// Whether memory that comes back is kept.
    keep: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Registered parts, first address and bytes.
    registered: Vec<(usize, usize)>,
    kept: Option<Arena>,
    /// Memory that should be gone, of which the driver still knows a part.
    stuck: Vec<Arena>,
}

impl Parking {
    pub(super) fn new(context: &Arc<Context>, keep: bool) -> Self {
        Self { context: Arc::clone(context), keep, state: Mutex::default() }
    }

    /// A buffer of `bytes`. If the system doesn't allow so much memory to be pinned it is pageable: slower, not
    /// wrong.
    pub(super) fn lend(
        self: &Arc<Self>,
        label: &'static str,
        bytes: usize,
    ) -> Result<HostBuffer, DeviceError> {
        let home: Arc<dyn Home> = Arc::<Self>::clone(self);
        let mut state = self.state.lock();
        self.forget_stuck(&mut state);
        if let Some(kept) = state.kept.take() {
            if kept.committed() >= bytes {
                return Ok(HostBuffer::lent(kept, bytes, home));
            }
            self.forget(&mut state, kept);
        }
        let memory = HostBuffer::new(label, bytes)?.into_memory();
        let range = (memory.address(), memory.committed());
        if let Err(error) = self.register(&mut state, range) {
            tracing::warn!(bytes, %error, "parked weights are not pinned");
            self.unregister(&mut state, range);
        }
        Ok(HostBuffer::lent(memory, bytes, home))
    }

    /// How the GPU can reach these bytes by itself: the parts of them that one copy may be of, in order. `None` if it
    /// can't.
    pub(super) fn parts(&self, bytes: &[u8]) -> Option<Vec<Range<usize>>> {
        let (first, end) = (bytes.as_ptr().addr(), bytes.as_ptr().addr() + bytes.len());
        let (mut next, mut parts) = (first, Vec::new());
        let state = self.state.lock();
        // The parts of a buffer are in the order of their addresses.
        for &(start, len) in &state.registered {
            if next < end && (start..start + len).contains(&next) {
                let until = end.min(start + len);
                parts.push(next - first..until - first);
                next = until;
            }
        }
        (next == end && !bytes.is_empty()).then_some(parts)
    }

    /// Bytes that are kept for the next time.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.state.lock().kept.as_ref().map_or(0, |kept| kept.committed() as u64)
    }

    fn register(&self, state: &mut State, (address, bytes): (usize, usize)) -> Result<(), CallError> {
        let _bound = self.context.bind()?;
        for offset in (0..bytes).step_by(self.context.piece_bytes()) {
            let (start, len) = (address + offset, self.context.piece_bytes().min(bytes - offset));
            let pointer = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: the memory is mapped and ours; it is unregistered before it goes.
            unsafe { self.context.driver.cuMemHostRegister_v2(pointer, len, 0) }?;
            state.registered.push((start, len));
        }
        Ok(())
    }

    /// Unregisters all parts within a range; returns whether none is left.
    fn unregister(&self, state: &mut State, (address, bytes): (usize, usize)) -> bool {
        let range = address..address + bytes;
        let bound = self.context.bind_to_end();
        let mut left = false;
        state.registered.retain(|&(start, len)| {
            if !range.contains(&start) {
                return true;
            }
            let pointer = std::ptr::with_exposed_provenance_mut(start);
            let unregistered = match &bound {
                // SAFETY: registered by `register`; copies to and from it were waited for.
                Ok(_) => unsafe { self.context.driver.cuMemHostUnregister(pointer) },
                Err(error) => Err(error.clone()),
            };
            if let Err(error) = &unregistered {
                tracing::error!(bytes = len, %error, "host memory stays pinned");
            }
            left |= unregistered.is_err();
            unregistered.is_err()
        });
        !left
    }

    /// Gives memory back to the system.
    fn forget(&self, state: &mut State, memory: Arena) {
        if !self.unregister(state, (memory.address(), memory.committed())) {
            // Another's memory at that address would be taken for pinned.
            state.stuck.push(memory);
        }
    }

    /// Tries once more what the driver would not forget.
    fn forget_stuck(&self, state: &mut State) {
        for memory in std::mem::take(&mut state.stuck) {
            self.forget(state, memory);
        }
    }
}

impl Home for Parking {
    fn take_back(&self, memory: Arena) {
        let mut state = self.state.lock();
        let pinned = state.registered.iter().any(|&(start, _)| start == memory.address());
        match self.keep && pinned && state.kept.is_none() {
            true => state.kept = Some(memory),
            false => self.forget(&mut state, memory),
        }
    }
}

impl Drop for Parking {
    fn drop(&mut self) {
        let mut state = std::mem::take(self.state.get_mut());
        if let Some(kept) = state.kept.take() {
            self.forget(&mut state, kept);
        }
        self.forget_stuck(&mut state);
        state.stuck.into_iter().for_each(std::mem::forget);
    }
}
