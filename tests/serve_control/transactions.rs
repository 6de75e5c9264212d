//! B32, B46, C18: updates that come call by call are current as a whole, or not at all.

use serde_json::{Value, json};

use crate::calls::{Answer, Expect};
use crate::host::Server;
use crate::payloads::buckets;

const OCTETS: &str = "application/octet-stream";

/// A server whose KV cache sleeps, and the new weights in three parts.
fn ready() -> (Server, Vec<Vec<u8>>) {
    let server = Server::start();
    server.post("/v1/sleep?tags=kv_cache").expect(200);
    let bytes: usize = server.new.0.iter().map(|(_, tensor)| tensor.data.len()).sum();
    let parts = buckets(&server.new, bytes.div_ceil(12) * 4);
    assert_eq!(parts.len(), 3);
    (server, parts)
}

fn start(server: &Server) -> u64 {
    let body = json!({"weight_version": "v1", "is_checkpoint_format": true});
    let begun = server.post_json("/start_weight_update", &body).expect(200);
    assert_eq!(begun["transaction"], begun["state"]["transaction"]);
    begun["transaction"].as_u64().unwrap()
}

/// A part for the transaction that is open.
fn push(server: &Server, part: &[u8]) -> Answer {
    let transaction = server.state()["transaction"].clone();
    server.post_bytes(&format!("/update_weights?transaction={transaction}"), OCTETS, part)
}

fn version(server: &Server) -> Value {
    server.get("/get_weight_version").expect(200)["version"].clone()
}

#[test]
fn parts_are_current_at_the_finish_and_not_before() {
    let (server, parts) = ready();
    let old = version(&server);
    let transaction = start(&server);
    for part in &parts {
        let pushed = push(&server, part).expect(200);
        assert_eq!(pushed["result"]["transaction"], transaction);
        assert_eq!(version(&server), old);
    }
    let finished = server.post("/finish_weight_update").expect(200);
    assert_eq!(finished["state"]["version"]["label"], "v1");
    assert_eq!(finished["state"]["transaction"], Value::Null);
    server.post("/wake_up?tags=kv_cache").expect(200);
    server.serves(&server.new);
}

#[test]
fn parts_may_come_to_weights_that_are_awaited_and_in_any_form() {
    let (server, parts) = ready();
    server.post("/sleep?level=2&tags=weights").expect(200);
    server.post("/wake_up?tags=weights").expect(200);
    let transaction = start(&server);
    let path = format!("/update_weights?transaction={transaction}");
    for part in parts.iter().rev() {
        server.post_bytes(&path, OCTETS, part).expect(200);
    }
    server.post_json("/finish_weight_update", &json!({"transaction": transaction})).expect(200);
    server.post("/wake_up?tags=kv_cache").expect(200);
    server.serves(&server.new);
    server.post("/v1/sleep?tags=kv_cache").expect(200);
    start(&server);
    server
        .post_json("/update_weights", &json!({"update_info": {"model_path": server.path("old")}}))
        .expect(200);
    server.post("/finish_weight_update").expect(200);
    server.post("/wake_up").expect(200);
    server.serves(&server.old);
}

#[test]
fn b32_b46_an_update_that_failed_publishes_nothing_and_the_next_one_works() {
    let (server, parts) = ready();
    let old = version(&server);
    let before = server.state();
    let transaction = start(&server);
    for part in &parts[..2] {
        push(&server, part).expect(200);
    }
    let twice = push(&server, &parts[0]);
    let over = format!("transaction {transaction} is over");
    assert!(twice.json()["message"].as_str().unwrap().contains(&over), "{twice:?}");
    server.refused(&before, &twice, 400, "invalid_weights", Some("/start_weight_update"));
    assert_eq!(version(&server), old);
    let finish = server.post("/finish_weight_update");
    server.refused(&before, &finish, 409, "conflict", Some("/start_weight_update"));
    let finish = server.post(&format!("/finish_weight_update?transaction={transaction}"));
    assert!(finish.json()["message"].as_str().unwrap().contains("push failed"), "{finish:?}");
    server.refused(&before, &finish, 404, "not_found", None);
    let abort = server.post(&format!("/abort_weight_update?transaction={transaction}"));
    server.refused(&before, &abort, 404, "not_found", None);
    assert_ne!(start(&server), transaction);
    for part in &parts {
        push(&server, part).expect(200);
    }
    server.post("/finish_weight_update").expect(200);
    assert_eq!(version(&server)["label"], "v1");
    server.post("/wake_up").expect(200);
    server.serves(&server.new);
}

#[test]
fn an_update_that_is_incomplete_or_aborted_leaves_the_old_weights() {
    let (server, parts) = ready();
    let before = server.state();
    start(&server);
    push(&server, &parts[0]).expect(200);
    let finish = server.post("/finish_weight_update");
    server.refused(&before, &finish, 400, "invalid_weights", Some("/start_weight_update"));
    start(&server);
    push(&server, &parts[0]).expect(200);
    let aborted = server.post("/abort_weight_update").expect(200);
    assert_eq!(aborted["state"]["transaction"], Value::Null);
    let again = server.post("/abort_weight_update");
    server.refused(&before, &again, 409, "conflict", Some("/start_weight_update"));
    server.post("/wake_up").expect(200);
    server.serves(&server.old);
}

#[test]
fn while_a_transaction_is_open_nothing_else_touches_the_engine() {
    let (server, parts) = ready();
    let transaction = start(&server);
    push(&server, &parts[0]).expect(200);
    let before = server.state();
    let calls = [
        "/v1/sleep",
        "/v1/wakeup",
        "/sleep?level=2",
        "/wakeup?tags=kv_cache",
        "/wake_up",
        "/start_weight_update",
        "/release_memory_occupation",
        "/get_weights_by_name?name=model.norm.weight",
    ];
    for call in calls {
        let refused = server.post(call);
        assert_eq!(refused.json()["error"]["transaction"], transaction, "{call}");
        server.refused(&before, &refused, 409, "conflict", Some("/finish_weight_update"));
    }
    for call in ["/clear_load_weight", "/update_model_weight"] {
        server.refused(&before, &server.get(call), 409, "conflict", Some("/finish_weight_update"));
    }
    let other = server.post_bytes("/update_weights?transaction=999", OCTETS, &parts[1]);
    server.refused(&before, &other, 404, "not_found", None);
    let path = format!("/update_weights?weight_version=v2&transaction={transaction}");
    let named = server.post_bytes(&path, OCTETS, &parts[1]);
    server.refused(&before, &named, 400, "invalid_argument", None);
    let pickle = server.post_bytes("/update_weights", OCTETS, b"\x80\x04.");
    server.refused(&before, &pickle, 415, "unsupported_media_type", None);
    for part in &parts[1..] {
        push(&server, part).expect(200);
    }
    server.post("/finish_weight_update").expect(200);
    server.post("/v1/wakeup").expect(200);
    server.serves(&server.new);
}
