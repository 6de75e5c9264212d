//! Typed access to a JSON object, with errors that name the field.

use serde_json::{Map, Value};

use super::ConfigError;

/// Longest rendering of a value in an error, in characters.
const SHOWN_CHARS: usize = 80;

/// An object and the path that leads to it. A `null` counts as absent, as transformers treats it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: &'static str,
}

impl<'a> Fields<'a> {
    /// `prefix` is empty or ends in a dot.
    pub(super) fn new(map: &'a Map<String, Value>, prefix: &'static str) -> Self {
        Self { map, prefix }
    }

    /// The full path of a key.
    pub(super) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Whether the key is there, be it with a `null`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// All entries.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    /// The value, unless absent or `null`.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A whole number from 1 to `max`.
    pub(super) fn size(&self, key: &str, max: usize) -> Result<Option<usize>, ConfigError> {
        self.value(key).map(|value| self.size_of(key, value, 1, max)).transpose()
    }

    /// A whole number from 0 to `max`.
    pub(super) fn count(&self, key: &str, max: usize) -> Result<Option<usize>, ConfigError> {
        self.value(key).map(|value| self.size_of(key, value, 0, max)).transpose()
    }

    fn size_of(&self, key: &str, value: &Value, min: usize, max: usize) -> Result<usize, ConfigError> {
        if !value.is_number() || value.is_f64() {
            return Err(self.wrong_type(key, "a whole number", value));
        }
        value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok())
            .filter(|number| (min..=max).contains(number))
            .ok_or_else(|| self.out_of_range(key, format!("{min} to {max}"), value))
    }

    /// A number above 0 that is finite and normal in single precision too: its inverse is finite as well.
    pub(super) fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| self.wrong_type(key, "a number", value))?;
        let single = number as f32;
        if single.is_normal() && single > 0.0 {
            Ok(Some(number))
        } else {
            Err(self.out_of_range(key, "a finite number above 0".into(), value))
        }
    }

    /// As [`Fields::positive`], with 0 read as absent: transformers' `value or default`.
    pub(super) fn positive_or_zero(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.value(key).and_then(Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => self.positive(key),
        }
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.value(key)
            .map(|value| value.as_bool().ok_or_else(|| self.wrong_type(key, "true or false", value)))
            .transpose()
    }

    /// A string.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.value(key)
            .map(|value| value.as_str().ok_or_else(|| self.wrong_type(key, "a string", value)))
            .transpose()
    }

    /// A list of strings.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let wrong = || self.wrong_type(key, "a list of strings", value);
        let list = value.as_array().ok_or_else(wrong)?;
        list.iter().map(|item| item.as_str().ok_or_else(wrong)).collect::<Result<_, _>>().map(Some)
    }

    /// An object that isn't empty; an empty one counts as absent.
    pub(super) fn object(&self, key: &str, prefix: &'static str) -> Result<Option<Fields<'a>>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.wrong_type(key, "an object", value))?;
        Ok((!map.is_empty()).then_some(Fields::new(map, prefix)))
    }

    /// A token id or a list of token ids, each inside the vocabulary.
    pub(super) fn token_ids(&self, key: &str, vocab_size: usize) -> Result<Option<Vec<u32>>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let one = |item: &Value| {
            let id = self.size_of(key, item, 0, vocab_size - 1)?;
            u32::try_from(id).map_err(|_| self.out_of_range(key, format!("0 to {}", vocab_size - 1), item))
        };
        match value {
            Value::Array(list) => list.iter().map(one).collect::<Result<_, _>>().map(Some),
            Value::Number(_) => Ok(Some(vec![one(value)?])),
            _ => Err(self.wrong_type(key, "a token id or a list of them", value)),
        }
    }

    /// The error for a value of a wrong type.
    pub(super) fn wrong_type(&self, key: &str, expected: &'static str, value: &Value) -> ConfigError {
        ConfigError::WrongType { field: self.path(key), expected, received: show(value) }
    }

    /// The error for a number out of its range.
    pub(super) fn out_of_range(&self, key: &str, expected: String, value: &Value) -> ConfigError {
        ConfigError::OutOfRange { field: self.path(key), expected, received: show(value) }
    }

    /// The error for a value that means something this engine doesn't do.
    pub(super) fn unsupported(&self, key: &str) -> ConfigError {
        let value = self.map.get(key).map_or_else(|| "absent".into(), show);
        ConfigError::Unsupported { field: self.path(key), value }
    }
}

/// JSON text of a value, cut to a readable length.
pub(super) fn show(value: &Value) -> String {
    let mut text = value.to_string();
    if let Some((cut, _)) = text.char_indices().nth(SHOWN_CHARS) {
        text.truncate(cut);
        text.push('…');
    }
    text
}
