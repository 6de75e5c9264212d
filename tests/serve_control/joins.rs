//! Which transaction a call belongs to, and what becomes of calls whose transaction is over.

use dormouse::control::{Operation, TransactionId};
use serde_json::{Value, json};

use crate::calls::{Answer, Expect};
use crate::host::Server;

const OCTETS: &str = "application/octet-stream";
const START: Option<&str> = Some("/start_weight_update");
const FINISH: Option<&str> = Some("/finish_weight_update");

/// A server whose KV cache sleeps, with a transaction that has a label.
fn started() -> (Server, u64) {
    let server = Server::start();
    server.post("/v1/sleep?tags=kv_cache").expect(200);
    let begun = server.post_json("/start_weight_update", &json!({"weight_version": "mine"})).expect(200);
    (server, begun["transaction"].as_u64().unwrap())
}

/// As vLLM's clients push.
fn part(server: &Server) -> Answer {
    server.post_json("/update_weights", &json!({"update_info": {"model_path": server.path("new")}}))
}

/// As those do that update in one go.
fn at_once(server: &Server, path: &str) -> Answer {
    server.post_json(path, &json!({"model_path": server.path("new")}))
}

fn says(answer: &Answer, words: &str) {
    assert!(answer.json()["message"].as_str().unwrap().contains(words), "{words}: {answer:?}");
}

#[test]
fn updates_in_one_go_are_no_part_of_anothers_transaction() {
    let (server, transaction) = started();
    let before = server.state();
    for path in ["/update_weights", "/v1/update_weights", "/update_weights_from_disk"] {
        let refused = at_once(&server, path);
        assert_eq!(refused.json()["error"]["transaction"], transaction);
        server.refused(&before, &refused, 409, "conflict", FINISH);
    }
    for path in ["/update_weights", "/v1/update_weights", "/update_weights_from_tensor"] {
        let refused = server.post_bytes(path, OCTETS, &server.new_bytes());
        server.refused(&before, &refused, 409, "conflict", FINISH);
    }
    // vLLM's flow, and whoever names it.
    part(&server).expect(200);
    server.post("/finish_weight_update").expect(200);
    assert_eq!(server.state()["version"]["label"], "mine");
    let begun = server.post("/start_weight_update").expect(200);
    let named = format!("/update_weights_from_tensor?transaction={}", begun["transaction"]);
    server.post_bytes(&named, OCTETS, &server.new_bytes()).expect(200);
    server.post("/finish_weight_update").expect(200);
}

/// Whatever ended it, the owner is told before anything else happens.
fn owner_is_told(server: &Server, transaction: u64, how: &str) {
    let before = server.state();
    for refused in [part(server), at_once(server, "/update_weights"), at_once(server, "/v1/update_weights")] {
        says(&refused, how);
        assert_eq!(refused.json()["error"]["transaction"], transaction);
        server.refused(&before, &refused, 409, "conflict", START);
    }
    let bytes = server.post_bytes("/update_weights", OCTETS, &server.new_bytes());
    server.refused(&before, &bytes, 409, "conflict", START);
    let finish = server.post("/finish_weight_update");
    says(&finish, how);
    server.refused(&before, &finish, 409, "conflict", START);
    // It knows now.
    let updated = at_once(server, "/update_weights").expect(200);
    assert_eq!(updated["state"]["version"]["label"], Value::Null);
}

#[test]
fn a_push_after_a_push_that_failed_is_no_update_in_one_go() {
    let (server, transaction) = started();
    let path = format!("/update_weights?transaction={transaction}");
    says(&server.post_bytes(&path, OCTETS, b"garbage!!"), "begins neither");
    std::fs::create_dir(server.path("broken")).unwrap();
    std::fs::write(server.path("broken/model.safetensors"), b"x").unwrap();
    let failed =
        server.post_json("/update_weights", &json!({"update_info": {"model_path": server.path("broken")}}));
    says(&failed, &format!("transaction {transaction} is over"));
    assert_eq!(failed.json()["error"]["missing_step"], "/start_weight_update");
    owner_is_told(&server, transaction, "a push failed");
}

#[test]
fn a_push_after_an_end_inside_the_process_is_no_update_in_one_go() {
    let (server, transaction) = started();
    let transaction_id = TransactionId::from_number(transaction);
    server.handle.run(Operation::Abandon { transaction: transaction_id }).unwrap();
    owner_is_told(&server, transaction, "it was abandoned");
}

#[test]
fn a_push_after_anothers_abort_is_no_update_in_one_go() {
    let (server, transaction) = started();
    server.post("/abort_weight_update").expect(200);
    let before = server.state();
    let refused = part(&server);
    says(&refused, &format!("no transaction {transaction} is open: it was abandoned"));
    server.refused(&before, &refused, 409, "conflict", START);
    // What can't be meant for it goes on, and a start makes all well.
    at_once(&server, "/update_weights").expect(200);
    server.post("/start_weight_update?weight_version=again").expect(200);
    part(&server).expect(200);
    server.post("/finish_weight_update").expect(200);
    assert_eq!(server.state()["version"]["label"], "again");
    part(&server).expect(200);
}

#[test]
fn a_call_that_can_only_fail_ends_no_requests() {
    let server = Server::start();
    let running = server.long_request();
    let before = server.state();
    let body = json!({"model_path": server.path("new"), "abort_all_requests": true});
    let refused = server.post_json("/update_weights_from_disk", &body);
    server.refused(&before, &refused, 409, "conflict", Some("/sleep?tags=kv_cache"));
    assert_eq!(server.get("/status").expect(200)["live_requests"], 1);
    drop(running);
}

#[test]
fn a_call_that_failed_half_way_says_what_it_did() {
    let (server, _) = started();
    let failed = server.post("/pause?clear_cache=true");
    assert_eq!(failed.status, 409, "{failed:?}");
    says(&failed, "before that, this call has done: pause");
    assert_eq!(server.state()["paused"], true);
}
