//! The one JSON shape of every refusal, and which status goes with which failure.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use dormouse::control::{
    ControlError, ControlResponse, ControlState, ErrorKind, MissingStep, SubmitError, TransactionId,
};
use serde_json::{Value, json};

use crate::app::App;
use crate::bodies::ReadError;
use crate::control_answer::state_json;

/// The header that names a control request, in both directions.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The calls that other calls miss.
pub const SLEEP_KV_CACHE: &str = "/sleep?tags=kv_cache";
/// As above.
pub const WAKE_WEIGHTS: &str = "/wakeup?tags=weights";
/// As above.
pub const START: &str = "/start_weight_update";
/// As above.
pub const FINISH: &str = "/finish_weight_update";

/// Why a call was not done. It is answered as JSON in which the clients of each dialect find what they look
/// for: `error.message` (OpenAI, vLLM), `message` and `success` (SGLang, LMDeploy), `status` and
/// `error_message` (FastDeploy).
#[derive(Debug)]
pub struct Refusal(Box<Fields>);

#[derive(Debug)]
struct Fields {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// The argument that is at fault.
    argument: Option<String>,
    missing_step: Option<&'static str>,
    transaction: Option<u64>,
    retryable: bool,
    retry_after: Option<Duration>,
    request_id: Option<String>,
    state: Option<ControlState>,
}

impl Refusal {
    /// A refusal with a kind of its own.
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Fields {
            status,
            kind,
            message: message.into(),
            argument: None,
            missing_step: None,
            transaction: None,
            retryable: false,
            retry_after: None,
            request_id: None,
            state: None,
        }))
    }

    /// A failure of the engine's kinds.
    pub fn of_kind(kind: ErrorKind, message: impl Into<String>) -> Self {
        let mut refusal = Self::new(status_of(kind), kind.as_str(), message);
        refusal.0.retryable = kind.is_retryable();
        refusal
    }

    /// An argument that means nothing.
    pub fn argument(name: &str, requirement: impl std::fmt::Display) -> Self {
        let mut refusal = Self::of_kind(ErrorKind::InvalidArgument, format!("{name}: {requirement}"));
        refusal.0.argument = Some(name.to_owned());
        refusal
    }

    /// A body that is of no type that is taken here.
    pub fn media_type(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
    }

    /// Another call must come first.
    pub fn conflict(missing_step: &'static str, message: impl Into<String>) -> Self {
        let mut refusal = Self::of_kind(ErrorKind::Conflict, message);
        refusal.0.missing_step = Some(missing_step);
        refusal
    }

    /// A control request that failed.
    pub fn of_control(error: &ControlError) -> Self {
        let mut refusal = Self::of_kind(error.kind(), chain(error));
        let missing = error.missing_step();
        refusal.0.missing_step = missing.map(route_of);
        if let Some(MissingStep::EndTransaction(transaction)) = missing {
            refusal.0.transaction = Some(transaction.number());
        }
        if let ControlError::InvalidArgument { argument, .. } = error {
            refusal.0.argument = Some((*argument).to_owned());
        }
        if let ControlError::Tags(_) = error {
            refusal.0.argument = Some("tags".to_owned());
        }
        refusal
    }

    /// Adds to what is said.
    #[must_use]
    pub fn and(mut self, more: &str) -> Self {
        self.0.message = format!("{}; {more}", self.0.message);
        self
    }

    /// Says what must come next, unless it does.
    #[must_use]
    pub fn next(mut self, route: &'static str) -> Self {
        self.0.missing_step.get_or_insert(route);
        self
    }

    /// Names the transaction that it is about.
    #[must_use]
    pub fn about(mut self, transaction: TransactionId) -> Self {
        self.0.transaction = Some(transaction.number());
        self
    }

    /// Another call must come first: the same failure, seen from a client.
    #[must_use]
    pub fn into_conflict(self, route: &'static str) -> Self {
        Self::conflict(route, self.0.message)
    }

    /// A control request's answer, if it failed.
    pub fn of_response(response: &ControlResponse) -> Option<Self> {
        let error = response.outcome.as_ref().err()?;
        Some(Self::of_control(error).request_id(&response.id).state(response.state_after.clone()))
    }

    /// Names the request, unless it has a name.
    #[must_use]
    pub fn request_id(mut self, id: &str) -> Self {
        self.0.request_id.get_or_insert_with(|| id.to_owned());
        self
    }

    /// Says what state the engine is in, unless it does.
    #[must_use]
    pub fn state(mut self, state: ControlState) -> Self {
        self.0.state.get_or_insert(state);
        self
    }

    /// The state as it is now, unless it says one.
    #[must_use]
    pub fn at(self, app: &App) -> Self {
        if self.0.state.is_some() { self } else { self.state(app.handle.state()) }
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.0.status
    }

    /// The kind's name.
    pub fn kind(&self) -> &'static str {
        self.0.kind
    }

    /// What is said.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    fn json(&self) -> Value {
        let Fields { status, kind, message, argument, missing_step, transaction, retryable, .. } = &*self.0;
        let request_id = &self.0.request_id;
        let error = json!({
            "message": message,
            "type": class_of(*status),
            "kind": kind,
            "code": kind,
            "param": argument,
            "state": self.0.state.as_ref().map(state_json),
            "missing_step": missing_step,
            "transaction": transaction,
            "retryable": retryable,
            "request_id": request_id,
        });
        json!({
            "error": error,
            "request_id": request_id,
            "status": "error",
            "success": false,
            "message": message,
            "error_message": message,
        })
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (self.0.status, Json(self.json())).into_response();
        let headers = response.headers_mut();
        if let Some(id) = self.0.request_id.as_deref().and_then(|id| HeaderValue::from_str(id).ok()) {
            headers.insert(REQUEST_ID, id);
        }
        let unread =
            [StatusCode::REQUEST_TIMEOUT, StatusCode::PAYLOAD_TOO_LARGE, StatusCode::UNSUPPORTED_MEDIA_TYPE];
        if unread.contains(&self.0.status) {
            // What is left of the body would be taken for the next request.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.0.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.0.status == StatusCode::SERVICE_UNAVAILABLE {
            let seconds = self.0.retry_after.unwrap_or_default().as_secs_f64().ceil().max(1.0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds as u64));
        }
        response
    }
}

impl From<ReadError> for Refusal {
    fn from(error: ReadError) -> Self {
        let mut refusal = Self::new(error.status(), error.kind(), error.to_string());
        refusal.0.retryable = matches!(error, ReadError::Late | ReadError::NoRoom);
        refusal
    }
}

impl From<SubmitError> for Refusal {
    fn from(error: SubmitError) -> Self {
        let mut refusal = Self::of_kind(error.kind(), chain(&error));
        if let SubmitError::NotServing { state, retry_after } = error {
            refusal.0.retry_after = Some(retry_after);
            refusal.0.state = Some(*state);
        }
        refusal
    }
}

/// The call that takes a step.
pub fn route_of(step: MissingStep) -> &'static str {
    match step {
        MissingStep::SleepKvCache => SLEEP_KV_CACHE,
        MissingStep::WakeWeights => WAKE_WEIGHTS,
        MissingStep::UpdateWeights => "/update_weights",
        MissingStep::WakeKvCache => "/wakeup?tags=kv_cache",
        MissingStep::EndTransaction(_) => FINISH,
        MissingStep::Resume => "/resume",
        _ => "/status",
    }
}

/// The status that goes with a kind of failure.
pub fn status_of(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::Conflict | ErrorKind::InFlight => StatusCode::CONFLICT,
        ErrorKind::InvalidArgument | ErrorKind::InvalidWeights => StatusCode::BAD_REQUEST,
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Deadline => StatusCode::GATEWAY_TIMEOUT,
        ErrorKind::OutOfMemory | ErrorKind::Overloaded | ErrorKind::NotServing | ErrorKind::Stopped => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// An error and what caused it, without what a message says already.
fn chain(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = error.source();
    }
    message
}

/// Answers for a path that there is not.
pub async fn no_such_path(State(app): State<App>, uri: Uri) -> Refusal {
    Refusal::of_kind(ErrorKind::NotFound, format!("there is nothing at {}", short(&uri))).at(&app)
}

/// Answers for a method that a path does not have; the header `Allow` says which it has.
pub async fn no_such_method(State(app): State<App>, method: Method, uri: Uri) -> Refusal {
    let message = format!("{} does not take {method}", short(&uri));
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).at(&app)
}

/// A path cut to a readable length.
fn short(uri: &Uri) -> String {
    uri.path().chars().take(200).collect()
}

/// What OpenAI's clients call the class of a failure.
pub fn class_of(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::CONFLICT => "conflict_error",
        StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    }
}
