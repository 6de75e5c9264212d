//! dormouse
mod device;
mod weights;
pub use device::DeviceError;
pub use weights::{DType, TensorSpec};
