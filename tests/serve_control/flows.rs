//! Whole cycles, as the clients of each dialect send them. After each, output equals a fresh engine's.

use serde_json::json;

use crate::calls::{Expect, send};
use crate::host::Server;

#[test]
fn fastdeploys_flow_serves_the_new_weights() {
    let server = Server::start();
    server.serves(&server.old);
    let slept = server.post("/v1/sleep").expect(200);
    assert_eq!(slept["status"], "success");
    assert_eq!(slept["already"], false);
    assert_eq!(slept["state"]["lifecycle"], "sleeping, weights kept");
    assert!(slept["result"]["sleep"]["freed"]["kv_cache_bytes"].as_u64().unwrap() > 0);
    let woken = server.post("/v1/wakeup?tags=weights").expect(200);
    assert_eq!(woken["state"]["lifecycle"], "weights loaded");
    let body = json!({"model_path": server.path("new"), "version": "step 7"});
    let updated = server.post_json("/v1/update_weights", &body).expect(200);
    assert_eq!(updated["state"]["version"]["label"], "step 7");
    assert_eq!(updated["result"]["update"]["version"]["counter"], 2);
    let woken = server.post("/v1/wakeup?tags=kv_cache").expect(200);
    assert_eq!(woken["state"]["lifecycle"], "awake");
    assert_eq!(woken["state"]["admitting"], true);
    server.serves(&server.new);
}

#[test]
fn fastdeploys_legacy_flow_reloads_what_the_disk_has() {
    let server = Server::start();
    server.serves(&server.old);
    let running = server.long_request();
    let cleared = server.get("/clear_load_weight").expect(200);
    assert_eq!(cleared["state"]["lifecycle"], "sleeping, weights discarded");
    assert_eq!(cleared["result"]["sleep"]["requests"]["aborted"], 1);
    assert!(running.wait().is_ok(), "it has ended with the tokens it had");
    assert_eq!(server.get("/clear_load_weight").expect(200)["already"], true);
    let updated = server.get("/update_model_weight").expect(200);
    assert_eq!(updated["state"]["lifecycle"], "awake");
    server.serves(&server.new);
    let before = server.state();
    let again = server.get("/update_model_weight");
    server.refused(&before, &again, 409, "conflict", Some("/sleep?tags=kv_cache"));
}

#[test]
fn a_pause_does_not_open_the_way_to_an_update() {
    let server = Server::start();
    server.serves(&server.old);
    assert_eq!(server.post("/v1/pause").expect(200)["already"], false);
    assert_eq!(server.post("/v1/pause").expect(200)["already"], true);
    assert_eq!(server.get("/v1/is_paused").expect(200)["result"]["is_paused"], true);
    assert_eq!(server.get("/is_paused").expect(200)["is_paused"], true);
    let before = server.state();
    let body = json!({"model_path": server.path("new")});
    let refused = server.post_json("/v1/update_weights", &body);
    server.refused(&before, &refused, 409, "conflict", Some("/sleep?tags=kv_cache"));
    assert_eq!(server.post("/v1/resume").expect(200)["already"], false);
    assert_eq!(server.post("/v1/resume").expect(200)["already"], true);
    assert_eq!(server.get("/v1/is_paused").expect(200)["result"]["is_paused"], false);
    server.serves(&server.old);
}

#[test]
fn fastdeploys_wakeup_resumes_and_vllms_does_not() {
    let server = Server::start();
    server.post("/v1/pause").expect(200);
    server.post("/v1/sleep?tags=weight,kv_cache").expect(200);
    let woken = server.post("/v1/wakeup?tags=weight,kv_cache").expect(200);
    assert_eq!(woken["state"]["paused"], false);
    server.serves(&server.old);
    server.post("/pause").expect(200);
    server.post("/sleep").expect(200);
    let woken = server.post("/wake_up").expect(200);
    assert_eq!((&woken["state"]["lifecycle"], &woken["state"]["paused"]), (&json!("awake"), &json!(true)));
    assert_eq!(server.post("/resume").expect(200)["status"], "resumed");
    server.serves(&server.old);
}

#[test]
fn lmdeploys_flow_takes_weights_as_the_body() {
    let server = Server::start();
    for _ in 0..2 {
        server.post("/sleep?level=2").expect(200);
        assert_eq!(server.get("/is_sleeping").expect(200)["is_sleeping"], true);
        let waiting = server.post("/wakeup?tags=weights").expect(200);
        assert_eq!(waiting["state"]["lifecycle"], "awaiting weights");
        let bytes = server.new_bytes();
        let updated = server.post_bytes("/update_weights", "application/octet-stream", &bytes).expect(200);
        assert_eq!(updated["state"]["lifecycle"], "weights loaded");
        server.post("/wakeup?tags=kv_cache").expect(200);
        assert_eq!(server.get("/is_sleeping").expect(200)["is_sleeping"], false);
        server.serves(&server.new);
    }
}

#[test]
fn vllms_flow_keeps_or_drops_the_weights_by_level() {
    let server = Server::start();
    server.post("/sleep?level=1&mode=abort").expect(200);
    server.post("/wake_up").expect(200);
    server.serves(&server.old);
    server.post("/sleep?level=2").expect(200);
    let before = server.state();
    server.refused(&before, &server.post("/wake_up"), 409, "conflict", Some("/update_weights"));
    server.post("/wake_up?tags=weights").expect(200);
    let body = json!({"update_info": {"model_path": server.path("new")}, "weight_version": "v1"});
    server.post_json("/update_weights", &body).expect(200);
    server.post("/wake_up?tags=kv_cache").expect(200);
    server.serves(&server.new);
    assert_eq!(server.get("/get_weight_version").expect(200)["weight_version"], "v1");
}

#[test]
fn sglangs_flow_takes_tags_from_the_body() {
    let server = Server::start();
    let released = server.post_json("/release_memory_occupation", &json!({"tags": ["kv_cache"]}));
    assert_eq!(released.expect(200)["state"]["lifecycle"], "weights loaded");
    let body = json!({"model_path": server.path("new"), "load_format": "auto", "weight_version": "7"});
    let updated = server.post_json("/update_weights_from_disk", &body).expect(200);
    assert_eq!((&updated["success"], &updated["num_paused_requests"]), (&json!(true), &json!(0)));
    server.post_json("/resume_memory_occupation", &json!({"tags": ["kv_cache"]})).expect(200);
    server.serves(&server.new);
    server.post_json("/release_memory_occupation", &json!({})).expect(200);
    server.post_json("/resume_memory_occupation", &json!({"tags": null})).expect(200);
    server.serves(&server.new);
    let rows = server.get("/get_weights_by_name?name=model.norm.weight&truncate_size=3").expect(200);
    let (_, norm) = server.new.0.iter().find(|(name, _)| name == "model.norm.weight").unwrap();
    let expected: Vec<f32> =
        norm.data.as_chunks().0.iter().take(3).map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let rows: Vec<f32> = rows.as_array().unwrap().iter().map(|row| row.as_f64().unwrap() as f32).collect();
    assert_eq!(rows, expected);
    let body = json!({"name": "model.layers.0.mlp.down_proj.weight", "truncate_size": 2});
    let rows = server.post_json("/get_weights_by_name", &body).expect(200);
    assert_eq!((rows.as_array().unwrap().len(), rows[0].as_array().unwrap().len()), (2, 48));
    let missing = server.get("/get_weights_by_name?name=no.such.tensor");
    server.refused(&server.state(), &missing, 404, "not_found", None);
}

#[test]
fn requests_in_flight_are_settled_as_the_call_says() {
    let server = Server::start();
    let running = server.long_request();
    let before = server.state();
    let busy = server.post("/release_memory_occupation");
    server.refused(&before, &busy, 409, "requests_in_flight", None);
    server.refused(&before, &server.post("/flush_cache"), 409, "requests_in_flight", None);
    server.refused(&before, &server.post("/reset_prefix_cache"), 409, "requests_in_flight", None);
    server.post("/reset_prefix_cache?reset_running_requests=true").expect(200);
    let late = server.post("/sleep?mode=wait&timeout=0.05");
    server.refused(&before, &late, 504, "deadline", None);
    let late = server.post("/pause?mode=wait&timeout=0.05");
    server.refused(&before, &late, 504, "deadline", None);
    let kept = server.post("/pause?mode=keep").expect(200);
    assert_eq!(kept["result"]["settled"]["kept"], 1);
    server.post("/resume").expect(200);
    let slept = server.post("/sleep?mode=keep").expect(200);
    assert_eq!(slept["result"]["sleep"]["requests"]["retracted"], 1);
    server.post("/wakeup").expect(200);
    let aborted = server.post_json("/abort_request", &json!({"abort_all": true})).expect(200);
    assert_eq!(aborted["result"]["settled"]["aborted"], 1);
    let output = running.wait().unwrap();
    assert!(!output.completions[0].tokens.is_empty());
    server.post("/flush_cache").expect(200);
    server.serves(&server.old);
}

#[test]
fn a_call_is_answered_under_the_name_it_has() {
    let server = Server::start();
    let named = |headers: &[(&str, &str)], body: &str| {
        let headers = [headers, &[("Content-Type", "application/json")]].concat();
        let answer = send(server.address, "POST", "/v1/pause", &headers, body.as_bytes());
        let id = answer.header("x-request-id").expect("a name").to_owned();
        assert_eq!(answer.json()["request_id"], json!(id), "{answer:?}");
        (answer.status, id)
    };
    assert_eq!(named(&[("X-Request-Id", "a/1")], ""), (200, "a/1".to_owned()));
    assert_eq!(named(&[], r#"{"request_id": "b"}"#), (200, "b".to_owned()));
    assert_eq!(named(&[("X-Request-Id", "a")], r#"{"control_id": "c"}"#), (200, "c".to_owned()));
    let (one, other) = (named(&[], ""), named(&[], ""));
    assert_ne!(one.1, other.1);
    for bad in [r#"{"request_id": ""}"#, r#"{"request_id": "a\r\nb"}"#, r#"{"control_id": "\u00e9"}"#] {
        assert_eq!(named(&[], bad).0, 400);
    }
    assert_eq!(named(&[("X-Request-Id", &"x".repeat(257))], "").0, 400);
}
