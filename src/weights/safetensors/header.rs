//! The header of a safetensors file: strict, and bounded before anything is allocated.
//!
//! Layout: an u64 (little-endian) with the header's length, the header (a JSON object that maps names to
//! dtype, shape and byte range, plus `__metadata__`), the data. We require what the format promises: every
//! data byte belongs to exactly one tensor.
//!
//! Source: github.com/huggingface/safetensors, README, "Format".

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};

use super::SafetensorsError;
use crate::weights::json::{Bounded, cut};
use crate::weights::source::UnsupportedTensor;
use crate::weights::{DType, TensorSpec};

/// Longest header that is read, in bytes. The largest published checkpoints need below 16 MiB for all
/// their tensors; with [`MAX_TENSORS`] it keeps what a hostile header makes us allocate below 64 MiB.
pub(crate) const MAX_HEADER_BYTES: u64 = 24 << 20;
/// Most tensors in one file.
pub(crate) const MAX_TENSORS: usize = 1 << 17;
/// Longest name of a tensor, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 1024;
/// Most dimensions of a tensor.
pub(crate) const MAX_RANK: usize = 8;
/// Longest element type that an error shows, in characters.
const MAX_DTYPE_CHARS: usize = 32;
/// Bytes before the header.
const PREFIX_BYTES: u64 = 8;

/// Bytes `begin..end` of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByteRange {
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

/// An element type, known or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ElementType {
    Known(safetensors::Dtype),
    /// As the file spells it, cut to a readable length.
    Unknown(String),
}

/// One tensor of a checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeaderTensor {
    pub(crate) name: String,
    pub(crate) dtype: ElementType,
    pub(crate) shape: Vec<usize>,
    /// From the begin of the file, inside it, overlapping with no other.
    pub(crate) file_range: ByteRange,
}

/// A checked header; the tensors lie one behind the other in this order and fill the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) tensors: Vec<HeaderTensor>,
}

impl Header {
    /// Reads and checks the header of a whole file in memory.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Result<Self, SafetensorsError> {
        let file_bytes = bytes.len() as u64;
        Self::check_prefix(file_bytes)?;
        let mut prefix = [0; 8];
        prefix.copy_from_slice(&bytes[..8]);
        let header_bytes = Self::check_length(prefix, file_bytes)?;
        Self::parse(&bytes[8..8 + header_bytes], file_bytes)
    }

    /// Whether a file can hold the length field at all.
    pub(crate) fn check_prefix(file_bytes: u64) -> Result<(), SafetensorsError> {
        if file_bytes >= PREFIX_BYTES {
            return Ok(());
        }
        Err(SafetensorsError::TruncatedHeader { expected_bytes: PREFIX_BYTES, actual_bytes: file_bytes })
    }

    /// The header's length, below the limit and inside the file.
    pub(crate) fn check_length(prefix: [u8; 8], file_bytes: u64) -> Result<usize, SafetensorsError> {
        let bytes = u64::from_le_bytes(prefix);
        if bytes > MAX_HEADER_BYTES {
            return Err(SafetensorsError::HeaderTooLong { bytes, limit_bytes: MAX_HEADER_BYTES });
        }
        let expected_bytes = PREFIX_BYTES + bytes;
        if expected_bytes > file_bytes {
            return Err(SafetensorsError::TruncatedHeader { expected_bytes, actual_bytes: file_bytes });
        }
        usize::try_from(bytes)
            .map_err(|_| SafetensorsError::HeaderTooLong { bytes, limit_bytes: MAX_HEADER_BYTES })
    }

    /// Reads and checks the header's text against the length of the whole file.
    pub(crate) fn parse(text: &[u8], file_bytes: u64) -> Result<Self, SafetensorsError> {
        if text.first() != Some(&b'{') {
            return Err(SafetensorsError::NotAnObject);
        }
        let text = std::str::from_utf8(text).map_err(|_| SafetensorsError::NotAnObject)?;
        let mut entries = Entries { tensors: Vec::new(), fault: None };
        let mut reader = serde_json::Deserializer::from_str(text);
        let parsed = entries.deserialize_from(&mut reader).and_then(|()| reader.end());
        if let Err(fault) = parsed {
            return Err(entries
                .fault
                .unwrap_or_else(|| SafetensorsError::Json { reason: fault.to_string() }));
        }
        let mut tensors = entries.tensors;
        check_names(&tensors)?;
        let data_begin = PREFIX_BYTES + text.len() as u64;
        tensors.sort_by_key(|tensor| (tensor.file_range.begin, tensor.file_range.end));
        check_layout(&tensors, data_begin, file_bytes)?;
        for tensor in &mut tensors {
            tensor.file_range.begin += data_begin;
            tensor.file_range.end += data_begin;
        }
        Ok(Self { tensors })
    }

    /// The tensors that weights can be, with their ranges, and the others.
    pub(crate) fn split(self) -> (Vec<(TensorSpec, ByteRange)>, Vec<UnsupportedTensor>) {
        let (mut listed, mut unsupported) = (Vec::with_capacity(self.tensors.len()), Vec::new());
        for HeaderTensor { name, dtype, shape, file_range } in self.tensors {
            match dtype.supported() {
                Some(dtype) => listed.push((TensorSpec { name, dtype, shape }, file_range)),
                None => unsupported.push(UnsupportedTensor { name, dtype: dtype.into_text() }),
            }
        }
        (listed, unsupported)
    }
}

fn check_names(tensors: &[HeaderTensor]) -> Result<(), SafetensorsError> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(SafetensorsError::Duplicate { tensor: cut(pair[0]).into() }),
        None => Ok(()),
    }
}

/// The tensors, sorted by range (still relative to the data), must fill the data exactly.
fn check_layout(tensors: &[HeaderTensor], data_begin: u64, file_bytes: u64) -> Result<(), SafetensorsError> {
    let mut filled = 0;
    for (i, tensor) in tensors.iter().enumerate() {
        let ByteRange { begin, end } = tensor.file_range;
        let name = || cut(&tensor.name).into();
        if begin < filled {
            let other = &tensors[i - 1];
            return Err(SafetensorsError::Overlap {
                tensor: name(),
                begin,
                other: cut(&other.name).into(),
                other_end: other.file_range.end,
            });
        }
        if begin > filled {
            return Err(SafetensorsError::Hole { tensor: name(), begin: filled, end: begin });
        }
        filled = end;
    }
    let data_bytes = file_bytes.saturating_sub(data_begin);
    let expected_bytes = data_begin.saturating_add(filled);
    if filled > data_bytes {
        let first = tensors.iter().find(|tensor| tensor.file_range.end > data_bytes);
        return Err(SafetensorsError::TruncatedData {
            tensor: first.map(|tensor| cut(&tensor.name).into()).unwrap_or_default(),
            expected_bytes,
            actual_bytes: file_bytes,
        });
    }
    if filled < data_bytes {
        return Err(SafetensorsError::TrailingBytes { expected_bytes, actual_bytes: file_bytes });
    }
    Ok(())
}

impl ElementType {
    fn parse(text: &str) -> Self {
        use serde::de::IntoDeserializer as _;
        use serde::de::value::{Error, StrDeserializer};
        let known: StrDeserializer<'_, Error> = text.into_deserializer();
        match safetensors::Dtype::deserialize(known) {
            Ok(dtype) => ElementType::Known(dtype),
            Err(_) => ElementType::Unknown(text.chars().take(MAX_DTYPE_CHARS).collect()),
        }
    }

    /// The element type, if a weight can have it.
    pub(crate) fn supported(&self) -> Option<DType> {
        match self {
            ElementType::Known(dtype) => DType::try_from(*dtype).ok(),
            ElementType::Unknown(_) => None,
        }
    }

    /// As a file spells it.
    pub(crate) fn into_text(self) -> String {
        match self {
            ElementType::Known(dtype) => dtype.to_string(),
            ElementType::Unknown(text) => text,
        }
    }
}

/// A description as it stands in the header.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor<'a> {
    #[serde(borrow)]
    dtype: std::borrow::Cow<'a, str>,
    shape: Bounded<usize, MAX_RANK>,
    data_offsets: (u64, u64),
}

/// The descriptions read so far and, if the reader was stopped for a reason of ours, that reason.
struct Entries {
    tensors: Vec<HeaderTensor>,
    fault: Option<SafetensorsError>,
}

impl Entries {
    fn deserialize_from<'de, D: Deserializer<'de>>(&mut self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }

    /// Stops the reader; the text of the error is not shown.
    fn stop<E: serde::de::Error>(&mut self, fault: SafetensorsError) -> E {
        self.fault = Some(fault);
        E::custom("stopped")
    }
}

impl<'de> Visitor<'de> for &mut Entries {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut metadata_seen = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if std::mem::replace(&mut metadata_seen, true) {
                    return Err(self.stop(SafetensorsError::Duplicate { tensor: name }));
                }
                map.next_value_seed(Metadata)?;
                continue;
            }
            if name.len() > MAX_NAME_BYTES {
                return Err(self.stop(SafetensorsError::NameTooLong {
                    tensor: cut(&name).into(),
                    bytes: name.len(),
                    limit_bytes: MAX_NAME_BYTES,
                }));
            }
            if self.tensors.len() == MAX_TENSORS {
                return Err(self.stop(SafetensorsError::TooManyTensors { limit: MAX_TENSORS }));
            }
            let checked = match map.next_value::<RawTensor<'_>>() {
                Ok(raw) => check_tensor(name, raw),
                Err(fault) => {
                    let reason = cut(&fault.to_string()).into();
                    Err(SafetensorsError::Entry { tensor: cut(&name).into(), reason })
                }
            };
            match checked {
                Ok(tensor) => self.tensors.push(tensor),
                Err(fault) => return Err(self.stop(fault)),
            }
        }
        Ok(())
    }
}

/// Skips `__metadata__`, an object of strings, without keeping it.
struct Metadata;

impl<'de> DeserializeSeed<'de> for Metadata {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Metadata {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_entry::<std::borrow::Cow<'de, str>, std::borrow::Cow<'de, str>>()?.is_some() {}
        Ok(())
    }
}

/// What can be checked of one tensor alone. The range stays relative to the data.
fn check_tensor(name: String, raw: RawTensor<'_>) -> Result<HeaderTensor, SafetensorsError> {
    let (begin, end) = raw.data_offsets;
    let shape = raw.shape.0;
    if begin > end {
        return Err(SafetensorsError::Inverted { tensor: cut(&name).into(), begin, end });
    }
    let dtype = ElementType::parse(&raw.dtype);
    let overflow = || SafetensorsError::SizeOverflow { tensor: cut(&name).into(), shape: shape.clone() };
    let elements = shape
        .iter()
        .try_fold(1_u64, |product, &dimension| product.checked_mul(dimension as u64))
        .ok_or_else(overflow)?;
    if let ElementType::Known(known) = dtype {
        let bits = elements.checked_mul(known.bitsize() as u64).ok_or_else(overflow)?;
        let expected_bytes = bits.div_ceil(8);
        if bits % 8 != 0 || expected_bytes != end - begin {
            return Err(SafetensorsError::WrongSize {
                tensor: cut(&name).into(),
                dtype: known.to_string(),
                shape,
                expected_bytes,
                actual_bytes: end - begin,
            });
        }
    }
    Ok(HeaderTensor { name, dtype, shape, file_range: ByteRange { begin, end } })
}
