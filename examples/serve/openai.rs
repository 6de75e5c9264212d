//! The endpoints that OpenAI's clients know, with the token ids, logprobs and weights' versions that a trainer
//! needs besides.
//!
//! Beyond OpenAI's: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`,
//! `allowed_token_ids`, `cache_salt`, `request_id`, `skip_special_tokens`, `include_stop_str_in_output`,
//! `return_token_ids` (token ids are there unless it is false; the prompt's only if it is true),
//! `return_tokens_as_token_ids`, `add_generation_prompt`, `chat_template_kwargs`. Without a tokenizer a text is
//! empty, and tokens are named by their ids.

mod answer;
mod error;
mod plan;
mod stream;
mod types;
mod write;

use std::time::Duration;

use axum::Router;
use axum::extract::{Request as HttpRequest, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use dormouse::control::Lifecycle;
use dormouse::{FinishReason, Request};
use serde_json::json;

use crate::app::App;
use crate::flow::Flow;
use crate::http;
pub use answer::failure;
pub use error::ApiError;
pub use plan::{encode, for_each, set};
pub use stream::{error_event, event_stream};
pub use types::{Object, Prompt, Stops, parse, seed, top_k};
pub use write::{list, put};

/// The two endpoints that generate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// The routes.
pub fn routes() -> Router<App> {
    let completions = |State(app): State<App>, request: HttpRequest| async move {
        generate(app, Endpoint::Completions, request).await
    };
    let chat = |State(app): State<App>, request: HttpRequest| async move {
        generate(app, Endpoint::Chat, request).await
    };
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/v1/models/{name}", get(model))
        .route("/health", get(health))
        .route("/health_generate", get(health_generate))
}

/// JSON with its type.
pub fn json_response(body: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

async fn generate(app: App, endpoint: Endpoint, request: HttpRequest) -> Result<Response, ApiError> {
    let body = http::read_json(&app, request, http::GENERATION_BYTES).await?;
    let for_plan = app.clone();
    let plan = http::think(&app, body, move |body| plan::plan(&for_plan, endpoint, body)).await?;
    let prompts: Vec<_> = plan.requests.iter().map(|request| request.prompt.clone()).collect();
    let id = plan.requests.first().and_then(|request| request.id.clone());
    let flow = Flow::start(&app, plan.requests, plan.group, plan.reading, plan.show.stream)?;
    let id = id.unwrap_or_else(|| format!("{:x}-{}", app.started, flow.id()));
    let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
    let writer = write::Writer::new(&app, &plan.show, &format!("{prefix}-{id}"));
    if plan.show.stream {
        Ok(stream::response(app, flow, writer, plan.show, prompts))
    } else {
        answer::response(&app, flow.finish().await?, &writer, &plan.show, &prompts)
    }
}

/// The failure of a model that is not there.
pub fn no_model(message: impl Into<String>) -> ApiError {
    ApiError::param("model", message).code("model_not_found").with_status(StatusCode::NOT_FOUND)
}

fn model_json(app: &App) -> serde_json::Value {
    json!({
        "id": app.model,
        "object": "model",
        "created": app.started,
        "owned_by": "dormouse",
        "max_model_len": app.handle.limits().max_model_len,
    })
}

async fn models(State(app): State<App>) -> Response {
    json_response(json!({"object": "list", "data": [model_json(&app)]}).to_string().into_bytes())
}

async fn model(
    State(app): State<App>,
    name: Result<axum::extract::Path<String>, axum::extract::rejection::PathRejection>,
) -> Result<Response, ApiError> {
    let Ok(axum::extract::Path(name)) = name else {
        return Err(ApiError::param("name", "the name in the path is no UTF-8"));
    };
    if name != app.model {
        return Err(no_model(format!("there is only the model `{}`", app.model)));
    }
    Ok(json_response(model_json(&app).to_string().into_bytes()))
}

/// Whether the server lives; it may be asleep.
async fn health(State(app): State<App>) -> Result<Response, ApiError> {
    if app.handle.state().lifecycle == Lifecycle::Stopped {
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the controller has stopped"));
    }
    Ok(json_response(b"{}".to_vec()))
}

/// Whether it makes a token now.
async fn health_generate(State(app): State<App>) -> Result<Response, ApiError> {
    const PATIENCE: Duration = Duration::from_secs(20);
    let request = Request::new(vec![0]).max_new_tokens(1).temperature(0.0).ignore_eos(true);
    let output = tokio::time::timeout(PATIENCE, app.handle.submit(request)?.output()).await;
    let output =
        output.map_err(|_| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "no token in 20 seconds"))??;
    match output.completions.first().map(|completion| &completion.finish_reason) {
        Some(FinishReason::Length) => Ok(json_response(b"{}".to_vec())),
        other => {
            let message = format!("no token: {}", other.map_or("nothing came", FinishReason::as_str));
            Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message))
        }
    }
}
