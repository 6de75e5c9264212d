//! The model: its configuration, its memory, and one transformer written over the device's operations.

mod config;
mod memory;
mod transformer;

pub use config::{ConfigError, ModelConfig, ModelFamily, RopeScaling};
pub(crate) use memory::{KvMemory, Workspace, WorkspaceShape};
pub(crate) use transformer::{Batch, BatchSpan, Transformer};
