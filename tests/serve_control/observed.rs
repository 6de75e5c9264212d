//! What a server says of itself, and to whom.

use serde_json::json;

use crate::calls::{Expect, send};
use crate::host::{Server, Setup};

/// A sample of the metrics.
fn metric(server: &Server, name: &str) -> f64 {
    let answer = server.get("/metrics");
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let text = answer.text();
    let value = text.lines().filter_map(|line| line.rsplit_once(' ')).find(|(sample, _)| *sample == name);
    let (_, value) = value.unwrap_or_else(|| panic!("{name} is there"));
    value.parse().expect("a number")
}

#[test]
fn b73_metrics_are_right_after_all_was_aborted_and_nothing_follows() {
    let server = Server::start();
    let running: Vec<_> = (0..20).map(|_| server.long_request()).collect();
    assert_eq!(metric(&server, "dormouse_requests_live"), 20.0);
    let idle = |aborted: f64| {
        for gauge in ["requests_live", "requests_aside", "sequences_running", "sequences_waiting"] {
            assert_eq!(metric(&server, &format!("dormouse_{gauge}")), 0.0, "{gauge}");
        }
        assert_eq!(metric(&server, "dormouse_kv_blocks{holds=\"running\"}"), 0.0);
        assert_eq!(metric(&server, "dormouse_requests_ended_total{how=\"aborted\"}"), aborted);
    };
    let aborted = server.post_json("/abort_request", &json!({"abort_all": true})).expect(200);
    assert_eq!(aborted["result"]["settled"]["aborted"], 20);
    idle(20.0);
    drop(running);
    for call in ["/v1/pause", "/v1/resume", "/sleep", "/wakeup"] {
        let running: Vec<_> = (0..3).map(|_| server.long_request()).collect();
        let before = metric(&server, "dormouse_requests_ended_total{how=\"aborted\"}");
        match call {
            "/v1/resume" => server.post_json("/abort_request", &json!({"abort_all": true})),
            "/wakeup" => server.post("/sleep"),
            _ => server.post(call),
        }
        .expect(200);
        idle(before + 3.0);
        drop(running);
        server.post("/v1/wakeup").expect(200);
    }
    let state = |name: &str| metric(&server, &format!("dormouse_state{{state=\"{name}\"}}"));
    assert_eq!(state("awake"), 1.0);
    server.post("/sleep").expect(200);
    assert_eq!((state("awake"), state("sleeping, weights kept")), (0.0, 1.0));
}

#[test]
fn requests_are_aborted_by_name() {
    let server = Server::start();
    let request =
        dormouse::Request::new(vec![1, 2, 3]).max_new_tokens(200).ignore_eos(true).stream(true).id("a");
    let named = server.handle.submit(request).unwrap();
    let other = server.long_request();
    let aborted = server.post_json("/abort_request", &json!({"rid": "a"})).expect(200);
    assert_eq!(aborted["result"]["settled"]["aborted"], 1);
    named.wait().unwrap();
    assert_eq!(server.get("/status").expect(200)["live_requests"], 1);
    let gone = server.post_json("/abort_request", &json!({"rid": ["a", "b"]})).expect(200);
    assert_eq!(gone["success"], true);
    drop(other);
}

#[test]
fn status_says_what_is_where() {
    let server = Server::start();
    let status = server.get("/status").expect(200);
    assert_eq!(status["state"]["lifecycle"], "awake");
    assert_eq!(status["engine"]["blocks"], 64);
    assert_eq!(status["busy"], json!(null));
    let model: usize = server.old.0.iter().map(|(_, tensor)| tensor.data.len()).sum();
    assert!(status["memory"]["weights_bytes"].as_u64().unwrap() >= model as u64);
    server.post("/sleep").expect(200);
    let memory = server.get("/status").expect(200)["memory"].clone();
    assert_eq!((&memory["weights_bytes"], &memory["kv_cache_bytes"]), (&json!(0), &json!(0)));
    assert!(memory["parked_bytes"].as_u64().unwrap() >= model as u64);
}

#[test]
fn a_server_with_a_token_asks_for_it() {
    let server = Server::with(Setup { token: Some("s3cret"), ..Setup::default() });
    let call = |method: &str, path: &str, authorization: &str| {
        let headers = [("Authorization", authorization)];
        let headers = if authorization.is_empty() { &headers[..0] } else { &headers[..] };
        send(server.address, method, path, headers, b"")
    };
    let paths = [
        ("POST", "/v1/sleep"),
        ("POST", "/v1/sleep?tags=draft"),
        ("POST", "/update_weights"),
        ("POST", "/abort_request"),
        ("POST", "/pause"),
        ("GET", "/clear_load_weight"),
        ("GET", "/get_weights_by_name?name=model.norm.weight"),
        ("GET", "/get_weight_version"),
        ("GET", "/is_sleeping"),
        ("GET", "/v1/is_paused"),
        ("GET", "/status"),
        ("GET", "/metrics"),
    ];
    for (method, path) in paths {
        for wrong in
            ["", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret1", "Bearer S3cret", "Basic s3cret"]
        {
            let refused = call(method, path, wrong);
            assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("Bearer")), "{path}");
            assert_eq!(refused.json()["error"]["kind"], "unauthorized");
        }
    }
    assert_eq!(call("GET", "/status", "bearer s3cret").expect(200)["state"]["lifecycle"], "awake");
    call("POST", "/v1/sleep", "Bearer s3cret").expect(200);
    call("POST", "/v1/wakeup", "Bearer  s3cret").expect(200);
    // What the server can do is no secret.
    assert_eq!(call("GET", "/openapi.json", "").status, 200);
    server.serves(&server.old);
}
