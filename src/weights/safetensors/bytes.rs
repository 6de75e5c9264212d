//! A safetensors file that is in memory as one buffer.

use std::fmt;

use super::SafetensorsError;
use super::header::{ByteRange, Header};
use crate::weights::TensorSpec;
use crate::weights::source::{SourceError, UnsupportedTensor, WeightSource};

/// The bytes of a whole safetensors file, at any address.
///
/// The buffer is borrowed or owned by this source until it is dropped; a load copies from it.
pub struct SafetensorsBytes<B> {
    bytes: B,
    ranges: Vec<ByteRange>,
    unsupported: Vec<UnsupportedTensor>,
}

impl<B: AsRef<[u8]>> SafetensorsBytes<B> {
    /// The buffer is checked by [`index`](WeightSource::index), not here.
    pub fn new(bytes: B) -> Self {
        Self { bytes, ranges: Vec::new(), unsupported: Vec::new() }
    }
}

impl<B: AsRef<[u8]>> fmt::Debug for SafetensorsBytes<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SafetensorsBytes").field("bytes", &self.bytes.as_ref().len()).finish()
    }
}

impl<B: AsRef<[u8]>> WeightSource for SafetensorsBytes<B> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.ranges.clear();
        self.unsupported.clear();
        let header = Header::of_bytes(self.bytes.as_ref())
            .map_err(|fault| SourceError::SafetensorsBuffer { fault: Box::new(fault) })?;
        let (listed, unsupported) = header.split();
        self.unsupported = unsupported;
        let (specs, ranges) = listed.into_iter().unzip();
        self.ranges = ranges;
        Ok(specs)
    }

    fn unsupported(&self) -> &[UnsupportedTensor] {
        &self.unsupported
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let no_such_tensor = SourceError::NoSuchTensor { tensor, count: self.ranges.len() };
        let range = self.ranges.get(tensor).ok_or(no_such_tensor)?;
        let bytes = self.bytes.as_ref();
        // Inside, unless the buffer isn't the one that was indexed.
        let piece = bytes.get(range.begin as usize..range.end as usize).ok_or_else(|| {
            let fault = SafetensorsError::TruncatedHeader {
                expected_bytes: range.end,
                actual_bytes: bytes.len() as u64,
            };
            SourceError::SafetensorsBuffer { fault: Box::new(fault) }
        })?;
        sink(piece);
        Ok(())
    }
}
