//! The control routes: what they share, and what belongs to no dialect.
//!
//! Where two dialects have the same path, one handler takes the arguments of both. What a dialect's server
//! would do silently, such as dropping requests, is an argument here, with that dialect's default.

use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use dormouse::control::{Lifecycle, Operation, PauseDeadline, PauseMode, SleepPlan, SleepWeights};
use dormouse::{InFlight, OnDeadline};
use serde_json::{Value, json};
use std::convert::identity;
use std::time::Duration;

use crate::app::App;
use crate::control_answer::status_json;
use crate::control_call::{Authorized, Call};
use crate::control_weights as weights;
use crate::error::Refusal;
use crate::{fastdeploy, lmdeploy, openapi, sglang_control as sglang, vllm};

/// Every control route.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi::document))
        .merge(fastdeploy::routes())
        .merge(lmdeploy::routes())
        .merge(vllm::routes())
        .merge(sglang::routes())
        .route("/update_weights", post(weights::update))
        .route("/sleep", post(sleep))
        .route("/is_sleeping", get(is_sleeping))
}

/// LMDeploy's and vLLM's sleep: level 1 keeps the weights in host memory, level 2 drops them. Requests in flight
/// are aborted unless the mode says otherwise.
pub async fn sleep(call: Call) -> Response {
    call.run(|call| Ok(vec![Operation::Sleep(sleep_plan(call, InFlight::Abort)?)]), identity).await
}

async fn is_sleeping(_: Authorized, State(app): State<App>) -> Json<Value> {
    Json(json!({"is_sleeping": app.handle.state().lifecycle != Lifecycle::Awake}))
}

async fn status(_: Authorized, State(app): State<App>) -> Json<Value> {
    Json(status_json(&app.handle.status()))
}

async fn metrics(_: Authorized, State(app): State<App>) -> impl IntoResponse {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, app.handle.metrics().render_prometheus())
}

/// How parts are put to sleep: `tags`, `level` and `mode`.
///
/// # Errors
/// One of them means nothing.
pub fn sleep_plan(call: &mut Call, default: InFlight) -> Result<SleepPlan, Refusal> {
    let weights = match call.args.integer("level")? {
        None | Some(1) => SleepWeights::Park,
        Some(2) => SleepWeights::Discard,
        Some(_) => return Err(Refusal::argument("level", "must be 1 (keep the weights) or 2 (drop them)")),
    };
    let in_flight = match call.args.word("mode", &["abort", "wait", "keep", "refuse"])? {
        None => default,
        Some("abort") => InFlight::Abort,
        Some("wait") => {
            InFlight::Drain { deadline: call.deadline().unwrap_or(LONG), then: OnDeadline::Refuse }
        }
        Some("keep") => InFlight::Retract,
        Some(_) => InFlight::Refuse,
    };
    Ok(SleepPlan { tags: call.args.tags()?, weights, in_flight })
}

/// A drain without a deadline; the controller's clock does not reach further.
const LONG: Duration = Duration::from_secs(1 << 31);

/// What a pause does with requests in flight: `mode`.
///
/// # Errors
/// It means nothing.
pub fn pause_mode(call: &mut Call, default: PauseMode) -> Result<PauseMode, Refusal> {
    Ok(match call.args.word("mode", &["abort", "wait", "keep"])? {
        None => default,
        Some("abort") => PauseMode::Abort,
        Some("wait") => PauseMode::Wait { on_deadline: PauseDeadline::Undo },
        Some(_) => PauseMode::Keep,
    })
}

/// Whether generation is paused.
pub async fn is_paused(_: Authorized, State(app): State<App>) -> Json<Value> {
    let paused = app.handle.state().paused;
    // The first is vLLM's, the others are FastDeploy's.
    Json(json!({
        "is_paused": paused,
        "status": "success",
        "error_message": null,
        "result": {"is_paused": paused},
    }))
}
