//! Weights in the device's memory, and how they get there.

use std::sync::Arc;

use parking_lot::Mutex;

use super::layout::{LayerLayout, MatrixId, Place, VectorId, WeightLayout};
use super::{
    Manifest, Match, SourceError, TensorDigest, TensorHasher, TensorSpec, WeightSource, WeightVersion,
    WeightsDigest,
};
use crate::device::{Arena, Device, DeviceError, Matrix, QkNorm, Vector};

/// Pieces of at least this size are digested and packed at once.
const TOGETHER_FROM_BYTES: usize = 64 << 10;

/// All weights of a model, whole and current: there is no other kind.
#[derive(Debug)]
pub(crate) struct ResidentWeights {
    arena: Arena,
    layout: Arc<WeightLayout>,
    version: WeightVersion,
}

/// The parts of one layer, ready for the device's operations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerWeights<'a> {
    pub(crate) input_norm: Vector<'a>,
    pub(crate) qkv: Matrix<'a>,
    pub(crate) qkv_bias: Option<Vector<'a>>,
    pub(crate) qk_norm: Option<QkNorm<'a>>,
    pub(crate) o: Matrix<'a>,
    pub(crate) o_bias: Option<Vector<'a>>,
    pub(crate) post_norm: Vector<'a>,
    pub(crate) gate_up: Matrix<'a>,
    pub(crate) gate_up_bias: Option<Vector<'a>>,
    pub(crate) down: Matrix<'a>,
    pub(crate) down_bias: Option<Vector<'a>>,
}

impl ResidentWeights {
    /// Wraps an arena that holds a complete set of weights in `layout`.
    pub(crate) fn new(arena: Arena, layout: Arc<WeightLayout>, version: WeightVersion) -> Self {
        assert_eq!(arena.committed(), layout.bytes, "resident weights are whole");
        Self { arena, layout, version }
    }

    pub(crate) fn version(&self) -> WeightVersion {
        self.version
    }

    pub(crate) fn bytes(&self) -> usize {
        self.arena.committed()
    }

    #[cfg(test)]
    pub(crate) fn address(&self) -> usize {
        self.arena.address()
    }

    pub(crate) fn embedding(&self) -> Matrix<'_> {
        self.matrix(self.layout.embedding)
    }

    pub(crate) fn head(&self) -> Matrix<'_> {
        self.matrix(self.layout.head)
    }

    pub(crate) fn final_norm(&self) -> Vector<'_> {
        self.vector(self.layout.final_norm)
    }

    /// The parts of layer `index`; `eps` is of the per-head norms.
    pub(crate) fn layer(&self, index: usize, eps: f32) -> LayerWeights<'_> {
        let layer: &LayerLayout = &self.layout.layers[index];
        LayerWeights {
            input_norm: self.vector(layer.input_norm),
            qkv: self.matrix(layer.qkv),
            qkv_bias: layer.qkv_bias.map(|id| self.vector(id)),
            qk_norm: layer.qk_norm.map(|(q, k)| QkNorm { q: self.vector(q), k: self.vector(k), eps }),
            o: self.matrix(layer.o),
            o_bias: layer.o_bias.map(|id| self.vector(id)),
            post_norm: self.vector(layer.post_norm),
            gate_up: self.matrix(layer.gate_up),
            gate_up_bias: layer.gate_up_bias.map(|id| self.vector(id)),
            down: self.matrix(layer.down),
            down_bias: layer.down_bias.map(|id| self.vector(id)),
        }
    }

    /// Copies everything into host memory, in the resident layout.
    pub(crate) fn read(&self, device: &dyn Device, out: &mut [u8]) {
        device.read_bytes(self.arena.view(0, self.arena.committed()), out);
    }

    /// Puts the pages of `staged` in place of the current ones: same addresses, new version.
    pub(crate) fn replace(&mut self, staged: Arena, version: WeightVersion) -> Result<(), DeviceError> {
        self.arena.adopt(staged)?;
        self.version = version;
        Ok(())
    }

    /// Gives the memory back and keeps the address range.
    pub(crate) fn release(self) -> (Arena, usize) {
        let mut arena = self.arena;
        let freed = arena.decommit();
        (arena, freed)
    }

    fn matrix(&self, id: MatrixId) -> Matrix<'_> {
        let placed = self.layout.matrix(id);
        Matrix { bytes: self.arena.view(placed.offset_bytes, placed.bytes), shape: placed.shape }
    }

    fn vector(&self, id: VectorId) -> Vector<'_> {
        let placed = self.layout.vector(id);
        let bytes = self.arena.view(placed.offset_bytes, placed.len * placed.dtype.size());
        Vector { bytes, len: placed.len, dtype: placed.dtype }
    }
}

/// The contents of a source did not arrive as its index had said.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A tensor's bytes ended early or went on too long.
    #[error("{tensor}: {expected_bytes} bytes expected, {received_bytes} received")]
    WrongLength {
        /// Its name.
        tensor: String,
        /// By shape and dtype.
        expected_bytes: u64,
        /// What the source delivered.
        received_bytes: u64,
    },
    /// The model ties its head to the embedding, and the source has another head.
    #[error("lm_head.weight differs from model.embed_tokens.weight, to which the configuration ties it")]
    TiedHeadDiffers,
}

/// Streams all tensors of `matched` from `source` into the committed, zeroed `arena`.
///
/// Returns the digest of what arrived. On an error the arena's contents are unspecified.
pub(crate) fn transfer(
    device: &dyn Device,
    arena: &mut Arena,
    layout: &WeightLayout,
    manifest: &Manifest,
    matched: &Match,
    source: &mut dyn WeightSource,
) -> Result<WeightsDigest, TransferError> {
    let mut order: Vec<(usize, usize)> = matched.offered.iter().copied().enumerate().collect();
    // The source's order: shards are read from front to back.
    order.sort_unstable_by_key(|&(_, offered)| offered);
    let mut digests = vec![None; manifest.tensors().len()];
    for (index, offered) in order {
        let spec = &manifest.tensors()[index];
        let mut writer = TensorWriter::new(device, arena, layout, layout.places[index], spec);
        let mut hasher = TensorHasher::new(spec);
        source.read(offered, &mut |chunk| digest_and_write(device, &mut hasher, &mut writer, chunk))?;
        writer.finish()?;
        digests[index] = Some(hasher.finish());
    }
    let digests: Vec<_> = digests.into_iter().map(|d| d.expect("a match covers the manifest")).collect();
    if let Some(head) = matched.tied_head {
        let embedding = &manifest.tensors()[head.embedding];
        check_tied_head(embedding, digests[head.embedding], head.offered, source)?;
    }
    source.finish()?;
    let names = manifest.tensors().iter().map(|tensor| tensor.name.as_str());
    Ok(WeightsDigest::combine(names.zip(digests)))
}

/// Digests a piece while it is packed: each takes about as long as the other.
fn digest_and_write(
    device: &dyn Device,
    hasher: &mut TensorHasher,
    writer: &mut TensorWriter<'_>,
    chunk: &[u8],
) {
    if chunk.len() < TOGETHER_FROM_BYTES {
        hasher.update(chunk);
        writer.write(chunk);
        return;
    }
    let (hasher, writer) = (Mutex::new(hasher), Mutex::new(writer));
    device.share_out(2, &|task| match task {
        0 => writer.lock().write(chunk),
        _ => hasher.lock().update(chunk),
    });
}

/// A tied head may be sent along if it is the embedding, bit for bit.
fn check_tied_head(
    embedding: &TensorSpec,
    digest: TensorDigest,
    offered: usize,
    source: &mut dyn WeightSource,
) -> Result<(), TransferError> {
    let mut hasher = TensorHasher::new(embedding);
    let mut received_bytes = 0;
    source.read(offered, &mut |chunk| {
        hasher.update(chunk);
        received_bytes += chunk.len() as u64;
    })?;
    let expected_bytes = (embedding.shape.iter().product::<usize>() * embedding.dtype.size()) as u64;
    if received_bytes != expected_bytes {
        let tensor = "lm_head.weight".to_owned();
        return Err(TransferError::WrongLength { tensor, expected_bytes, received_bytes });
    }
    if hasher.finish() == digest { Ok(()) } else { Err(TransferError::TiedHeadDiffers) }
}

/// Cuts a tensor's byte stream into whole rows and puts them in their place.
struct TensorWriter<'a> {
    device: &'a dyn Device,
    arena: &'a mut Arena,
    layout: &'a WeightLayout,
    place: Place,
    name: &'a str,
    row_bytes: usize,
    expected: usize,
    received: usize,
    /// Bytes of a row that is not whole yet.
    partial: Vec<u8>,
    rows_written: usize,
}

impl<'a> TensorWriter<'a> {
    fn new(
        device: &'a dyn Device,
        arena: &'a mut Arena,
        layout: &'a WeightLayout,
        place: Place,
        spec: &'a TensorSpec,
    ) -> Self {
        let row_bytes = spec.shape[1..].iter().product::<usize>() * spec.dtype.size();
        let expected = row_bytes * spec.shape[0];
        let partial = Vec::with_capacity(row_bytes);
        Self {
            device,
            arena,
            layout,
            place,
            name: &spec.name,
            row_bytes,
            expected,
            received: 0,
            partial,
            rows_written: 0,
        }
    }

    fn write(&mut self, mut chunk: &[u8]) {
        self.received += chunk.len();
        if self.received > self.expected {
            return; // `finish` reports it
        }
        if !self.partial.is_empty() {
            let take = chunk.len().min(self.row_bytes - self.partial.len());
            self.partial.extend_from_slice(&chunk[..take]);
            chunk = &chunk[take..];
            if self.partial.len() < self.row_bytes {
                return;
            }
            let row = std::mem::take(&mut self.partial);
            self.put(&row);
            self.partial = row;
            self.partial.clear();
        }
        let whole = chunk.len() - chunk.len() % self.row_bytes;
        self.put(&chunk[..whole]);
        self.partial.extend_from_slice(&chunk[whole..]);
    }

    /// Writes whole rows (a vector's rows are its elements).
    fn put(&mut self, rows: &[u8]) {
        if rows.is_empty() {
            return;
        }
        match self.place {
            Place::Rows { matrix, first_row } => {
                let placed = self.layout.matrix(matrix);
                let dst = self.arena.view_mut(placed.offset_bytes, placed.bytes);
                self.device.write_rows(dst, placed.shape, first_row + self.rows_written, rows);
            }
            Place::Elements { vector, first_element } => {
                let placed = self.layout.vector(vector);
                let offset = (first_element + self.rows_written) * placed.dtype.size();
                let dst = self.arena.view_mut(placed.offset_bytes + offset, rows.len());
                self.device.write_bytes(dst, rows);
            }
        }
        self.rows_written += rows.len() / self.row_bytes;
    }

    fn finish(self) -> Result<(), TransferError> {
        if self.received == self.expected {
            return Ok(());
        }
        Err(TransferError::WrongLength {
            tensor: self.name.to_owned(),
            expected_bytes: self.expected as u64,
            received_bytes: self.received as u64,
        })
    }
}
