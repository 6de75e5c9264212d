//! What can be wrong with a model's configuration.

use std::path::PathBuf;

/// A configuration that can't be read, isn't one, or describes a model that this engine doesn't run.
///
/// Nothing is built from a configuration before all of it is checked, so there is no state to repair.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file can't be opened or read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A fault in the text of this file.
    #[error("{}: {fault}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The fault.
        fault: Box<ConfigError>,
    },
    /// The text is longer than any real configuration.
    #[error("{bytes} bytes of configuration, {limit_bytes} at most")]
    TooLarge {
        /// Length of the text; of a file that grows while it is read, as much as was seen.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The text isn't a JSON object, is nested too deeply, or has a key twice.
    #[error("not a valid JSON object: {source}")]
    Json {
        /// What and where, by line and column.
        source: serde_json::Error,
    },
    /// A value of another JSON type than the field has.
    #[error("`{field}` is {received}, expected {expected}")]
    WrongType {
        /// Path of the field, such as `rope_scaling.factor`.
        field: String,
        /// The type in words.
        expected: &'static str,
        /// The value, cut to a readable length.
        received: String,
    },
    /// A number that no model of this engine can have.
    #[error("`{field}` is {received}, expected {expected}")]
    OutOfRange {
        /// Path of the field.
        field: String,
        /// The range in words.
        expected: String,
        /// The value.
        received: String,
    },
    /// A required field isn't there.
    #[error("`{field}` is missing")]
    Missing {
        /// Path of the field.
        field: String,
    },
    /// A model or a feature that this engine doesn't have.
    #[error("`{field}` is {value}, which is not supported")]
    Unsupported {
        /// Path of the field.
        field: String,
        /// The value, cut to a readable length.
        value: String,
    },
    /// Two fields that can't both be true.
    #[error("`{field}` is {value}, which contradicts `{other_field}` of {other_value}")]
    Contradiction {
        /// Path of one field.
        field: String,
        /// Its value.
        value: String,
        /// Path of the other.
        other_field: String,
        /// Its value.
        other_value: String,
    },
}

impl ConfigError {
    /// A contradiction between two values that can be shown.
    pub(super) fn contradiction(
        (field, value): (impl Into<String>, impl ToString),
        (other_field, other_value): (impl Into<String>, impl ToString),
    ) -> Self {
        ConfigError::Contradiction {
            field: field.into(),
            value: value.to_string(),
            other_field: other_field.into(),
            other_value: other_value.to_string(),
        }
    }
}
