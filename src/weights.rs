//! Weights: what a model needs, where they come from, what they are (digest, version).

mod bounded;
mod checkpoint;
mod digest;
mod json;
mod layout;
mod manifest;
mod resident;
mod safetensors;
mod shared_memory;
mod source;
mod spec;
#[cfg(test)]
pub(crate) mod testing;
mod views;

pub(crate) use bounded::{ReadError, read_bounded};
pub use checkpoint::Checkpoint;
pub use digest::{ParseDigestError, WeightVersion, WeightsDigest};
pub(crate) use digest::{TensorDigest, TensorHasher};
pub(crate) use json::UniqueKeys;
pub use layout::MixedDTypes;
pub(crate) use layout::WeightLayout;
pub use manifest::{Manifest, Match, TiedHead, WeightsMismatch, WrongDType, WrongShape};
pub use resident::TransferError;
pub(crate) use resident::{ResidentWeights, transfer};
pub use safetensors::{SafetensorsBytes, SafetensorsError, SafetensorsFile};
pub use shared_memory::{
    ProtocolViolation, SharedMemoryClient, SharedMemoryError, SharedMemoryOptions, SharedMemorySource,
};
pub use source::{SourceError, UnsupportedTensor, WeightSource};
pub use spec::{DType, TensorSpec};
pub use views::TensorSet;
