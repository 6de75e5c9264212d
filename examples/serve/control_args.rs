//! Arguments of a call, from its query and its JSON body alike.
//!
//! An argument is there once, and every argument means something: a call with an unknown one is refused
//! before anything is done, so that a misspelt `tags` does not put everything to sleep.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use axum::extract::Query;
use axum::http::Uri;
use dormouse::control::Tags;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::Refusal;
use crate::openapi_control::is_argument;

/// Longest deadline, in seconds.
pub const MAX_TIMEOUT: f64 = 1e7;

/// Arguments that were not looked at yet.
#[derive(Debug, Default)]
pub struct Args(BTreeMap<String, Arg>);

#[derive(Debug)]
enum Arg {
    /// All values of a key of the query.
    Query(Vec<String>),
    /// A value of the body, not null.
    Body(Value),
    /// Null in the body: as if it were left out, if the call has such an argument.
    Null,
}

impl Args {
    /// Reads the query.
    ///
    /// # Errors
    /// It is not one.
    pub fn of_query(uri: &Uri) -> Result<Self, Refusal> {
        let Query(pairs) = Query::<Vec<(String, String)>>::try_from_uri(uri)
            .map_err(|error| Refusal::argument("query", error))?;
        let mut args = BTreeMap::new();
        for (name, value) in pairs {
            match args.entry(name).or_insert_with(|| Arg::Query(Vec::new())) {
                Arg::Query(values) => values.push(value),
                Arg::Body(_) | Arg::Null => {}
            }
        }
        Ok(Self(args))
    }

    /// Adds those of a JSON body; null is as if it were left out.
    ///
    /// # Errors
    /// One of them is in the query, too.
    pub fn add_body(&mut self, body: Map<String, Value>) -> Result<(), Refusal> {
        for (name, value) in body {
            if value.is_null() {
                self.0.entry(name).or_insert(Arg::Null);
                continue;
            }
            if self.has(&name) {
                return Err(Refusal::argument(&cut(&name), "is in the query and in the body"));
            }
            self.0.insert(name, Arg::Body(value));
        }
        Ok(())
    }

    /// Whether an argument is there.
    pub fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|arg| !matches!(arg, Arg::Null))
    }

    /// A JSON value from the body.
    ///
    /// # Errors
    /// It is in the query.
    pub fn json(&mut self, name: &str) -> Result<Option<Value>, Refusal> {
        match self.0.remove(name) {
            None | Some(Arg::Null) => Ok(None),
            Some(Arg::Body(value)) => Ok(Some(value)),
            Some(Arg::Query(_)) => Err(Refusal::argument(name, "must be in the body")),
        }
    }

    /// A text.
    ///
    /// # Errors
    /// It is none, or there are several.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, Refusal> {
        match self.0.remove(name) {
            None | Some(Arg::Null) => Ok(None),
            Some(Arg::Body(Value::String(text))) => Ok(Some(text)),
            Some(Arg::Body(_)) => Err(Refusal::argument(name, "must be a string")),
            Some(Arg::Query(values)) => only(name, values).map(Some),
        }
    }

    /// One of these words.
    ///
    /// # Errors
    /// It is another.
    pub fn word<'a>(&mut self, name: &str, words: &[&'a str]) -> Result<Option<&'a str>, Refusal> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let known = words.iter().copied().find(|word| *word == text);
        known.map(Some).ok_or_else(|| {
            let words = words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
            Refusal::argument(name, format!("must be one of {words}"))
        })
    }

    /// Yes or no: a JSON boolean, or `true`, `false`, `1` or `0` in the query.
    ///
    /// # Errors
    /// It is neither.
    pub fn flag(&mut self, name: &str) -> Result<Option<bool>, Refusal> {
        let wrong = || Refusal::argument(name, "must be true or false");
        match self.0.remove(name) {
            None | Some(Arg::Null) => Ok(None),
            Some(Arg::Body(value)) => value.as_bool().map(Some).ok_or_else(wrong),
            Some(Arg::Query(values)) => match only(name, values)?.to_ascii_lowercase().as_str() {
                "true" | "1" => Ok(Some(true)),
                "false" | "0" => Ok(Some(false)),
                _ => Err(wrong()),
            },
        }
    }

    /// A whole number, not below 0.
    ///
    /// # Errors
    /// It is none.
    pub fn integer(&mut self, name: &str) -> Result<Option<u64>, Refusal> {
        let number = match self.0.remove(name) {
            None | Some(Arg::Null) => return Ok(None),
            Some(Arg::Body(value)) => value.as_u64().or_else(|| whole(value.as_f64()?)),
            Some(Arg::Query(values)) => {
                let text = only(name, values)?;
                text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
            }
        };
        number.map(Some).ok_or_else(|| Refusal::argument(name, "must be a whole number, not below 0"))
    }

    /// Texts: a JSON list or string, a key that is there several times, or a list with commas in either. The
    /// empty text is the empty list.
    ///
    /// # Errors
    /// It is none.
    pub fn texts(&mut self, name: &str) -> Result<Option<Vec<String>>, Refusal> {
        let split = |texts: Vec<String>| {
            let texts = texts.iter().filter(|text| !text.is_empty()).flat_map(|text| text.split(','));
            texts.map(str::to_owned).collect()
        };
        self.list(name, split)
    }

    /// Texts in which a comma is a comma: a JSON list or string, or a key that is there several times.
    ///
    /// # Errors
    /// It is none.
    pub fn names(&mut self, name: &str) -> Result<Option<Vec<String>>, Refusal> {
        self.list(name, |names| names.into_iter().filter(|name| !name.is_empty()).collect())
    }

    fn list(
        &mut self,
        name: &str,
        of_texts: impl FnOnce(Vec<String>) -> Vec<String>,
    ) -> Result<Option<Vec<String>>, Refusal> {
        let wrong = || Refusal::argument(name, "must be a list of strings, or one string");
        let texts = match self.0.remove(name) {
            None | Some(Arg::Null) => return Ok(None),
            Some(Arg::Query(values)) => values,
            Some(Arg::Body(Value::String(text))) => vec![text],
            Some(Arg::Body(Value::Array(values))) => {
                let texts = values.into_iter().map(|value| match value {
                    Value::String(text) => Ok(text),
                    _ => Err(wrong()),
                });
                // An entry of a list is one text, whatever is in it.
                return texts.collect::<Result<_, _>>().map(Some);
            }
            Some(Arg::Body(_)) => return Err(wrong()),
        };
        Ok(Some(of_texts(texts)))
    }

    /// Parts of the engine; all if nothing is said.
    ///
    /// # Errors
    /// The list is empty, or one of it is unknown.
    pub fn tags(&mut self) -> Result<Tags, Refusal> {
        match self.texts("tags")? {
            None => Ok(Tags::ALL),
            Some(names) => Tags::from_names(names).map_err(|error| Refusal::argument("tags", error)),
        }
    }

    /// SGLang's parts of the engine. Its third, `cuda_graph`, is a part of the KV cache here.
    ///
    /// # Errors
    /// As [`tags`](Args::tags).
    pub fn sglang_tags(&mut self) -> Result<Tags, Refusal> {
        let Some(mut names) = self.texts("tags")? else { return Ok(Tags::ALL) };
        for name in names.iter_mut().filter(|name| *name == "cuda_graph") {
            "kv_cache".clone_into(name);
        }
        names.sort();
        names.dedup();
        Tags::from_names(names).map_err(|error| Refusal::argument("tags", error))
    }

    /// How long a call may take.
    ///
    /// # Errors
    /// It is no number of seconds.
    pub fn timeout(&mut self) -> Result<Option<Duration>, Refusal> {
        let seconds = match self.0.remove("timeout") {
            None | Some(Arg::Null) => return Ok(None),
            Some(Arg::Body(value)) => value.as_f64(),
            Some(Arg::Query(values)) => only("timeout", values)?.parse::<f64>().ok(),
        };
        match seconds {
            Some(seconds) if seconds > 0.0 && seconds <= MAX_TIMEOUT => {
                Ok(Some(Duration::from_secs_f64(seconds)))
            }
            _ => {
                let requirement = format!("must be a number of seconds above 0, at most {MAX_TIMEOUT}");
                Err(Refusal::argument("timeout", requirement))
            }
        }
    }

    /// Refuses what is left.
    ///
    /// # Errors
    /// Something is.
    pub fn finish(self) -> Result<(), Refusal> {
        // What a dialect's client leaves out may be there as null, also where it would mean nothing.
        let known = |name: &str, arg: &Arg| matches!(arg, Arg::Null) && is_argument(name);
        match self.0.into_iter().find(|(name, arg)| !known(name, arg)) {
            None => Ok(()),
            Some((name, _)) => Err(Refusal::argument(&cut(&name), "this call has no such argument")),
        }
    }
}

/// The value of a key that is there once.
fn only(name: &str, values: Vec<String>) -> Result<String, Refusal> {
    <[String; 1]>::try_from(values)
        .map(|[value]| value)
        .map_err(|_| Refusal::argument(name, "is there more than once"))
}

/// JSON knows no integers: 2.0 is one, too.
fn whole(number: f64) -> Option<u64> {
    let exact = number.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&number);
    exact.then_some(number as u64)
}

/// A caller's word, cut to a readable length.
fn cut(name: &str) -> String {
    name.chars().take(80).collect()
}

/// A JSON value in which no object has a key twice: which one is meant would be a guess.
pub struct Unique(pub Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
                let mut values = Vec::new();
                while let Some(Unique(value)) = list.next_element()? {
                    values.push(value);
                }
                Ok(values.into())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
                let mut fields = Map::new();
                while let Some(name) = members.next_key::<String>()? {
                    if fields.contains_key(&name) {
                        return Err(de::Error::custom(format_args!("`{}` is there twice", cut(&name))));
                    }
                    let Unique(value) = members.next_value()?;
                    fields.insert(name, value);
                }
                Ok(fields.into())
            }
        }
        input.deserialize_any(Visit).map(Self)
    }
}
