//! Weights: what a model needs, where they come from, what they are (digest, version).

mod bounded;
mod json;
mod spec;

pub(crate) use bounded::{ReadError, read_bounded};
pub(crate) use json::UniqueKeys;
pub use spec::{DType, TensorSpec};
