//! What a small body may cost, and what is counted from where.

use std::time::Duration;

use axum::body::Body;
use dormouse::Request;
use serde_json::{Value, json};

use crate::bodies::{self, Budget, Limits};
use crate::client::{Connection, Server, choices, oracle};

const COMPLETIONS: &str = "/v1/completions";

/// The most memory that this process has had, in MiB.
fn peak_mib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() / 1024
}

#[test]
fn what_all_prompts_share_is_checked_before_each_has_its_own() {
    let server = Server::start();
    let before = peak_mib();
    let prompts = vec![[4]; 1000];
    let long = "x".repeat(4_000_000);
    let many: Vec<u32> = vec![1; 1_000_000];
    for (name, value) in [
        ("cache_salt", json!(long)),
        ("request_id", json!(long)),
        ("stop_token_ids", json!(many)),
        ("allowed_token_ids", json!(many)),
    ] {
        let answer = server.post(COMPLETIONS, &json!({"prompt": prompts, "max_tokens": 1, name: value}));
        assert_eq!(answer.status, 400, "{name}: {}", answer.text());
        assert_eq!(answer.json()["error"]["param"], name);
    }
    for body in [
        json!({"input_ids": prompts, "rid": long}),
        json!({"input_ids": prompts, "sampling_params": {"stop_token_ids": many}}),
    ] {
        assert_eq!(server.post("/generate", &body).status, 400);
    }
    // Valid, and too much for so many.
    let body = json!({"prompt": vec![[4]; 4096], "stop_token_ids": vec![1; 4096]});
    assert_eq!(server.post(COMPLETIONS, &body).status, 400);
    let more = peak_mib() - before;
    assert!(more < 700, "{more} MiB for bodies of 4");
    server.check();
}

#[test]
fn bodies_take_no_more_than_their_budget_and_give_it_back() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limits = Limits { bytes: 100, idle: Duration::from_secs(60), rate: 1, until: None };
    let budget = Budget::new(10);
    runtime.block_on(async {
        let mut first = budget.room();
        assert_eq!(bodies::read(Body::from("12345678"), limits, &mut first).await.unwrap(), "12345678");
        let mut second = budget.room();
        let refused = bodies::read(Body::from("123"), limits, &mut second).await.unwrap_err();
        assert_eq!((refused.status().as_u16(), refused.kind()), (503, "overloaded"));
        drop(first);
        assert!(bodies::read(Body::from("1234567890"), limits, &mut second).await.is_ok());
    });
}

#[test]
fn a_group_is_aborted_by_its_name() {
    let server = Server::start();
    let sampling = json!({"max_new_tokens": 500, "ignore_eos": true});
    let long = || Request::new(vec![1]).max_new_tokens(500).ignore_eos(true);
    let calls = [
        ("/generate", json!({"input_ids": [[1], [2], [3]], "rid": "a,b", "sampling_params": sampling}), 3),
        ("/generate", json!({"input_ids": [1], "rid": "a,b", "sampling_params": sampling}), 1),
        (
            COMPLETIONS,
            json!({"prompt": [[1], [2], [3]], "request_id": "a,b", "max_tokens": 500, "ignore_eos": true}),
            3,
        ),
    ];
    for (path, body, requests) in calls {
        let other = server.handle.submit(long().id("a")).unwrap();
        let mut client = server.connect();
        client.send_post(path, body.to_string().as_bytes());
        server.wait_live(requests + 1);
        let aborted = server.post("/abort_request", &json!({"rid": "a,b"}));
        assert_eq!(aborted.json()["result"]["settled"]["aborted"], requests, "{}", aborted.text());
        assert_eq!(server.handle.status().live_requests, 1, "the one named `a` goes on");
        drop(other);
        server.wait_live(0);
        assert_eq!(client.answer().status, 200);
    }
}

#[test]
fn logprobs_of_a_prompt_begin_where_they_are_asked_for() {
    let server = Server::start();
    let ask = |start: i64| {
        server.post(
            "/generate",
            &json!({"input_ids": [5, 6, 7, 8], "return_logprob": true, "logprob_start_len": start,
                "sampling_params": {"max_new_tokens": 2}}),
        )
    };
    let all = ask(0).json()["meta_info"]["input_token_logprobs"].clone();
    let all = all.as_array().unwrap();
    assert_eq!((all.len(), &all[0]), (4, &json!([null, 5, null])));
    for start in 1..4_i64 {
        let from = usize::try_from(start).unwrap();
        assert_eq!(ask(start).json()["meta_info"]["input_token_logprobs"], json!(all[from..]));
    }
    assert_eq!(ask(-1).json()["meta_info"].get("input_token_logprobs"), None);
    for beyond in [4, 5, i64::MAX, -2] {
        let refused = ask(beyond);
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("logprob_start_len")));
    }
}

#[test]
fn failures_of_all_kinds_have_a_kind() {
    let server = Server::start();
    let kind = |answer: &crate::client::Answer| answer.json()["error"]["kind"].clone();
    let raw = |bytes: &[u8]| {
        let mut connection = Connection::to(server.address);
        connection.send(bytes);
        connection.answer()
    };
    for body in
        [json!({"prompt": [1], "n": "x"}), json!({"prompt": []}), json!({"prompt": [1], "echo": true})]
    {
        assert_eq!(kind(&server.post(COMPLETIONS, &body)), "invalid_argument");
    }
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n");
    let long = raw(format!("{head}content-length: 100000000\r\n\r\n").as_bytes());
    assert_eq!((long.status, kind(&long)), (413, json!("payload_too_large")));
    let text = raw(format!("{head}content-type: text/plain\r\ncontent-length: 0\r\n\r\n").as_bytes());
    assert_eq!((text.status, kind(&text)), (415, json!("unsupported_media_type")));
    let name = server.get("/v1/models/%ff");
    assert_eq!((name.status, kind(&name)), (400, json!("invalid_argument")));
    assert_eq!(name.header("content-type"), Some("application/json"));
    let none = server.get("/v1/models/other");
    assert_eq!((none.status, none.json()["error"]["code"].clone()), (404, json!("model_not_found")));
    let _: Value = server.get("/v1/models/tiny").json();
}

#[test]
fn what_only_clients_care_about_is_passed_over() {
    let server = Server::start();
    let body = json!({"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 4, "reasoning_effort": "low",
        "modalities": ["text"], "verbosity": "low"});
    let given = choices(&[server.post(COMPLETIONS, &body).json()]);
    let expected = oracle(&Request::new(vec![1, 2, 3]).temperature(0.0).max_new_tokens(4));
    assert_eq!(given[0].tokens, expected.completions[0].tokens);
}
