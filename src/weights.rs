//! Weights: what a model needs, where they come from, how they come in, what they are (digest, version).

mod bounded;
mod bucket;
mod checkpoint;
mod convert;
mod delta;
mod digest;
#[cfg(feature = "cuda")]
mod gpu;
mod intake;
mod json;
mod layout;
mod loaded;
mod manifest;
mod names;
mod options;
mod resident;
mod safetensors;
mod shared_memory;
mod source;
mod spec;
#[cfg(test)]
pub(crate) mod testing;
mod version;
mod views;

pub(crate) use bounded::{ReadError, read_bounded};
pub use bucket::{Bucket, BucketEntry, BucketError, BucketWriter};
pub use checkpoint::Checkpoint;
pub(crate) use delta::Prepared as PreparedDelta;
pub use delta::{Delta, DeltaError, LoraAdapter, LoraError, LoraMismatch, LoraShapes, SparseOp};
#[cfg(feature = "cuda")]
pub(crate) use digest::LEAF_BYTES;
pub(crate) use digest::TensorHasher;
pub use digest::{ParseDigestError, TensorDigest, WeightsDigest};
#[cfg(all(test, feature = "cuda"))]
pub(crate) use gpu::TEST_WORKSPACE_BYTES;
#[cfg(feature = "cuda")]
pub(crate) use gpu::resident_digests;
#[cfg(feature = "cuda")]
pub use gpu::{GpuBucket, GpuTensors};
pub(crate) use intake::{FinishError, Intake, IntakeShape, Memory, NoMemory, Received};
pub use intake::{PieceError, PushError, TransferError};
pub(crate) use json::{UniqueKeys, cut};
pub use layout::MixedDTypes;
pub(crate) use layout::WeightLayout;
pub(crate) use loaded::{LoadedWeights, Torn};
pub(crate) use manifest::LM_HEAD;
pub use manifest::{Incomplete, Manifest, Match, TiedHead, WeightsMismatch, WrongDType, WrongShape};
pub use names::NameMap;
pub use options::{LoadOptions, UpdateMode, UpdateOptions};
pub(crate) use resident::{Identity, ResidentWeights, copy_unwanted, read_rows};
pub use safetensors::{SafetensorsBytes, SafetensorsError, SafetensorsFile};
pub use shared_memory::{
    ProtocolViolation, SharedMemoryClient, SharedMemoryError, SharedMemoryOptions, SharedMemorySource,
};
pub use source::{SourceError, TensorReader, UnsupportedTensor, WeightSource};
pub use spec::{DType, TensorSpec, WeightTensor};
pub(crate) use version::MAX_LABEL_BYTES;
pub use version::WeightVersion;
pub use views::TensorSet;
