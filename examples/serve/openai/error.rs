//! Failures as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`.

use std::time::Duration;

use axum::http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use dormouse::control::{ErrorKind, GenerationError, SubmitError};
use dormouse::{CompletionError, RequestError, TokenList};
use serde_json::{Value, json};

use crate::control_answer::state_json;
use crate::error::{class_of, status_of};

/// A failure on its way to a client.
#[derive(Debug, Clone)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    state: Option<Value>,
    retry_after: Option<Duration>,
    close: bool,
}

impl ApiError {
    /// A failure with a status and what is wrong.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let (message, code) = (message.into(), kind_of(status));
        Self { status, message, param: None, code: Some(code), state: None, retry_after: None, close: false }
    }

    /// A request that means nothing.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A parameter that means nothing.
    pub fn param(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(name.into()), ..Self::bad(message) }
    }

    /// Sets the code that machines look at.
    pub fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// Says when to ask again.
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Closes the connection after the answer: its body was not read.
    pub fn closing(mut self) -> Self {
        self.close = true;
        self
    }

    /// Sets the status.
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// The JSON of the answer.
    pub fn body(&self) -> Value {
        let error = json!({
            "message": self.message,
            "type": class_of(self.status),
            "param": self.param,
            "code": self.code,
            "kind": self.code,
            "state": self.state,
            "retryable": self.retry_after.is_some(),
        });
        json!({ "error": error })
    }
}

/// The kind of failures that say no other.
fn kind_of(status: StatusCode) -> &'static str {
    match status {
        StatusCode::NOT_FOUND => ErrorKind::NotFound.as_str(),
        StatusCode::REQUEST_TIMEOUT => "request_timeout",
        StatusCode::PAYLOAD_TOO_LARGE => "payload_too_large",
        StatusCode::UNSUPPORTED_MEDIA_TYPE => "unsupported_media_type",
        StatusCode::SERVICE_UNAVAILABLE => ErrorKind::NotServing.as_str(),
        status if status.is_client_error() => ErrorKind::InvalidArgument.as_str(),
        _ => ErrorKind::Internal.as_str(),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.body().to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(wait) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(wait.as_secs_f32().ceil().max(1.0) as u64));
        }
        if self.close {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let kind = error.kind();
        let mut api = Self::new(status_of(kind), error.to_string()).code(kind.as_str());
        if kind.is_retryable() {
            api.retry_after = Some(Duration::from_secs(1));
        }
        match error {
            SubmitError::NotServing { state, retry_after } => {
                api.state = Some(state_json(&state));
                api.retry_after = Some(retry_after);
            }
            SubmitError::Request(error) => api.param = param_of(&error).map(str::to_owned),
            _ => {}
        }
        api
    }
}

/// The parameter that a request is refused for, by its name in the engine's own requests.
fn param_of(error: &RequestError) -> Option<&'static str> {
    Some(match error {
        RequestError::EmptyPrompt => "prompt",
        RequestError::TooLong { .. } | RequestError::NothingToDo => "max_tokens",
        RequestError::SampleCount { .. } => "n",
        RequestError::MinOverMax { .. } => "min_tokens",
        RequestError::Temperature { .. } => "temperature",
        RequestError::TopP { .. } => "top_p",
        RequestError::MinP { .. } => "min_p",
        RequestError::RepetitionPenalty { .. } => "repetition_penalty",
        RequestError::PresencePenalty { .. } => "presence_penalty",
        RequestError::FrequencyPenalty { .. } => "frequency_penalty",
        RequestError::LogitBias { .. } => "logit_bias",
        RequestError::SaltTooLong { .. } => "cache_salt",
        RequestError::IdTooLong { .. } | RequestError::DuplicateId { .. } => "request_id",
        RequestError::TokenOutOfVocabulary { list, .. } | RequestError::ListTooLong { list, .. } => {
            match list {
                TokenList::Prompt => "prompt",
                TokenList::StopTokenIds => "stop_token_ids",
                TokenList::LogitBias => "logit_bias",
                TokenList::AllowedTokens => "allowed_token_ids",
                _ => return None,
            }
        }
        _ => return None,
    })
}

impl From<GenerationError> for ApiError {
    fn from(error: GenerationError) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).code(ErrorKind::Internal.as_str())
    }
}

impl From<&CompletionError> for ApiError {
    fn from(error: &CompletionError) -> Self {
        let kind = match error {
            CompletionError::NothingAllowed { .. } => ErrorKind::InvalidArgument,
            CompletionError::NoCapacity { .. } => ErrorKind::Overloaded,
            _ => ErrorKind::Internal,
        };
        Self::new(status_of(kind), error.to_string()).code(kind.as_str())
    }
}
