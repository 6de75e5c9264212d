//! JSON objects in which a key that occurs twice is an error, not the last one's victory.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
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

/// The text cut to a length that fits an error message.
pub(crate) fn cut(text: &str) -> std::borrow::Cow<'_, str> {
    const SHOWN_CHARS: usize = 120;
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}
