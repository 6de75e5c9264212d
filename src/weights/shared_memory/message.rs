//! The messages, and what bounds them.

use serde::{Deserialize, Serialize};

use super::error::{ProtocolViolation, SharedMemoryError};
use crate::weights::json::{Bounded, cut};
use crate::weights::{DType, TensorSpec, UnsupportedTensor, WeightVersion};

/// The version of the protocol that this is.
pub(super) const PROTOCOL: u32 = 1;
/// Longest message other than those below, in bytes.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// Longest index, in bytes.
pub(super) const MAX_INDEX_BYTES: usize = 64 << 20;
/// Longest `want`, in bytes.
pub(super) const MAX_WANT_BYTES: usize = 16 << 20;
/// Most tensors of an index, and of a `want`.
pub(super) const MAX_TENSORS: usize = 1 << 20;
/// Longest name of a tensor, in bytes.
const MAX_NAME_BYTES: usize = 1024;
/// Longest element type that is kept, in bytes.
const MAX_DTYPE_BYTES: usize = 64;
/// Most dimensions of a tensor.
const MAX_RANK: usize = 8;
/// Longest reason that is sent or kept, in characters: some hundred names of missing tensors.
const MAX_REASON_CHARS: usize = 8000;

/// What the engine sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum FromEngine {
    Welcome { protocol: u32, half_bytes: u64 },
    Want { tensors: Bounded<u64, MAX_TENSORS> },
    Taken { half: u64 },
    Finish {},
    Committed(WeightVersion),
    Refused { reason: String },
}

/// What the trainer sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum FromTrainer {
    Index(Index),
    Filled { half: u64, bytes: u64 },
    Sent {},
    Abort { reason: String },
}

/// A message of either side.
pub(super) trait Message: Serialize + serde::de::DeserializeOwned {
    /// Its name on the wire.
    fn name(&self) -> &'static str;

    /// Longest one of its kind, in bytes.
    fn limit_bytes(&self) -> usize;

    /// What the other side says before it goes.
    fn last_word(self) -> Option<SharedMemoryError>;
}

impl Message for FromEngine {
    fn name(&self) -> &'static str {
        match self {
            FromEngine::Welcome { .. } => "welcome",
            FromEngine::Want { .. } => "want",
            FromEngine::Taken { .. } => "taken",
            FromEngine::Finish {} => "finish",
            FromEngine::Committed(_) => "committed",
            FromEngine::Refused { .. } => "refused",
        }
    }

    fn limit_bytes(&self) -> usize {
        match self {
            FromEngine::Want { .. } => MAX_WANT_BYTES,
            _ => MAX_MESSAGE_BYTES,
        }
    }

    fn last_word(self) -> Option<SharedMemoryError> {
        match self {
            FromEngine::Refused { reason } => Some(SharedMemoryError::Refused { reason: readable(&reason) }),
            _ => None,
        }
    }
}

impl Message for FromTrainer {
    fn name(&self) -> &'static str {
        match self {
            FromTrainer::Index(_) => "index",
            FromTrainer::Filled { .. } => "filled",
            FromTrainer::Sent {} => "sent",
            FromTrainer::Abort { .. } => "abort",
        }
    }

    fn limit_bytes(&self) -> usize {
        match self {
            FromTrainer::Index(_) => MAX_INDEX_BYTES,
            _ => MAX_MESSAGE_BYTES,
        }
    }

    fn last_word(self) -> Option<SharedMemoryError> {
        match self {
            FromTrainer::Abort { reason } => Some(SharedMemoryError::Aborted { reason: readable(&reason) }),
            _ => None,
        }
    }
}

/// What the trainer has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    tensors: Bounded<Entry, MAX_TENSORS>,
    #[serde(default)]
    unsupported: Bounded<Unsupported, MAX_TENSORS>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(with = "DTypeText")]
    dtype: DType,
    shape: Bounded<u64, MAX_RANK>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unsupported {
    name: String,
    dtype: String,
}

/// [`DType`] as safetensors spells it.
#[derive(Serialize, Deserialize)]
#[serde(remote = "DType", rename_all = "UPPERCASE")]
enum DTypeText {
    F32,
    F16,
    Bf16,
}

impl Index {
    /// The index of a trainer's source.
    pub(super) fn of(specs: &[TensorSpec], unsupported: &[UnsupportedTensor]) -> Self {
        let entry = |spec: &TensorSpec| Entry {
            name: spec.name.clone(),
            dtype: spec.dtype,
            shape: Bounded(spec.shape.iter().map(|&dimension| dimension as u64).collect()),
        };
        let other = |tensor: &UnsupportedTensor| Unsupported {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
        };
        Self {
            tensors: Bounded(specs.iter().map(entry).collect()),
            unsupported: Bounded(unsupported.iter().map(other).collect()),
        }
    }

    /// Checks the index and turns it into what sources list.
    pub(super) fn into_specs(self) -> Result<(Vec<TensorSpec>, Vec<UnsupportedTensor>), ProtocolViolation> {
        let count = self.tensors.0.len() + self.unsupported.0.len();
        if count > MAX_TENSORS {
            return Err(ProtocolViolation::TooManyTensors { tensors: count, limit: MAX_TENSORS });
        }
        let specs = self.tensors.0.into_iter().map(Entry::into_spec).collect::<Result<_, _>>()?;
        let other = |tensor: Unsupported| match tensor {
            Unsupported { name, .. } if name.len() > MAX_NAME_BYTES => Err(impossible(&name, NAME_TOO_LONG)),
            Unsupported { name, dtype } if dtype.len() > MAX_DTYPE_BYTES => {
                Err(impossible(&name, "the name of its element type is too long"))
            }
            Unsupported { name, dtype } => Ok(UnsupportedTensor { name, dtype }),
        };
        Ok((specs, self.unsupported.0.into_iter().map(other).collect::<Result<_, _>>()?))
    }
}

const NAME_TOO_LONG: &str = "its name is too long";

impl Entry {
    fn into_spec(self) -> Result<TensorSpec, ProtocolViolation> {
        if self.name.len() > MAX_NAME_BYTES {
            return Err(impossible(&self.name, NAME_TOO_LONG));
        }
        let shape: Result<Vec<usize>, _> = self.shape.0.into_iter().map(usize::try_from).collect();
        let too_large = || impossible(&self.name, "its shape is larger than memory can be");
        let spec =
            TensorSpec { shape: shape.map_err(|_| too_large())?, dtype: self.dtype, name: self.name.clone() };
        match spec.checked_bytes() {
            Some(bytes) if isize::try_from(bytes).is_ok() => Ok(spec),
            _ => Err(too_large()),
        }
    }
}

fn impossible(tensor: &str, fault: &'static str) -> ProtocolViolation {
    ProtocolViolation::Tensor { tensor: cut(tensor).into(), fault }
}

/// A reason cut to what a message may hold, without control characters that would disturb a terminal or a
/// log.
pub(super) fn readable(reason: &str) -> String {
    let kept = |c: &char| !c.is_control() || *c == '\n';
    reason.chars().filter(kept).take(MAX_REASON_CHARS).collect()
}
