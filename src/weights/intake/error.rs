//! What can go wrong while weights come in.

use crate::device::DeviceError;
use crate::weights::json::cut;
use crate::weights::{DeltaError, SourceError, WeightsDigest, WeightsMismatch};

/// The contents did not arrive as announced, or are not what is asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A tensor's bytes ended early or went on too long.
    #[error("{}: {expected_bytes} bytes expected, {received_bytes} received", cut(tensor))]
    WrongLength {
        /// Its name.
        tensor: String,
        /// By shape and dtype.
        expected_bytes: u64,
        /// What the source delivered.
        received_bytes: u64,
    },
    /// An element is infinite or no number, and [`LoadOptions::require_finite`] is set. It is the first of its
    /// tensor.
    ///
    /// [`LoadOptions::require_finite`]: crate::LoadOptions::require_finite
    #[error("{}{index:?} is {value} in the engine's dtype, all values must be finite", cut(tensor))]
    NonFinite {
        /// The tensor's name.
        tensor: String,
        /// Row and column, or the position in a vector.
        index: Vec<usize>,
        /// The value in the engine's dtype.
        value: f32,
    },
    /// The model ties its head to the embedding, and another head was sent.
    #[error("lm_head.weight differs from model.embed_tokens.weight, to which the configuration ties it")]
    TiedHeadDiffers,
    /// The device failed to take bytes in, or to give back what a change is made to.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The whole is not what the caller expects.
    #[error("the weights have digest {received}, expected {expected}")]
    WrongDigest {
        /// By [`LoadOptions::expected_digest`](crate::LoadOptions::expected_digest).
        expected: WeightsDigest,
        /// Of what arrived.
        received: WeightsDigest,
    },
}

/// A piece of a tensor that can't be where it says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PieceError {
    /// It ends behind the tensor's end.
    #[error("{}: {bytes} bytes at offset {offset} of a tensor of {tensor_bytes} bytes", cut(tensor))]
    OutOfRange {
        /// The tensor's name.
        tensor: String,
        /// Where the piece begins.
        offset: usize,
        /// Its length.
        bytes: usize,
        /// The tensor's length.
        tensor_bytes: usize,
    },
    /// Some of it has arrived before.
    #[error("{}: {bytes} bytes at offset {offset}, of which some have arrived before", cut(tensor))]
    Overlap {
        /// The tensor's name.
        tensor: String,
        /// Where the piece begins.
        offset: usize,
        /// Its length.
        bytes: usize,
    },
    /// An earlier piece of the tensor gave another dtype or shape.
    #[error("{}: {received}, in an earlier piece {expected}", cut(tensor))]
    Conflict {
        /// The tensor's name.
        tensor: String,
        /// Dtype and shape as in the first piece.
        expected: String,
        /// Dtype and shape of this one.
        received: String,
    },
    /// More pieces arrived before those in front of them than are kept.
    #[error("{}: more than {limit} pieces wait for one in front of them", cut(tensor))]
    TooManyWaiting {
        /// The tensor's name.
        tensor: String,
        /// Pieces that are kept, of all tensors together.
        limit: usize,
    },
}

/// A push was refused or failed. The transaction is over: it can only be dropped. What the engine held before
/// stands, unless the update was in place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// Tensors don't belong here: every fault of the push is listed. Nothing of it was stored.
    #[error(transparent)]
    Mismatch(#[from] Box<WeightsMismatch>),
    /// The source's index could not be read, or the tensor doesn't have the bytes it claims.
    #[error(transparent)]
    Index(SourceError),
    /// The contents did not arrive as announced, or are not acceptable.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A piece can't be where it says.
    #[error(transparent)]
    Piece(#[from] PieceError),
    /// A change can't be made to its tensor.
    #[error("{}: {source}", cut(tensor))]
    Delta {
        /// The tensor's name.
        tensor: String,
        /// Why.
        source: DeltaError,
    },
    /// A change was sent to weights that an earlier update in place has torn: there is nothing to change.
    #[error("{}: the weights are torn, only whole tensors can be taken", cut(tensor))]
    NoBase {
        /// The tensor's name.
        tensor: String,
    },
    /// An earlier push of this transaction failed.
    #[error("an earlier push of this transaction failed: drop it and begin another")]
    Failed,
}

impl From<SourceError> for PushError {
    fn from(error: SourceError) -> Self {
        PushError::Index(error)
    }
}
