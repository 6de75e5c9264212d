//! Tensors on their way in that are on the engine's GPU already.
//!
//! Whole granules of rows are worked on where they are, many windows together, and only hashes come to the host. What
//! is not a whole granule (at the ends of a piece of a tensor, never of a whole one) goes the host's way.

use std::sync::Arc;

use super::stream::{Rows, Stream, Writer, non_finite};
use super::{Intake, Memory, PushError, Slot, TransferError};
use crate::device::cuda::{GpuMemory, GpuMemoryError};
use crate::device::{Opened, Origin, WORKSPACE_ALIGNMENT, WeightWorkspace, Window};
use crate::weights::gpu::{MAX_WINDOWS, workspace_bytes};
use crate::weights::manifest::Target;
use crate::weights::resident::write_window;
use crate::weights::{DType, GpuBucket, LEAF_BYTES, LM_HEAD, SourceError, TensorSpec, WeightSource};

/// What three parts of a window take at most because they are aligned, with the numbers that every window has.
const ROOM_FOR_ALIGNMENT: usize = 4 * WORKSPACE_ALIGNMENT;

/// A tensor on the GPU and where it goes.
struct Located<'a> {
    spec: &'a TensorSpec,
    target: Target,
    /// Where the piece begins in the tensor.
    offset: usize,
    memory: GpuMemory,
}

/// Rows that wait for their turn in the workspace.
struct Queued {
    target: Target,
    from: Opened,
    /// As sent.
    dtype: DType,
    rows: Rows,
}

/// The work of one push.
struct Queue<'d> {
    workspace: Box<dyn WeightWorkspace + 'd>,
    queued: Vec<Queued>,
}

impl Intake {
    /// Takes those tensors of a source that are on the GPU; returns the others.
    pub(super) fn take_from_gpu(
        &mut self,
        memory: &mut dyn Memory,
        source: &mut dyn WeightSource,
        order: Vec<usize>,
        specs: &[TensorSpec],
        targets: &[Target],
    ) -> Result<Vec<usize>, PushError> {
        let (mut located, mut others) = (Vec::new(), Vec::new());
        for position in order {
            let spec = &specs[position];
            match source.gpu_memory(position).map_err(TransferError::from)? {
                Some(memory) if spec.checked_bytes() == Some(memory.bytes()) => {
                    located.push(Located { spec, target: targets[position], offset: 0, memory });
                }
                Some(memory) => {
                    let fault = SourceError::wrong_length(spec, memory.bytes());
                    return Err(TransferError::from(fault).into());
                }
                None => others.push(position),
            }
        }
        self.take_located(memory, &located)?;
        Ok(others)
    }

    /// Takes all pieces of a bucket on the GPU; every name, shape and dtype is checked before the first is stored.
    pub(crate) fn push_gpu_bucket(
        &mut self,
        memory: &mut dyn Memory,
        bucket: &GpuBucket,
    ) -> Result<(), PushError> {
        self.guard(|intake| {
            let targets = intake.resolve(bucket.entries().iter().map(|entry| &entry.tensor))?;
            let located = bucket.entries().iter().zip(targets).map(|(entry, target)| {
                let range = entry.range.clone();
                let memory = bucket.memory().slice(range.start, range.len()).expect("the table was checked");
                Located { spec: &entry.tensor, target, offset: entry.offset, memory }
            });
            intake.take_located(memory, &located.collect::<Vec<_>>())
        })
    }

    /// Takes pieces that are on the GPU. When it returns, nothing of them is open or in use.
    fn take_located(&mut self, memory: &mut dyn Memory, located: &[Located<'_>]) -> Result<(), PushError> {
        let located = || located.iter().filter(|piece| piece.target != Target::Ignored);
        let Some(first) = located().next() else { return Ok(()) };
        let device = Arc::clone(&self.shape.device);
        let workspace = device.weight_workspace(self.room_for(located())).map_err(TransferError::from)?;
        let Some(workspace) = workspace else {
            return Err(refused(first.spec, GpuMemoryError::NotOnGpu));
        };
        let mut queue = Queue { workspace, queued: Vec::new() };
        for piece in located() {
            let from = queue.workspace.open(&piece.memory).map_err(|fault| refused(piece.spec, fault))?;
            self.enqueue(memory, &mut queue, piece, from)?;
        }
        self.flush(memory, &mut queue)
    }

    /// Bytes of a workspace for these pieces: for all, or as many as are usual, but for a granule of the widest.
    fn room_for<'a>(&self, located: impl Iterator<Item = &'a Located<'a>>) -> usize {
        let (mut all, mut granule) = (0_usize, 0);
        for piece in located {
            let to = self.resident(piece.target).dtype;
            let row_elements: usize = piece.spec.shape[1..].iter().product();
            let (elements, from) = (piece.memory.bytes() / piece.spec.dtype.size(), piece.spec.dtype);
            all = all.saturating_add(most_room(elements, from, to));
            let rows = self.shape.device.packed_rows();
            granule = granule.max(most_room((rows * row_elements).min(elements), from, to));
        }
        all.min(workspace_bytes()).max(granule)
    }

    /// The tensor of the model that is stored there or compared with it.
    fn resident(&self, target: Target) -> &TensorSpec {
        match target {
            Target::Tensor(position) | Target::TiedHead { embedding: position } => {
                &self.shape.manifest.tensors()[position]
            }
            Target::Ignored => unreachable!("what is ignored is left out"),
        }
    }

    /// Takes one piece: what can be is put in the queue.
    fn enqueue(
        &mut self,
        memory: &mut dyn Memory,
        queue: &mut Queue<'_>,
        piece: &Located<'_>,
        from: Opened,
    ) -> Result<(), PushError> {
        let bytes = from.bytes();
        let Some(mut stream) = self.take_stream(piece.target, piece.spec)? else { return Ok(()) };
        stream.check_piece(piece.spec, piece.offset, bytes)?;
        self.received_bytes += bytes as u64;
        if bytes > 0 && piece.offset > stream.received() {
            let waiting = queue.read(from)?;
            self.keep_waiting(&mut stream, piece.offset, &waiting)?;
            self.put_stream(piece.target, stream);
            return Ok(());
        }
        let ends_granule = stream.open_granule_bytes().min(bytes);
        if ends_granule > 0 {
            stream = self.through_host(memory, queue, stream, piece, from.slice(0, ends_granule))?;
        }
        let mut done = ends_granule;
        let limit = window_limit(piece.spec.dtype, self.resident(piece.target).dtype, queue.workspace.room());
        while done < bytes
            && let Some(rows) = stream.take_rows(bytes - done, limit)
        {
            let (target, dtype) = (piece.target, piece.spec.dtype);
            queue.queued.push(Queued { target, from: from.slice(done, rows.bytes), dtype, rows });
            done += rows.bytes;
        }
        if stream.is_filled() {
            stream.skip(bytes - done);
        } else if done < bytes {
            stream = self.through_host(memory, queue, stream, piece, from.slice(done, bytes - done))?;
        }
        if stream.has_next_waiting() {
            stream = self.flush_before(memory, queue, stream, piece.target)?;
            let mut writer = Writer::new(&self.shape, &self.options, memory, &mut self.scratch);
            while let Some(waiting) = stream.next_waiting() {
                self.waiting_pieces -= 1;
                self.waiting_bytes -= waiting.len() as u64;
                stream.consume(&mut writer, &waiting)?;
            }
        }
        self.put_stream(piece.target, stream);
        Ok(())
    }

    /// Does what is in the queue, if some of it is the stream's, so that it can go on with bytes on the host.
    fn flush_before(
        &mut self,
        memory: &mut dyn Memory,
        queue: &mut Queue<'_>,
        stream: Box<Stream>,
        target: Target,
    ) -> Result<Box<Stream>, PushError> {
        if stream.is_digested() {
            return Ok(stream);
        }
        self.put_stream(target, stream);
        self.flush(memory, queue)?;
        match std::mem::replace(self.slot(target).expect("a stream has a slot"), Slot::Empty) {
            Slot::Open(stream) => Ok(stream),
            Slot::Empty | Slot::Done(_) => unreachable!("there is more to come for it"),
        }
    }

    /// Takes the next bytes over the host.
    fn through_host(
        &mut self,
        memory: &mut dyn Memory,
        queue: &mut Queue<'_>,
        stream: Box<Stream>,
        piece: &Located<'_>,
        from: Opened,
    ) -> Result<Box<Stream>, PushError> {
        let mut stream = self.flush_before(memory, queue, stream, piece.target)?;
        let bytes = queue.read(from)?;
        let mut writer = Writer::new(&self.shape, &self.options, memory, &mut self.scratch);
        stream.consume(&mut writer, &bytes)?;
        Ok(stream)
    }

    /// Does what is in the queue, and ends the streams to which nothing is left to come.
    fn flush(&mut self, memory: &mut dyn Memory, queue: &mut Queue<'_>) -> Result<(), PushError> {
        let mut done = 0;
        while done < queue.queued.len() {
            let next = &queue.queued[done..queue.queued.len().min(done + MAX_WINDOWS)];
            let windows: Vec<Window<'_>> = next.iter().map(|queued| self.window(queued)).collect();
            let taken = queue.workspace.take(&windows).map_err(TransferError::from)?;
            for (window, seen) in taken.iter().enumerate() {
                let Queued { target, rows, .. } = queue.queued[done];
                let Some(Slot::Open(stream)) = self.slot(target) else { unreachable!("it is put back open") };
                stream.update_hashed(seen);
                let (position, stored) = stream.target();
                let resident = &self.shape.manifest.tensors()[position];
                if let Some(found) = seen.non_finite {
                    let name = if stored { &resident.name } else { LM_HEAD };
                    let value = &found.value[..resident.dtype.size()];
                    return Err(non_finite(name, resident, rows.first_row, found.element, value).into());
                }
                if stored && let Some(arena) = memory.arena() {
                    let (layout, place) = (&self.shape.layout, self.shape.layout.places[position]);
                    let bytes = (window, windows[window].bytes_to());
                    write_window(&mut *queue.workspace, layout, arena, place, rows.first_row, bytes)
                        .map_err(TransferError::from)?;
                }
                done += 1;
            }
        }
        for Queued { target, .. } in queue.queued.drain(..) {
            let slot = self.slot(target).expect("a stream has a slot");
            match std::mem::replace(slot, Slot::Empty) {
                Slot::Open(stream) => self.put_stream(target, stream),
                other => *slot = other,
            }
        }
        Ok(())
    }

    /// What is to be done with rows of an open stream.
    fn window(&self, queued: &Queued) -> Window<'static> {
        let resident = self.resident(queued.target);
        let row_bytes = resident.row_bytes();
        let row_elements = row_bytes / resident.dtype.size();
        let elements = queued.rows.rows * row_elements;
        Window {
            origin: Origin::Opened(queued.from),
            elements,
            from: queued.dtype,
            to: resident.dtype,
            bytes_before: queued.rows.first_row * row_bytes,
            ends: queued.rows.first_row + queued.rows.rows == resident.shape[0],
            find_non_finite: self.options.require_finite,
        }
    }
}

impl Queue<'_> {
    fn read(&mut self, from: Opened) -> Result<Vec<u8>, TransferError> {
        let mut bytes = vec![0; from.bytes()];
        self.workspace.read(from, &mut bytes)?;
        Ok(bytes)
    }
}

/// Bytes of a workspace that a window of so many elements takes at most, wherever it begins.
fn most_room(elements: usize, from: DType, to: DType) -> usize {
    let elements = |dtype: DType| elements.saturating_mul(dtype.size());
    let converted = if from == to { 0 } else { elements(to) };
    let hashes = elements(to) / (LEAF_BYTES / size_of::<u128>());
    let parts_of_leaves = elements(to).min(2 * LEAF_BYTES);
    [elements(from), converted, hashes, parts_of_leaves, ROOM_FOR_ALIGNMENT]
        .into_iter()
        .fold(0, usize::saturating_add)
}

/// Bytes, as sent, that a window may have so that it fits the room; the inverse of [`most_room`].
fn window_limit(from: DType, to: DType, room: usize) -> usize {
    let element = from.size() + if from == to { 0 } else { to.size() };
    // Small windows have small parts of leaves, if they have any.
    let parts_of_leaves = (2 * LEAF_BYTES).min(room / 2);
    let elements = room.saturating_sub(parts_of_leaves + ROOM_FOR_ALIGNMENT) / element;
    // One hash for each leaf.
    (elements - elements / (LEAF_BYTES / size_of::<u128>() / 2)) * from.size()
}

fn refused(spec: &TensorSpec, fault: GpuMemoryError) -> PushError {
    TransferError::from(SourceError::gpu(spec, fault)).into()
}
