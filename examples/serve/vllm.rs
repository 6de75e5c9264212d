//! vLLM's dialect. An update is a transaction: `/start_weight_update`, any number of `/update_weights`, which carry
//! `update_info` or name the transaction, and `/finish_weight_update` or `/abort_weight_update`. Unlike vLLM's, it
//! names its version at its start.

use std::convert::identity;

use axum::Router;
use axum::response::Response;
use axum::routing::{get, post};
use dormouse::control::{Operation, PauseDeadline, PauseMode};

use crate::app::App;
use crate::control::{is_paused, pause_mode};
use crate::control_call::Call;
use crate::error::Refusal;
use crate::{control_weights as weights, lmdeploy};

/// Its routes.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/wake_up", post(lmdeploy::wakeup))
        .route("/pause", post(pause))
        .route("/resume", post(resume))
        .route("/is_paused", get(is_paused))
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .route("/start_weight_update", post(weights::start))
        .route("/finish_weight_update", post(weights::finish))
        .route("/abort_weight_update", post(weights::abort))
}

async fn pause(call: Call) -> Response {
    call.run(pause_steps, |done| done.with("status", "paused")).await
}

fn pause_steps(call: &mut Call) -> Result<Vec<Operation>, Refusal> {
    let wait = call.args.flag("wait_for_inflight_requests")?.unwrap_or_default();
    let default = match wait {
        true => PauseMode::Wait { on_deadline: PauseDeadline::Undo },
        false => PauseMode::Abort,
    };
    let mode = pause_mode(call, default)?;
    let mut steps = vec![Operation::Pause(mode)];
    // Not by default: a prefix that other weights computed is never found, so nothing depends on it.
    if call.args.flag("clear_cache")?.unwrap_or_default() && mode != PauseMode::Keep {
        steps.push(Operation::ResetPrefixCache { with_requests: false });
    }
    Ok(steps)
}

async fn resume(call: Call) -> Response {
    call.run(|_| Ok(vec![Operation::Resume]), |done| done.with("status", "resumed")).await
}

async fn reset_prefix_cache(call: Call) -> Response {
    let plan = |call: &mut Call| {
        let with_requests = call.args.flag("reset_running_requests")?.unwrap_or_default();
        // There is no cache outside the engine, so that it is reset, too.
        call.args.flag("reset_external")?;
        Ok(vec![Operation::ResetPrefixCache { with_requests }])
    };
    call.run(plan, identity).await
}
