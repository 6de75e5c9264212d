//! Tensors that the caller has in memory.

use std::borrow::Cow;
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
        sink(&open(name, view)?.1);
        Ok(())
    }
}

/// What a view claims to be, and its bytes.
pub(crate) fn open<'a>(name: &str, view: &'a impl View) -> Result<(TensorSpec, Cow<'a, [u8]>), SourceError> {
    let spec = spec_of(name, view)?;
    let data = view.data();
    match spec.checked_bytes() == Some(data.len()) {
        true => Ok((spec, data)),
        false => Err(SourceError::wrong_length(&spec, data.len())),
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
        Err(SourceError::wrong_length(&spec, view.data_len()))
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;
    use crate::weights::testing::{file, load};
    use crate::weights::{Manifest, SafetensorsBytes, WeightsDigest};

    struct Tensor {
        dtype: Dtype,
        shape: Vec<usize>,
        data: Vec<u8>,
        claimed: usize,
    }

    impl View for Tensor {
        fn dtype(&self) -> Dtype {
            self.dtype
        }
        fn shape(&self) -> &[usize] {
            &self.shape
        }
        fn data(&self) -> Cow<'_, [u8]> {
            self.data.as_slice().into()
        }
        fn data_len(&self) -> usize {
            self.claimed
        }
    }

    fn tensor(dtype: Dtype, shape: &[usize], bytes: usize) -> Tensor {
        Tensor { dtype, shape: shape.to_vec(), data: vec![7; bytes], claimed: bytes }
    }

    #[test]
    fn c29_same_digest_as_a_file() {
        let bytes = file(&[("a", "F32", &[2], b"abcdefgh"), ("b", "BF16", &[1], b"yz")]);
        let parsed = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors = parsed.tensors();
        let expected = WeightsDigest::of(&mut SafetensorsBytes::new(&bytes)).unwrap();
        assert_eq!(WeightsDigest::of(&mut TensorSet::new(tensors.clone())).unwrap(), expected);
        tensors.reverse();
        let mut set: TensorSet<_> = tensors.into_iter().collect();
        let boxed: &mut dyn WeightSource = &mut set;
        assert_eq!(WeightsDigest::of(&mut Box::new(boxed)).unwrap(), expected);
    }

    /// A view that has fewer bytes each time it is asked.
    struct Shrinking(std::cell::Cell<usize>);

    impl View for &Shrinking {
        fn dtype(&self) -> Dtype {
            Dtype::F32
        }
        fn shape(&self) -> &[usize] {
            &[2]
        }
        fn data(&self) -> Cow<'_, [u8]> {
            vec![0; self.0.get()].into()
        }
        fn data_len(&self) -> usize {
            self.0.replace(self.0.get() - 4)
        }
    }

    #[test]
    fn what_counts_are_the_bytes_that_a_view_gave_not_those_it_speaks_of_later() {
        let view = Shrinking(8.into());
        let error = open("t", &&view).unwrap_err();
        assert!(matches!(error, SourceError::WrongLength { received_bytes: 4, .. }), "{error}");
    }

    #[test]
    fn b37_wrong_dtypes_and_lengths_are_errors_that_name_the_tensor() {
        for wrong in [
            tensor(Dtype::F8_E4M3, &[4], 4),
            tensor(Dtype::I64, &[1], 8),
            tensor(Dtype::F32, &[2], 4),
            tensor(Dtype::F16, &[2], 8),
            tensor(Dtype::F32, &[usize::MAX, 2], 8),
            tensor(Dtype::F32, &[], 0),
        ] {
            let mut set = TensorSet::new([("t", wrong)]);
            let fault = set.index().unwrap_err().to_string();
            assert!(fault.contains("`t`"), "{fault}");
            assert!(set.read(0, &mut |_| panic!("nothing to read")).is_err());
        }
        // A view that lies about its length.
        let mut liar = TensorSet::new([("t", Tensor { claimed: 8, ..tensor(Dtype::F32, &[2], 4) })]);
        assert!(liar.index().is_ok());
        assert!(matches!(load(&mut liar), Err(SourceError::WrongLength { received_bytes: 4, .. })));
        assert!(matches!(liar.read(1, &mut |_| ()), Err(SourceError::NoSuchTensor { tensor: 1, count: 1 })));
    }

    #[test]
    fn b42_a_name_given_twice_is_found_by_the_manifest() {
        let text = r#"{"model_type": "llama", "vocab_size": 3, "num_hidden_layers": 1}"#;
        let manifest = Manifest::new(&crate::model::ModelConfig::from_json(text).unwrap(), DType::F32);
        let twice = || (String::from("lm_head.weight"), tensor(Dtype::F32, &[1], 4));
        let specs = TensorSet::new([twice(), twice()]).index().unwrap();
        assert_eq!(manifest.check(&specs).unwrap_err().duplicate, ["lm_head.weight"]);
    }
}
