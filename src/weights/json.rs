//! JSON that is read strictly: objects in which a key that occurs twice is an error, lists that end at a limit.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// The entries of an object, each key once. Only this level is checked; nested objects are plain values.
pub(crate) struct UniqueKeys(pub(crate) Map<String, Value>);

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = UniqueKeys;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<UniqueKeys, A::Error> {
                let mut map = Map::new();
                while let Some(key) = access.next_key::<String>()? {
                    if map.contains_key(&key) {
                        return Err(A::Error::custom(format_args!("key `{}` occurs twice", cut(&key))));
                    }
                    map.insert(key, access.next_value()?);
                }
                Ok(UniqueKeys(map))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// A list of at most `LIMIT` elements: reading stops at the first one too many.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct Bounded<T, const LIMIT: usize>(pub(crate) Vec<T>);

impl<T, const LIMIT: usize> Default for Bounded<T, LIMIT> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const LIMIT: usize> Deserialize<'de> for Bounded<T, LIMIT> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T, const LIMIT: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const LIMIT: usize> Visitor<'de> for List<T, LIMIT> {
            type Value = Bounded<T, LIMIT>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {LIMIT} elements")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut elements = Vec::new();
                while let Some(element) = list.next_element()? {
                    if elements.len() == LIMIT {
                        return Err(A::Error::custom(format_args!("more than {LIMIT} elements")));
                    }
                    elements.push(element);
                }
                Ok(Bounded(elements))
            }
        }
        deserializer.deserialize_seq(List(PhantomData))
    }
}

/// The text cut to a length that fits an error message, its control characters escaped: names come from
/// anywhere, and must not write to a terminal or begin lines of a log.
pub(crate) fn cut(text: &str) -> Cow<'_, str> {
    const SHOWN_CHARS: usize = 120;
    let end = text.char_indices().nth(SHOWN_CHARS).map(|(end, _)| end);
    let shown = &text[..end.unwrap_or(text.len())];
    if end.is_none() && !shown.contains(char::is_control) {
        return text.into();
    }
    let mut out = String::with_capacity(shown.len());
    for c in shown.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out.push_str(if end.is_some() { "…" } else { "" });
    out.into()
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn shown_text_is_short_and_has_no_control_characters() {
        assert_eq!(cut("model.norm.weight"), "model.norm.weight");
        assert_eq!(cut("é\"\\"), "é\"\\");
        assert_eq!(cut("a\nb\u{1b}[2J\0\u{9b}"), "a\\nb\\u{1b}[2J\\u{0}\\u{9b}");
        assert_eq!(cut(&"é".repeat(120)), "é".repeat(120));
        assert_eq!(cut(&"é".repeat(121)), format!("{}…", "é".repeat(120)));
        assert_eq!(cut(&"\n".repeat(1000)).len(), 240 + "…".len());
    }
}
