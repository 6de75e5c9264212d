//! FastDeploy's dialect. Its sleep keeps the weights in host memory, as its clients may wake without an
//! update (`level=2` drops them); its legacy `/clear_load_weight` drops them.

use std::convert::identity;

use axum::Router;
use axum::response::Response;
use axum::routing::{get, post};
use dormouse::control::{Operation, PauseMode};
use dormouse::{InFlight, LoadOptions};

use crate::app::App;
use crate::control::{is_paused, pause_mode, sleep_plan};
use crate::control_call::Call;
use crate::control_weights as weights;

/// Its routes.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/v1/pause", post(pause))
        .route("/v1/resume", post(resume))
        .route("/v1/is_paused", get(is_paused))
        .route("/v1/sleep", post(sleep))
        .route("/v1/wakeup", post(wakeup))
        .route("/v1/update_weights", post(weights::update))
        .route("/clear_load_weight", get(clear_load_weight))
        .route("/update_model_weight", get(update_model_weight))
}

async fn pause(call: Call) -> Response {
    call.run(|call| Ok(vec![Operation::Pause(pause_mode(call, PauseMode::Abort)?)]), identity).await
}

async fn resume(call: Call) -> Response {
    call.run(|_| Ok(vec![Operation::Resume]), identity).await
}

async fn sleep(call: Call) -> Response {
    call.run(|call| Ok(vec![Operation::Sleep(sleep_plan(call, InFlight::Abort)?)]), identity).await
}

/// FastDeploy's wakeup resumes, too, as its callers expect: they leave the resume out.
async fn wakeup(call: Call) -> Response {
    let plan = |call: &mut Call| {
        let tags = call.args.tags()?;
        Ok(vec![Operation::WakeUp { tags }, Operation::Resume])
    };
    call.run(plan, identity).await
}

async fn clear_load_weight(call: Call) -> Response {
    call.run(|_| Ok(vec![Operation::ClearLoadWeight]), identity).await
}

/// Loads what the server was told to load from, as it is by now, and serves again.
async fn update_model_weight(call: Call) -> Response {
    let plan = |call: &mut Call| {
        let label = weights::label(&mut call.args)?;
        let options = label.into_iter().fold(LoadOptions::default(), LoadOptions::label);
        Ok(vec![Operation::UpdateModelWeight { weights: None, options }])
    };
    call.run(plan, identity).await
}
