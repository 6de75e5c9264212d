//! Mistakes are 4xx that name them, beside requests that go on undisturbed.

use dormouse::Request;
use dormouse::control::{ControllerOptions, Operation, PauseMode, WhileNotServing};
use serde_json::{Value, json};

use crate::client::{Connection, Server, Setup, choices, oracle};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const GENERATE: &str = "/generate";

/// What a path refuses, and what it says.
type Bad = (&'static str, Value, &'static str);

fn with(name: &str, value: Value) -> Value {
    let mut body = json!({"prompt": [1, 2], "max_tokens": 4});
    body[name] = value;
    body
}

fn bad_prompts() -> Vec<Bad> {
    vec![
        (COMPLETIONS, json!({}), "prompt is missing"),
        (COMPLETIONS, json!({"prompt": null}), "prompt is missing"),
        (COMPLETIONS, with("prompt", json!([])), "the prompt is empty"),
        (COMPLETIONS, with("prompt", json!([[]])), "the prompt is empty"),
        (COMPLETIONS, with("prompt", json!([[1], []])), "the prompt is empty"),
        (COMPLETIONS, with("prompt", json!([64])), "token 64 at index 0 of prompt"),
        (COMPLETIONS, with("prompt", json!([1, u32::MAX])), "token 4294967295 at index 1 of prompt"),
        (COMPLETIONS, with("prompt", json!([1, -1])), "prompt[1]"),
        (COMPLETIONS, with("prompt", json!([1u64 << 32])), "prompt[0]: a number that is no token id"),
        (COMPLETIONS, with("prompt", json!([u64::MAX])), "no token id"),
        (COMPLETIONS, with("prompt", json!([1.5])), "prompt[0]"),
        (COMPLETIONS, with("prompt", json!([1, [2]])), "mixed"),
        (COMPLETIONS, with("prompt", json!([1, "a"])), "mixed"),
        (COMPLETIONS, with("prompt", json!([[[1]]])), "prompt[0][0]"),
        (COMPLETIONS, with("prompt", json!({"a": 1})), "prompt"),
        (COMPLETIONS, with("prompt", json!("text")), "prompt as text needs a tokenizer"),
        (COMPLETIONS, with("prompt", json!(["text", "more"])), "needs a tokenizer"),
        (COMPLETIONS, with("stop", json!("a")), "stop needs a tokenizer"),
        (COMPLETIONS, with("prompt", json!(vec![1; 513])), "exceed max_model_len 512"),
        (COMPLETIONS, with("prompt", json!(vec![1; 100_000])), "100000 prompt tokens"),
        (COMPLETIONS, with("prompt", json!(vec![[1]; 5000])), "more than 4096 prompts"),
    ]
}

fn bad_parameters() -> Vec<Bad> {
    let long = "x".repeat(2000);
    vec![
        (COMPLETIONS, with("max_tokens", json!(0)), "max_new_tokens is 0"),
        (COMPLETIONS, with("max_tokens", json!(511)), "exceed max_model_len 512"),
        (COMPLETIONS, with("max_tokens", json!(u64::MAX)), "new ones exceed"),
        (COMPLETIONS, with("max_tokens", json!(-1)), "max_tokens"),
        (COMPLETIONS, with("max_tokens", json!(1e300)), "max_tokens"),
        (COMPLETIONS, with("n", json!(0)), "n is 0"),
        (COMPLETIONS, with("n", json!(2000)), "n is 2000"),
        (COMPLETIONS, with("n", json!(u64::MAX)), "more than 16384 choices"),
        (COMPLETIONS, with("temperature", json!(-1)), "temperature is -1"),
        (COMPLETIONS, with("temperature", json!(1e300)), "temperature is inf"),
        (COMPLETIONS, with("temperature", json!("1")), "temperature: invalid type"),
        (COMPLETIONS, with("top_p", json!(0)), "top_p is 0"),
        (COMPLETIONS, with("top_k", json!(-2)), "top_k is -2"),
        (COMPLETIONS, with("min_p", json!(2)), "min_p is 2"),
        (COMPLETIONS, with("seed", json!(1.5)), "seed is 1.5"),
        (COMPLETIONS, with("stop", json!([""])), "a stop string has"),
        (COMPLETIONS, with("stop", json!([long])), "a stop string has"),
        (COMPLETIONS, with("stop", json!(vec!["a"; 100])), "more than 32 strings"),
        (COMPLETIONS, with("stop", json!(5)), "stop"),
        (COMPLETIONS, with("stop_token_ids", json!([64])), "stop_token_ids"),
        (COMPLETIONS, with("logit_bias", json!({"64": 1})), "token 64"),
        (COMPLETIONS, with("logit_bias", json!({"x": 1})), "logit_bias"),
        (COMPLETIONS, with("logprobs", json!(21)), "logprobs is 21, more than 20"),
        (COMPLETIONS, with("logprobs", json!("1")), "logprobs"),
        (COMPLETIONS, with("allowed_token_ids", json!([])), "allowed_token_ids is empty"),
        (COMPLETIONS, with("cache_salt", json!("s".repeat(300))), "cache_salt has 300 bytes"),
        (COMPLETIONS, with("request_id", json!("i".repeat(300))), "id has 300 bytes"),
        (COMPLETIONS, with("echo", json!(true)), "echo is not supported"),
        (COMPLETIONS, with("suffix", json!("x")), "suffix is not supported"),
        (COMPLETIONS, with("best_of", json!(2)), "best_of"),
        (COMPLETIONS, with("stream_options", json!({})), "stream_options needs stream"),
        (COMPLETIONS, with("temprature", json!(1)), "unknown parameter `temprature`"),
        (COMPLETIONS, with("messages", json!([])), "messages belongs to /v1/chat/completions"),
        (COMPLETIONS, json!([1, 2]), "the body is not a request"),
        (COMPLETIONS, json!("x"), "the body is not a request"),
    ]
}

fn bad_elsewhere() -> Vec<Bad> {
    vec![
        (CHAT, json!({}), "messages are missing"),
        (CHAT, json!({"messages": []}), "messages are missing"),
        (CHAT, json!({"messages": [{"role": "user", "content": "x"}]}), "needs a tokenizer"),
        (CHAT, json!({"messages": [{"content": "x"}]}), "messages[0]"),
        (CHAT, json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (CHAT, json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "not text"),
        (CHAT, json!({"messages": [{"role": "user", "contents": "x"}]}), "unknown parameter `contents`"),
        (CHAT, json!({"messages": [{"role": "user"}], "tools": [{"type": "function"}]}), "tools are not"),
        (CHAT, json!({"messages": [{"role": "user"}], "top_logprobs": 2}), "top_logprobs needs logprobs"),
        (
            CHAT,
            json!({"messages": [{"role": "user"}], "response_format": {"type": "json_object"}}),
            "as text only",
        ),
        (GENERATE, json!({}), "either text or input_ids"),
        (GENERATE, json!({"text": "x", "input_ids": [1]}), "either text or input_ids"),
        (GENERATE, json!({"text": [1]}), "text has the wrong kind"),
        (GENERATE, json!({"text": "x"}), "needs a tokenizer"),
        (GENERATE, json!({"input_ids": [64]}), "token 64"),
        (GENERATE, json!({"input_ids": [[1], [2]], "rid": ["a"]}), "1 names for 2 prompts"),
        (GENERATE, json!({"input_ids": [1], "sampling_params": {"temp": 1}}), "unknown parameter `temp`"),
    ]
}

#[test]
fn b39_bad_requests_are_named_beside_healthy_ones() {
    let server = Server::start();
    let healthy = |seed: u64| {
        let body = json!({"prompt": [3, 4, 5], "seed": seed, "max_tokens": 60, "logprobs": 0});
        let given = choices(&[server.post(COMPLETIONS, &body).json()]).remove(0);
        let expected = oracle(&Request::new(vec![3, 4, 5]).seed(seed).max_new_tokens(60));
        assert_eq!(given.tokens, expected.completions[0].tokens);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| (0..20).for_each(healthy));
        for stream in [false, true] {
            let server = &server;
            scope.spawn(move || {
                let mut connection = server.connect();
                for (path, mut body, says) in [bad_prompts(), bad_parameters(), bad_elsewhere()].concat() {
                    if stream && body.is_object() {
                        body["stream"] = json!(true);
                        if says.starts_with("stream_options") {
                            continue;
                        }
                    }
                    let answer = connection.post(path, &body);
                    let what = format!(
                        "{path} {}: {}",
                        &body.to_string()[..body.to_string().len().min(200)],
                        answer.text()
                    );
                    assert_eq!(answer.status, 400, "{what}");
                    assert!(answer.error().contains(says), "{what} instead of {says}");
                    assert!(answer.body.len() < 2000, "{what}");
                }
            });
        }
    });
    server.wait_live(0);
    server.check();
}

#[test]
fn garbage_is_answered_in_json() {
    let server = Server::start();
    let post = |path: &str, kind: &str, body: &[u8]| {
        let mut connection = server.connect();
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\n{kind}content-length: {}\r\n\r\n", body.len());
        connection.send(&[head.as_bytes(), body].concat());
        connection.answer()
    };
    let json = "content-type: application/json\r\n";
    let deep = [vec![b'['; 100_000], b"1".to_vec()].concat();
    let bodies: [&[u8]; 8] = [
        b"",
        b"[",
        b"{\"prompt\": [1]",
        b"\xff\xfe",
        b"null",
        b"{} {}",
        &deep,
        b"{\"prompt\": [1], \"prompt\": [2]}",
    ];
    for path in [COMPLETIONS, CHAT, GENERATE] {
        for body in bodies {
            let answer = post(path, json, body);
            assert_eq!(answer.status, 400, "{}", answer.text());
            assert!(!answer.error().is_empty());
        }
        let answer = post(path, "content-type: text/plain\r\n", b"{}");
        assert_eq!((answer.status, answer.error()), (415, "the body must be application/json".into()));
        let answer = server.get(path);
        assert_eq!((answer.status, answer.error()), (405, format!("{path} does not take GET")));
    }
    let answer = server.get("/nothing");
    assert_eq!((answer.status, answer.error()), (404, "there is nothing at /nothing".into()));
    // What is no HTTP is closed.
    for bytes in [&b"\x16\x03\x01\x02\x00\x01\x00"[..], b"\0\0\0\0\r\n\r\n", b"GET\r\n\r\n"] {
        let mut connection = server.connect();
        connection.send(bytes);
        assert!(connection.is_closed());
    }
    server.check();
}

#[test]
fn b54_a_live_name_is_not_taken_twice() {
    let options = {
        let mut options = ControllerOptions::default();
        options.while_not_serving = WhileNotServing::Queue;
        options
    };
    let server = Server::with(Setup { options, ..Setup::default() });
    server.handle.run(Operation::Pause(PauseMode::Keep)).unwrap();
    let body = json!({"prompt": [1], "temperature": 0, "max_tokens": 3, "request_id": "same"});
    let mut first: Connection = server.connect();
    first.send_post(COMPLETIONS, body.to_string().as_bytes());
    server.wait_live(1);
    let second = server.post(COMPLETIONS, &body);
    assert_eq!((second.status, second.error()), (409, "a live request has the id \"same\"".into()));
    assert_eq!(second.json()["error"]["param"], "request_id");
    let third = server.post(GENERATE, &json!({"input_ids": [1], "rid": "same"}));
    assert_eq!(third.status, 409);
    server.handle.run(Operation::Resume).unwrap();
    assert_eq!(choices(&[first.answer().json()])[0].tokens.len(), 3);
    assert_eq!(server.post(COMPLETIONS, &body).status, 200, "the name is free again");
}
