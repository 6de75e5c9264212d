//! The description of every route (OpenAPI 3.1): what each takes, and all that it may answer.

use std::sync::OnceLock;

use axum::Json;
use serde_json::{Map, Value, json};

use crate::{openapi_control, openapi_generation};

/// Answers with the description.
pub async fn document() -> Json<&'static Value> {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    Json(DOCUMENT.get_or_init(build))
}

fn build() -> Value {
    let mut paths = Map::new();
    let mut schemas = shared_schemas();
    openapi_control::describe(&mut paths, &mut schemas);
    openapi_generation::describe(&mut paths, &mut schemas);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "dormouse",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A rollout engine: generation as OpenAI's and SGLang's clients ask for it, and control of \
                its sleep, its wake and its weights in the dialects of FastDeploy, LMDeploy, vLLM and SGLang.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {
                "type": "http",
                "scheme": "bearer",
                "description": "Asked for by control routes, if the server has a token.",
            }},
        },
    })
}

/// Adds an operation to a path.
pub fn add(paths: &mut Map<String, Value>, method: &str, path: &str, operation: Value) {
    let methods = paths.entry(path).or_insert_with(|| json!({}));
    methods[method] = operation;
}

/// A schema by its name.
pub fn named(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// An answer in JSON.
pub fn json_answer(description: &str, schema: &Value) -> Value {
    json!({"description": description, "content": {"application/json": {"schema": schema}}})
}

/// An object; nothing else may be in it.
pub fn closed(properties: &Value, required: &[&str]) -> Value {
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

/// The refusals that a route may answer with.
pub fn refusals(responses: &mut Map<String, Value>, statuses: &[u16]) {
    for status in statuses {
        let description = match status {
            400 => {
                "An argument, a body or weights that mean nothing. Nothing was done; the transaction that a push or a \
                finish belonged to is over, if the message says so."
            }
            401 => "The token is missing or wrong.",
            403 => "The server has no token, and a page of another site sent this (`Origin`).",
            404 => "What was named does not exist.",
            408 => "The body stood still for too long.",
            409 => {
                "Another step must come first, or requests are in flight. Nothing was done, unless the message \
                says what was."
            }
            413 => "The body is too long.",
            415 => "The body is of no type that is taken here; a pickle is of none.",
            422 => "The body is JSON, and no request.",
            500 => "Files, devices or the engine failed.",
            503 => "The engine does not serve, too much waits, or memory is short.",
            504 => "The deadline passed. What was not begun was not begun, what was under way is undone.",
            _ => "Refused.",
        };
        let mut answer = json_answer(description, &named("Refusal"));
        let text = json!({"type": "string"});
        match status {
            401 => answer["headers"] = json!({"WWW-Authenticate": {"required": true, "schema": text}}),
            503 => {
                let seconds = json!({"type": "integer", "minimum": 1});
                answer["headers"] = json!({"Retry-After": {"required": true, "schema": seconds}});
            }
            _ => {}
        }
        responses.insert(status.to_string(), answer);
    }
}

fn shared_schemas() -> Map<String, Value> {
    let nullable = |kind: &str| json!({"type": [kind, "null"]});
    let refusal = json!({
        "type": "object",
        "description": "Why a call was not done. Control routes give all fields of `error`, and say the same \
            outside of it, where other dialects' clients look.",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": nullable("string"),
                    "code": nullable("string"),
                    "kind": nullable("string"),
                    "state": {"anyOf": [named("State"), {"type": "null"}]},
                    "missing_step": {"type": ["string", "null"], "pattern": "^/",
                        "description": "The call that comes next."},
                    "transaction": nullable("integer"),
                    "retryable": {"type": "boolean"},
                    "request_id": nullable("string"),
                },
                "required": ["message", "type", "param", "code", "kind", "state", "retryable"],
            },
            "request_id": nullable("string"),
            "status": {"const": "error"},
            "success": {"const": false},
            "message": {"type": "string"},
            "error_message": {"type": "string"},
        },
        "required": ["error"],
    });
    let count = json!({"type": "integer", "minimum": 0});
    let version = closed(
        &json!({
            "counter": count,
            "digest": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
            "label": nullable("string"),
        }),
        &["counter", "digest", "label"],
    );
    let lifecycles: Vec<_> = dormouse::control::Lifecycle::ALL.iter().map(|state| state.as_str()).collect();
    let state = closed(
        &json!({
            "lifecycle": {"enum": lifecycles},
            "paused": {"type": "boolean"},
            "admitting": {"type": "boolean"},
            "epoch": count,
            "version": {"anyOf": [named("Version"), {"type": "null"}]},
            "transaction": nullable("integer"),
        }),
        &["lifecycle", "paused", "admitting", "epoch", "version", "transaction"],
    );
    let memory = [
        "weights_bytes",
        "parked_bytes",
        "kv_cache_bytes",
        "workspace_bytes",
        "staging_bytes",
        "device_bytes",
        "total_bytes",
    ];
    let all: Map<_, _> = memory.iter().map(|part| ((*part).to_owned(), count.clone())).collect();
    let memory = closed(&Value::Object(all), &memory);
    let schemas = [("Refusal", refusal), ("Version", version), ("State", state), ("Memory", memory)];
    schemas.map(|(name, schema)| (name.to_owned(), schema)).into_iter().collect()
}
