//! What can be wrong with an adapter.

use std::fmt;
use std::path::PathBuf;

use crate::weights::SourceError;
use crate::weights::json::cut;
use crate::weights::source::{UnsupportedTensor, needed};

/// Faults of each kind that the message lists; the fields hold all.
const SHOWN: usize = 10;

/// An adapter that can't be read or merged. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// The source can't be listed or read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The system refused to read the configuration.
    #[error("{}: {source}", path.display())]
    ConfigIo {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A configuration longer than any real one.
    #[error("{}: configuration of {bytes} bytes, {limit_bytes} at most", path.display())]
    ConfigTooLarge {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A configuration that is no JSON object.
    #[error("{}: not a valid configuration: {source}", path.display())]
    ConfigJson {
        /// The file.
        path: PathBuf,
        /// What and where, by line and column.
        source: serde_json::Error,
    },
    /// A field of the configuration that is missing or not what it must be.
    #[error("{}: `{field}` is {received}, expected {expected}", path.display())]
    ConfigField {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is, as JSON, cut to a readable length.
        received: String,
    },
    /// The configuration asks for something that isn't supported.
    #[error("{}: `{field}` = {value} is not supported", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// Its value, as JSON, cut to a readable length.
        value: String,
    },
    /// More tensors than any real adapter has.
    #[error("adapter of {tensors} tensors, {limit} at most")]
    TooManyTensors {
        /// Number of tensors.
        tensors: usize,
        /// The limit.
        limit: usize,
    },
    /// The tensors don't form pairs.
    #[error(transparent)]
    Mismatch(Box<LoraMismatch>),
    /// A pair whose rank the configuration doesn't mention, neither as `r` nor in `rank_pattern`.
    #[error("the pair of `{}` has rank {rank}, the configuration says {configured:?}", cut(name))]
    RankNotConfigured {
        /// The weight.
        name: String,
        /// Rank of its pair.
        rank: usize,
        /// The ranks that the configuration mentions.
        configured: Vec<usize>,
    },
    /// A scale that is NaN or infinite.
    #[error("the scale of `{}` is {scale}, not finite", cut(name))]
    Scale {
        /// The weight.
        name: String,
        /// The scale.
        scale: f32,
    },
    /// The source handed over more or fewer bytes than the shape it listed has.
    #[error("tensor `{}` has {received_bytes} bytes, its shape needs {}", cut(name), needed(*expected_bytes))]
    WrongLength {
        /// The tensor.
        name: String,
        /// Bytes that the shape needs; `None` if they can't be counted.
        expected_bytes: Option<usize>,
        /// Bytes received.
        received_bytes: usize,
    },
}

/// Tensors that don't form the pairs of an adapter. Nothing was read.
///
/// The fields hold every fault, by name; the message shows the first ones of each kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoraMismatch {
    /// Weights that have a `lora_A` and no `lora_B`.
    pub without_b: Vec<String>,
    /// Weights that have a `lora_B` and no `lora_A`.
    pub without_a: Vec<String>,
    /// Pairs that aren't `[rank, in]` and `[out, rank]` with a rank from 1 to 4096.
    pub wrong_shapes: Vec<LoraShapes>,
    /// Tensors that are neither, under the names that were sent.
    pub unknown: Vec<String>,
    /// Tensors that repeat one before, under the names that were sent; once for each repetition.
    pub duplicate: Vec<String>,
    /// Tensors in an element type that no weight can have.
    pub unsupported_dtype: Vec<UnsupportedTensor>,
}

/// A pair of shapes that don't fit each other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoraShapes {
    /// The weight that the pair changes.
    pub name: String,
    /// Shape of `lora_A`.
    pub a: Vec<usize>,
    /// Shape of `lora_B`.
    pub b: Vec<usize>,
}

impl LoraMismatch {
    /// Number of all faults.
    pub fn num_faults(&self) -> usize {
        self.without_b.len()
            + self.without_a.len()
            + self.wrong_shapes.len()
            + self.unknown.len()
            + self.duplicate.len()
            + self.unsupported_dtype.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.num_faults() == 0
    }

    /// The same tensors give the same error in any order. What is listed by weight is in order already.
    pub(super) fn sort(&mut self) {
        self.unknown.sort_unstable();
        self.duplicate.sort_unstable();
        self.unsupported_dtype.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    }
}

impl fmt::Display for LoraMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the tensors are no LoRA adapter ({} faults)", self.num_faults())?;
        list(f, "no lora_B for", &self.without_b, |name| cut(name).into())?;
        list(f, "no lora_A for", &self.without_a, |name| cut(name).into())?;
        list(f, "wrong shapes", &self.wrong_shapes, |pair| {
            format!("{} (A {}, B {})", cut(&pair.name), shown_shape(&pair.a), shown_shape(&pair.b))
        })?;
        list(f, "unknown", &self.unknown, |name| cut(name).into())?;
        list(f, "duplicate", &self.duplicate, |name| cut(name).into())?;
        list(f, "unsupported dtype", &self.unsupported_dtype, |fault| {
            format!("{} ({})", cut(&fault.name), cut(&fault.dtype))
        })
    }
}

impl std::error::Error for LoraMismatch {}

/// A shape, cut: a hostile source may offer any number of dimensions.
fn shown_shape(shape: &[usize]) -> String {
    cut(&format!("{:?}", &shape[..shape.len().min(64)])).into()
}

fn list<T>(f: &mut fmt::Formatter<'_>, kind: &str, faults: &[T], show: impl Fn(&T) -> String) -> fmt::Result {
    for (i, fault) in faults.iter().take(SHOWN).enumerate() {
        let lead = if i == 0 { format!("; {kind}: ") } else { ", ".into() };
        write!(f, "{lead}{}", show(fault))?;
    }
    match faults.len().saturating_sub(SHOWN) {
        0 => Ok(()),
        more => write!(f, " and {more} more"),
    }
}
