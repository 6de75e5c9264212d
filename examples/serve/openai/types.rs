//! What clients send to the two endpoints.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use dormouse::{Request, TokenId};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, DeserializeOwned, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::ApiError;

/// Most prompts of one request.
pub const MAX_PROMPTS: usize = 4096;
/// Most stop strings.
pub const MAX_STOPS: usize = 32;
/// Most bytes of a stop string.
pub const MAX_STOP_BYTES: usize = 1024;

/// The body of either endpoint. What clients send and the server has no use for is [`Ignored`]; any other name is
/// an error, so that a typo never passes silently.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub struct Body {
    pub model: Option<String>,
    pub prompt: Option<Prompt>,
    pub messages: Option<Vec<Object<Message>>>,
    pub n: Option<usize>,
    pub best_of: Option<usize>,
    pub max_tokens: Option<usize>,
    pub max_completion_tokens: Option<usize>,
    pub min_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub seed: Option<serde_json::Number>,
    pub stop: Option<Stops>,
    pub stop_token_ids: Option<Vec<TokenId>>,
    pub ignore_eos: Option<bool>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub logit_bias: Option<BTreeMap<TokenId, f32>>,
    pub allowed_token_ids: Option<Vec<TokenId>>,
    pub logprobs: Option<Logprobs>,
    pub top_logprobs: Option<usize>,
    pub echo: Option<bool>,
    pub suffix: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<Object<StreamOptions>>,
    pub cache_salt: Option<String>,
    pub request_id: Option<String>,
    pub skip_special_tokens: Option<bool>,
    pub include_stop_str_in_output: Option<bool>,
    pub return_token_ids: Option<bool>,
    pub return_tokens_as_token_ids: Option<bool>,
    pub add_generation_prompt: Option<bool>,
    pub chat_template_kwargs: Option<serde_json::Map<String, Value>>,
    pub response_format: Option<Object<ResponseFormat>>,
    pub tools: Option<Vec<IgnoredAny>>,
    pub tool_choice: Option<Value>,
    #[serde(rename = "parallel_tool_calls")]
    _parallel_tool_calls: Ignored,
    #[serde(rename = "user")]
    _user: Ignored,
    #[serde(rename = "store")]
    _store: Ignored,
    #[serde(rename = "metadata")]
    _metadata: Ignored,
    #[serde(rename = "service_tier")]
    _service_tier: Ignored,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Ignored,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Ignored,
    #[serde(rename = "reasoning_effort")]
    _reasoning_effort: Ignored,
    #[serde(rename = "modalities")]
    _modalities: Ignored,
    #[serde(rename = "verbosity")]
    _verbosity: Ignored,
}

/// Read and dropped.
#[derive(Default)]
pub struct Ignored;

impl<'de> Deserialize<'de> for Ignored {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(input).map(|_| Self)
    }
}

/// A JSON object. What is derived would take a list of its members, too.
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Visit<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Visit<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(members)).map(Object)
            }
        }
        input.deserialize_map(Visit(PhantomData))
    }
}

/// How a stream is told.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Ignored,
}

/// The form of the answer; there is one.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResponseFormat {
    pub r#type: String,
}

/// One message of a conversation. What a template may use passes through.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    pub role: String,
    #[serde(default)]
    pub content: Option<Content>,
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub reasoning_content: Option<String>,
    #[serde(default)]
    pub tool_calls: Option<Vec<Value>>,
    #[serde(default)]
    pub tool_call_id: Option<String>,
    /// An answer that is sent back as a message has these, as `null` or empty.
    #[serde(default, rename = "refusal")]
    _refusal: Ignored,
    #[serde(default, rename = "audio")]
    _audio: Ignored,
    #[serde(default, rename = "function_call")]
    _function_call: Ignored,
    #[serde(default, rename = "annotations")]
    _annotations: Ignored,
}

/// `logprobs`: how many alternatives, or whether any.
#[derive(Clone, Copy)]
pub enum Logprobs {
    Switch(bool),
    Count(usize),
}

/// Strings to stop at: one, or several.
pub struct Stops(pub Vec<String>);

/// What to continue: one prompt or several, as text or as tokens.
pub enum Prompt {
    Texts {
        texts: Vec<String>,
        /// Whether it was a list.
        listed: bool,
    },
    Tokens {
        prompts: Vec<Vec<TokenId>>,
        /// Whether it was a list of lists.
        listed: bool,
    },
}

/// Text of a message: a string, or parts that are text.
pub struct Content(pub String);

/// Reads a body.
///
/// # Errors
/// 400 that names the parameter.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut input = serde_json::Deserializer::from_slice(body);
    let parsed: Result<Object<T>, _> = serde_path_to_error::deserialize(&mut input).map_err(|error| {
        let path = error.path().to_string();
        let message = error.into_inner().to_string();
        let unknown = message.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`'));
        match unknown {
            Some((name, _)) => ApiError::param(short(name), format!("unknown parameter `{}`", short(name)))
                .code("unknown_parameter"),
            None if path == "." => ApiError::bad(format!("the body is not a request: {}", short(&message))),
            None => ApiError::param(short(&path), format!("{}: {}", short(&path), short(&message))),
        }
    });
    let Object(parsed) = parsed?;
    input.end().map_err(|error| ApiError::bad(format!("after the request: {error}")))?;
    Ok(parsed)
}

/// What a client sent, cut to a readable length.
fn short(text: &str) -> String {
    text.chars().take(300).collect()
}

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Visit;
        impl Visitor<'_> for Visit {
            type Value = Logprobs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of alternatives, or true or false")
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<Logprobs, E> {
                Ok(Logprobs::Switch(on))
            }

            fn visit_u64<E: de::Error>(self, count: u64) -> Result<Logprobs, E> {
                Ok(Logprobs::Count(usize::try_from(count).unwrap_or(usize::MAX)))
            }
        }
        input.deserialize_any(Visit)
    }
}

impl<'de> Deserialize<'de> for Stops {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Stops;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }

            fn visit_str<E: de::Error>(self, stop: &str) -> Result<Stops, E> {
                self.visit_string(stop.to_owned())
            }

            fn visit_string<E: de::Error>(self, stop: String) -> Result<Stops, E> {
                checked(vec![stop])
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Stops, A::Error> {
                let mut stops = Vec::new();
                while let Some(stop) = list.next_element()? {
                    stops.push(stop);
                    if stops.len() > MAX_STOPS {
                        return Err(de::Error::custom(format_args!("more than {MAX_STOPS} strings")));
                    }
                }
                checked(stops)
            }
        }
        fn checked<E: de::Error>(stops: Vec<String>) -> Result<Stops, E> {
            if stops.iter().any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
                return Err(E::custom(format_args!("a stop string has 1 to {MAX_STOP_BYTES} bytes")));
            }
            Ok(Stops(stops))
        }
        input.deserialize_any(Visit)
    }
}

/// One element of a prompt's list.
enum Element {
    Text(String),
    Token(TokenId),
    Tokens(Vec<TokenId>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id, or a list of token ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Text(text.to_owned()))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Element, E> {
                Ok(Element::Text(text))
            }

            fn visit_u64<E: de::Error>(self, token: u64) -> Result<Element, E> {
                let token = TokenId::try_from(token);
                token.map(Element::Token).map_err(|_| E::custom("a number that is no token id"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = list.next_element()? {
                    tokens.push(token);
                }
                Ok(Element::Tokens(tokens))
            }
        }
        input.deserialize_any(Visit)
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of strings, of token ids, or of lists of token ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompt, E> {
                self.visit_string(text.to_owned())
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Prompt, E> {
                Ok(Prompt::Texts { texts: vec![text], listed: false })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompt, A::Error> {
                let (mut texts, mut one, mut lists) = (Vec::new(), Vec::new(), Vec::new());
                while let Some(element) = list.next_element()? {
                    match element {
                        Element::Text(text) => texts.push(text),
                        Element::Token(token) => one.push(token),
                        Element::Tokens(tokens) => lists.push(tokens),
                    }
                    if texts.len().max(lists.len()) > MAX_PROMPTS {
                        return Err(de::Error::custom(format_args!("more than {MAX_PROMPTS} prompts")));
                    }
                }
                match (texts.is_empty(), one.is_empty(), lists.is_empty()) {
                    (false, true, true) => Ok(Prompt::Texts { texts, listed: true }),
                    (true, false, true) => Ok(Prompt::Tokens { prompts: vec![one], listed: false }),
                    (true, true, false) => Ok(Prompt::Tokens { prompts: lists, listed: true }),
                    (true, true, true) => Err(de::Error::custom("the prompt is empty")),
                    _ => Err(de::Error::custom("strings, token ids and lists are mixed")),
                }
            }
        }
        input.deserialize_any(Visit)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Part {
            r#type: String,
            #[serde(default)]
            text: Option<String>,
        }
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of parts that are text")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content(text.to_owned()))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Content, E> {
                Ok(Content(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
                let mut content = String::new();
                while let Some(part) = list.next_element::<Object<Part>>()? {
                    match part.0.text {
                        Some(text) if part.0.r#type == "text" => content.push_str(&text),
                        _ => return Err(de::Error::custom("a part that is not text")),
                    }
                }
                Ok(Content(content))
            }
        }
        input.deserialize_any(Visit)
    }
}

/// A seed: any integer of 64 bits, with or without a sign.
///
/// # Errors
/// 400 for other numbers.
pub fn seed(number: &serde_json::Number) -> Result<u64, ApiError> {
    let seed = number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned));
    seed.ok_or_else(|| ApiError::param("seed", format!("seed is {number}, not an integer of 64 bits")))
}

/// `top_k`, where -1 is a spelling of "off".
///
/// # Errors
/// 400 for other negative numbers.
pub fn top_k(value: i64) -> Result<usize, ApiError> {
    let value = if value == -1 { 0 } else { value };
    usize::try_from(value)
        .map_err(|_| ApiError::param("top_k", format!("top_k is {value}, not -1, 0 or a number of tokens")))
}

/// Checks a number of alternatives.
///
/// # Errors
/// 400 if it is more than a client may ask for.
pub fn alternatives(name: &str, count: usize) -> Result<usize, ApiError> {
    let limit = 20.min(Request::MAX_TOP_LOGPROBS);
    if count <= limit {
        return Ok(count);
    }
    Err(ApiError::param(name, format!("{name} is {count}, more than {limit}")))
}
