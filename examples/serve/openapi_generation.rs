//! The description of the routes that generate, and of those that say what there is.

use dormouse::Request;
use serde_json::{Map, Value, json};

use crate::openapi::{add, closed, json_answer, named, refusals};

/// Adds the routes.
pub fn describe(paths: &mut Map<String, Value>, schemas: &mut Map<String, Value>) {
    let events = "Server-sent events, if `stream` is true: chunks of the answer, then `[DONE]`.";
    for (method, path, summary, request, answer) in [
        ("post", "/v1/completions", "Continues prompts.", "CompletionRequest", "Completion"),
        ("post", "/v1/chat/completions", "Continues a conversation.", "ChatRequest", "ChatCompletion"),
        ("post", "/generate", "Continues prompts, as SGLang does.", "GenerateRequest", "Generated"),
        ("put", "/generate", "Continues prompts, as SGLang does.", "GenerateRequest", "Generated"),
    ] {
        let mut responses = Map::new();
        let mut whole = json_answer("What came of it.", &named(answer));
        whole["content"]["text/event-stream"] = json!({"schema": {"description": events}});
        responses.insert("200".to_owned(), whole);
        refusals(&mut responses, &[400, 404, 408, 409, 413, 415, 500, 503]);
        let content = json!({"application/json": {"schema": named(request)}});
        let operation = json!({
            "operationId": format!("{method}_{}", path.trim_start_matches('/').replace('/', "_")),
            "tags": ["generation"],
            "summary": summary,
            "requestBody": {"required": true, "content": content},
            "responses": responses,
        });
        add(paths, method, path, operation);
    }
    describe_models(paths);
    let requests = [
        ("CompletionRequest", completion_request()),
        ("ChatRequest", chat_request()),
        ("GenerateRequest", generate_request()),
        ("Model", model()),
        ("Usage", usage()),
        ("Completion", openai_answer("text_completion", &completion_choice())),
        ("ChatCompletion", openai_answer("chat.completion", &chat_choice())),
        ("Generated", generated()),
    ];
    schemas.extend(requests.map(|(name, schema)| (name.to_owned(), schema)));
}

fn describe_models(paths: &mut Map<String, Value>) {
    let list = closed(
        &json!({"object": {"const": "list"}, "data": {"type": "array", "items": named("Model")}}),
        &["object", "data"],
    );
    let name = json!([{"name": "name", "in": "path", "required": true, "schema": {"type": "string"}}]);
    let empty = closed(&json!({}), &[]);
    for (path, summary, schema, parameters, statuses) in [
        ("/v1/models", "The model.", list, json!([]), &[][..]),
        ("/v1/models/{name}", "The model, by its name.", named("Model"), name, &[400, 404]),
        ("/health", "Whether the server lives; it may be asleep.", empty.clone(), json!([]), &[503]),
        ("/health_generate", "Whether it makes a token now.", empty, json!([]), &[500, 503]),
    ] {
        let mut responses = Map::new();
        responses.insert("200".to_owned(), json_answer("It is so.", &schema));
        refusals(&mut responses, statuses);
        let id = path.trim_start_matches('/').replace('/', "_").replace(['{', '}'], "");
        let operation = json!({"operationId": format!("get_{id}"), "tags": ["generation"], "summary": summary,
            "parameters": parameters, "responses": responses});
        add(paths, "get", path, operation);
    }
}

/// A schema, or null.
fn or_null(schema: Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

fn all_or_null(fields: Value) -> Map<String, Value> {
    let Value::Object(fields) = fields else { return Map::new() };
    fields.into_iter().map(|(name, schema)| (name, or_null(schema))).collect()
}

fn token() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": u32::MAX})
}

/// So many tokens at most.
fn few_tokens(minimum: usize, maximum: usize) -> Value {
    json!({"type": "array", "items": token(), "minItems": minimum, "maxItems": maximum})
}

/// A number that is one of 32 bits, too.
fn number() -> Value {
    json!({"type": "number", "minimum": f32::MIN, "maximum": f32::MAX})
}

fn tokens() -> Value {
    json!({"type": "array", "items": token()})
}

fn count(minimum: u64) -> Value {
    json!({"type": "integer", "minimum": minimum, "maximum": u64::MAX})
}

fn stops() -> Value {
    let stop = json!({"type": "string", "minLength": 1, "maxLength": 1024});
    json!({"anyOf": [stop, {"type": "array", "items": stop, "maxItems": 32}]})
}

/// What both dialects have, in the same words.
fn sampling() -> Value {
    let bias = json!({"type": "object", "propertyNames": {"pattern": "^[0-9]+$"},
        "maxProperties": Request::MAX_LOGIT_BIAS,
        "additionalProperties": {"type": "number", "minimum": f32::MIN, "maximum": f32::MAX}});
    json!({
        "n": {"type": "integer", "minimum": 1, "maximum": Request::MAX_SAMPLES},
        "temperature": {"type": "number", "minimum": 0, "maximum": f32::MAX},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1, "maximum": i64::MAX},
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "stop": stops(),
        "stop_token_ids": few_tokens(0, Request::MAX_STOP_TOKEN_IDS),
        "ignore_eos": {"type": "boolean"},
        "presence_penalty": number(),
        "frequency_penalty": number(),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": f32::MAX},
        "logit_bias": bias,
        "skip_special_tokens": {"type": "boolean"},
    })
}

/// What both OpenAI endpoints take.
fn openai_request(more: Value, required: &[&str]) -> Value {
    let flag = json!({"type": "boolean"});
    let seed = json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX});
    let mut fields = all_or_null(sampling());
    fields.extend(all_or_null(json!({
        "model": {"type": "string"},
        "best_of": count(1),
        "max_tokens": count(0),
        "max_completion_tokens": count(0),
        "min_tokens": count(0),
        "seed": seed,
        "allowed_token_ids": {"type": "array", "items": token(), "minItems": 1},
        "echo": {"const": false},
        "suffix": {"const": ""},
        "stream": flag,
        "stream_options": closed(&json!({"include_usage": {"type": ["boolean", "null"]},
            "include_obfuscation": {}}), &[]),
        "cache_salt": {"type": "string", "maxLength": Request::MAX_CACHE_SALT_BYTES},
        "request_id": {"type": "string", "maxLength": Request::MAX_ID_BYTES},
        "include_stop_str_in_output": flag,
        "return_token_ids": flag,
        "return_tokens_as_token_ids": flag,
        "response_format": closed(&json!({"type": {"const": "text"}}), &["type"]),
        "tools": {"type": "array", "maxItems": 0},
        "tool_choice": {"enum": ["none", "auto"]},
    })));
    for ignored in [
        "parallel_tool_calls",
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "reasoning_effort",
        "modalities",
        "verbosity",
    ] {
        fields.insert(ignored.to_owned(), json!({}));
    }
    if let Value::Object(more) = more {
        fields.extend(more);
    }
    closed(&Value::Object(fields), required)
}

fn completion_request() -> Value {
    let texts = json!({"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4096});
    let ids = json!({"type": "array", "items": token(), "minItems": 1});
    let lists = json!({"type": "array", "items": tokens(), "minItems": 1, "maxItems": 4096});
    let logprobs = json!({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": "null"}]});
    let more = json!({
        "prompt": {"anyOf": [{"type": "string"}, texts, ids, lists]},
        "logprobs": logprobs,
        // The other endpoint's: as if they were left out.
        "messages": {"type": "null"},
        "top_logprobs": {"type": "null"},
        "add_generation_prompt": {"type": "null"},
        "chat_template_kwargs": {"type": "null"},
    });
    openai_request(more, &["prompt"])
}

fn chat_request() -> Value {
    let part = json!({"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"]});
    let text = json!({"type": ["string", "null"]});
    let message = closed(
        &json!({
            "role": {"type": "string"},
            "content": {"anyOf": [text, {"type": "array", "items": part}]},
            "name": text,
            "reasoning_content": text,
            "tool_calls": {"type": ["array", "null"]},
            "tool_call_id": text,
            "refusal": {},
            "audio": {},
            "function_call": {},
            "annotations": {},
        }),
        &["role"],
    );
    let more = json!({
        "messages": {"type": "array", "items": message, "minItems": 1},
        "prompt": {"type": "null"},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"type": "null"}]},
        "add_generation_prompt": {"type": ["boolean", "null"]},
        "chat_template_kwargs": {"type": ["object", "null"]},
    });
    openai_request(more, &["messages"])
}

fn generate_request() -> Value {
    let text = json!({"type": "string"});
    let texts = json!({"type": "array", "items": text, "minItems": 1, "maxItems": 4096});
    let ids = json!({"type": "array", "items": token(), "minItems": 1});
    let lists = json!({"type": "array", "items": tokens(), "minItems": 1, "maxItems": 4096});
    let mut params = all_or_null(sampling());
    params.extend(all_or_null(json!({
        "max_new_tokens": count(0),
        "min_new_tokens": count(0),
        "sampling_seed": {"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX},
        "no_stop_trim": {"type": "boolean"},
        "spaces_between_special_tokens": {"type": "boolean"},
    })));
    let rid = json!({"type": "string", "maxLength": Request::MAX_ID_BYTES});
    let rids = json!({"anyOf": [rid, {"type": "array", "items": rid, "minItems": 1, "maxItems": 4096}]});
    let fields = all_or_null(json!({
        "text": {"anyOf": [text, texts]},
        "input_ids": {"anyOf": [ids, lists]},
        "sampling_params": closed(&Value::Object(params), &[]),
        "rid": rids,
        "stream": {"type": "boolean"},
        "return_logprob": {"type": "boolean"},
        "logprob_start_len": {"type": "integer", "minimum": -1, "maximum": i64::MAX},
        "top_logprobs_num": count(0),
        "return_text_in_logprobs": {"type": "boolean"},
    }));
    let mut request = closed(&Value::Object(fields), &[]);
    request["description"] = json!("Either `text` or `input_ids` is there.");
    request
}

fn model() -> Value {
    let fields = json!({
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": count(0),
        "owned_by": {"type": "string"},
        "max_model_len": count(1),
    });
    closed(&fields, &["id", "object", "created", "owned_by", "max_model_len"])
}

fn usage() -> Value {
    let details = closed(&json!({"cached_tokens": count(0)}), &["cached_tokens"]);
    let fields = json!({
        "prompt_tokens": count(0),
        "completion_tokens": count(0),
        "total_tokens": count(0),
        "prompt_tokens_details": details,
    });
    closed(&fields, &["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"])
}

fn openai_answer(object: &str, choice: &Value) -> Value {
    json!({
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"const": object},
            "created": count(0),
            "model": {"type": "string"},
            "choices": {"type": "array", "items": choice},
            "usage": named("Usage"),
            "weight_version": {"description": "The weights that made the last token: counter, digest, label."},
        },
        "required": ["id", "object", "created", "model", "choices", "usage", "weight_version"],
    })
}

fn choice(more: &Value, required: &[&str]) -> Value {
    let required = [&["index", "logprobs", "finish_reason"], required].concat();
    let mut schema = json!({
        "type": "object",
        "properties": {
            "index": count(0),
            "token_ids": tokens(),
            "prompt_token_ids": tokens(),
            "finish_reason": {"enum": ["stop", "length", "abort", "error", "content_filter"]},
            "stop_reason": {"type": ["integer", "string", "null"]},
            "seed": count(0),
        },
        "required": required,
    });
    if let (Value::Object(all), Value::Object(more)) = (&mut schema["properties"], more) {
        all.extend(more.clone());
    }
    schema
}

fn completion_choice() -> Value {
    let logprobs = closed(
        &json!({
            "tokens": {"type": "array", "items": {"type": "string"}},
            "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
            "text_offset": {"type": "array", "items": count(0)},
            "top_logprobs": {"type": ["array", "null"]},
        }),
        &["tokens", "token_logprobs", "text_offset", "top_logprobs"],
    );
    choice(&json!({"text": {"type": "string"}, "logprobs": or_null(logprobs)}), &["text"])
}

fn chat_choice() -> Value {
    let message = json!({
        "type": "object",
        "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}, "refusal": {"type": "null"}},
        "required": ["role", "content"],
    });
    let entry = json!({
        "type": "object",
        "properties": {
            "token": {"type": "string"},
            "logprob": {"type": ["number", "null"]},
            "bytes": {"type": ["array", "null"]},
            "top_logprobs": {"type": "array"},
        },
        "required": ["token", "logprob", "bytes", "top_logprobs"],
    });
    let logprobs = json!({"type": "object", "properties": {"content": {"type": "array", "items": entry}},
        "required": ["content"]});
    choice(&json!({"message": message, "logprobs": or_null(logprobs)}), &["message"])
}

fn generated() -> Value {
    let meta = json!({
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "finish_reason": {"type": ["object", "null"]},
            "prompt_tokens": count(0),
            "completion_tokens": count(0),
            "cached_tokens": count(0),
            "output_token_logprobs": {"type": "array"},
            "output_top_logprobs": {"type": "array"},
            "input_token_logprobs": {"type": "array"},
        },
        "required": ["id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"],
    });
    let one = json!({
        "type": "object",
        "properties": {"text": {"type": "string"}, "output_ids": tokens(), "meta_info": meta},
        "required": ["text", "output_ids", "meta_info"],
    });
    json!({"anyOf": [one, {"type": "array", "items": one}]})
}
