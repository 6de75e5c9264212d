//! Errors of loads and updates that come in piece by piece.

use super::LoadError;
use crate::device::DeviceError;
use crate::weights::{
    FinishError, LoadOptions, MAX_LABEL_BYTES, PushError, TransferError, WeightVersion, WeightsMismatch,
};

/// A load or an update could not be begun. The engine is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BeginError {
    /// The label is too long.
    #[error("the label takes {bytes} bytes, {limit_bytes} at most")]
    LabelTooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// A partial update names tensors that the model doesn't have.
    #[error("a partial update of tensors that the model doesn't have: {}", shown(unknown))]
    UnknownTensors {
        /// Their names.
        unknown: Vec<String>,
    },
    /// A partial update names no tensor.
    #[error("a partial update of no tensors")]
    NoTensors,
    /// A partial update of weights that an earlier update in place has torn: only a complete one leads out.
    #[error("a partial update of weights that an update in place has torn (last whole: {last}); send all")]
    Torn {
        /// Version of the last whole weights.
        last: WeightVersion,
    },
    /// There is no memory to build the new weights beside the current ones.
    #[error("no room beside the current weights ({source}); an update in place needs none")]
    NoRoom {
        /// What the device says.
        source: DeviceError,
    },
    /// The device refused memory for new weights.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl BeginError {
    /// Whether the options make sense.
    pub(super) fn check(options: &LoadOptions) -> Result<(), Self> {
        match options.label.as_ref().map_or(0, |label| label.len()) {
            bytes if bytes > MAX_LABEL_BYTES => {
                Err(Self::LabelTooLong { bytes, limit_bytes: MAX_LABEL_BYTES })
            }
            _ => Ok(()),
        }
    }

    /// Says that there is another way, if it is the room beside the current weights that is missing.
    pub(super) fn beside_current(self) -> Self {
        match self {
            Self::Device(source @ DeviceError::OutOfMemory { .. }) => Self::NoRoom { source },
            other => other,
        }
    }
}

fn shown(names: &[String]) -> String {
    let first: Vec<_> = names.iter().take(10).map(|name| crate::weights::cut(name)).collect();
    let more = names.len().saturating_sub(first.len());
    format!("{}{}", first.join(", "), if more > 0 { format!(" and {more} more") } else { String::new() })
}

/// What arrived did not become current. The engine has the weights it had (or torn ones, after an update in
/// place).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// Not everything has arrived: what is missing and what is there in part are listed.
    #[error(transparent)]
    Mismatch(#[from] Box<WeightsMismatch>),
    /// The whole is not acceptable.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A push had failed.
    #[error("a push of this transaction failed: it can't be committed")]
    PushFailed,
    /// The device refused to put the new weights in place.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<FinishError> for CommitError {
    fn from(error: FinishError) -> Self {
        match error {
            FinishError::Mismatch(mismatch) => Self::Mismatch(mismatch),
            FinishError::Transfer(error) => Self::Transfer(error),
            FinishError::Failed => Self::PushFailed,
        }
    }
}

/// An update failed. The engine has the weights it had (or torn ones, after an update in place).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    /// It could not be begun.
    #[error(transparent)]
    Begin(#[from] BeginError),
    /// The source failed or doesn't fit.
    #[error(transparent)]
    Push(#[from] PushError),
    /// It could not be committed.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

impl From<BeginError> for LoadError {
    fn from(error: BeginError) -> Self {
        match error {
            BeginError::Device(error) => Self::Device(error),
            other => Self::Begin(other),
        }
    }
}

impl LoadError {
    /// What a push of a whole source gives, which is the only one of its transaction.
    pub(super) fn of_push(error: PushError) -> Self {
        match error {
            PushError::Mismatch(mismatch) => Self::Mismatch(mismatch),
            PushError::Transfer(error) => Self::Transfer(error),
            PushError::Index(error) => Self::Source(error),
            PushError::Piece(_) | PushError::Delta { .. } | PushError::NoBase { .. } | PushError::Failed => {
                unreachable!("a load from a source is a single push of whole tensors")
            }
        }
    }

    /// What the commit after such a push gives.
    pub(super) fn of_commit(error: CommitError) -> Self {
        match error {
            CommitError::Mismatch(mismatch) => Self::Mismatch(mismatch),
            CommitError::Transfer(error) => Self::Transfer(error),
            CommitError::Device(error) => Self::Device(error),
            CommitError::PushFailed => unreachable!("a push that failed is not committed"),
        }
    }
}
