//! The transformer: its configuration, and what it computes over a device's operations.

mod config;

pub use config::{ConfigError, ModelConfig, ModelFamily, RopeScaling};
