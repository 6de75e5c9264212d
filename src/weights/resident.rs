//! Weights in the device's memory, and how they get there.

use std::sync::Arc;

use super::layout::{LayerLayout, MatrixId, Place, VectorId, WeightLayout};
use super::{TensorDigest, WeightVersion};
use crate::device::{Arena, Device, DeviceError, Matrix, QkNorm, Vector};
#[cfg(feature = "cuda")]
use crate::device::{Origin, WeightWorkspace};

/// What weights are: their version, and the digest of each tensor of the manifest.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) version: WeightVersion,
    pub(crate) digests: Arc<[TensorDigest]>,
}

/// All weights of a model, whole and current: there is no other kind.
#[derive(Debug)]
pub(crate) struct ResidentWeights {
    arena: Arena,
    layout: Arc<WeightLayout>,
    identity: Identity,
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
    pub(crate) fn new(arena: Arena, layout: Arc<WeightLayout>, identity: Identity) -> Self {
        assert_eq!(arena.committed(), layout.bytes, "resident weights are whole");
        Self { arena, layout, identity }
    }

    /// Takes apart.
    pub(crate) fn into_parts(self) -> (Arena, Identity) {
        (self.arena, self.identity)
    }

    pub(crate) fn version(&self) -> &WeightVersion {
        &self.identity.version
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The memory, in the resident layout.
    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn bytes(&self) -> usize {
        self.arena.committed()
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
    pub(crate) fn read(&self, device: &dyn Device, out: &mut [u8]) -> Result<(), DeviceError> {
        device.read_bytes(self.arena.view(0, self.arena.committed()), out)
    }

    /// Puts the pages of `staged` in place of the current ones: same addresses, new weights. On an error the
    /// current ones stand.
    pub(crate) fn replace(&mut self, staged: Arena, identity: Identity) -> Result<(), DeviceError> {
        self.arena.adopt(staged)?;
        self.identity = identity;
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

/// Puts rows of the tensor at `place` where they belong; a vector's rows are its elements.
pub(crate) fn write_rows(
    device: &dyn Device,
    layout: &WeightLayout,
    arena: &mut Arena,
    place: Place,
    first_row: usize,
    rows: &[u8],
) -> Result<(), DeviceError> {
    match place {
        Place::Rows { matrix, first_row: start } => {
            let placed = layout.matrix(matrix);
            let dst = arena.view_mut(placed.offset_bytes, placed.bytes);
            device.write_rows(dst, placed.shape, start + first_row, rows)
        }
        Place::Elements { vector, first_element } => {
            let placed = layout.vector(vector);
            let offset = placed.offset_bytes + (first_element + first_row) * placed.dtype.size();
            device.write_bytes(arena.view_mut(offset, rows.len()), rows)
        }
    }
}

/// The inverse of [`write_rows`]: rows of the tensor at `place`, in Hugging Face layout.
pub(crate) fn read_rows(
    device: &dyn Device,
    layout: &WeightLayout,
    arena: &Arena,
    place: Place,
    first_row: usize,
    rows: &mut [u8],
) -> Result<(), DeviceError> {
    match place {
        Place::Rows { matrix, first_row: start } => {
            let placed = layout.matrix(matrix);
            let src = arena.view(placed.offset_bytes, placed.bytes);
            device.read_rows(src, placed.shape, start + first_row, rows)
        }
        Place::Elements { vector, first_element } => {
            let placed = layout.vector(vector);
            let offset = placed.offset_bytes + (first_element + first_row) * placed.dtype.size();
            device.read_bytes(arena.view(offset, rows.len()), rows)
        }
    }
}

/// [`write_rows`] of rows that are a window of the last batch in the device's workspace.
#[cfg(feature = "cuda")]
pub(crate) fn write_window(
    workspace: &mut dyn WeightWorkspace,
    layout: &WeightLayout,
    arena: &mut Arena,
    place: Place,
    first_row: usize,
    (window, bytes): (usize, usize),
) -> Result<(), DeviceError> {
    match place {
        Place::Rows { matrix, first_row: start } => {
            let placed = layout.matrix(matrix);
            let dst = arena.view_mut(placed.offset_bytes, placed.bytes);
            workspace.pack(window, dst, placed.shape, start + first_row)
        }
        Place::Elements { vector, first_element } => {
            let placed = layout.vector(vector);
            let offset = placed.offset_bytes + (first_element + first_row) * placed.dtype.size();
            workspace.copy(window, arena.view_mut(offset, bytes))
        }
    }
}

/// Where `rows` rows of the tensor at `place` are in resident memory.
#[cfg(feature = "cuda")]
pub(crate) fn origin_of<'a>(
    layout: &WeightLayout,
    arena: &'a Arena,
    place: Place,
    first_row: usize,
    rows: usize,
) -> Origin<'a> {
    match place {
        Place::Rows { matrix, first_row: start } => {
            let placed = layout.matrix(matrix);
            let src = arena.view(placed.offset_bytes, placed.bytes);
            Origin::Packed { src, shape: placed.shape, first_row: start + first_row }
        }
        Place::Elements { vector, first_element } => {
            let placed = layout.vector(vector);
            let offset = placed.offset_bytes + (first_element + first_row) * placed.dtype.size();
            Origin::Plain(arena.view(offset, rows * placed.dtype.size()))
        }
    }
}

/// Copies every matrix and vector of `from` of which some tensor is not `wanted`.
pub(crate) fn copy_unwanted(
    device: &dyn Device,
    layout: &WeightLayout,
    wanted: &[bool],
    from: &Arena,
    to: &mut Arena,
) -> Result<(), DeviceError> {
    let unwanted =
        || layout.places.iter().zip(wanted).filter(|(_, wanted)| !**wanted).map(|(place, _)| place);
    let mut ranges: Vec<(usize, usize)> = unwanted()
        .map(|place| match *place {
            Place::Rows { matrix, .. } => {
                let placed = layout.matrix(matrix);
                (placed.offset_bytes, placed.bytes)
            }
            Place::Elements { vector, .. } => {
                let placed = layout.vector(vector);
                (placed.offset_bytes, placed.len * placed.dtype.size())
            }
        })
        .collect();
    ranges.sort_unstable();
    // The parts of a fused matrix are in it once each.
    ranges.dedup();
    for (offset, bytes) in ranges {
        device.copy_bytes(to.view_mut(offset, bytes), from.view(offset, bytes))?;
    }
    Ok(())
}
