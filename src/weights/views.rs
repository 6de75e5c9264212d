//! Tensors that the caller has in memory.

use std::fmt;

use safetensors::View;

use super::json::cut;
use super::source::{SourceError, WeightSource};
use super::{DType, TensorSpec};

/// Tensors in memory, by name: anything that implements the ecosystem's [`safetensors::View`].
///
/// The views are borrowed or owned by this set until it is dropped; a load copies their bytes and keeps none.
pub struct TensorSet<V> {
    tensors: Vec<(String, V)>,
}

impl<V: View> TensorSet<V> {
    /// The tensors of an iterator. They are checked by [`index`](WeightSource::index), not here.
    pub fn new<N: Into<String>>(tensors: impl IntoIterator<Item = (N, V)>) -> Self {
        Self { tensors: tensors.into_iter().map(|(name, view)| (name.into(), view)).collect() }
    }
}

impl<N: Into<String>, V: View> FromIterator<(N, V)> for TensorSet<V> {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(tensors: I) -> Self {
        Self::new(tensors)
    }
}

impl<V> fmt::Debug for TensorSet<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorSet").field("tensors", &self.tensors.len()).finish()
    }
}

impl<V: View> WeightSource for TensorSet<V> {
    /// # Errors
    /// [`SourceError::UnsupportedDType`] and [`SourceError::WrongLength`]: a caller's own tensors are all
    /// meant to be weights.
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.tensors.iter().map(|(name, view)| spec_of(name, view)).collect()
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let no_such_tensor = SourceError::NoSuchTensor { tensor, count: self.tensors.len() };
        let (name, view) = self.tensors.get(tensor).ok_or(no_such_tensor)?;
        let spec = spec_of(name, view)?;
        let data = view.data();
        if data.len() != view.data_len() {
            return Err(wrong_length(spec, data.len()));
        }
        sink(&data);
        Ok(())
    }
}

fn spec_of(name: &str, view: &impl View) -> Result<TensorSpec, SourceError> {
    let dtype = DType::try_from(view.dtype()).map_err(|dtype| SourceError::UnsupportedDType {
        tensor: cut(name).into(),
        dtype: dtype.to_string(),
    })?;
    let spec = TensorSpec { name: name.to_owned(), dtype, shape: view.shape().to_vec() };
    if spec.checked_bytes() == Some(view.data_len()) {
        Ok(spec)
    } else {
        Err(wrong_length(spec, view.data_len()))
    }
}

fn wrong_length(spec: TensorSpec, received_bytes: usize) -> SourceError {
    SourceError::WrongLength {
        tensor: cut(&spec.name).into(),
        dtype: spec.dtype,
        expected_bytes: spec.checked_bytes(),
        shape: spec.shape,
        received_bytes,
    }
}
