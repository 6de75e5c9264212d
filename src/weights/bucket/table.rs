//! The table of an encoded bucket: bounded while it is read, not afterwards.

use std::fmt;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::{BucketEntry, BucketError, MAX_ENTRIES, MAX_NAME_BYTES, MAX_RANK, check};
use crate::weights::json::cut;
use crate::weights::{DType, TensorSpec};

/// Longest element type that is kept whole, in bytes.
const MAX_DTYPE_BYTES: usize = 16;

/// The entries of a table, each checked alone.
pub(super) fn parse(text: &str, data_bytes: usize) -> Result<Vec<BucketEntry>, BucketError> {
    let mut table = Table { data_bytes, entries: Vec::new(), fault: None };
    let mut reader = serde_json::Deserializer::from_str(text);
    let parsed = reader.deserialize_map(&mut table).and_then(|()| reader.end());
    match parsed {
        Ok(()) => Ok(table.entries),
        Err(fault) => Err(table.fault.unwrap_or_else(|| json_fault(&fault))),
    }
}

/// An entry as it stands in a table.
pub(super) fn text_of(spec: &TensorSpec, offset: usize, begin: usize, end: usize) -> String {
    let dtype = match spec.dtype {
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::Bf16 => "BF16",
    };
    let (name, shape, range) = (&spec.name, &spec.shape, [begin, end]);
    serde_json::json!({ "name": name, "dtype": dtype, "shape": shape, "offset": offset, "range": range })
        .to_string()
}

fn json_fault(fault: &serde_json::Error) -> BucketError {
    let (line, column) = (fault.line(), fault.column());
    let text = fault.to_string();
    let reason = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text);
    BucketError::Table { line, column, reason: cut(reason).into() }
}

/// The entries read so far and, if the reader was stopped for a reason of ours, that reason.
struct Table {
    data_bytes: usize,
    entries: Vec<BucketEntry>,
    fault: Option<BucketError>,
}

impl Table {
    /// Stops the reader; the text of the error is not shown.
    fn stop<E: serde::de::Error>(&mut self, fault: BucketError) -> E {
        self.fault = Some(fault);
        E::custom("stopped")
    }
}

impl<'de> Visitor<'de> for &mut Table {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with the list `tensors`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        #[derive(Deserialize)]
        #[serde(field_identifier, rename_all = "lowercase")]
        enum Key {
            Tensors,
        }
        let mut seen = false;
        while let Some(Key::Tensors) = map.next_key()? {
            if std::mem::replace(&mut seen, true) {
                return Err(A::Error::duplicate_field("tensors"));
            }
            map.next_value_seed(List(&mut *self))?;
        }
        if seen { Ok(()) } else { Err(A::Error::missing_field("tensors")) }
    }
}

/// Reads the list `tensors`.
struct List<'a>(&'a mut Table);

impl<'de> DeserializeSeed<'de> for List<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for List<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let Self(table) = self;
        while let Some(Object(raw)) = list.next_element()? {
            if table.entries.len() == MAX_ENTRIES {
                return Err(table.stop(BucketError::TooManyEntries { limit: MAX_ENTRIES }));
            }
            let checked = raw.into_entry().and_then(|entry| {
                check::entry(&entry, table.data_bytes)?;
                Ok(entry)
            });
            match checked {
                Ok(entry) => table.entries.push(entry),
                Err(fault) => return Err(table.stop(fault)),
            }
        }
        Ok(())
    }
}

/// An entry as it stands in the table. Nothing in it is longer than an entry may be.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    name: Text<MAX_NAME_BYTES>,
    dtype: Text<MAX_DTYPE_BYTES>,
    shape: Shape,
    #[serde(default)]
    offset: usize,
    range: (usize, usize),
}

impl RawEntry {
    fn into_entry(self) -> Result<BucketEntry, BucketError> {
        let tensor = || cut(&self.name.text).into_owned();
        if self.name.bytes > MAX_NAME_BYTES {
            return Err(BucketError::NameTooLong {
                tensor: tensor(),
                bytes: self.name.bytes,
                limit_bytes: MAX_NAME_BYTES,
            });
        }
        let dtype = match self.dtype.text.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::Bf16,
            _ => return Err(BucketError::UnknownDType { tensor: tensor(), dtype: self.dtype.text }),
        };
        if self.shape.rank > MAX_RANK {
            let (tensor, dimensions) = (tensor(), self.shape.rank);
            return Err(BucketError::TooManyDimensions { tensor, dimensions, limit: MAX_RANK });
        }
        let tensor = TensorSpec { name: self.name.text, dtype, shape: self.shape.dimensions };
        Ok(BucketEntry { tensor, offset: self.offset, range: self.range.0..self.range.1 })
    }
}

/// A [`RawEntry`] that is written as an object: for serde alone a list of the values would do.
struct Object(RawEntry);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with name, dtype, shape and range")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object, A::Error> {
                RawEntry::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

/// A text, cut if it is longer than `LIMIT` bytes.
struct Text<const LIMIT: usize> {
    text: String,
    /// Length of the whole.
    bytes: usize,
}

impl<'de, const LIMIT: usize> Deserialize<'de> for Text<LIMIT> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Cut<const LIMIT: usize>;
        impl<const LIMIT: usize> Visitor<'_> for Cut<LIMIT> {
            type Value = Text<LIMIT>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Text<LIMIT>, E> {
                let bytes = text.len();
                let text = if bytes > LIMIT { cut(text).into() } else { text.into() };
                Ok(Text { text, bytes })
            }
        }
        deserializer.deserialize_str(Cut)
    }
}

/// A shape, of which at most [`MAX_RANK`] dimensions are kept.
struct Shape {
    dimensions: Vec<usize>,
    /// Length of the whole.
    rank: usize,
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;
        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
                let mut shape = Shape { dimensions: Vec::new(), rank: 0 };
                while let Some(dimension) = list.next_element()? {
                    if shape.rank < MAX_RANK {
                        shape.dimensions.push(dimension);
                    }
                    shape.rank += 1;
                }
                Ok(shape)
            }
        }
        deserializer.deserialize_seq(Dimensions)
    }
}
