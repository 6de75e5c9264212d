//! Weights: what a model needs, where they come from, what they are (digest, version).

mod spec;

pub use spec::{DType, TensorSpec};
