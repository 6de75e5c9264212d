//! Everything that is wrong with an offered set of weights, in one error.

use std::fmt;

use super::Manifest;
use crate::weights::json::cut;
use crate::weights::source::UnsupportedTensor;
use crate::weights::{DType, LoadOptions, TensorSpec};

/// Faults of each kind that the message lists; the fields hold all.
const SHOWN: usize = 10;

/// An offered set of tensors that isn't what the model needs.
///
/// The fields hold every fault, by name; the message shows the first ones of each kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightsMismatch {
    /// Tensors of the model that were not offered.
    pub missing: Vec<String>,
    /// Tensors of which only a part had arrived at the commit.
    pub incomplete: Vec<Incomplete>,
    /// Offered tensors that the model doesn't have.
    pub unknown: Vec<String>,
    /// Tensors of the model that a partial update isn't about.
    pub not_asked: Vec<String>,
    /// Tensors that were offered more than once; listed once for each repetition.
    pub duplicate: Vec<String>,
    /// Tensors of another shape than the model's.
    pub wrong_shape: Vec<WrongShape>,
    /// Tensors of another element type than expected.
    pub wrong_dtype: Vec<WrongDType>,
    /// Tensors of the model that were offered in an element type that no weight can have.
    pub unsupported_dtype: Vec<UnsupportedTensor>,
}

/// A tensor of which only a part has arrived.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Incomplete {
    /// Name of the tensor.
    pub name: String,
    /// Bytes of the whole, in the dtype it was sent in.
    pub expected_bytes: u64,
    /// Bytes that arrived.
    pub received_bytes: u64,
}

/// A tensor of another shape than the model's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct WrongShape {
    /// Name of the tensor.
    pub name: String,
    /// Shape in the model.
    pub expected: Vec<usize>,
    /// Shape as offered.
    pub received: Vec<usize>,
}

/// A tensor of another element type than expected.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct WrongDType {
    /// Name of the tensor.
    pub name: String,
    /// Element type expected.
    pub expected: DType,
    /// Element type as offered.
    pub received: DType,
}

impl WeightsMismatch {
    /// Number of all faults.
    pub fn num_faults(&self) -> usize {
        self.missing.len()
            + self.incomplete.len()
            + self.unknown.len()
            + self.not_asked.len()
            + self.duplicate.len()
            + self.wrong_shape.len()
            + self.wrong_dtype.len()
            + self.unsupported_dtype.len()
    }

    /// Nothing if there is no fault; otherwise all of them, by name, except `missing`, which follows the model:
    /// the same set gives the same error in any order.
    pub(crate) fn into_result(mut self) -> Result<(), Box<Self>> {
        if self.num_faults() == 0 {
            return Ok(());
        }
        self.incomplete.sort_unstable();
        self.unknown.sort_unstable();
        self.not_asked.sort_unstable();
        self.duplicate.sort_unstable();
        self.wrong_shape.sort_unstable();
        self.wrong_dtype.sort_unstable();
        self.unsupported_dtype.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Err(Box::new(self))
    }
}

/// Notes shape and element type of an offered tensor, if they aren't acceptable.
pub(super) fn check_one(
    expected: &TensorSpec,
    received: &TensorSpec,
    options: &LoadOptions,
    faults: &mut WeightsMismatch,
) {
    let trimmed = options.trim_vocab_padding
        && Manifest::has_vocabulary_rows(&expected.name)
        && received.shape.len() == expected.shape.len()
        && received.shape[1..] == expected.shape[1..]
        && received.shape[0] > expected.shape[0]
        && received.checked_bytes().is_some();
    if expected.shape != received.shape && !trimmed {
        faults.wrong_shape.push(WrongShape {
            name: received.name.clone(),
            expected: expected.shape.clone(),
            received: received.shape.clone(),
        });
    }
    if expected.dtype != received.dtype && !options.convert_dtypes {
        faults.wrong_dtype.push(WrongDType {
            name: received.name.clone(),
            expected: expected.dtype,
            received: received.dtype,
        });
    }
}

impl fmt::Display for WeightsMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "weights don't match the model ({} faults)", self.num_faults())?;
        list(f, "missing", &self.missing, |name| cut(name).into())?;
        list(f, "incomplete", &self.incomplete, |fault| {
            format!("{} ({} of {} bytes)", cut(&fault.name), fault.received_bytes, fault.expected_bytes)
        })?;
        list(f, "unknown", &self.unknown, |name| cut(name).into())?;
        list(f, "not in the partial set", &self.not_asked, |name| cut(name).into())?;
        list(f, "duplicate", &self.duplicate, |name| cut(name).into())?;
        list(f, "wrong shape", &self.wrong_shape, |fault| {
            let received = shown_shape(&fault.received);
            format!("{} (expected {}, received {received})", cut(&fault.name), shown_shape(&fault.expected))
        })?;
        list(f, "wrong dtype", &self.wrong_dtype, |fault| {
            format!("{} (expected {}, received {})", cut(&fault.name), fault.expected, fault.received)
        })?;
        list(f, "unsupported dtype", &self.unsupported_dtype, |fault| {
            format!("{} ({})", cut(&fault.name), cut(&fault.dtype))
        })
    }
}

impl std::error::Error for WeightsMismatch {}

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
