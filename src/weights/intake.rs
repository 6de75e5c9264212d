//! Weights on their way in: tensors, pieces and whole sources become the resident layout, in any order and
//! any split, checked and digested as they stream past.
//!
//! An intake owns no memory of the device. Each call is lent the memory that it may write, so that an update in
//! place and one beside the current weights are the same code.

mod error;
#[cfg(feature = "cuda")]
mod gpu;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use safetensors::View;

pub use self::error::{PieceError, PushError, TransferError};
use self::stream::{Stream, Writer};
use super::manifest::{Accept, Target};
use super::views::open as open_view;
use super::{
    Bucket, Incomplete, LoadOptions, Manifest, TensorDigest, TensorReader, TensorSpec, WeightLayout,
    WeightSource, WeightsDigest, WeightsMismatch,
};
use crate::device::{Arena, Device, share_chunks};

/// Bytes of a tensor that are read before they are looked at, by all threads together.
const READ_BYTES: usize = 4 << 20;
/// Bytes of them that one thread reads at a time.
const READ_PART_BYTES: usize = 256 << 10;

/// Pieces that wait for one in front of them: what a hostile sender can make us keep beside their bytes.
const MAX_WAITING_PIECES: usize = 1 << 16;

/// Where an intake writes.
pub(crate) trait Memory {
    /// The memory, in the resident layout; called when something is about to be written. `None`: the weights
    /// are only checked and digested.
    fn arena(&mut self) -> Option<&mut Arena>;
}

impl Memory for Arena {
    fn arena(&mut self) -> Option<&mut Arena> {
        Some(self)
    }
}

/// Nothing is stored.
pub(crate) struct NoMemory;

impl Memory for NoMemory {
    fn arena(&mut self) -> Option<&mut Arena> {
        None
    }
}

/// The device and the model that weights come in for.
#[derive(Debug, Clone)]
pub(crate) struct IntakeShape {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) layout: Arc<WeightLayout>,
}

/// A set of weights of which some have arrived.
pub(crate) struct Intake {
    shape: IntakeShape,
    options: LoadOptions,
    /// By position in the manifest: whether it is to arrive.
    wanted: Vec<bool>,
    /// Digests of what stays.
    kept: Option<Arc<[TensorDigest]>>,
    /// By position in the manifest.
    slots: Vec<Slot>,
    /// A tied model's head, which is compared and not stored.
    head: Slot,
    /// One window of converted elements.
    scratch: Vec<u8>,
    /// What several threads read at a time.
    buffer: Vec<u8>,
    /// Set by the first push that failed.
    failed: bool,
    received_bytes: u64,
    waiting_pieces: usize,
    waiting_bytes: u64,
    peak_waiting_bytes: u64,
}

impl fmt::Debug for Intake {
    /// How far it is, not the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |is: fn(&Slot) -> bool| self.slots.iter().filter(|slot| is(slot)).count();
        f.debug_struct("Intake")
            .field("options", &self.options)
            .field("tensors", &self.slots.len())
            .field("open", &count(|slot| matches!(slot, Slot::Open(_))))
            .field("done", &count(|slot| matches!(slot, Slot::Done(_))))
            .field("received_bytes", &self.received_bytes)
            .field("waiting_bytes", &self.waiting_bytes)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

/// What has arrived of a tensor.
#[derive(Debug)]
enum Slot {
    Empty,
    Open(Box<Stream>),
    Done(TensorDigest),
}

/// What came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) digest: WeightsDigest,
    /// By position in the manifest.
    pub(crate) digests: Arc<[TensorDigest]>,
    pub(crate) tensors: usize,
    pub(crate) received_bytes: u64,
    /// Most host memory that pieces took which had arrived before those in front of them.
    pub(crate) peak_waiting_bytes: u64,
}

impl Intake {
    /// Awaits all tensors.
    pub(crate) fn complete(shape: IntakeShape, options: LoadOptions) -> Self {
        let wanted = shape.manifest.all();
        Self::new(shape, options, wanted, None)
    }

    /// Awaits the `wanted` tensors; the digests of the others stay.
    pub(crate) fn partial(
        shape: IntakeShape,
        options: LoadOptions,
        wanted: Vec<bool>,
        kept: Arc<[TensorDigest]>,
    ) -> Self {
        Self::new(shape, options, wanted, Some(kept))
    }

    fn new(
        shape: IntakeShape,
        options: LoadOptions,
        wanted: Vec<bool>,
        kept: Option<Arc<[TensorDigest]>>,
    ) -> Self {
        let slots = wanted.iter().map(|_| Slot::Empty).collect();
        Self {
            shape,
            options,
            wanted,
            kept,
            slots,
            head: Slot::Empty,
            scratch: Vec::new(),
            buffer: Vec::new(),
            failed: false,
            received_bytes: 0,
            waiting_pieces: 0,
            waiting_bytes: 0,
            peak_waiting_bytes: 0,
        }
    }

    /// Takes everything that `source` offers. With `complete`, that must be all that is wanted, which is
    /// checked before anything is read.
    pub(crate) fn push_all(
        &mut self,
        memory: &mut dyn Memory,
        source: &mut dyn WeightSource,
        complete: bool,
    ) -> Result<(), PushError> {
        self.guard(|intake| {
            let specs = source.index()?;
            let accept = Accept { options: &intake.options, wanted: &intake.wanted, complete };
            let manifest = &intake.shape.manifest;
            let has = |target| intake.has(target);
            let targets = manifest.assign(&specs, source.unsupported(), &accept, &has)?;
            let wanted = |&position: &usize| targets[position] != Target::Ignored;
            let order: Vec<usize> = (0..specs.len()).filter(wanted).collect();
            source.plan(&order).map_err(TransferError::from)?;
            #[cfg(feature = "cuda")]
            let order = intake.take_from_gpu(memory, source, order, &specs, &targets)?;
            for position in order {
                intake.read(memory, source, position, &specs[position], targets[position])?;
            }
            source.finish().map_err(TransferError::from)?;
            Ok(())
        })
    }

    /// Takes a whole tensor.
    pub(crate) fn push(
        &mut self,
        memory: &mut dyn Memory,
        name: &str,
        tensor: &impl View,
    ) -> Result<(), PushError> {
        self.guard(|intake| {
            let (spec, bytes) = open_view(name, tensor)?;
            let target = intake.resolve([&spec])?.remove(0);
            intake.piece(memory, &spec, target, 0, &bytes)
        })
    }

    /// Takes a piece of a tensor: `bytes` at `offset`, both in bytes as sent.
    pub(crate) fn push_piece(
        &mut self,
        memory: &mut dyn Memory,
        tensor: &TensorSpec,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), PushError> {
        self.guard(|intake| {
            let target = intake.resolve([tensor])?.remove(0);
            intake.piece(memory, tensor, target, offset, bytes)
        })
    }

    /// Whether tensors of these names of the model, each once, may be pushed whole. Nothing is stored.
    pub(crate) fn check_whole<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<(), PushError> {
        if self.failed {
            return Err(PushError::Failed);
        }
        let mut faults = WeightsMismatch::default();
        for name in names {
            match self.shape.manifest.position(name) {
                None => faults.unknown.push(name.to_owned()),
                Some(position) if !self.wanted[position] => faults.not_asked.push(name.to_owned()),
                Some(position) if !matches!(self.slots[position], Slot::Empty) => {
                    faults.duplicate.push(name.to_owned());
                }
                Some(_) => {}
            }
        }
        Ok(faults.into_result()?)
    }

    /// Takes a piece of the tensor at a position of the manifest, in its resident dtype.
    pub(crate) fn push_resident(
        &mut self,
        memory: &mut dyn Memory,
        position: usize,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), PushError> {
        self.guard(|intake| {
            let tensor = intake.shape.manifest.tensors()[position].clone();
            if !intake.wanted[position] {
                let not_asked = vec![tensor.name];
                return Err(Box::new(WeightsMismatch { not_asked, ..WeightsMismatch::default() }).into());
            }
            intake.piece(memory, &tensor, Target::Tensor(position), offset, bytes)
        })
    }

    /// Takes all pieces of a bucket; every name, shape and dtype is checked before the first is stored.
    pub(crate) fn push_bucket(
        &mut self,
        memory: &mut dyn Memory,
        bucket: &Bucket<'_>,
    ) -> Result<(), PushError> {
        self.guard(|intake| {
            let targets = intake.resolve(bucket.entries().iter().map(|entry| &entry.tensor))?;
            for ((entry, bytes), target) in bucket.pieces().zip(targets) {
                intake.piece(memory, &entry.tensor, target, entry.offset, bytes)?;
            }
            Ok(())
        })
    }

    /// What came in, if that is all.
    ///
    /// # Errors
    /// What is missing, or why what came in is not acceptable.
    pub(crate) fn finish(self) -> Result<Received, FinishError> {
        if self.failed {
            return Err(FinishError::Failed);
        }
        let mut faults = WeightsMismatch::default();
        let mut digests = Vec::with_capacity(self.slots.len());
        for (position, slot) in self.slots.iter().enumerate() {
            let name = &self.shape.manifest.tensors()[position].name;
            match (slot, &self.kept) {
                (Slot::Done(digest), _) => digests.push(*digest),
                (Slot::Open(stream), _) => faults.incomplete.push(stream.incomplete()),
                (Slot::Empty, Some(kept)) if !self.wanted[position] => digests.push(kept[position]),
                (Slot::Empty, _) => faults.missing.push(name.clone()),
            }
        }
        if let Slot::Open(stream) = &self.head {
            faults.incomplete.push(stream.incomplete());
        }
        faults.into_result()?;
        if let (Slot::Done(head), Some(embedding)) = (&self.head, self.shape.manifest.tied_to())
            && digests[embedding] != *head
        {
            return Err(TransferError::TiedHeadDiffers.into());
        }
        let names = self.shape.manifest.tensors().iter().map(|tensor| tensor.name.as_str());
        let digest = WeightsDigest::combine(names.zip(digests.iter().copied()));
        match self.options.expected_digest {
            Some(expected) if expected != digest => {
                Err(TransferError::WrongDigest { expected, received: digest }.into())
            }
            _ => Ok(Received {
                digest,
                digests: digests.into(),
                tensors: self.wanted.iter().filter(|wanted| **wanted).count(),
                received_bytes: self.received_bytes,
                peak_waiting_bytes: self.peak_waiting_bytes,
            }),
        }
    }

    /// Runs one push; the first that fails, by error or panic, is the last.
    fn guard(&mut self, push: impl FnOnce(&mut Self) -> Result<(), PushError>) -> Result<(), PushError> {
        if std::mem::replace(&mut self.failed, true) {
            return Err(PushError::Failed);
        }
        push(self)?;
        self.failed = false;
        Ok(())
    }

    /// Refuses all further pushes.
    pub(crate) fn fail(&mut self) {
        self.failed = true;
    }

    /// Whether anything of this tensor has arrived.
    fn has(&self, target: Target) -> bool {
        match target {
            Target::Tensor(position) => !matches!(self.slots[position], Slot::Empty),
            Target::TiedHead { .. } => !matches!(self.head, Slot::Empty),
            Target::Ignored => false,
        }
    }

    fn slot(&mut self, target: Target) -> Option<&mut Slot> {
        match target {
            Target::Tensor(position) => Some(&mut self.slots[position]),
            Target::TiedHead { .. } => Some(&mut self.head),
            Target::Ignored => None,
        }
    }

    /// Targets of tensors that may have arrived in part.
    fn resolve<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a TensorSpec>,
    ) -> Result<Vec<Target>, Box<WeightsMismatch>> {
        let accept = Accept { options: &self.options, wanted: &self.wanted, complete: false };
        let mut faults = WeightsMismatch::default();
        let mut targets = Vec::new();
        let mut names: HashMap<Target, &str> = HashMap::new();
        for tensor in tensors {
            let Some(target) = self.shape.manifest.target(tensor, &accept, &mut faults) else { continue };
            targets.push(target);
            let slot = match target {
                Target::Tensor(position) => &self.slots[position],
                Target::TiedHead { .. } => &self.head,
                Target::Ignored => continue,
            };
            // Pieces of one tensor have one name: of two that are mapped to the same, one is too many.
            let twice = match slot {
                Slot::Done(_) => true,
                Slot::Open(stream) => stream.name() != tensor.name,
                Slot::Empty => *names.entry(target).or_insert(&tensor.name) != tensor.name,
            };
            if twice {
                faults.duplicate.push(tensor.name.clone());
            }
        }
        faults.into_result().map(|()| targets)
    }

    /// Opens the stream of a tensor, or takes out the open one.
    ///
    /// # Errors
    /// A duplicate, if all of it has arrived.
    fn take_stream(
        &mut self,
        target: Target,
        tensor: &TensorSpec,
    ) -> Result<Option<Box<Stream>>, Box<WeightsMismatch>> {
        let Some(slot) = self.slot(target) else { return Ok(None) };
        match std::mem::replace(slot, Slot::Empty) {
            Slot::Open(stream) => Ok(Some(stream)),
            Slot::Empty => Ok(Some(Box::new(Stream::new(&self.shape, target, tensor)))),
            Slot::Done(_) => {
                let duplicate = vec![tensor.name.clone()];
                Err(Box::new(WeightsMismatch { duplicate, ..WeightsMismatch::default() }))
            }
        }
    }

    /// Puts a stream back: as a digest if it has ended, not at all if only empty pieces have come.
    fn put_stream(&mut self, target: Target, stream: Box<Stream>) {
        let slot = self.slot(target).expect("a stream has a slot");
        *slot = match stream.is_done() {
            true => Slot::Done(stream.finish()),
            false if stream.is_untouched() => Slot::Empty,
            false => Slot::Open(stream),
        };
    }

    /// Keeps a piece that lies further on.
    fn keep_waiting(&mut self, stream: &mut Stream, offset: usize, bytes: &[u8]) -> Result<(), PieceError> {
        if self.waiting_pieces == MAX_WAITING_PIECES {
            let (tensor, limit) = (stream.name().to_owned(), MAX_WAITING_PIECES);
            return Err(PieceError::TooManyWaiting { tensor, limit });
        }
        self.waiting_pieces += 1;
        self.waiting_bytes += bytes.len() as u64;
        self.peak_waiting_bytes = self.peak_waiting_bytes.max(self.waiting_bytes);
        stream.keep(offset, bytes);
        Ok(())
    }

    fn piece(
        &mut self,
        memory: &mut dyn Memory,
        tensor: &TensorSpec,
        target: Target,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), PushError> {
        let Some(mut stream) = self.take_stream(target, tensor)? else { return Ok(()) };
        stream.check_piece(tensor, offset, bytes.len())?;
        self.received_bytes += bytes.len() as u64;
        if bytes.is_empty() {
            // Nothing to keep, and nothing to wait for.
        } else if offset > stream.received() {
            self.keep_waiting(&mut stream, offset, bytes)?;
        } else {
            let mut writer = Writer::new(&self.shape, &self.options, memory, &mut self.scratch);
            stream.consume(&mut writer, bytes)?;
            while let Some(waiting) = stream.next_waiting() {
                self.waiting_pieces -= 1;
                self.waiting_bytes -= waiting.len() as u64;
                stream.consume(&mut writer, &waiting)?;
            }
        }
        self.put_stream(target, stream);
        Ok(())
    }

    /// Reads one whole tensor of a source.
    fn read(
        &mut self,
        memory: &mut dyn Memory,
        source: &mut dyn WeightSource,
        position: usize,
        tensor: &TensorSpec,
        target: Target,
    ) -> Result<(), PushError> {
        let Some(mut stream) = self.take_stream(target, tensor)? else { return Ok(()) };
        let mut writer = Writer::new(&self.shape, &self.options, memory, &mut self.scratch);
        let is_read = match source.reader(position).map_err(TransferError::from)? {
            Some(reader) => {
                read_shared(&self.shape, &mut self.buffer, &*reader, &mut stream, &mut writer)?;
                true
            }
            None => false,
        };
        if !is_read {
            read_alone(source, position, tensor, &mut stream, &mut writer)?;
        }
        self.received_bytes += stream.expected() as u64;
        self.put_stream(target, stream);
        Ok(())
    }
}

/// Reads a whole tensor that the source hands over by itself.
fn read_alone(
    source: &mut dyn WeightSource,
    position: usize,
    tensor: &TensorSpec,
    stream: &mut Stream,
    writer: &mut Writer<'_>,
) -> Result<(), PushError> {
    let expected_bytes = stream.expected() as u64;
    let mut received_bytes = 0_u64;
    let mut outcome = Ok(());
    source
        .read(position, &mut |piece| {
            received_bytes += piece.len() as u64;
            if outcome.is_ok() && received_bytes <= expected_bytes {
                outcome = stream.consume(writer, piece);
            }
        })
        .map_err(TransferError::from)?;
    outcome?;
    if received_bytes == expected_bytes {
        return Ok(());
    }
    let tensor = tensor.name.clone();
    Err(TransferError::WrongLength { tensor, expected_bytes, received_bytes }.into())
}

/// Reads a whole tensor on the device's threads.
fn read_shared(
    shape: &IntakeShape,
    buffer: &mut Vec<u8>,
    reader: &dyn TensorReader,
    stream: &mut Stream,
    writer: &mut Writer<'_>,
) -> Result<(), PushError> {
    let expected = stream.expected();
    for offset in (0..expected).step_by(READ_BYTES) {
        let bytes = READ_BYTES.min(expected - offset);
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        let fault = Mutex::new(None);
        share_chunks(&*shape.device, &mut buffer[..bytes], READ_PART_BYTES, &|part, out| {
            if let Err(error) = reader.read_at(offset + part * READ_PART_BYTES, out) {
                fault.lock().get_or_insert(error);
            }
        });
        if let Some(error) = fault.into_inner() {
            return Err(TransferError::from(error).into());
        }
        stream.consume(writer, &buffer[..bytes])?;
    }
    Ok(())
}

/// Why an intake is not a whole set of weights.
#[derive(Debug)]
pub(crate) enum FinishError {
    Mismatch(Box<WeightsMismatch>),
    Transfer(TransferError),
    /// A push had failed.
    Failed,
}

impl From<Box<WeightsMismatch>> for FinishError {
    fn from(mismatch: Box<WeightsMismatch>) -> Self {
        FinishError::Mismatch(mismatch)
    }
}

impl From<TransferError> for FinishError {
    fn from(error: TransferError) -> Self {
        FinishError::Transfer(error)
    }
}

impl Incomplete {
    pub(super) fn of(tensor: &TensorSpec, expected: usize, received: usize) -> Self {
        let name = tensor.name.clone();
        Self { name, expected_bytes: expected as u64, received_bytes: received as u64 }
    }
}
