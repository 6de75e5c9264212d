//! Changes to weights that are there already: a few elements, or a product of two thin matrices.

mod lora;
mod merge;
#[cfg(test)]
mod tests;

use std::fmt;

pub use self::lora::{LoraAdapter, LoraError, LoraMismatch, LoraShapes};
pub(crate) use self::merge::Prepared;
use super::{DType, TensorSpec};

/// Largest rank of a low-rank change.
const MAX_RANK: usize = 4096;

/// A change to one tensor, merged into its resident values.
///
/// The result is defined to the bit, whatever the machine, the threads and the order of the merge. Everything
/// is widened to f32, which is exact; computed in f32, every operation rounded to nearest even by itself (no
/// fused multiply-add); and rounded once, to nearest even, to the dtype that the tensor has. In numpy, where
/// `w`, `values`, `a` and `b` are arrays of the dtypes in question (`ml_dtypes.bfloat16` is one):
///
/// ```text
/// flat, v32 = w.reshape(-1), values.astype(np.float32)
/// flat[indices] = v32.astype(w.dtype)                                         # Sparse, SparseOp::Set
/// flat[indices] = (flat[indices].astype(np.float32) + v32).astype(w.dtype)    # Sparse, SparseOp::Add
///
/// w32, a32, b32 = (x.astype(np.float32) for x in (w, a, b))                   # LowRank
/// acc = np.zeros_like(w32)
/// for k in range(rank):                       # in this order; `b32 @ a32` adds in another
///     acc = acc + b32[:, k:k+1] * a32[k:k+1, :]
/// w = (w32 + np.float32(scale) * acc).astype(w.dtype)
/// ```
///
/// NaN stays NaN, with bits that may be others than numpy's.
///
/// An update takes one change for each tensor; several take several updates, each with its own rounding.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Delta<'a> {
    /// New values for some elements, or what to add to them.
    Sparse {
        /// Positions in the flat, row-major tensor, strictly ascending.
        indices: &'a [u64],
        /// One value for each position, little-endian.
        values: &'a [u8],
        /// Element type of `values`.
        dtype: DType,
        /// What to do with the values.
        op: SparseOp,
    },
    /// `scale * (b · a)`, added to a matrix `[out, in]`.
    LowRank {
        /// `[rank, in]`, row-major, little-endian.
        a: &'a [u8],
        /// `[out, rank]`, row-major, little-endian.
        b: &'a [u8],
        /// At least 1, at most 4096.
        rank: usize,
        /// Element type of `a` and `b`.
        dtype: DType,
        /// A finite factor: for LoRA `lora_alpha / rank`.
        scale: f32,
    },
}

/// What a sparse change does with its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SparseOp {
    /// The element becomes the value.
    Set,
    /// The value is added to the element.
    Add,
}

/// A change that doesn't fit its tensor. Nothing was changed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// The tensor's shape has more bytes than can be counted.
    #[error("shape {shape:?} has more bytes than can be counted")]
    TensorTooLarge {
        /// The shape.
        shape: Vec<usize>,
    },
    /// More or fewer bytes of values than the indices need.
    #[error("{indices} indices of {dtype} need {} bytes of values, received {received_bytes}",
        super::source::needed(*expected_bytes))]
    ValuesLength {
        /// Number of indices.
        indices: usize,
        /// Element type of the values.
        dtype: DType,
        /// Bytes needed; `None` if they can't be counted.
        expected_bytes: Option<usize>,
        /// Bytes received.
        received_bytes: usize,
    },
    /// An index that isn't larger than the one before it.
    #[error("index {index} at position {position} follows {previous}: indices must strictly ascend")]
    NotAscending {
        /// Position in `indices`.
        position: usize,
        /// The index before it.
        previous: u64,
        /// The index there.
        index: u64,
    },
    /// An index past the end of the tensor.
    #[error("index {index} at position {position} is past the tensor's {elements} elements")]
    IndexPastEnd {
        /// Position in `indices`.
        position: usize,
        /// The index there.
        index: u64,
        /// Elements of the tensor.
        elements: usize,
    },
    /// A low-rank change of a tensor that is no matrix.
    #[error("a low-rank change needs a matrix, the tensor's shape is {shape:?}")]
    NotAMatrix {
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// A rank of zero or beyond any real one.
    #[error("rank {rank} is not in 1..={limit}")]
    Rank {
        /// The rank.
        rank: usize,
        /// The largest one.
        limit: usize,
    },
    /// A factor of another length than rank and tensor say.
    #[error("factor {factor} [{rows}, {columns}] of {dtype} needs {} bytes, received {received_bytes}",
        super::source::needed(*expected_bytes))]
    FactorLength {
        /// `a` or `b`.
        factor: char,
        /// Rows that it must have.
        rows: usize,
        /// Columns that it must have.
        columns: usize,
        /// Its element type.
        dtype: DType,
        /// Bytes needed; `None` if they can't be counted.
        expected_bytes: Option<usize>,
        /// Bytes received.
        received_bytes: usize,
    },
    /// A scale that is NaN or infinite.
    #[error("scale {scale} is not finite")]
    Scale {
        /// The scale.
        scale: f32,
    },
}

impl fmt::Debug for Delta<'_> {
    /// The lengths, not the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Delta::Sparse { indices, dtype, op, .. } => f
                .debug_struct("Sparse")
                .field("indices", &indices.len())
                .field("dtype", dtype)
                .field("op", op)
                .finish_non_exhaustive(),
            Delta::LowRank { a, b, rank, dtype, scale } => f
                .debug_struct("LowRank")
                .field("a_bytes", &a.len())
                .field("b_bytes", &b.len())
                .field("rank", rank)
                .field("dtype", dtype)
                .field("scale", scale)
                .finish(),
        }
    }
}

impl<'a> Delta<'a> {
    /// Whether the change fits a tensor.
    ///
    /// # Errors
    /// A [`DeltaError`] with the first fault.
    pub(crate) fn check(&self, tensor: &TensorSpec) -> Result<(), DeltaError> {
        let Some(bytes) = tensor.checked_bytes() else {
            return Err(DeltaError::TensorTooLarge { shape: tensor.shape.clone() });
        };
        match *self {
            Delta::Sparse { indices, values, dtype, .. } => {
                check_sparse(indices, values.len(), dtype, bytes / tensor.dtype.size())
            }
            Delta::LowRank { a, b, rank, dtype, scale } => {
                let &[out, columns] = tensor.shape.as_slice() else {
                    return Err(DeltaError::NotAMatrix { shape: tensor.shape.clone() });
                };
                if !(1..=MAX_RANK).contains(&rank) {
                    return Err(DeltaError::Rank { rank, limit: MAX_RANK });
                }
                if !scale.is_finite() {
                    return Err(DeltaError::Scale { scale });
                }
                check_factor('a', [rank, columns], dtype, a.len())?;
                check_factor('b', [out, rank], dtype, b.len())
            }
        }
    }

    /// Checks the change and brings it into the form that merges fast. Of a low-rank change this is a copy in
    /// f32, at most 512 KiB longer than the factors are in that.
    ///
    /// # Errors
    /// As [`check`](Delta::check).
    pub(crate) fn prepare(&self, tensor: &TensorSpec) -> Result<Prepared<'a>, DeltaError> {
        self.check(tensor)?;
        Ok(Prepared::new(self, tensor))
    }
}

fn check_sparse(
    indices: &[u64],
    received_bytes: usize,
    dtype: DType,
    elements: usize,
) -> Result<(), DeltaError> {
    let expected_bytes = indices.len().checked_mul(dtype.size());
    if expected_bytes != Some(received_bytes) {
        return Err(DeltaError::ValuesLength {
            indices: indices.len(),
            dtype,
            expected_bytes,
            received_bytes,
        });
    }
    if let Some(place) = indices.windows(2).position(|pair| pair[0] >= pair[1]) {
        return Err(DeltaError::NotAscending {
            position: place + 1,
            previous: indices[place],
            index: indices[place + 1],
        });
    }
    // They ascend: if any is past the end, the last one is.
    let position = indices.partition_point(|&index| index < elements as u64);
    match indices.get(position) {
        Some(&index) => Err(DeltaError::IndexPastEnd { position, index, elements }),
        None => Ok(()),
    }
}

fn check_factor(
    factor: char,
    [rows, columns]: [usize; 2],
    dtype: DType,
    received_bytes: usize,
) -> Result<(), DeltaError> {
    let expected_bytes = rows.checked_mul(columns).and_then(|elements| elements.checked_mul(dtype.size()));
    match expected_bytes {
        Some(bytes) if bytes == received_bytes => Ok(()),
        _ => Err(DeltaError::FactorLength { factor, rows, columns, dtype, expected_bytes, received_bytes }),
    }
}
