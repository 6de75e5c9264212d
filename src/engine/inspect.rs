//! Proof of what is loaded: digests, resident memory read back, tensors in Hugging Face layout.

use std::time::{Duration, Instant};

use super::state::Resident;
use super::{Engine, LoadError, State};
use crate::device::{Arena, DeviceError, Transfer};
use crate::weights::{
    Intake, LoadOptions, NoMemory, TensorDigest, TensorHasher, TensorSpec, WeightSource, WeightTensor,
    WeightVersion, WeightsDigest, read_rows,
};

/// Bytes that are read back and digested at a time: they stay in the second-level cache.
const BLOCK_BYTES: usize = 1 << 20;

/// What [`Engine::verify`] found in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// Version of the weights.
    pub version: WeightVersion,
    /// Tensors read back.
    pub tensors: usize,
    /// Bytes read back.
    pub bytes: u64,
    /// Time it took.
    pub verify: Duration,
}

/// Resident memory could not be verified, or does not hold the weights that came in. The engine is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// An update in place began and did not commit: there are no whole weights.
    #[error(
        "the weights are torn by an update in place that did not commit (last whole: {last}); \
             send a complete update"
    )]
    Torn {
        /// Version of the last whole weights.
        last: WeightVersion,
    },
    /// Tensors differ from what came in: memory was damaged. Nothing that this engine says can be trusted.
    #[error("{} tensors of version {version} differ from what came in, first {}", tensors.len(), tensors[0])]
    Differs {
        /// Version of the weights.
        version: WeightVersion,
        /// Names of the tensors; at least one.
        tensors: Vec<String>,
    },
    /// The device failed to give the weights back.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A tensor could not be read back. The engine is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The model has no tensor of that name.
    #[error("the model has no tensor `{}`", crate::weights::cut(name))]
    Unknown {
        /// The name.
        name: String,
    },
    /// An update in place began and did not commit: there are no whole weights.
    #[error(
        "the weights are torn by an update in place that did not commit (last whole: {last}); \
             send a complete update"
    )]
    Torn {
        /// Version of the last whole weights.
        last: WeightVersion,
    },
    /// The device failed to give the tensor back.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl<S: Resident> Engine<S> {
    /// Reads a tensor back, by its Hugging Face name: the bytes that came in, or what they were rounded to. The
    /// head of a model that ties it is its embedding.
    ///
    /// # Errors
    /// [`TensorError`].
    pub fn tensor(&self, name: &str) -> Result<WeightTensor, TensorError> {
        let parts = &self.core.parts;
        let (arena, _) =
            self.state.resident().map_err(|torn| TensorError::Torn { last: torn.last.clone() })?;
        let unknown = || TensorError::Unknown { name: name.to_owned() };
        let position = parts.manifest.position_read(name).ok_or_else(unknown)?;
        let tensor = &parts.manifest.tensors()[position];
        let mut data = vec![0; tensor.shape[0] * tensor.row_bytes()];
        let _transfer = Transfer(parts.device.clone());
        read_rows(&*parts.device, &parts.layout, arena, parts.layout.places[position], 0, &mut data)?;
        Ok(WeightTensor { spec: TensorSpec { name: name.to_owned(), ..tensor.clone() }, data })
    }

    /// The digest of each tensor, computed when it came in, in the order of
    /// [`expected_weights`](Engine::expected_weights).
    ///
    /// # Errors
    /// [`VerifyError::Torn`].
    pub fn tensor_digests(&self) -> Result<Vec<(&str, TensorDigest)>, VerifyError> {
        let (_, identity) =
            self.state.resident().map_err(|torn| VerifyError::Torn { last: torn.last.clone() })?;
        let names = self.core.parts.manifest.tensors().iter().map(|tensor| tensor.name.as_str());
        Ok(names.zip(identity.digests.iter().copied()).collect())
    }

    /// Reads all resident weights back and compares each tensor's digest with the one it had when it came in.
    ///
    /// # Errors
    /// [`VerifyError`].
    pub fn verify(&self) -> Result<VerifyReport, VerifyError> {
        let begin = Instant::now();
        let (arena, identity) =
            self.state.resident().map_err(|torn| VerifyError::Torn { last: torn.last.clone() })?;
        let manifest = &self.core.parts.manifest;
        let digests = self.digests(arena)?;
        let all = manifest.tensors().iter().zip(digests).zip(identity.digests.iter());
        let differ = all.filter(|((_, now), then)| now != *then);
        let tensors: Vec<String> = differ.map(|((tensor, _), _)| tensor.name.clone()).collect();
        let version = identity.version.clone();
        match tensors.is_empty() {
            false => Err(VerifyError::Differs { version, tensors }),
            true => Ok(VerifyReport {
                version,
                tensors: manifest.tensors().len(),
                bytes: manifest.bytes(),
                verify: begin.elapsed(),
            }),
        }
    }

    /// Digests of all tensors as they are in memory now.
    fn digests(&self, arena: &Arena) -> Result<Vec<TensorDigest>, DeviceError> {
        let parts = &self.core.parts;
        #[cfg(feature = "cuda")]
        if let Some(digests) =
            crate::weights::resident_digests(&*parts.device, &parts.manifest, &parts.layout, arena)?
        {
            return Ok(digests);
        }
        let mut block = Vec::new();
        let _transfer = Transfer(parts.device.clone());
        (0..parts.manifest.tensors().len()).map(|position| self.digest(arena, position, &mut block)).collect()
    }

    /// Digest of a tensor as it is in memory now, read back by way of `block`.
    fn digest(
        &self,
        arena: &Arena,
        position: usize,
        block: &mut Vec<u8>,
    ) -> Result<TensorDigest, DeviceError> {
        let parts = &self.core.parts;
        let tensor = &parts.manifest.tensors()[position];
        let row_bytes = tensor.row_bytes();
        let granule = parts.device.packed_rows();
        let block_rows = (BLOCK_BYTES / row_bytes / granule).max(1) * granule;
        let mut hasher = TensorHasher::new(tensor);
        block.resize(block.len().max(block_rows.min(tensor.shape[0]) * row_bytes), 0);
        for first_row in (0..tensor.shape[0]).step_by(block_rows) {
            let rows = block_rows.min(tensor.shape[0] - first_row);
            let block = &mut block[..rows * row_bytes];
            read_rows(&*parts.device, &parts.layout, arena, parts.layout.places[position], first_row, block)?;
            hasher.update_shared(block, &|count, work| parts.device.share_out(count, work));
        }
        Ok(hasher.finish())
    }
}

impl<S: State> Engine<S> {
    /// The digest that the weights of `source` would have in this engine, under these options: names mapped,
    /// dtypes converted, padding trimmed. Nothing is stored.
    ///
    /// # Errors
    /// [`LoadError`], as the load would report; nothing has changed.
    pub fn digest_of(
        &self,
        mut source: impl WeightSource,
        options: LoadOptions,
    ) -> Result<WeightsDigest, LoadError> {
        let mut intake = Intake::complete(self.core.parts.intake_shape(), options);
        intake.push_all(&mut NoMemory, &mut source, true).map_err(LoadError::of_push)?;
        let received = intake.finish().map_err(|error| LoadError::of_commit(error.into()))?;
        Ok(received.digest)
    }
}
