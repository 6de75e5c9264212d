//! dormouse
mod device;
mod model;
mod weights;
pub use device::DeviceError;
pub use model::{ConfigError, ModelConfig, ModelFamily, RopeScaling};
pub use weights::{
    Checkpoint, DType, Manifest, Match, ParseDigestError, SafetensorsBytes, SafetensorsError,
    SafetensorsFile, SourceError, TensorSet, TensorSpec, TiedHead, UnsupportedTensor, WeightSource,
    WeightVersion, WeightsDigest, WeightsMismatch, WrongDType, WrongShape,
};
