//! LMDeploy's dialect, as far as it is not vLLM's, too: its `/sleep` and `/is_sleeping` are in `control`, its
//! `/update_weights` in `control_weights`.

use std::convert::identity;

use axum::Router;
use axum::response::Response;
use axum::routing::post;
use dormouse::control::Operation;

use crate::app::App;
use crate::control_call::Call;

/// Its routes.
pub fn routes() -> Router<App> {
    Router::new().route("/wakeup", post(wakeup))
}

/// Wakes parts; the weights come before the KV cache.
pub async fn wakeup(call: Call) -> Response {
    let plan = |call: &mut Call| Ok(vec![Operation::WakeUp { tags: call.args.tags()? }]);
    call.run(plan, identity).await
}
