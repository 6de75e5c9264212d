//! What can be wrong with a bucket.

use crate::weights::DType;

/// Bytes that are no bucket, or a table that isn't right. Names are cut to a readable length.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BucketError {
    /// A Python pickle. Reading one runs what is in it, so nothing here does.
    #[error("not a bucket: this looks like a pickle; pickles are never read")]
    Pickle,
    /// A zip archive, as `torch.save` writes them.
    #[error("not a bucket: this looks like a zip archive or a torch file (a pickle); these are never read")]
    ZipFile,
    /// A safetensors file.
    #[error("not a bucket: this looks like a safetensors file, load it with `SafetensorsBytes`")]
    SafetensorsFile,
    /// Bytes that don't begin as a bucket does.
    #[error("not a bucket: begins with \"{begin}\", expected \"DORMOUSE\"")]
    WrongMagic {
        /// The first bytes, escaped.
        begin: String,
    },
    /// An encoding that this version of the crate doesn't know.
    #[error("bucket of version {version}, only {supported} is known")]
    UnknownVersion {
        /// The version.
        version: u32,
        /// The one that is known.
        supported: u32,
    },
    /// The bytes end before the bucket does.
    #[error("truncated: the bucket needs {expected_bytes} bytes, {actual_bytes} are there")]
    Truncated {
        /// Bytes that it needs at least, as far as it can be read; `u64::MAX` if more than can be counted.
        expected_bytes: u64,
        /// Bytes that are there.
        actual_bytes: u64,
    },
    /// More bytes than the bucket says it has.
    #[error("the bucket says that it has {expected_bytes} bytes, {actual_bytes} are there")]
    TrailingBytes {
        /// Bytes that the lengths at its begin add up to.
        expected_bytes: u64,
        /// Bytes that are there.
        actual_bytes: u64,
    },
    /// A longer table than a bucket may have.
    #[error("table of {bytes} bytes, {limit_bytes} at most")]
    TableTooLong {
        /// Its length.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The table isn't text.
    #[error("table is not UTF-8 behind byte {valid_bytes}")]
    TableNotUtf8 {
        /// Bytes of the table before the first that isn't.
        valid_bytes: usize,
    },
    /// The table isn't JSON, or isn't of the form described at [`Bucket`](crate::Bucket).
    #[error("table is not valid at line {line}, column {column}: {reason}")]
    Table {
        /// Line, from 1.
        line: usize,
        /// Column in bytes, from 1; 0 before the first.
        column: usize,
        /// What the JSON reader says, cut to a readable length.
        reason: String,
    },
    /// More entries than a bucket may have.
    #[error("more than {limit} entries")]
    TooManyEntries {
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
    /// An element type that no weight can have.
    #[error("tensor `{tensor}` is {dtype:?}, expected F32, F16 or BF16")]
    UnknownDType {
        /// The tensor.
        tensor: String,
        /// The element type as the table spells it, cut to a readable length.
        dtype: String,
    },
    /// More dimensions than a tensor may have.
    #[error("tensor `{tensor}` has {dimensions} dimensions, {limit} at most")]
    TooManyDimensions {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        dimensions: usize,
        /// The limit.
        limit: usize,
    },
    /// Shape and element type need more bytes than can be counted.
    #[error("tensor `{tensor}` has the shape {shape:?}, whose size overflows")]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A range ends before it begins.
    #[error("piece of tensor `{tensor}` begins at byte {begin} of the data and ends at {end}")]
    Inverted {
        /// The tensor.
        tensor: String,
        /// First byte, from the begin of the data.
        begin: usize,
        /// First byte behind it.
        end: usize,
    },
    /// A range ends behind the data.
    #[error("piece of tensor `{tensor}` is bytes {begin} to {end} of the data, which have {data_bytes}")]
    OutsideData {
        /// The tensor.
        tensor: String,
        /// First byte, from the begin of the data.
        begin: usize,
        /// First byte behind it.
        end: usize,
        /// Bytes of the data.
        data_bytes: usize,
    },
    /// A piece without bytes.
    #[error("piece of tensor `{tensor}` at byte {begin} of the data is empty")]
    Empty {
        /// The tensor.
        tensor: String,
        /// Where it is in the data.
        begin: usize,
    },
    /// A piece that isn't whole elements.
    #[error(
        "wrong alignment: {bytes} bytes at byte {offset} of tensor `{tensor}` are no whole {dtype} elements"
    )]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Its element type; its [`size`](DType::size) should divide `offset` and `bytes`.
        dtype: DType,
        /// Where the piece begins, in bytes of the tensor.
        offset: usize,
        /// Length of the piece.
        bytes: usize,
    },
    /// A piece that ends behind its tensor.
    #[error("{bytes} bytes at byte {offset} of tensor `{tensor}` are outside it, it has {tensor_bytes}")]
    OutsideTensor {
        /// The tensor.
        tensor: String,
        /// Where the piece begins, in bytes of the tensor.
        offset: usize,
        /// Length of the piece.
        bytes: usize,
        /// Bytes of the whole tensor.
        tensor_bytes: usize,
    },
    /// Entries of one name differ in element type or shape.
    #[error("tensor `{tensor}` is {dtype} {shape:?} and {other_dtype} {other_shape:?} in one bucket")]
    Conflict {
        /// The tensor.
        tensor: String,
        /// Element type in one entry.
        dtype: DType,
        /// Shape there.
        shape: Vec<usize>,
        /// Element type in another entry.
        other_dtype: DType,
        /// Shape there.
        other_shape: Vec<usize>,
    },
    /// Bytes of a tensor are there twice.
    #[error("bytes {begin} to {end} of tensor `{tensor}` occur twice")]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// First byte that does, from the begin of the tensor.
        begin: usize,
        /// First byte behind them.
        end: usize,
    },
    /// Two pieces share bytes of the data.
    #[error(
        "piece of tensor `{tensor}` begins at byte {begin} of the data, inside one of `{other}`, which ends \
         at {other_end}"
    )]
    Overlap {
        /// The tensor of the piece that begins later.
        tensor: String,
        /// Its first byte, from the begin of the data.
        begin: usize,
        /// The tensor of the other piece.
        other: String,
        /// First byte behind that.
        other_end: usize,
    },
    /// Bytes of the data belong to no piece.
    #[error("bytes {begin} to {end} of the data belong to no tensor")]
    Gap {
        /// First byte, from the begin of the data.
        begin: usize,
        /// First byte behind them.
        end: usize,
    },
    /// Buckets that are written have less room than one element needs.
    #[error("buckets of {capacity_bytes} data bytes can't hold an element of tensor `{tensor}` ({dtype})")]
    CapacityTooSmall {
        /// The tensor.
        tensor: String,
        /// Its element type.
        dtype: DType,
        /// Most data bytes of a bucket, as the writer was told.
        capacity_bytes: usize,
    },
    /// There is no memory for a bucket that is written.
    #[error("no memory for a bucket with {data_bytes} data bytes")]
    OutOfMemory {
        /// Bytes of its data.
        data_bytes: usize,
    },
}
