//! B75: every control call in every state it is wrong in says what is missing, and changes nothing. The controller
//! says the same to a caller in the process.

use dormouse::control::{Operation, Payload, TransactionId};
use dormouse::{Checkpoint, LoadOptions, UpdateOptions};
use serde_json::json;

use crate::calls::{Answer, Expect};
use crate::host::{Server, Setup};
use crate::payloads::buckets;

/// What leads from a fresh server to a state.
const STATES: [(&str, &[&str]); 6] = [
    ("awake", &[]),
    ("sleeping, weights kept", &["/v1/sleep"]),
    ("sleeping, weights discarded", &["/sleep?level=2"]),
    ("awaiting weights", &["/sleep?level=2", "/wakeup?tags=weights"]),
    ("weights loaded", &["/v1/sleep?tags=kv_cache"]),
    ("weights torn", &["/v1/sleep?tags=kv_cache"]),
];

const NEED_KV_ASLEEP: Option<&str> = Some("/sleep?tags=kv_cache");
const NEED_WEIGHTS_AWAKE: Option<&str> = Some("/wakeup?tags=weights");
const NEED_UPDATE: Option<&str> = Some("/update_weights");

/// For each call what is missing in each state: `None` where it is no mistake.
const CALLS: [(&str, [Option<&str>; 6]); 14] = [
    ("/v1/sleep?tags=weights", [NEED_KV_ASLEEP, None, None, None, None, NEED_UPDATE]),
    ("/sleep?tags=weights&level=2", [NEED_KV_ASLEEP, None, None, None, None, None]),
    ("/v1/sleep", [None, None, None, None, None, NEED_UPDATE]),
    ("/v1/wakeup?tags=kv_cache", KV_FIRST),
    ("/wakeup?tags=kv_cache", KV_FIRST),
    ("/wake_up?tags=kv_cache", KV_FIRST),
    ("/resume_memory_occupation?tags=kv_cache", KV_FIRST),
    ("/wake_up", [None, None, NEED_UPDATE, NEED_UPDATE, None, NEED_UPDATE]),
    ("/v1/update_weights?model_path=MODEL", UPDATE),
    ("/update_weights?model_path=MODEL", UPDATE),
    ("/update_weights_from_disk?model_path=MODEL", UPDATE),
    ("/start_weight_update", UPDATE),
    ("/update_weights?model_path=MODEL&names=model.norm.weight", PARTIAL),
    ("/get_weights_by_name?name=model.norm.weight", READ),
];
const KV_FIRST: [Option<&str>; 6] =
    [None, NEED_WEIGHTS_AWAKE, NEED_WEIGHTS_AWAKE, NEED_UPDATE, None, NEED_UPDATE];
const UPDATE: [Option<&str>; 6] = [NEED_KV_ASLEEP, NEED_WEIGHTS_AWAKE, NEED_WEIGHTS_AWAKE, None, None, None];
const PARTIAL: [Option<&str>; 6] =
    [NEED_KV_ASLEEP, NEED_WEIGHTS_AWAKE, NEED_WEIGHTS_AWAKE, NEED_UPDATE, None, NEED_UPDATE];
const READ: [Option<&str>; 6] =
    [None, NEED_WEIGHTS_AWAKE, NEED_WEIGHTS_AWAKE, NEED_UPDATE, None, NEED_UPDATE];

fn in_state(name: &str, calls: &[&str]) -> Server {
    let server = Server::start();
    for call in calls {
        server.post(call).expect(200);
    }
    if name == "weights torn" {
        let begun = server.post("/start_weight_update?in_place=true").expect(200);
        let path = format!("/update_weights?transaction={}", begun["transaction"]);
        let part = buckets(&server.new, 4096).remove(0);
        server.post_bytes(&path, "application/octet-stream", &part).expect(200);
        server.post("/abort_weight_update").expect(200);
    }
    assert_eq!(server.lifecycle(), name);
    server
}

#[test]
fn b75_calls_in_the_wrong_order_name_the_missing_step() {
    for (at, (name, path)) in STATES.iter().enumerate() {
        let server = in_state(name, path);
        let before = server.state();
        for (call, missing) in CALLS {
            if missing[at].is_some() {
                let refused = server.post(&call.replace("MODEL", &server.path("new")));
                server.refused(&before, &refused, 409, "conflict", missing[at]);
            }
        }
        let none = [
            ("/finish_weight_update", 409, "conflict", Some("/start_weight_update")),
            ("/abort_weight_update", 409, "conflict", Some("/start_weight_update")),
            ("/finish_weight_update?transaction=77", 404, "not_found", None),
            ("/abort_weight_update?transaction=77", 404, "not_found", None),
            ("/update_weights?transaction=77&model_path=MODEL", 404, "not_found", None),
        ];
        for (call, status, kind, missing) in none {
            let refused = server.post(&call.replace("MODEL", &server.path("new")));
            server.refused(&before, &refused, status, kind, missing);
        }
    }
}

#[test]
fn b75_what_is_missing_leads_out_of_every_state() {
    for (name, path) in STATES {
        let server = in_state(name, path);
        for _ in 0..6 {
            let answer = server.post("/wake_up");
            if answer.status == 200 {
                break;
            }
            match answer.json()["error"]["missing_step"].as_str() {
                Some("/update_weights") => {
                    let body = json!({"model_path": server.path("new")});
                    let updated = server.post_json("/update_weights", &body);
                    if updated.status == 409 {
                        assert_eq!(updated.json()["error"]["missing_step"], "/wakeup?tags=weights");
                        server.post("/wake_up?tags=weights").expect(200);
                    }
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        assert_eq!(server.lifecycle(), "awake", "{name}");
        let discarded = !matches!(name, "awake" | "sleeping, weights kept" | "weights loaded");
        server.serves(if discarded { &server.new } else { &server.old });
    }
}

#[test]
fn b75_the_controller_says_the_same_to_a_caller_in_the_process() {
    for (name, path) in STATES {
        let server = in_state(name, path);
        let source = || Payload::source(Checkpoint::at(server.path("new")));
        let pairs: [(Operation, Answer); 5] = [
            (
                Operation::Push { transaction: TransactionId::from_number(9), weights: source() },
                server.post(&format!("/update_weights?transaction=9&model_path={}", server.path("new"))),
            ),
            (
                Operation::Commit { transaction: TransactionId::from_number(9) },
                server.post("/finish_weight_update?transaction=9"),
            ),
            (
                Operation::ReadTensor { name: "no.such.tensor".to_owned() },
                server.post("/get_weights_by_name?name=no.such.tensor"),
            ),
            (
                Operation::UpdateWeights {
                    weights: source(),
                    options: UpdateOptions::default().partial(["no.such.tensor"]),
                },
                server
                    .post(&format!("/update_weights?names=no.such.tensor&model_path={}", server.path("new"))),
            ),
            (
                Operation::UpdateModelWeight {
                    weights: None,
                    options: LoadOptions::default().label("x".repeat(300)),
                },
                server.get(&format!("/update_model_weight?version={}", "x".repeat(300))),
            ),
        ];
        for (operation, answer) in pairs {
            let operation_name = operation.name();
            let error = server.handle.run(operation).expect_err("wrong in every state");
            let body = answer.json();
            assert_eq!(body["error"]["kind"], error.kind().as_str(), "{name}: {operation_name}: {body}");
            let missing = error.missing_step().map(crate::error::route_of);
            assert_eq!(body["error"]["missing_step"], json!(missing), "{name}: {operation_name}");
        }
    }
}

#[test]
fn a_server_without_a_source_to_reload_from_says_so() {
    let server = Server::with(Setup { no_reload: true, ..Setup::default() });
    server.get("/clear_load_weight").expect(200);
    let before = server.state();
    server.refused(&before, &server.get("/update_model_weight"), 400, "invalid_argument", None);
}

#[test]
fn paths_and_methods_there_are_not() {
    let server = Server::start();
    let before = server.state();
    let nothing = |answer: Answer| answer.json()["error"]["kind"].clone();
    assert_eq!(nothing(server.get("/v1/nothing")), "not_found");
    assert_eq!(nothing(server.post("/v1/sleep/")), "not_found");
    for (call, allow) in
        [("/v1/sleep", "POST"), ("/update_weights", "POST"), ("/finish_weight_update", "POST")]
    {
        let refused = server.get(call);
        assert_eq!((refused.status, refused.header("allow")), (405, Some(allow)));
        assert_eq!(nothing(refused), "method_not_allowed");
    }
    let refused = server.post("/clear_load_weight");
    assert_eq!((refused.status, refused.header("allow")), (405, Some("GET")));
    assert_eq!(server.state(), before);
}
