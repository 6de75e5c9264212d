//! JSON that is read strictly: objects in which a key that occurs twice is an error, lists that end at a limit.

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

/// The text cut to a length that fits an error message.
pub(crate) fn cut(text: &str) -> std::borrow::Cow<'_, str> {
    const SHOWN_CHARS: usize = 120;
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}
