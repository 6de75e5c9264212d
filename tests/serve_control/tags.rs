//! C11, C12, B21, B22: which parts sleep and wake, and what a list of parts may look like.

use serde_json::{Value, json};

use crate::calls::{Answer, Expect};
use crate::host::Server;

#[test]
fn c11_repeats_say_already_and_touch_nothing_else() {
    let server = Server::start();
    let already = |answer: Answer| answer.expect(200)["already"].clone();
    for (sleep, wake) in [("/v1/sleep", "/v1/wakeup"), ("/sleep", "/wake_up"), ("/sleep", "/wakeup")] {
        server.serves(&server.old);
        assert_eq!(already(server.post(sleep)), false);
        let memory = server.get("/status").expect(200)["memory"].clone();
        for tags in ["", "?tags=weights", "?tags=kv_cache", "?tags=kv_cache,weights"] {
            assert_eq!(already(server.post(&format!("{sleep}{tags}"))), true);
        }
        assert_eq!(server.get("/status").expect(200)["memory"], memory);
        assert_eq!(already(server.post(&format!("{wake}?tags=weights"))), false);
        assert_eq!(already(server.post(&format!("{wake}?tags=weights"))), true);
        assert_eq!(already(server.post(wake)), false);
        server.serves(&server.old);
        let memory = server.get("/status").expect(200)["memory"].clone();
        for tags in ["", "?tags=weights", "?tags=kv_cache", "?tags=kv_cache&tags=weights"] {
            assert_eq!(already(server.post(&format!("{wake}{tags}"))), true);
        }
        assert_eq!(server.get("/status").expect(200)["memory"], memory);
    }
}

#[test]
fn b21_a_part_that_is_awake_is_passed_over() {
    let server = Server::start();
    server.post("/v1/sleep").expect(200);
    server.post("/v1/wakeup?tags=weight").expect(200);
    let before = server.state();
    for tags in ["weights,draft", "draft,kv_cache", "draft"] {
        let refused = server.post(&format!("/v1/wakeup?tags={tags}"));
        server.refused(&before, &refused, 400, "invalid_argument", None);
    }
    let woken = server.post("/v1/wakeup?tags=weights,kv_cache,kv_cache").expect(200);
    assert_eq!(woken["state"]["lifecycle"], "awake");
    server.serves(&server.old);
}

#[test]
fn c12_lists_that_mean_nothing_do_nothing() {
    let server = Server::start();
    let running = server.long_request();
    let before = server.state();
    let paths = [
        "/v1/sleep",
        "/v1/wakeup",
        "/sleep",
        "/wakeup",
        "/wake_up",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    ];
    let queries = [
        "tags=",
        "tags=&tags=",
        "tags=graphs",
        "tags=weights,",
        "tags=weights,graphs",
        "tags=kv_cache&tags=draft",
        "tags=Weights",
        "tags=weights%20",
        "tags=%00",
        "tag=weights",
        "tags[]=weights",
    ];
    let bodies = [
        json!({"tags": []}),
        json!({"tags": ""}),
        json!({"tags": [""]}),
        json!({"tags": ["weights", "graphs"]}),
        json!({"tags": ["weights,kv_cache"]}),
        json!({"tags": ["weights", 1]}),
        json!({"tags": 1}),
        json!({"tags": {"weights": true}}),
        json!({"tags": "draft"}),
        json!({"Tags": ["weights"]}),
    ];
    for path in paths {
        for query in queries {
            let refused = server.post(&format!("{path}?{query}"));
            server.refused(&before, &refused, 400, "invalid_argument", None);
        }
        for body in &bodies {
            server.refused(&before, &server.post_json(path, body), 400, "invalid_argument", None);
        }
        let twice = server.post_json(&format!("{path}?tags=weights"), &json!({"tags": ["weights"]}));
        server.refused(&before, &twice, 400, "invalid_argument", None);
    }
    server.post_json("/abort_request", &json!({"abort_all": true})).expect(200);
    assert!(!running.wait().unwrap().completions[0].tokens.is_empty(), "nobody stopped it");
}

#[test]
fn a_list_is_spelled_as_each_dialect_spells_it() {
    let server = Server::start();
    let lists: [Value; 4] = [
        json!(["kv_cache", "weight"]),
        json!("weights,kv_cache"),
        json!(["weights", "kv_cache"]),
        Value::Null,
    ];
    for tags in &lists {
        let slept = server.post_json("/release_memory_occupation", &json!({"tags": tags})).expect(200);
        assert_eq!(slept["state"]["lifecycle"], "sleeping, weights kept");
        let woken = server.post_json("/v1/wakeup", &json!({"tags": tags})).expect(200);
        assert_eq!(woken["state"]["lifecycle"], "awake");
    }
    for query in ["tags=weights&tags=kv_cache", "tags=kv_cache%2Cweight", "tags=weight,weights,kv_cache"] {
        let slept = server.post(&format!("/sleep?{query}")).expect(200);
        assert_eq!(slept["state"]["lifecycle"], "sleeping, weights kept");
        let woken = server.post(&format!("/wakeup?{query}")).expect(200);
        assert_eq!(woken["state"]["lifecycle"], "awake");
    }
    server.serves(&server.old);
}

#[test]
fn b22_arguments_out_of_range_are_refused_by_name() {
    let server = Server::start();
    let before = server.state();
    let calls = [
        ("/sleep?level=0", "level"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=-1", "level"),
        ("/sleep?level=two", "level"),
        ("/sleep?level=1&level=2", "level"),
        ("/sleep?mode=drain", "mode"),
        ("/sleep?levle=2", "levle"),
        ("/pause?mode=", "mode"),
        ("/pause?wait_for_inflight_requests=yes", "wait_for_inflight_requests"),
        ("/pause_generation?mode=keep", "mode"),
        ("/v1/pause?timeout=0", "timeout"),
        ("/v1/pause?timeout=-1", "timeout"),
        ("/v1/pause?timeout=nan", "timeout"),
        ("/v1/pause?timeout=inf", "timeout"),
        ("/v1/pause?timeout=1e300", "timeout"),
        ("/reset_prefix_cache?reset_running_requests=2", "reset_running_requests"),
        ("/abort_request", "rid"),
        ("/abort_request?rid=", "rid"),
        ("/update_weights", "model_path"),
        ("/update_weights_from_disk", "model_path"),
        ("/update_weights_from_tensor", "body"),
        ("/get_weights_by_name", "name"),
        ("/get_weights_by_name?name=x&truncate_size=-1", "truncate_size"),
        ("/finish_weight_update?transaction=x", "transaction"),
        ("/start_weight_update?expected_digest=00", "expected_digest"),
        ("/start_weight_update?is_checkpoint_format=false", "is_checkpoint_format"),
    ];
    for (call, argument) in calls {
        let refused = server.post(call);
        assert_eq!(refused.json()["error"]["param"], argument, "{call}");
        server.refused(&before, &refused, 400, "invalid_argument", None);
    }
    for body in ["[]", "1", "\"tags\"", "{", "{\"tags\":[\"weights\"]}}", "\u{0}"] {
        let refused = server.post_bytes("/v1/sleep", "application/json", body.as_bytes());
        server.refused(&before, &refused, 400, "invalid_argument", None);
    }
    server.serves(&server.old);
}
