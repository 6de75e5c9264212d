//! dormouse
mod device;
mod model;
mod weights;
pub use device::DeviceError;
pub use model::{ConfigError, ModelConfig, ModelFamily, RopeScaling};
pub use weights::{DType, TensorSpec};
