//! Where weights come from: the trait, and what can go wrong in a source.

use std::path::PathBuf;

use super::json::cut;
use super::safetensors::SafetensorsError;
use super::{BucketError, DType, SharedMemoryError, TensorSpec};
#[cfg(feature = "cuda")]
use crate::device::cuda::{GpuMemory, GpuMemoryError};

/// A set of named tensors that can be listed and then read, one at a time, in any order.
///
/// A load calls [`index`](WeightSource::index) once, [`plan`](WeightSource::plan) once, then
/// [`read`](WeightSource::read) for the tensors it wants, then [`finish`](WeightSource::finish); its result
/// counts only if all of them succeed. Only `index` and `read` have to be written:
///
/// ```
/// use dormouse::{DType, SourceError, TensorSpec, WeightSource};
///
/// /// The tensors of some framework.
/// struct Policy(Vec<(String, Vec<usize>, Vec<f32>)>);
///
/// impl WeightSource for Policy {
///     fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
///         let spec = |(name, shape, _): &(String, Vec<usize>, Vec<f32>)| TensorSpec {
///             name: name.clone(),
///             dtype: DType::F32,
///             shape: shape.clone(),
///         };
///         Ok(self.0.iter().map(spec).collect())
///     }
///
///     fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
///         let (_, _, values) = &self.0[tensor];
///         for piece in values.chunks(4096) {
///             sink(&piece.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait WeightSource {
    /// Lists the tensors that the source holds now; nothing from an earlier load is reused.
    ///
    /// Tensors of element types that weights can't have are not in this list, see
    /// [`unsupported`](WeightSource::unsupported). A name may occur twice, if the source can't rule it out:
    /// [`Manifest::check`](super::Manifest::check) reports it.
    ///
    /// # Errors
    /// A [`SourceError`] if the source can't be listed or is malformed anywhere, needed tensor or not.
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError>;

    /// Tensors of the last [`index`](WeightSource::index) that exist but whose element type is none of
    /// [`DType`]'s, so that a needed one is reported as what it is and not as missing.
    fn unsupported(&self) -> &[UnsupportedTensor] {
        &[]
    }

    /// Says which tensors of the last index will be read, by position, each once and in this order, so that a
    /// source can fetch ahead. A load that fails reads fewer.
    ///
    /// # Errors
    /// A [`SourceError`] if the source can't deliver them.
    fn plan(&mut self, tensors: &[usize]) -> Result<(), SourceError> {
        let _ = tensors;
        Ok(())
    }

    /// Hands the bytes of the tensor at a position of the last index to `sink`: in order, in pieces of any
    /// size and alignment, little-endian and row-major, `dtype.size() * product(shape)` of them in total.
    ///
    /// # Errors
    /// A [`SourceError`]; `sink` may have been given a part.
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError>;

    /// Opens the tensor at a position of the last index for several threads that read parts of it at once.
    /// `None`, which is the default: it is [read](WeightSource::read) in one go.
    ///
    /// # Errors
    /// A [`SourceError`].
    fn reader(&mut self, tensor: usize) -> Result<Option<Box<dyn TensorReader + '_>>, SourceError> {
        let _ = tensor;
        Ok(None)
    }

    /// Where the tensor at a position of the last index is on a GPU, if it is: an engine on that GPU then takes it from
    /// there and doesn't [read](WeightSource::read) it. Each tensor of the plan is asked for before the first is taken
    /// or read. What was given must stay until [`finish`](WeightSource::finish), or until the load has failed. `None`,
    /// which is the default: it is read.
    ///
    /// # Errors
    /// A [`SourceError`].
    #[cfg(feature = "cuda")]
    fn gpu_memory(&mut self, tensor: usize) -> Result<Option<GpuMemory>, SourceError> {
        let _ = tensor;
        Ok(None)
    }

    /// Ends the load: releases what the source holds open.
    ///
    /// # Errors
    /// [`SourceError::ChangedDuringRead`] if the source isn't what it was at `index`: what was read may then
    /// be a mix and must not be used.
    fn finish(&mut self) -> Result<(), SourceError> {
        Ok(())
    }
}

/// A tensor that several threads can read at once, see [`WeightSource::reader`].
pub trait TensorReader: Sync {
    /// Fills `out` with the tensor's bytes from `offset` on: little-endian, row-major.
    ///
    /// # Errors
    /// A [`SourceError`]; what `out` holds then is unspecified.
    fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), SourceError>;
}

macro_rules! forward_weight_source {
    ($target:ty) => {
        fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
            <$target>::index(self)
        }

        fn unsupported(&self) -> &[UnsupportedTensor] {
            <$target>::unsupported(self)
        }

        fn plan(&mut self, tensors: &[usize]) -> Result<(), SourceError> {
            <$target>::plan(self, tensors)
        }

        fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
            <$target>::read(self, tensor, sink)
        }

        fn reader(&mut self, tensor: usize) -> Result<Option<Box<dyn TensorReader + '_>>, SourceError> {
            <$target>::reader(self, tensor)
        }

        #[cfg(feature = "cuda")]
        fn gpu_memory(&mut self, tensor: usize) -> Result<Option<GpuMemory>, SourceError> {
            <$target>::gpu_memory(self, tensor)
        }

        fn finish(&mut self) -> Result<(), SourceError> {
            <$target>::finish(self)
        }
    };
}

impl<S: WeightSource + ?Sized> WeightSource for &mut S {
    forward_weight_source!(S);
}

impl<S: WeightSource + ?Sized> WeightSource for Box<S> {
    forward_weight_source!(S);
}

/// A tensor whose element type no weight can have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsupportedTensor {
    /// Its name.
    pub name: String,
    /// The element type as the source spells it, cut to a readable length.
    pub dtype: String,
}

/// A source that can't be listed or read. What was loaded from it so far must be dropped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The system refused an operation on a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A malformed or truncated safetensors file.
    #[error("{}: {fault}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The fault.
        fault: Box<SafetensorsError>,
    },
    /// Malformed or truncated safetensors bytes in memory.
    #[error("safetensors buffer: {fault}")]
    SafetensorsBuffer {
        /// The fault.
        fault: Box<SafetensorsError>,
    },
    /// A malformed `model.safetensors.index.json`.
    #[error("{}: not a valid index: {source}", path.display())]
    IndexJson {
        /// The index file.
        path: PathBuf,
        /// What and where, by line and column.
        source: serde_json::Error,
    },
    /// An index file longer than any real one.
    #[error("{}: index of {bytes} bytes, {limit_bytes} at most", path.display())]
    IndexTooLarge {
        /// The index file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// More tensors or shards than a checkpoint may have.
    #[error("{}: more than {limit} {what}", path.display())]
    TooMany {
        /// The directory or index file.
        path: PathBuf,
        /// "tensors" or "shards".
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// An index entry that isn't the plain name of a file in the checkpoint's directory. Nothing was opened.
    #[error("{}: shard name {entry:?} of tensor `{tensor}` is not a plain file name", path.display())]
    ShardName {
        /// The index file.
        path: PathBuf,
        /// A tensor listed in that shard.
        tensor: String,
        /// The name, cut to a readable length.
        entry: String,
    },
    /// A file of the checkpoint is a link to outside its directory. The target was not opened.
    #[error("{}: links to {}, outside the checkpoint", path.display(), target.display())]
    LinkLeavesDirectory {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// The directory holds neither `model.safetensors` nor `model.safetensors.index.json`.
    #[error("{}: no model.safetensors and no model.safetensors.index.json", path.display())]
    NoCheckpoint {
        /// The directory.
        path: PathBuf,
    },
    /// The index promises a tensor that its shard doesn't have.
    #[error("{}: tensor `{tensor}` is listed in the index, but not in this shard", path.display())]
    NotInShard {
        /// The shard.
        path: PathBuf,
        /// The tensor, its name cut to a readable length.
        tensor: String,
    },
    /// A shard holds a tensor that the index places elsewhere or doesn't list.
    #[error("{}: tensor `{tensor}` is in this shard, but {}", path.display(), placed(listed_in.as_deref()))]
    NotInIndex {
        /// The shard.
        path: PathBuf,
        /// The tensor, its name cut to a readable length.
        tensor: String,
        /// The shard that the index names for it.
        listed_in: Option<String>,
    },
    /// The source is not what it was when it was listed.
    #[error("{} changed while it was read", path.display())]
    ChangedDuringRead {
        /// The file.
        path: PathBuf,
    },
    /// A tensor given in memory has an element type that no weight can have.
    #[error("tensor `{tensor}` is {dtype}, expected f32, f16 or bf16")]
    UnsupportedDType {
        /// The tensor, its name cut to a readable length.
        tensor: String,
        /// The element type as the source spells it.
        dtype: String,
    },
    /// A tensor has more or fewer bytes than its shape says.
    #[error(
        "tensor `{tensor}` has {received_bytes} bytes, its {dtype} shape {shape:?} needs {}",
        needed(*expected_bytes)
    )]
    WrongLength {
        /// The tensor, its name cut to a readable length.
        tensor: String,
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes that the shape needs; `None` if the product overflows.
        expected_bytes: Option<usize>,
        /// Bytes that are there.
        received_bytes: usize,
    },
    /// `read` was asked for a position that the last `index` doesn't have.
    #[error("tensor {tensor} was asked for, the source listed {count}")]
    NoSuchTensor {
        /// The position.
        tensor: usize,
        /// Length of the last index; 0 before the first.
        count: usize,
    },
    /// The tensors can't be written as buckets.
    #[error("can't be written as buckets: {fault}")]
    Bucket {
        /// The fault.
        fault: Box<BucketError>,
    },
    /// A transfer from another process failed.
    #[error(transparent)]
    SharedMemory(Box<SharedMemoryError>),
    /// A tensor on a GPU can't be read.
    #[cfg(feature = "cuda")]
    #[error("tensor `{tensor}`: {fault}")]
    Gpu {
        /// The tensor, its name cut to a readable length.
        tensor: String,
        /// The fault.
        fault: Box<GpuMemoryError>,
    },
    /// A framework's own source failed.
    #[error(transparent)]
    Custom(Box<dyn std::error::Error + Send + Sync>),
}

impl From<BucketError> for SourceError {
    fn from(fault: BucketError) -> Self {
        Self::Bucket { fault: Box::new(fault) }
    }
}

impl SourceError {
    #[cfg(feature = "cuda")]
    pub(crate) fn gpu(spec: &TensorSpec, fault: GpuMemoryError) -> Self {
        Self::Gpu { tensor: cut(&spec.name).into(), fault: Box::new(fault) }
    }

    /// A tensor that has or delivers another number of bytes than its shape says.
    pub(crate) fn wrong_length(spec: &TensorSpec, received_bytes: usize) -> Self {
        Self::WrongLength {
            tensor: cut(&spec.name).into(),
            dtype: spec.dtype,
            shape: spec.shape.clone(),
            expected_bytes: spec.checked_bytes(),
            received_bytes,
        }
    }
}

fn placed(listed_in: Option<&str>) -> String {
    match listed_in {
        Some(shard) => format!("the index places it in {shard:?}"),
        None => "not in the index".into(),
    }
}

pub(super) fn needed(bytes: Option<usize>) -> String {
    bytes.map_or_else(|| "more than can be counted".into(), |bytes| bytes.to_string())
}
