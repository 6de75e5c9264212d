//! dormouse
mod device;
mod kv;
mod scheduler;
mod weights;
pub use device::DeviceError;
pub use weights::{DType, TensorSpec};
