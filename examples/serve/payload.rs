//! Weights as the body of a call: a safetensors file or a flattened bucket, told apart by content type and first
//! bytes. Formats that can run code are refused by name.

use axum::body::Bytes;
use axum::http::{HeaderMap, header};
use dormouse::SafetensorsBytes;
use dormouse::control::{ErrorKind, Payload};

use crate::app::App;
use crate::bodies;
use crate::error::Refusal;

/// What tables and headers may take beside the tensors.
const OVERHEAD_BYTES: u64 = 16 << 20;

const SAFETENSORS: [&str; 3] =
    ["application/x-safetensors", "application/vnd.safetensors", "application/safetensors"];
const BUCKET: &str = "application/x-dormouse-bucket";
const OCTETS: &str = "application/octet-stream";
/// What a pickle or an archive of pickles is sent as.
const PICKLES: [&str; 7] = [
    "application/x-pickle",
    "application/pickle",
    "application/python-pickle",
    "application/x-python-serialize",
    "application/x-pytorch",
    "application/x-torch",
    "application/zip",
];

/// Why a pickle is refused.
const NO_PICKLES: &str = "a pickle can run any code when it is read, so it is not read here; \
     send a safetensors file or a bucket";

/// Weights that arrived whole and are not what is refused unread.
#[derive(Debug)]
pub enum Weights {
    /// A safetensors file.
    Safetensors(Bytes),
    /// A bucket.
    Bucket(Bytes),
}

impl Weights {
    /// Tells by content type and first bytes what a body is; none if it is empty.
    ///
    /// # Errors
    /// It is a pickle, or nothing that is known, or not what its type says.
    pub fn of_body(bytes: Bytes, headers: &HeaderMap) -> Result<Option<Self>, Refusal> {
        let said = content_type(headers);
        let weights = match &bytes[..] {
            [] => return Ok(None),
            [0x80, 2..=5, ..] | [b'P', b'K', 3 | 5 | 7, ..] => return Err(Refusal::media_type(NO_PICKLES)),
            // The same in base64.
            [b'g', b'A', b'I'..=b'V', ..] | [b'U', b'E', b's', ..] => {
                return Err(Refusal::media_type(NO_PICKLES));
            }
            [b'D', b'O', b'R', b'M', b'O', b'U', b'S', b'E', ..] => Self::Bucket(bytes),
            // A header's length below 4 GiB, then the header.
            [_, _, _, _, 0, 0, 0, 0, b'{', ..] => Self::Safetensors(bytes),
            _ => return Err(invalid("the body begins neither as a safetensors file nor as a bucket")),
        };
        match (&weights, said.as_deref()) {
            (Self::Safetensors(_), Some(BUCKET)) => {
                Err(invalid("the body is a safetensors file, not a bucket"))
            }
            (Self::Bucket(_), Some(said)) if SAFETENSORS.contains(&said) => {
                Err(invalid("the body is a bucket, not a safetensors file"))
            }
            _ => Ok(Some(weights)),
        }
    }

    /// For the controller.
    pub fn into_payload(self) -> Payload {
        match self {
            Self::Safetensors(bytes) => Payload::source(SafetensorsBytes::new(bytes)),
            Self::Bucket(bytes) => Payload::Bucket(bytes.into()),
        }
    }
}

/// Arguments that hold pickles in other servers' dialects.
///
/// # Errors
/// Always; it says what to send instead.
pub fn refuse_pickled(argument: &str) -> Refusal {
    Refusal::media_type(format!("{argument}: {NO_PICKLES}"))
}

fn invalid(message: &str) -> Refusal {
    Refusal::of_kind(ErrorKind::InvalidWeights, message)
}

/// Longest body of weights: what the model takes four times, so that f32 can be sent to a bf16 engine and a
/// vocabulary can be padded.
pub fn limit_bytes(app: &App) -> u64 {
    app.handle.expected_weights().bytes().saturating_mul(4).saturating_add(OVERHEAD_BYTES)
}

/// The content type without its parameters.
fn content_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::CONTENT_TYPE)?.to_str().unwrap_or("?");
    Some(value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase())
}

/// Whether the body is said to be JSON.
pub fn is_json(headers: &HeaderMap) -> bool {
    content_type(headers).is_some_and(|said| {
        said == "application/json" || (said.starts_with("application/") && said.ends_with("+json"))
    })
}

/// Refuses a body of weights by its headers, before it is read.
///
/// # Errors
/// Its type, its encoding or its length won't do.
pub fn check_headers(headers: &HeaderMap, limit: u64) -> Result<(), Refusal> {
    let encoded = headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity");
    if encoded {
        return Err(Refusal::media_type("the body must not be compressed"));
    }
    match content_type(headers).as_deref() {
        None | Some(OCTETS | BUCKET) => {}
        Some(said) if SAFETENSORS.contains(&said) => {}
        Some(said) if PICKLES.contains(&said) => return Err(Refusal::media_type(NO_PICKLES)),
        Some(_) => {
            let message = format!(
                "weights come as {OCTETS}, {}, or {BUCKET}; the arguments of a path on this machine as \
                 application/json",
                SAFETENSORS[0]
            );
            return Err(Refusal::media_type(message));
        }
    }
    bodies::check_length(headers, limit).map_err(Refusal::from)
}
