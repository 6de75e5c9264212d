//! States, reports and versions as JSON.

use std::time::{Duration, Instant};

use axum::Json;
use axum::http::HeaderValue;
use axum::response::{IntoResponse, Response};
use dormouse::control::{ControlResponse, ControlState, Outcome, Report, Status};
use dormouse::{EngineStats, MemoryReport, RequestId, WeightVersion};
use serde_json::{Map, Value, json};

use crate::error::REQUEST_ID;

/// What was done. All dialects share this shape; each adds its own words.
#[derive(Debug)]
pub struct Done {
    fields: Map<String, Value>,
    id: String,
}

impl Done {
    /// What these operations, which all succeeded, did under one name.
    pub fn of(responses: &[ControlResponse]) -> Option<Self> {
        let last = responses.last()?;
        let already = responses.iter().all(|r| matches!(r.outcome, Ok(Outcome::Already)));
        let mut result = Map::new();
        for report in responses.iter().flat_map(|response| &response.report) {
            add_report(&mut result, report);
        }
        let queued: Duration = responses.iter().map(|response| response.queued).sum();
        let executed: Duration = responses.iter().map(|response| response.executed).sum();
        result.insert("queued_seconds".into(), queued.as_secs_f64().into());
        result.insert("executed_seconds".into(), executed.as_secs_f64().into());
        let outcome = if already { Outcome::Already } else { Outcome::Done };
        let operation = responses[0].operation;
        let fields = json!({
            "request_id": last.id,
            "operation": operation,
            "status": "success",
            "success": true,
            "already": already,
            "message": format!("{operation}: {}", outcome.as_str()),
            "error_message": null,
            "state": state_json(&last.state_after),
            "result": result,
        });
        let Value::Object(fields) = fields else { return None };
        Some(Self { fields, id: last.id.clone() })
    }

    /// Sets a field of the dialect.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.fields.insert(name.into(), value.into());
        self
    }

    /// Copies a field of the result to where the dialect has it.
    #[must_use]
    pub fn with_result(mut self, name: &str) -> Self {
        let value = self.fields.get("result").and_then(|result| result.get(name)).cloned();
        self.fields.insert(name.into(), value.unwrap_or_default());
        self
    }
}

impl IntoResponse for Done {
    fn into_response(self) -> Response {
        named(&self.id, Json(Value::Object(self.fields)).into_response())
    }
}

/// An answer with the request's name in its header.
pub fn named(id: &str, mut response: Response) -> Response {
    if let Ok(id) = HeaderValue::from_str(id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// A state.
pub fn state_json(state: &ControlState) -> Value {
    json!({
        "lifecycle": state.lifecycle.as_str(),
        "paused": state.paused,
        "admitting": state.admitting,
        "epoch": state.epoch,
        "version": state.version.as_ref().map(version_json),
        "transaction": state.transaction.map(|transaction| transaction.number()),
    })
}

/// A version of the weights.
pub fn version_json(version: &WeightVersion) -> Value {
    json!({
        "counter": version.counter,
        "digest": version.digest.to_string(),
        "label": version.label.as_deref(),
    })
}

/// A version as one word: its label, or counter and digest.
pub fn version_name(version: &WeightVersion) -> String {
    version.label.as_deref().map_or_else(|| version.to_string(), str::to_owned)
}

/// The controller at a moment.
pub fn status_json(status: &Status) -> Value {
    let busy = status.busy.as_ref().map(|busy| {
        let seconds = Instant::now().saturating_duration_since(busy.since).as_secs_f64();
        json!({"request_id": busy.id, "operation": busy.operation, "for_seconds": seconds})
    });
    json!({
        "state": state_json(&status.state),
        "busy": busy,
        "control_queue": status.control_queue,
        "live_requests": status.live_requests,
        "requests_aside": status.requests_aside,
        "memory": memory_json(&status.memory),
        "engine": engine_json(&status.engine),
        "step_error": status.step_error,
    })
}

fn memory_json(memory: &MemoryReport) -> Value {
    json!({
        "weights_bytes": memory.weights_bytes,
        "parked_bytes": memory.parked_bytes,
        "staging_bytes": memory.staging_bytes,
        "device_bytes": memory.device_bytes,
        "kv_cache_bytes": memory.kv_cache_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "total_bytes": memory.total_bytes(),
    })
}

fn engine_json(stats: &EngineStats) -> Value {
    json!({
        "live_requests": stats.live_requests,
        "waiting": stats.waiting,
        "running": stats.running,
        "blocks": stats.blocks,
        "blocks_free": stats.blocks_free,
        "blocks_cached": stats.blocks_cached,
        "blocks_owned": stats.blocks_owned,
        "steps": stats.steps,
        "computed_tokens": stats.computed_tokens,
        "sampled_tokens": stats.sampled_tokens,
        "cached_tokens": stats.cached_tokens,
        "preemptions": stats.preemptions,
        "finished": stats.finished,
        "aborted": stats.aborted,
    })
}

fn add_report(result: &mut Map<String, Value>, report: &Report) {
    let (name, value) = match report {
        Report::Settled(settled) => {
            let counts = json!({
                "drained": settled.drained.len(),
                "aborted": settled.aborted.len(),
                "retracted": settled.retracted.len(),
                "kept": settled.kept.len(),
            });
            ("settled", counts)
        }
        Report::Sleep(sleep) => {
            let report = json!({
                "freed": memory_json(&sleep.freed),
                "parked_bytes": sleep.parked_bytes,
                "blocks_dropped": sleep.blocks_dropped,
                "requests": counts(&sleep.settled.drained, &sleep.settled.aborted, &sleep.settled.retracted),
            });
            ("sleep", report)
        }
        Report::Load(load) => {
            let report = json!({
                "version": version_json(&load.version),
                "tensors": load.tensors,
                "received_bytes": load.received_bytes,
                "taken_bytes": load.taken_bytes,
                "peak_weights_bytes": load.peak_weights_bytes,
            });
            ("load", report)
        }
        Report::Update(update) => {
            let report = json!({
                "version": version_json(&update.version),
                "previous": version_json(&update.previous),
                "tensors": update.tensors,
                "received_bytes": update.received_bytes,
                "peak_weights_bytes": update.peak_weights_bytes,
            });
            ("update", report)
        }
        Report::Wake(wake) => {
            let report = json!({
                "version": version_json(&wake.version),
                "blocks": wake.blocks,
                "taken": memory_json(&wake.taken),
                "resumed": wake.resumed.len(),
            });
            ("wake", report)
        }
        Report::Begun(transaction) | Report::Abandoned(transaction) => {
            ("transaction", transaction.number().into())
        }
        Report::Pushed { transaction, .. } => ("transaction", transaction.number().into()),
        _ => return,
    };
    result.insert(name.into(), value);
}

fn counts(drained: &[RequestId], aborted: &[RequestId], retracted: &[RequestId]) -> Value {
    json!({"drained": drained.len(), "aborted": aborted.len(), "retracted": retracted.len()})
}
