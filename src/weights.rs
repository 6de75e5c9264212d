//! Weights: what a model needs, where they come from, what they are (digest, version).

mod digest;
mod spec;

pub use digest::{WeightVersion, WeightsDigest};
pub use spec::{DType, TensorSpec};
