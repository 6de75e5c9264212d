//! The description of the control routes.

use serde_json::{Map, Value, json};

use crate::control_args::MAX_TIMEOUT;
use crate::control_weights::PICKLED;
use crate::openapi::{add, closed, json_answer, named, refusals};

/// What a route takes as its body.
#[derive(Clone, Copy, PartialEq)]
enum Body {
    /// None: it is a GET.
    Nothing,
    /// Its arguments as JSON, or in the query.
    Arguments,
    /// Its arguments as JSON, or weights and the arguments in the query.
    Weights,
    /// Weights, and the arguments in the query.
    OnlyWeights,
}
use Body::{Arguments, Nothing, OnlyWeights, Weights};

/// Path, dialect, what it does, body, arguments.
type Route = (&'static str, &'static str, &'static str, Body, &'static [&'static str]);

const SLEEP: &[&str] = &["tags", "level", "mode"];
const SGLANG_SLEEP: &[&str] = &["sglang_tags", "level", "sglang_sleep_mode"];
const UPDATE: &[&str] = &[
    "model_path",
    "version",
    "weight_version",
    "names",
    "in_place",
    "convert_dtypes",
    "require_finite",
    "expected_digest",
    "transaction",
    "update_info",
    "abort_all_requests",
    "flush_cache",
    "torch_empty_cache",
    "recapture_cuda_graph",
    "load_format",
];
const BEGIN: &[&str] = &[
    "version",
    "weight_version",
    "names",
    "in_place",
    "convert_dtypes",
    "require_finite",
    "expected_digest",
    "is_checkpoint_format",
];

const ROUTES: [Route; 32] = [
    ("/v1/pause", "FastDeploy", "Stops generation; requests in flight are aborted.", Arguments, &["mode"]),
    ("/v1/resume", "FastDeploy", "Undoes a pause.", Arguments, &[]),
    ("/v1/sleep", "FastDeploy", "Puts parts to sleep; requests in flight are aborted.", Arguments, SLEEP),
    ("/v1/wakeup", "FastDeploy", "Wakes parts, and resumes.", Arguments, &["tags"]),
    ("/v1/update_weights", "FastDeploy", "Brings new weights; the KV cache must sleep.", Weights, UPDATE),
    ("/clear_load_weight", "FastDeploy", "Aborts all, drops KV cache and weights.", Nothing, &[]),
    (
        "/update_model_weight",
        "FastDeploy",
        "Loads the weights that the disk has by now, and serves.",
        Nothing,
        &["version", "weight_version"],
    ),
    ("/sleep", "LMDeploy, vLLM", "Puts parts to sleep; requests in flight are aborted.", Arguments, SLEEP),
    ("/wakeup", "LMDeploy", "Wakes parts.", Arguments, &["tags"]),
    ("/update_weights", "LMDeploy, vLLM", "Brings new weights; the KV cache must sleep.", Weights, UPDATE),
    ("/wake_up", "vLLM", "Wakes parts.", Arguments, &["tags"]),
    (
        "/pause",
        "vLLM",
        "Stops generation; requests in flight are aborted.",
        Arguments,
        &["mode", "wait_for_inflight_requests", "clear_cache"],
    ),
    ("/resume", "vLLM", "Undoes a pause.", Arguments, &[]),
    (
        "/reset_prefix_cache",
        "vLLM",
        "Forgets cached prefixes; refused with requests in flight.",
        Arguments,
        &["reset_running_requests", "reset_external"],
    ),
    ("/start_weight_update", "vLLM", "Begins an update that comes call by call.", Arguments, BEGIN),
    (
        "/finish_weight_update",
        "vLLM",
        "Makes all that came current, or nothing.",
        Arguments,
        &["transaction"],
    ),
    ("/abort_weight_update", "vLLM", "Drops what came.", Arguments, &["transaction"]),
    ("/flush_cache", "SGLang", "Forgets cached prefixes; refused with requests in flight.", Arguments, &[]),
    (
        "/release_memory_occupation",
        "SGLang",
        "Puts parts of an idle server to sleep.",
        Arguments,
        SGLANG_SLEEP,
    ),
    ("/resume_memory_occupation", "SGLang", "Wakes parts.", Arguments, &["sglang_tags"]),
    ("/update_weights_from_disk", "SGLang", "Brings new weights from a path.", Arguments, UPDATE),
    ("/update_weights_from_tensor", "SGLang", "Brings new weights as the body.", OnlyWeights, UPDATE),
    ("/pause_generation", "SGLang", "Stops generation.", Arguments, &["sglang_mode"]),
    ("/continue_generation", "SGLang", "Undoes a pause.", Arguments, &["torch_empty_cache"]),
    (
        "/abort_request",
        "SGLang",
        "Ends requests with the tokens they have.",
        Arguments,
        &["rid", "abort_all"],
    ),
    ("/get_weights_by_name", "SGLang", "Reads a tensor's first rows.", Arguments, &["name", "truncate_size"]),
    ("/v1/is_paused", "FastDeploy", "Whether generation is paused.", Nothing, &[]),
    ("/is_paused", "vLLM", "Whether generation is paused.", Nothing, &[]),
    ("/is_sleeping", "LMDeploy, vLLM", "Whether anything sleeps.", Nothing, &[]),
    ("/get_weight_version", "SGLang", "Which weights there are.", Nothing, &[]),
    ("/get_model_info", "SGLang", "What the model is.", Nothing, &[]),
    ("/status", "control", "The state, requests and memory.", Nothing, &[]),
];

/// Those that ask; they have no name.
const QUESTIONS: [&str; 6] =
    ["/v1/is_paused", "/is_paused", "/is_sleeping", "/get_weight_version", "/get_model_info", "/status"];

/// Whether any call has an argument of this name.
pub fn is_argument(name: &str) -> bool {
    // Other servers' pickles are known by name, too.
    PICKLED.contains(&name) || ROUTES.iter().flat_map(|route| route.4).any(|argument| said(argument) == name)
}

/// Adds the control routes.
pub fn describe(paths: &mut Map<String, Value>, schemas: &mut Map<String, Value>) {
    for route in ROUTES {
        let (path, _, _, body, _) = route;
        let method = if body == Nothing { "get" } else { "post" };
        add(paths, method, path, operation(route, method));
        if matches!(path, "/flush_cache" | "/get_weights_by_name") {
            let (_, dialect, summary, _, arguments) = route;
            add(paths, "get", path, operation((path, dialect, summary, Nothing, arguments), "get"));
        }
    }
    let text = json!({"200": {"description": "Prometheus's text format 0.0.4.",
        "content": {"text/plain": {"schema": {"type": "string"}}}}});
    add(paths, "get", "/metrics", plain("metrics", "What Prometheus reads.", text, &[401, 403]));
    let this = json!({"200": json_answer("OpenAPI 3.1.", &json!({"type": "object"}))});
    add(paths, "get", "/openapi.json", plain("openapi", "This description.", this, &[]));
    schemas.insert("Done".to_owned(), done());
    schemas.insert("Status".to_owned(), status());
}

fn plain(id: &str, summary: &str, responses: Value, more: &[u16]) -> Value {
    let mut operation =
        json!({"operationId": id, "tags": ["control"], "summary": summary, "responses": responses});
    if let Value::Object(responses) = &mut operation["responses"] {
        refusals(responses, more);
    }
    operation
}

fn operation((path, dialect, summary, body, arguments): Route, method: &str) -> Value {
    let question = QUESTIONS.contains(&path);
    let arguments: Vec<&str> = arguments.iter().copied().chain((!question).then_some("timeout")).collect();
    let mut parameters: Vec<Value> = arguments.iter().filter_map(|name| parameter(name)).collect();
    if !question {
        parameters.push(json!({
            "name": "X-Request-Id",
            "in": "header",
            "description": "The call's name, which comes back. Without one it gets one.",
            "schema": name_of_a_call(),
        }));
    }
    let mut responses = Map::new();
    let mut answer = json_answer("Done, now or before.", &answer_schema(path));
    if !question {
        answer["headers"] = json!({"X-Request-Id": {"required": true, "schema": name_of_a_call()}});
    }
    responses.insert("200".to_owned(), answer);
    refusals(
        &mut responses,
        if question { &[401, 403] } else { &[400, 401, 403, 404, 408, 409, 413, 415, 500, 503, 504] },
    );
    let mut operation = json!({
        "operationId": format!("{method}_{}", path.trim_start_matches('/').replace('/', "_")),
        "tags": ["control", dialect],
        "summary": summary,
        "parameters": parameters,
        "responses": responses,
        "security": [{}, {"token": []}],
    });
    if let Some(body) = request_body(body, &arguments) {
        operation["requestBody"] = body;
    }
    operation
}

fn request_body(body: Body, arguments: &[&str]) -> Option<Value> {
    let fields = arguments.iter().map(|name| (said(name), or_null(schema(name))));
    let ids = ["request_id", "control_id"].map(|name| (name, or_null(name_of_a_call())));
    let fields: Map<_, _> = fields.chain(ids).map(|(name, schema)| (name.to_owned(), schema)).collect();
    let json = ("application/json", json!({"schema": closed(&Value::Object(fields), &[])}));
    let bytes = json!({"schema": {"type": "string", "format": "binary"}});
    let weights = ["application/octet-stream", "application/x-safetensors", "application/x-dormouse-bucket"]
        .map(|kind| (kind, bytes.clone()));
    let content: Map<String, Value> = match body {
        Nothing => return None,
        Arguments => vec![json],
        Weights => [json].into_iter().chain(weights).collect(),
        OnlyWeights => weights.to_vec(),
    }
    .into_iter()
    .map(|(kind, content)| (kind.to_owned(), content))
    .collect();
    Some(json!({
        "description": "An argument is in the query or in the body, not in both.",
        "required": body == OnlyWeights,
        "content": content,
    }))
}

/// An argument's name on the wire.
fn said(name: &str) -> &str {
    match name {
        "sglang_mode" | "sglang_sleep_mode" => "mode",
        "sglang_tags" => "tags",
        name => name,
    }
}

fn parameter(name: &str) -> Option<Value> {
    // It is an object, and has no form in a query.
    (name != "update_info").then(|| {
        let mut schema = schema(name);
        if let Some(list) = schema["anyOf"].get(0).cloned() {
            // A query knows no types: one string is a list of one.
            schema = list;
        }
        json!({"name": said(name), "in": "query", "schema": schema})
    })
}

fn name_of_a_call() -> Value {
    json!({"type": "string", "pattern": "^[!-~]{1,256}$"})
}

/// Null is as if the argument were left out.
fn or_null(schema: Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

/// What an argument may be.
fn schema(name: &str) -> Value {
    let list = |items: Value| {
        let list = json!({"type": "array", "items": items, "minItems": 1});
        json!({"anyOf": [list, {"type": "string", "minLength": 1}]})
    };
    match name {
        "tags" => {
            let tag = json!({"enum": ["weights", "weight", "kv_cache"]});
            let one = json!({"type": "string", "pattern": "^(weights?|kv_cache)(,(weights?|kv_cache))*$"});
            json!({"anyOf": [{"type": "array", "items": tag, "minItems": 1}, one],
                "description": "Parts; all if there are none. A string may have several, with commas between."})
        }
        "sglang_tags" => {
            let tag = json!({"enum": ["weights", "weight", "kv_cache", "cuda_graph"]});
            let one = "^(weights?|kv_cache|cuda_graph)(,(weights?|kv_cache|cuda_graph))*$";
            json!({"anyOf": [{"type": "array", "items": tag, "minItems": 1}, {"type": "string", "pattern": one}],
                "description": "Parts; all if there are none. `cuda_graph` is a part of `kv_cache` here."})
        }
        "level" => {
            json!({"enum": [1, 2], "description": "1 keeps the weights in host memory, 2 drops them."})
        }
        "sglang_sleep_mode" => json!({"enum": ["abort", "wait", "keep", "refuse"],
            "description": "What becomes of requests in flight; they are no obstacle unless it is `refuse`."}),
        "mode" => json!({"enum": ["abort", "wait", "keep"],
            "description": "What becomes of requests in flight."}),
        "sglang_mode" => json!({"enum": ["abort", "retract", "in_place"]}),
        "timeout" => json!({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT,
            "description": "How long it may take, in seconds."}),
        "model_path" => json!({"type": "string", "minLength": 1, "maxLength": 4096,
            "description": "A directory of the server's machine with model.safetensors or an index of shards."}),
        "version" | "weight_version" => {
            json!({"type": "string", "maxLength": 256, "description": "The caller's name for the weights."})
        }
        "names" => list(json!({"type": "string"})),
        "rid" => list(json!({"type": "string", "minLength": 1})),
        "expected_digest" => json!({"type": "string", "pattern": "^[0-9a-f]{64}$"}),
        "transaction" => json!({"type": "integer", "minimum": 0, "maximum": u64::MAX,
            "description": "As /start_weight_update gave it. A call that brings weights and neither names it nor has \
                `update_info` is an update in one go, refused while one is open; a finish or an abort without it is \
                that of the open one."}),
        "truncate_size" => json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}),
        "update_info" => {
            json!({"type": "object", "description": "More arguments, as vLLM's clients send them."})
        }
        "load_format" => json!({"enum": ["auto", "safetensors", "flattened_bucket"]}),
        "is_checkpoint_format" => json!({"const": true}),
        "name" => json!({"type": "string", "description": "A tensor's Hugging Face name."}),
        _ => json!({"type": "boolean"}),
    }
}

fn answer_schema(path: &str) -> Value {
    let flag = json!({"type": "boolean"});
    match path {
        "/v1/is_paused" | "/is_paused" => {
            let result = closed(&json!({"is_paused": flag}), &["is_paused"]);
            let all = json!({"is_paused": flag, "status": {"const": "success"}, "error_message": {"type": "null"},
                "result": result});
            closed(&all, &["is_paused", "status", "error_message", "result"])
        }
        "/is_sleeping" => closed(&json!({"is_sleeping": flag}), &["is_sleeping"]),
        "/get_model_info" => {
            let text = json!({"type": "string"});
            let version = json!({"type": ["string", "null"]});
            let all = json!({"model_path": text, "tokenizer_path": text, "is_generation": {"const": true},
                "weight_version": version});
            closed(&all, &["model_path", "tokenizer_path", "is_generation", "weight_version"])
        }
        "/get_weight_version" => {
            let version = json!({"anyOf": [named("Version"), {"type": "null"}]});
            let all = json!({"weight_version": {"type": ["string", "null"]}, "version": version});
            closed(&all, &["weight_version", "version"])
        }
        "/status" => named("Status"),
        "/get_weights_by_name" => {
            json!({"type": "array", "description": "Numbers, nested as the tensor is."})
        }
        _ => named("Done"),
    }
}

fn done() -> Value {
    json!({
        "type": "object",
        "description": "What was done. Dialects add fields of their own.",
        "properties": {
            "request_id": name_of_a_call(),
            "operation": {"type": "string"},
            "status": {"enum": ["success", "ok", "paused", "resumed"]},
            "success": {"const": true},
            "already": {"type": "boolean", "description": "There was nothing to do."},
            "message": {"type": "string"},
            "error_message": {"type": "null"},
            "state": named("State"),
            "result": {"type": "object", "description": "Reports of what was done, by phase."},
        },
        "required": [
            "request_id", "operation", "status", "success", "already", "message", "error_message", "state", "result",
        ],
    })
}

fn status() -> Value {
    let count = json!({"type": "integer", "minimum": 0});
    let busy = closed(
        &json!({"request_id": {"type": "string"}, "operation": {"type": "string"}, "for_seconds": {"type": "number"}}),
        &["request_id", "operation", "for_seconds"],
    );
    let fields = json!({
        "state": named("State"),
        "busy": {"anyOf": [busy, {"type": "null"}]},
        "control_queue": count,
        "live_requests": count,
        "requests_aside": count,
        "memory": named("Memory"),
        "engine": {"type": "object", "additionalProperties": count},
        "step_error": {"type": ["string", "null"]},
    });
    let required = [
        "state",
        "busy",
        "control_queue",
        "live_requests",
        "requests_aside",
        "memory",
        "engine",
        "step_error",
    ];
    closed(&fields, &required)
}
