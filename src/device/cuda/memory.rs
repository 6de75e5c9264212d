//! Arenas of GPU memory: an address range reserved once, physical memory mapped and unmapped behind it.
//!
//! Driver calls can fail at any point, those that give memory back among them. What could not be given back
//! stays in the arena's list and is tried again at the next occasion; the accounts say what is really held.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::any::Any;
use std::sync::Arc;

use parking_lot::Mutex;

use super::context::Context;
use super::driver::{CUdevice, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle};
use super::error::{CallError, OUT_OF_MEMORY};
use super::stream::Stream;
use crate::device::{DeviceError, Pages};

/// What memory of this GPU is asked for: physical memory that stays on it.
pub(super) fn properties(device: CUdevice) -> CUmemAllocationProp {
    // SAFETY: a plain C structure, of which zero is the default in every field.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = cudarc::driver::sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = cudarc::driver::sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties
}

/// The bytes that all arenas of a device hold, and how many they may.
#[derive(Debug)]
pub(super) struct Account {
    limit_bytes: u64,
    held_bytes: Mutex<u64>,
}

impl Account {
    pub(super) fn new(limit_bytes: Option<u64>) -> Self {
        Self { limit_bytes: limit_bytes.unwrap_or(u64::MAX), held_bytes: Mutex::new(0) }
    }

    fn take(&self, label: &'static str, bytes: usize) -> Result<(), DeviceError> {
        let mut held = self.held_bytes.lock();
        let available_bytes = self.limit_bytes.saturating_sub(*held);
        if bytes as u64 > available_bytes {
            return Err(DeviceError::OutOfMemory { label, needed_bytes: bytes as u64, available_bytes });
        }
        *held += bytes as u64;
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        *self.held_bytes.lock() -= bytes as u64;
    }
}

/// Physical memory, and where it is mapped.
#[derive(Debug)]
struct Piece {
    handle: CUmemGenericAllocationHandle,
    bytes: usize,
    /// Addresses at which it can be reached now: one, or for a moment two, or none.
    mapped_at: Vec<u64>,
}

/// An address range of a GPU and the memory behind it.
#[derive(Debug)]
pub(super) struct CudaPages {
    label: &'static str,
    context: Arc<Context>,
    stream: Arc<Stream>,
    account: Arc<Account>,
    address: u64,
    reserved: usize,
    /// In the order of their addresses, from the first on.
    pieces: Vec<Piece>,
    /// What should be gone, but the driver didn't take.
    stuck: Vec<Piece>,
    /// Ranges in which adopted pieces are still mapped, first address and bytes.
    other_ranges: Vec<(u64, usize)>,
}

impl CudaPages {
    /// Reserves at least `bytes`.
    pub(super) fn reserve(
        label: &'static str,
        bytes: usize,
        context: &Arc<Context>,
        stream: &Arc<Stream>,
        account: &Arc<Account>,
    ) -> Result<Self, DeviceError> {
        let too_many = DeviceError::AddressSpace { label, bytes: bytes as u64 };
        let reserved = bytes.max(1).checked_next_multiple_of(context.granularity).ok_or(too_many)?;
        let mut address = 0;
        let mut reserve = || {
            let _bound = context.bind()?;
            // SAFETY: `address` is ours to write; `Drop` frees the range.
            unsafe { context.driver.cuMemAddressReserve(&raw mut address, reserved, 0, 0, 0) }
        };
        reserve().map_err(|error| match error.code {
            OUT_OF_MEMORY => DeviceError::AddressSpace { label, bytes: bytes as u64 },
            _ => error.during(label),
        })?;
        let (context, stream, account) = (Arc::clone(context), Arc::clone(stream), Arc::clone(account));
        Ok(Self {
            label,
            context,
            stream,
            account,
            address,
            reserved,
            pieces: Vec::new(),
            stuck: Vec::new(),
            other_ranges: Vec::new(),
        })
    }

    /// Puts memory behind the first `bytes`, all or nothing; `fill` is called with each piece's offset and length
    /// once it can be written, while the next are still to come.
    pub(super) fn commit_filled(
        &mut self,
        bytes: usize,
        fill: &mut dyn FnMut(u64, usize) -> Result<(), CallError>,
    ) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        let whole = bytes.next_multiple_of(self.context.granularity);
        self.clear_stuck()?;
        self.account.take(self.label, whole)?;
        let mut taken = 0;
        let filled = self.take_pieces(whole, &mut taken, fill).and_then(|()| self.stream.synchronize());
        if let Err(error) = filled {
            let available = self.context.memory().map_or(0, |(free, _)| free);
            self.account.give_back(whole - taken);
            self.release_all();
            return Err(error.for_memory(self.label, whole, available));
        }
        Ok(())
    }

    fn take_pieces(
        &mut self,
        whole: usize,
        taken: &mut usize,
        fill: &mut dyn FnMut(u64, usize) -> Result<(), CallError>,
    ) -> Result<(), CallError> {
        let context = Arc::clone(&self.context);
        let _bound = context.bind()?;
        let piece_bytes = self.context.piece_bytes().next_multiple_of(self.context.granularity);
        while *taken < whole {
            let bytes = piece_bytes.min(whole - *taken);
            let address = self.address + *taken as u64;
            let handle = self.create(bytes)?;
            self.pieces.push(Piece { handle, bytes, mapped_at: Vec::new() });
            let last = self.pieces.len() - 1;
            *taken += bytes;
            self.map(last, address)?;
            self.open(address, bytes)?;
            fill(address, bytes)?;
        }
        Ok(())
    }

    fn create(&self, bytes: usize) -> Result<CUmemGenericAllocationHandle, CallError> {
        let (mut handle, wanted) = (0, properties(self.context.device()));
        // SAFETY: both are ours; the handle is released by `release`.
        unsafe { self.context.driver.cuMemCreate(&raw mut handle, bytes, &raw const wanted, 0) }?;
        Ok(handle)
    }

    /// Maps piece `index` at `address`, which is within the reservation and free.
    fn map(&mut self, index: usize, address: u64) -> Result<(), CallError> {
        let piece = &mut self.pieces[index];
        // SAFETY: the range is reserved and nothing is mapped there; the handle is alive.
        unsafe { self.context.driver.cuMemMap(address, piece.bytes, 0, piece.handle, 0) }?;
        piece.mapped_at.push(address);
        Ok(())
    }

    /// Lets the GPU read and write a mapped range.
    fn open(&self, address: u64, bytes: usize) -> Result<(), CallError> {
        // SAFETY: a plain C structure; all fields are set.
        let mut access: CUmemAccessDesc = unsafe { std::mem::zeroed() };
        access.location = properties(self.context.device()).location;
        access.flags = cudarc::driver::sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        // SAFETY: the range is mapped whole.
        unsafe { self.context.driver.cuMemSetAccess(address, bytes, &raw const access, 1) }
    }

    /// Gives back what it can of these; the others stay, without blocking those behind them.
    fn release(&mut self, pieces: Vec<Piece>) {
        for mut piece in pieces {
            let mut failed = None;
            let context = &self.context;
            piece.mapped_at.retain(|&address| {
                // SAFETY: the piece is mapped there whole; the stream that uses it is done (the callers have
                // synchronised), and callers hold the arena exclusively, so no view is alive.
                let unmapped = unsafe { context.driver.cuMemUnmap(address, piece.bytes) };
                unmapped.map_err(|error| failed = Some(error)).is_err()
            });
            if piece.mapped_at.is_empty() {
                // SAFETY: made by `create`, released once: it is forgotten if this succeeds.
                match unsafe { self.context.driver.cuMemRelease(piece.handle) } {
                    Ok(()) => {
                        self.account.give_back(piece.bytes);
                        continue;
                    }
                    Err(error) => failed = Some(error),
                }
            }
            if let Some(error) = failed {
                tracing::error!(label = self.label, bytes = piece.bytes, %error, "memory was not given back");
            }
            self.stuck.push(piece);
        }
    }

    /// Gives everything back that the driver takes.
    fn release_all(&mut self) {
        let context = Arc::clone(&self.context);
        let _bound = match context.bind_to_end() {
            Ok(bound) => bound,
            Err(error) => {
                tracing::error!(label = self.label, %error, "memory was not given back");
                self.stuck.append(&mut self.pieces);
                return;
            }
        };
        // What still runs may use it. If that can't be known any more, neither can anything be done about it.
        if let Err(error) = self.stream.synchronize() {
            tracing::error!(label = self.label, %error, "the GPU failed before memory was given back");
        }
        let pieces = std::mem::take(&mut self.pieces);
        self.release(pieces);
    }

    /// Tries once more what the driver didn't take.
    fn clear_stuck(&mut self) -> Result<(), DeviceError> {
        if self.stuck.is_empty() {
            return Ok(());
        }
        let context = Arc::clone(&self.context);
        let _bound = context.bind().map_err(|error| error.during(self.label))?;
        let stuck = std::mem::take(&mut self.stuck);
        self.release(stuck);
        match self.stuck.iter().map(|piece| piece.bytes).sum::<usize>() {
            0 => Ok(()),
            bytes => {
                let detail = format!("the driver does not take back {bytes} bytes of before");
                Err(DeviceError::Operation { operation: self.label, detail })
            }
        }
    }

    /// Maps the pieces one after another from the first address on.
    fn map_all(&mut self) -> Result<(), CallError> {
        let mut address = self.address;
        for index in 0..self.pieces.len() {
            let bytes = self.pieces[index].bytes;
            if !self.pieces[index].mapped_at.contains(&address) {
                self.map(index, address)?;
            }
            self.open(address, bytes)?;
            address += bytes as u64;
        }
        Ok(())
    }

    /// Unmaps the pieces from this range; they keep their contents.
    fn unmap_all(&mut self) -> Result<(), CallError> {
        let range = self.address..self.address + self.reserved as u64;
        for piece in &mut self.pieces {
            while let Some(at) = piece.mapped_at.iter().position(|address| range.contains(address)) {
                // SAFETY: the piece is mapped there whole; the caller has synchronised and holds the arena
                // exclusively.
                unsafe { self.context.driver.cuMemUnmap(piece.mapped_at[at], piece.bytes) }?;
                piece.mapped_at.swap_remove(at);
            }
        }
        Ok(())
    }

    /// Puts `staged`'s pieces in place of these, which come back; on an error all is as it was.
    fn exchange(&mut self, staged: &mut Self) -> Result<Vec<Piece>, CallError> {
        let context = Arc::clone(&self.context);
        let _bound = context.bind()?;
        self.stream.synchronize()?;
        let unmapped = self.unmap_all();
        let before = std::mem::take(&mut self.pieces);
        let exchanged = unmapped.and_then(|()| {
            self.pieces = std::mem::take(&mut staged.pieces);
            // Both ranges show the memory for a moment: taking it from the other first would leave it in
            // neither if this fails.
            self.map_all()
        });
        let Err(error) = exchanged else { return Ok(before) };
        let mut failed = self.unmap_all().err();
        if staged.pieces.is_empty() {
            staged.pieces = std::mem::take(&mut self.pieces);
        }
        self.pieces = before;
        failed = failed.or(self.map_all().err());
        if let Some(error) = failed {
            // Every later operation on the range fails; nothing reads what isn't there.
            tracing::error!(label = self.label, %error, "memory is not at its address any more");
        }
        Err(error)
    }
}

impl Pages for CudaPages {
    fn address(&self) -> usize {
        self.address as usize
    }

    fn commit(&mut self, bytes: usize) -> Result<(), DeviceError> {
        let (context, stream) = (Arc::clone(&self.context), Arc::clone(&self.stream));
        // What another process left there is nobody's to read.
        self.commit_filled(bytes, &mut |address, bytes| stream.zero(&context, address, bytes))
    }

    fn decommit(&mut self) -> usize {
        self.release_all();
        self.stuck.iter().map(|piece| piece.bytes).sum()
    }

    fn adopt(&mut self, staged: Box<dyn Pages>) -> Result<(), DeviceError> {
        let staged: Box<dyn Any> = staged;
        let mut staged = staged.downcast::<Self>().expect("an arena adopts one of the same device");
        assert!(Arc::ptr_eq(&self.account, &staged.account), "an arena adopts one of the same device");
        self.clear_stuck()?;
        let before = self.exchange(&mut staged).map_err(|error| error.during(self.label))?;
        let context = Arc::clone(&self.context);
        match context.bind_to_end() {
            Ok(_bound) => {
                self.release(before);
                self.forget_other_addresses();
            }
            Err(error) => {
                tracing::error!(label = self.label, %error, "memory was not given back");
                self.stuck.extend(before);
            }
        }
        let range = self.address..self.address + self.reserved as u64;
        if self.pieces.iter().any(|piece| piece.mapped_at.iter().any(|address| !range.contains(address))) {
            self.other_ranges.append(&mut staged.ranges());
        }
        self.other_ranges.append(&mut staged.other_ranges);
        Ok(())
    }
}

impl CudaPages {
    /// Takes away the ranges that are to be freed with the arena: its own first.
    fn ranges(&mut self) -> Vec<(u64, usize)> {
        let own = (std::mem::take(&mut self.address), std::mem::take(&mut self.reserved));
        let mut ranges = vec![own];
        ranges.append(&mut self.other_ranges);
        ranges.retain(|&(_, bytes)| bytes > 0);
        ranges
    }

    /// Unmaps adopted pieces from the range they were staged in. Where that fails they are unmapped with the
    /// arena; the range they were in can't be freed before.
    fn forget_other_addresses(&mut self) {
        let range = self.address..self.address + self.reserved as u64;
        for piece in &mut self.pieces {
            piece.mapped_at.retain(|&address| {
                if range.contains(&address) {
                    return true;
                }
                // SAFETY: the piece is mapped there whole, and the arena it was staged in is consumed.
                match unsafe { self.context.driver.cuMemUnmap(address, piece.bytes) } {
                    Ok(()) => false,
                    Err(error) => {
                        tracing::error!(label = self.label, %error, "staged memory is still mapped");
                        true
                    }
                }
            });
        }
    }
}

impl Drop for CudaPages {
    fn drop(&mut self) {
        self.release_all();
        if self.clear_stuck().is_err() {
            tracing::error!(label = self.label, "memory is lost until the process ends");
        }
        for (address, bytes) in self.ranges() {
            let free = || {
                let _bound = self.context.bind_to_end()?;
                // SAFETY: reserved by `reserve`, freed once; nothing is mapped there (or the driver refuses).
                unsafe { self.context.driver.cuMemAddressFree(address, bytes) }
            };
            // Once more: what it freed already is refused.
            if let Err(error) = free().or_else(|_| free()) {
                tracing::error!(label = self.label, bytes, %error, "a range was not freed");
            }
        }
    }
}

/// A byte of an emulated GPU, whose memory is the host's.
#[cfg(test)]
pub(crate) fn read_emulated(address: usize) -> u8 {
    // SAFETY: it is mapped while there is memory behind it; after that the process ends, which is what a test is about.
    unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() }
}
