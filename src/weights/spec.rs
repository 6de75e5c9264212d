//! One tensor: name, dtype and shape, and its bytes.

use std::borrow::Cow;
use std::fmt;

/// Element type of a weight tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper half of an f32.
    Bf16,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        })
    }
}

/// Name, dtype and shape of one tensor, in Hugging Face naming and layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// For example `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major; a linear layer is `[out_features, in_features]`.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of the whole tensor; `None` if that overflows.
    pub fn checked_bytes(&self) -> Option<usize> {
        self.shape.iter().try_fold(self.dtype.size(), |bytes, &dimension| bytes.checked_mul(dimension))
    }

    /// Bytes of a row of a tensor of a model, whose sizes fit; a vector's row is an element.
    pub(crate) fn row_bytes(&self) -> usize {
        self.shape[1..].iter().product::<usize>() * self.dtype.size()
    }
}

/// A tensor in memory, in Hugging Face layout: read back from an engine by
/// [`Engine::tensor`](crate::Engine::tensor), or to be sent to one.
#[derive(Clone, PartialEq, Eq)]
pub struct WeightTensor {
    /// Name, dtype and shape.
    pub spec: TensorSpec,
    /// Row-major and little-endian.
    pub data: Vec<u8>,
}

impl fmt::Debug for WeightTensor {
    /// The length, not the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.data.len();
        f.debug_struct("WeightTensor").field("spec", &self.spec).field("data_bytes", &bytes).finish()
    }
}

impl safetensors::View for &WeightTensor {
    fn dtype(&self) -> safetensors::Dtype {
        self.spec.dtype.into()
    }

    fn shape(&self) -> &[usize] {
        &self.spec.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (&self.data).into()
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}
