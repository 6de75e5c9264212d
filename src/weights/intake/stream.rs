//! One tensor on its way in.

use std::collections::BTreeMap;
use std::fmt;

use parking_lot::Mutex;

use super::{IntakeShape, Memory, PieceError, PushError, TransferError};
#[cfg(feature = "cuda")]
use crate::device::Seen;
use crate::device::share_chunks;
use crate::weights::convert::{convert, first_non_finite};
use crate::weights::manifest::Target;
use crate::weights::resident::write_rows;
use crate::weights::{DType, Incomplete, LM_HEAD, LoadOptions, TensorDigest, TensorHasher, TensorSpec};

/// Bytes that are converted, digested and packed before the next are looked at: they stay in the caches.
const WINDOW_BYTES: usize = 2 << 20;
/// Bytes that one thread converts and checks at a time.
const PART_BYTES: usize = 64 << 10;

/// A tensor of which some bytes have arrived.
pub(super) struct Stream {
    /// As sent.
    sent: TensorSpec,
    /// Position of what it is compared with or stored as in the manifest, and whether it is stored.
    position: usize,
    stored: bool,
    /// Bytes of the tensor as sent.
    expected: usize,
    /// Bytes of it that count; the rest is vocabulary padding.
    kept: usize,
    /// Bytes of a row as sent; a vector's row is an element.
    row_bytes: usize,
    /// Bytes that are cut off a stream at a time: rows that are packed together.
    granule_bytes: usize,
    /// Bytes that have arrived without a gap.
    received: usize,
    /// The last of them, no whole granule.
    carry: Vec<u8>,
    rows_written: usize,
    /// Windows of rows that were taken and not digested yet.
    undigested: usize,
    hasher: TensorHasher,
    /// Pieces that lie further on, by offset.
    waiting: BTreeMap<usize, Vec<u8>>,
}

impl fmt::Debug for Stream {
    /// How far it is, not the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Stream");
        shown.field("sent", &self.sent).field("expected", &self.expected).field("received", &self.received);
        shown.field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

impl Stream {
    /// Nothing has arrived yet of `sent`, which the manifest accepts as `target`.
    pub(super) fn new(shape: &IntakeShape, target: Target, sent: &TensorSpec) -> Self {
        let (position, stored) = match target {
            Target::Tensor(position) => (position, true),
            Target::TiedHead { embedding } => (embedding, false),
            Target::Ignored => unreachable!("what is ignored has no stream"),
        };
        let resident = &shape.manifest.tensors()[position];
        let rows = resident.shape[0];
        let row_bytes = resident.shape[1..].iter().product::<usize>() * sent.dtype.size();
        Self {
            expected: sent.shape[0] * row_bytes,
            kept: rows * row_bytes,
            row_bytes,
            granule_bytes: row_bytes * shape.device.packed_rows(),
            received: 0,
            carry: Vec::new(),
            rows_written: 0,
            undigested: 0,
            hasher: TensorHasher::new(resident),
            waiting: BTreeMap::new(),
            sent: sent.clone(),
            position,
            stored,
        }
    }

    /// As sent.
    pub(super) fn name(&self) -> &str {
        &self.sent.name
    }

    pub(super) fn expected(&self) -> usize {
        self.expected
    }

    pub(super) fn received(&self) -> usize {
        self.received
    }

    pub(super) fn is_done(&self) -> bool {
        self.received == self.expected && self.undigested == 0
    }

    /// Whether no byte has arrived.
    pub(super) fn is_untouched(&self) -> bool {
        self.received == 0 && self.waiting.is_empty()
    }

    /// The digest of a tensor that is done.
    pub(super) fn finish(self) -> TensorDigest {
        self.hasher.finish()
    }

    pub(super) fn incomplete(&self) -> Incomplete {
        let waiting: usize = self.waiting.values().map(Vec::len).sum();
        Incomplete::of(&self.sent, self.expected, self.received + waiting)
    }

    /// Whether a piece fits beside what has arrived.
    pub(super) fn check_piece(
        &self,
        tensor: &TensorSpec,
        offset: usize,
        bytes: usize,
    ) -> Result<(), PieceError> {
        let name = || self.sent.name.clone();
        if (self.sent.dtype, &self.sent.shape) != (tensor.dtype, &tensor.shape) {
            let shown = |spec: &TensorSpec| format!("{} {:?}", spec.dtype, spec.shape);
            let (expected, received) = (shown(&self.sent), shown(tensor));
            return Err(PieceError::Conflict { tensor: name(), expected, received });
        }
        let end = match offset.checked_add(bytes) {
            Some(end) if end <= self.expected => end,
            _ => {
                let tensor_bytes = self.expected;
                return Err(PieceError::OutOfRange { tensor: name(), offset, bytes, tensor_bytes });
            }
        };
        let before = self.waiting.range(..end).next_back();
        let free_from = before.map_or(0, |(at, piece)| at + piece.len()).max(self.received);
        match bytes == 0 || offset >= free_from {
            true => Ok(()),
            false => Err(PieceError::Overlap { tensor: name(), offset, bytes }),
        }
    }

    /// Keeps a piece that lies further on until those in front of it have arrived.
    pub(super) fn keep(&mut self, offset: usize, bytes: &[u8]) {
        self.waiting.insert(offset, bytes.to_vec());
    }

    /// Position of what it is compared with or stored as in the manifest, and whether it is stored.
    #[cfg(feature = "cuda")]
    pub(super) fn target(&self) -> (usize, bool) {
        (self.position, self.stored)
    }

    /// Bytes that would end a granule of which some have arrived.
    #[cfg(feature = "cuda")]
    pub(super) fn open_granule_bytes(&self) -> usize {
        if self.carry.is_empty() { 0 } else { self.granule_bytes - self.carry.len() }
    }

    /// Takes whole granules, or all that is left, of the next `bytes` bytes for a device that has them: at most
    /// `limit` bytes, if a granule fits. The digest waits for [`Stream::update_hashed`]. `None`: nothing of them can
    /// be taken so.
    #[cfg(feature = "cuda")]
    pub(super) fn take_rows(&mut self, bytes: usize, limit: usize) -> Option<Rows> {
        debug_assert!(self.carry.is_empty(), "granules are taken from their begin");
        let counts = self.kept.saturating_sub(self.received).min(bytes);
        let all_left = self.received + counts == self.kept;
        let most = (limit / self.granule_bytes).max(1) * self.granule_bytes;
        let taken = match counts {
            _ if counts > most => most,
            _ if all_left => counts,
            _ => counts - counts % self.granule_bytes,
        };
        if taken == 0 {
            return None;
        }
        let rows = Rows { first_row: self.rows_written, rows: taken / self.row_bytes, bytes: taken };
        self.received += taken;
        self.rows_written += rows.rows;
        self.undigested += 1;
        Some(rows)
    }

    /// Takes bytes that don't count: vocabulary padding.
    #[cfg(feature = "cuda")]
    pub(super) fn skip(&mut self, bytes: usize) {
        debug_assert!(self.received >= self.kept, "padding is at the end");
        self.received += bytes;
    }

    /// Whether all that counts has arrived.
    #[cfg(feature = "cuda")]
    pub(super) fn is_filled(&self) -> bool {
        self.received >= self.kept
    }

    /// What was taken by [`Stream::take_rows`], in the same order.
    #[cfg(feature = "cuda")]
    pub(super) fn update_hashed(&mut self, seen: &Seen) {
        self.hasher.update_hashed(&seen.head, &seen.leaves, &seen.tail);
        self.undigested -= 1;
    }

    /// Whether all that was taken is digested.
    #[cfg(feature = "cuda")]
    pub(super) fn is_digested(&self) -> bool {
        self.undigested == 0
    }

    /// Whether a piece that waited is next.
    #[cfg(feature = "cuda")]
    pub(super) fn has_next_waiting(&self) -> bool {
        self.waiting.contains_key(&self.received)
    }

    /// Takes out the piece that is next.
    pub(super) fn next_waiting(&mut self) -> Option<Vec<u8>> {
        self.waiting.remove(&self.received)
    }

    /// Takes the next bytes; they don't go beyond the end.
    pub(super) fn consume(&mut self, writer: &mut Writer<'_>, bytes: &[u8]) -> Result<(), PushError> {
        let counts = self.kept.saturating_sub(self.received).min(bytes.len());
        self.received += bytes.len();
        let mut bytes = &bytes[..counts];
        if !self.carry.is_empty() {
            let take = bytes.len().min(self.granule_bytes - self.carry.len());
            self.carry.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.carry.len() == self.granule_bytes {
                self.store_carry(writer)?;
            }
        }
        let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % self.granule_bytes);
        self.store(writer, whole)?;
        self.carry.extend_from_slice(rest);
        if self.received >= self.kept {
            self.store_carry(writer)?;
        }
        Ok(())
    }

    fn store_carry(&mut self, writer: &mut Writer<'_>) -> Result<(), TransferError> {
        let mut carry = std::mem::take(&mut self.carry);
        self.store(writer, &carry)?;
        carry.clear();
        self.carry = carry;
        Ok(())
    }

    /// Converts, checks, digests and packs whole rows.
    fn store(&mut self, writer: &mut Writer<'_>, rows: &[u8]) -> Result<(), TransferError> {
        let window_bytes = (WINDOW_BYTES / self.granule_bytes).max(1) * self.granule_bytes;
        for window in rows.chunks(window_bytes) {
            let first_row = self.rows_written;
            writer.write(self, first_row, window)?;
            self.rows_written += window.len() / self.row_bytes;
        }
        Ok(())
    }
}

/// Rows that a device takes from where they are.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub(super) first_row: usize,
    pub(super) rows: usize,
    /// As sent.
    pub(super) bytes: usize,
}

/// Where rows go and what is done to them on the way.
pub(super) struct Writer<'a> {
    shape: &'a IntakeShape,
    options: &'a LoadOptions,
    memory: &'a mut dyn Memory,
    scratch: &'a mut Vec<u8>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(
        shape: &'a IntakeShape,
        options: &'a LoadOptions,
        memory: &'a mut dyn Memory,
        scratch: &'a mut Vec<u8>,
    ) -> Self {
        Self { shape, options, memory, scratch }
    }

    fn write(&mut self, stream: &mut Stream, first_row: usize, sent: &[u8]) -> Result<(), TransferError> {
        let device = &*self.shape.device;
        let resident = &self.shape.manifest.tensors()[stream.position];
        let rows = if stream.sent.dtype == resident.dtype {
            sent
        } else {
            let bytes = sent.len() / stream.sent.dtype.size() * resident.dtype.size();
            if self.scratch.len() < bytes {
                self.scratch.resize(bytes, 0);
            }
            let out = &mut self.scratch[..bytes];
            convert_shared(self.shape, stream.sent.dtype, sent, resident.dtype, out);
            &*out
        };
        if self.options.require_finite
            && let Some(element) = non_finite_shared(self.shape, resident.dtype, rows)
        {
            let name = if stream.stored { &resident.name } else { LM_HEAD };
            let size = resident.dtype.size();
            return Err(non_finite(name, resident, first_row, element, &rows[element * size..][..size]));
        }
        stream.hasher.update_shared(rows, &|count, work| device.share_out(count, work));
        if stream.stored
            && let Some(arena) = self.memory.arena()
        {
            let place = self.shape.layout.places[stream.position];
            write_rows(device, &self.shape.layout, arena, place, first_row, rows)?;
        }
        Ok(())
    }
}

/// [`convert`] on the device's threads.
fn convert_shared(shape: &IntakeShape, from: DType, input: &[u8], to: DType, out: &mut [u8]) {
    let elements = PART_BYTES / 4;
    share_chunks(&*shape.device, out, elements * to.size(), &|part, out| {
        let begin = part * elements * from.size();
        let input = &input[begin..input.len().min(begin + elements * from.size())];
        convert(from, input, to, out);
    });
}

/// The first element that is infinite or no number, found on the device's threads.
fn non_finite_shared(shape: &IntakeShape, dtype: DType, bytes: &[u8]) -> Option<usize> {
    let first = Mutex::new(None);
    shape.device.share_out(bytes.len().div_ceil(PART_BYTES), &|part| {
        let begin = part * PART_BYTES;
        let part = &bytes[begin..bytes.len().min(begin + PART_BYTES)];
        if let Some(element) = first_non_finite(dtype, part) {
            let element = begin / dtype.size() + element;
            let mut first = first.lock();
            *first = Some(first.map_or(element, |first: usize| first.min(element)));
        }
    });
    first.into_inner()
}

/// `name` is that of the tensor, which a tied head shares no more than its form with the `resident` one.
pub(super) fn non_finite(
    name: &str,
    resident: &TensorSpec,
    first_row: usize,
    element: usize,
    bytes: &[u8],
) -> TransferError {
    let mut value = [0; 4];
    convert(resident.dtype, bytes, DType::F32, &mut value);
    let cols: usize = resident.shape[1..].iter().product();
    let (row, col) = (first_row + element / cols, element % cols);
    let index = if resident.shape.len() > 1 { vec![row, col] } else { vec![row] };
    TransferError::NonFinite { tensor: name.to_owned(), index, value: f32::from_le_bytes(value) }
}
