//! SGLang's dialect: control.

use std::convert::identity;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use dormouse::control::{AbortTarget, Operation, PauseMode, Report, SleepPlan};
use dormouse::{DType, InFlight, WeightTensor};
use serde_json::{Value, json};

use crate::app::App;
use crate::control::sleep_plan;
use crate::control_answer::{named, version_json, version_name};
use crate::control_call::{Authorized, Call};
use crate::control_weights as weights;
use crate::error::Refusal;

/// Numbers of a tensor in one answer.
const MAX_NUMBERS: usize = 1 << 20;

/// Its routes.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/flush_cache", get(flush_cache).post(flush_cache))
        .route("/release_memory_occupation", post(release))
        .route("/resume_memory_occupation", post(resume_memory))
        .route("/update_weights_from_disk", post(weights::from_disk))
        .route("/update_weights_from_tensor", post(weights::from_tensor))
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume))
        .route("/abort_request", post(abort))
        .route("/get_weights_by_name", get(get_weights).post(get_weights))
        .route("/get_weight_version", get(get_weight_version))
        .route("/get_model_info", get(get_model_info))
}

async fn flush_cache(call: Call) -> Response {
    call.run(|_| Ok(vec![Operation::ResetPrefixCache { with_requests: false }]), identity).await
}

/// SGLang's release is for an idle server: with requests in flight it is refused, unless `mode` says what becomes
/// of them. The weights are kept in host memory.
async fn release(call: Call) -> Response {
    let plan = |call: &mut Call| {
        let tags = call.args.sglang_tags()?;
        Ok(vec![Operation::Sleep(SleepPlan { tags, ..sleep_plan(call, InFlight::Refuse)? })])
    };
    call.run(plan, identity).await
}

async fn resume_memory(call: Call) -> Response {
    call.run(|call| Ok(vec![Operation::WakeUp { tags: call.args.sglang_tags()? }]), identity).await
}

async fn pause(call: Call) -> Response {
    let plan = |call: &mut Call| {
        let mode = match call.args.word("mode", &["abort", "retract", "in_place"])? {
            None | Some("abort") => PauseMode::Abort,
            // Those that are retracted keep their KV, too, until something needs the room.
            Some(_) => PauseMode::Keep,
        };
        Ok(vec![Operation::Pause(mode)])
    };
    call.run(plan, |done| done.with("status", "ok")).await
}

async fn resume(call: Call) -> Response {
    let plan = |call: &mut Call| {
        call.args.flag("torch_empty_cache")?;
        Ok(vec![Operation::Resume])
    };
    call.run(plan, |done| done.with("status", "ok")).await
}

/// Ends requests by name, or all. A name that no request has is no error: it may have ended by itself.
async fn abort(call: Call) -> Response {
    let plan = |call: &mut Call| {
        let names = call.args.names("rid")?.unwrap_or_default();
        let target = match call.args.flag("abort_all")?.unwrap_or_default() {
            true => AbortTarget::All,
            false if names.is_empty() => {
                return Err(Refusal::argument("rid", "must name a request, unless abort_all is true"));
            }
            false => {
                // One name may stand for all prompts of a call.
                let requests = names.iter().flat_map(|name| call.app.groups.members(name)).collect();
                AbortTarget::These { requests, names }
            }
        };
        Ok(vec![Operation::Abort(target)])
    };
    call.run(plan, identity).await
}

/// The first rows of a tensor, as nested lists of numbers.
async fn get_weights(call: Call) -> Response {
    let (mut rows, id) = (0, call.id().to_owned());
    let app = call.app.clone();
    let plan = |call: &mut Call| {
        let name = call.args.text("name")?.ok_or_else(|| Refusal::argument("name", "must name a tensor"))?;
        rows = call.args.integer("truncate_size")?.unwrap_or(100);
        Ok(vec![Operation::ReadTensor { name }])
    };
    let responses = match call.carry_out(plan).await {
        Ok(responses) => responses,
        Err(refusal) => return refusal.into_response(),
    };
    let tensor = responses.iter().flat_map(|response| &response.report).find_map(|report| match report {
        Report::Tensor(tensor) => Some(tensor),
        _ => None,
    });
    match tensor.map(|tensor| first_rows(tensor, rows)) {
        Some(Ok(numbers)) => named(&id, Json(numbers).into_response()),
        Some(Err(refusal)) => refusal.request_id(&id).at(&app).into_response(),
        None => named(&id, Json(Value::Null).into_response()),
    }
}

fn first_rows(tensor: &WeightTensor, rows: u64) -> Result<Value, Refusal> {
    let shape = &tensor.spec.shape;
    let rows = usize::try_from(rows).unwrap_or(usize::MAX).min(shape.first().copied().unwrap_or(1));
    let row: usize = shape.iter().skip(1).product();
    let count = rows.saturating_mul(row);
    if count > MAX_NUMBERS {
        let requirement = format!("asks for {count} numbers; an answer has at most {MAX_NUMBERS}");
        return Err(Refusal::argument("truncate_size", requirement));
    }
    let numbers = numbers(tensor, count);
    let inner = shape.get(1..).unwrap_or_default();
    Ok(nested(&numbers, rows, inner))
}

/// The first numbers; what is no number in JSON is null.
fn numbers(tensor: &WeightTensor, count: usize) -> Vec<Value> {
    let data = &tensor.data;
    let number = |value: f32| json!(value.is_finite().then_some(value));
    match tensor.spec.dtype {
        DType::F32 => {
            data.as_chunks().0.iter().take(count).map(|bytes| number(f32::from_le_bytes(*bytes))).collect()
        }
        DType::F16 => {
            let values = data.as_chunks().0.iter().take(count);
            values.map(|bytes| number(half::f16::from_le_bytes(*bytes).to_f32())).collect()
        }
        DType::Bf16 => {
            let values = data.as_chunks().0.iter().take(count);
            values.map(|bytes| number(half::bf16::from_le_bytes(*bytes).to_f32())).collect()
        }
    }
}

fn nested(numbers: &[Value], rows: usize, inner: &[usize]) -> Value {
    match inner.split_first() {
        None => numbers.to_vec().into(),
        Some((&next, deeper)) if rows > 0 && !numbers.is_empty() => {
            let rows = numbers.chunks(numbers.len() / rows);
            rows.map(|row| nested(row, next, deeper)).collect::<Vec<_>>().into()
        }
        Some(_) => Value::Array(Vec::new()),
    }
}

async fn get_weight_version(_: Authorized, State(app): State<App>) -> Json<Value> {
    let version = app.handle.state().version;
    Json(json!({
        "weight_version": version.as_ref().map(version_name),
        "version": version.as_ref().map(version_json),
    }))
}

/// What SGLang's clients ask for first. The name stands for the path, which is nobody's business.
async fn get_model_info(_: Authorized, State(app): State<App>) -> Json<Value> {
    let version = app.handle.state().version;
    Json(json!({
        "model_path": app.model,
        "tokenizer_path": app.model,
        "is_generation": true,
        "weight_version": version.as_ref().map(version_name),
    }))
}
