//! What can be wrong with safetensors bytes.

/// A safetensors file or buffer that isn't whole or isn't well-formed. Names are cut to a readable length.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The file ends before its header does.
    #[error("truncated: the header needs {expected_bytes} bytes, the file has {actual_bytes}")]
    TruncatedHeader {
        /// Bytes that the file needs at least; `u64::MAX` if more than can be counted.
        expected_bytes: u64,
        /// Bytes that it has.
        actual_bytes: u64,
    },
    /// The file ends before the data of this tensor do.
    #[error(
        "truncated: the data up to tensor `{tensor}` need {expected_bytes} bytes, the file has {actual_bytes}"
    )]
    TruncatedData {
        /// The first tensor that isn't whole.
        tensor: String,
        /// Bytes of the file that the header describes; `u64::MAX` if more than can be counted.
        expected_bytes: u64,
        /// Bytes that it has.
        actual_bytes: u64,
    },
    /// The header says that it is longer than any real one.
    #[error("header of {bytes} bytes, {limit_bytes} at most")]
    HeaderTooLong {
        /// Length as the file says.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The header doesn't begin with `{` or isn't text.
    #[error("header is not a JSON object in UTF-8")]
    NotAnObject,
    /// The header isn't valid JSON of the expected form.
    #[error("header is not valid: {reason}")]
    Json {
        /// What the JSON reader says, with line and column.
        reason: String,
    },
    /// A tensor's description isn't of the expected form.
    #[error("tensor `{tensor}` is not described correctly: {reason}")]
    Entry {
        /// The tensor.
        tensor: String,
        /// What the JSON reader says.
        reason: String,
    },
    /// A name occurs twice.
    #[error("tensor `{tensor}` occurs twice in the header")]
    Duplicate {
        /// The tensor.
        tensor: String,
    },
    /// More tensors than a file may have.
    #[error("more than {limit} tensors")]
    TooManyTensors {
        /// The limit.
        limit: usize,
    },
    /// A longer name than a tensor may have.
    #[error("tensor name `{tensor}` has {bytes} bytes, {limit_bytes} at most")]
    NameTooLong {
        /// The name's beginning.
        tensor: String,
        /// Its length.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The range of a tensor's data ends before it begins.
    #[error("tensor `{tensor}` begins at byte {begin} and ends at {end}")]
    Inverted {
        /// The tensor.
        tensor: String,
        /// First byte, from the end of the header.
        begin: u64,
        /// First byte behind it.
        end: u64,
    },
    /// Shape and element type need more bytes than can be counted.
    #[error("tensor `{tensor}` has the shape {shape:?}, whose size overflows")]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Shape and element type need another number of bytes than the range has.
    #[error(
        "tensor `{tensor}` ({dtype} {shape:?}) needs {expected_bytes} bytes, its range has {actual_bytes}"
    )]
    WrongSize {
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes needed.
        expected_bytes: u64,
        /// Bytes of the range.
        actual_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor `{tensor}` begins at byte {begin}, inside `{other}`, which ends at {other_end}")]
    Overlap {
        /// The tensor that begins later.
        tensor: String,
        /// Its first byte, from the end of the header.
        begin: u64,
        /// The other tensor.
        other: String,
        /// First byte behind that.
        other_end: u64,
    },
    /// Bytes before a tensor belong to none.
    #[error("bytes {begin} to {end} before tensor `{tensor}` belong to no tensor")]
    Hole {
        /// The tensor behind the hole.
        tensor: String,
        /// First byte of the hole, from the end of the header.
        begin: u64,
        /// First byte behind it.
        end: u64,
    },
    /// Bytes behind the last tensor belong to none.
    #[error("{} bytes behind the last tensor belong to none", actual_bytes - expected_bytes)]
    TrailingBytes {
        /// Bytes of the file that the header describes.
        expected_bytes: u64,
        /// Bytes that it has.
        actual_bytes: u64,
    },
}
