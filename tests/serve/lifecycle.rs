//! What clients see of sleeps, pauses, updates and the end.

use std::time::Duration;

use dormouse::control::{
    ControllerOptions, Operation, PauseMode, Payload, SleepPlan, SleepWeights, Tags, WhileNotServing,
};
use dormouse::{DType, InFlight, LoadOptions, SafetensorsBytes, UpdateOptions};
use serde_json::{Value, json};

use crate::client::{Server, Setup, choices, weights};
use crate::common::{Weights, tiny_weights};

const COMPLETIONS: &str = "/v1/completions";

fn payload(weights: &Weights) -> Payload {
    let tensors = weights.0.iter().map(|(name, tensor)| (name.clone(), tensor));
    let bytes = safetensors::serialize(tensors, None).unwrap();
    Payload::source(SafetensorsBytes::new(bytes))
}

/// 500 tokens of 4 samples.
fn long(stream: bool) -> Value {
    json!({"prompt": [1], "max_tokens": 500, "ignore_eos": true, "stream": stream, "n": 4, "seed": 1})
}

#[test]
fn who_asks_while_it_sleeps_is_told_so() {
    let server = Server::start();
    let plan = SleepPlan { weights: SleepWeights::Park, in_flight: InFlight::Abort, tags: Tags::ALL };
    server.handle.run(Operation::Sleep(plan)).unwrap();
    for (path, stream) in [(COMPLETIONS, false), (COMPLETIONS, true), ("/generate", true)] {
        let prompt = if path == COMPLETIONS { "prompt" } else { "input_ids" };
        let answer = server.post(path, &json!({prompt: [1], "stream": stream}));
        assert_eq!(
            (answer.status, answer.error()),
            (503, "not serving: the engine is sleeping, weights kept".into())
        );
        assert!(answer.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
        assert_eq!(answer.json()["error"]["state"]["lifecycle"], "sleeping, weights kept");
        assert_eq!(answer.json()["error"]["code"], "not_serving");
    }
    assert_eq!((server.get("/health").status, server.get("/health_generate").status), (200, 503));
    server.handle.run(Operation::WakeUp { tags: Tags::ALL }).unwrap();
    server.check();
}

#[test]
fn requests_beyond_the_limit_are_refused() {
    let mut options = ControllerOptions::default();
    options.max_live_requests = 2;
    let server = Server::with(Setup { options, ..Setup::default() });
    let answer =
        server.post(COMPLETIONS, &json!({"prompt": [[1], [2], [3]], "max_tokens": 400, "ignore_eos": true}));
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["error"]["code"], "overloaded");
    assert_eq!(answer.header("retry-after"), Some("1"));
    // The two that were accepted went with it.
    server.wait_live(0);
    server.check();
}

#[test]
fn an_abort_ends_answers_with_what_they_have() {
    let server = Server::start();
    for stream in [true, false] {
        let mut client = server.connect();
        client.send_post(COMPLETIONS, long(stream).to_string().as_bytes());
        server.wait_live(1);
        server.handle.run(Operation::Pause(PauseMode::Abort)).unwrap();
        let answer = client.answer();
        let events = if stream { answer.events() } else { vec![answer.json()] };
        let given = choices(&events);
        assert_eq!(given.len(), 4);
        assert!(
            given.iter().all(|choice| choice.finish == "abort" && choice.tokens.len() < 500),
            "{given:?}"
        );
        server.handle.run(Operation::Resume).unwrap();
    }
    server.check();
}

#[test]
fn a_completion_of_several_versions_says_which_made_what() {
    let server = Server::start();
    let mut client = server.connect();
    client.send_post(COMPLETIONS, long(true).to_string().as_bytes());
    assert_eq!(client.head().status, 200);
    let mut body = client.chunk().unwrap();
    let plan = SleepPlan { tags: Tags::KV_CACHE, in_flight: InFlight::Retract, ..SleepPlan::default() };
    server.handle.run(Operation::Sleep(plan)).unwrap();
    let options = UpdateOptions::from(LoadOptions::default().label("step 2"));
    let update = Operation::UpdateWeights { weights: payload(&tiny_weights(false, DType::F32, 2)), options };
    server.handle.run(update).unwrap();
    server.handle.run(Operation::WakeUp { tags: Tags::KV_CACHE }).unwrap();
    while let Some(chunk) = client.chunk() {
        body.extend(chunk);
    }
    let text = String::from_utf8(body).unwrap();
    let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let events: Vec<Value> = events.filter_map(|data| serde_json::from_str(data).ok()).collect();
    assert!(choices(&events).iter().all(|choice| choice.tokens.len() == 500 && choice.finish == "length"));
    let ends: Vec<_> = events.iter().filter(|event| event.get("weight_version").is_some()).collect();
    assert_eq!(ends.len(), 4);
    for end in ends {
        assert_eq!(
            (&end["weight_version"]["counter"], &end["weight_version"]["label"]),
            (&json!(2), &json!("step 2"))
        );
        let spans = end["choices"][0]["weight_versions"].as_array().expect("spans");
        assert_eq!((spans.len(), &spans[0]["start"], &spans[1]["end"]), (2, &json!(0), &json!(500)));
        assert_eq!((&spans[0]["counter"], &spans[1]["counter"]), (&json!(1), &json!(2)));
        assert_eq!(spans[0]["end"], spans[1]["start"]);
    }
    drop(weights());
}

#[test]
fn answers_are_finished_before_the_end() {
    let mut server = Server::start();
    let mut idle = server.connect();
    let mut clients = [server.connect(), server.connect()];
    for (client, stream) in clients.iter_mut().zip([true, false]) {
        client.send_post(COMPLETIONS, long(stream).to_string().as_bytes());
    }
    server.wait_live(2);
    server.begin_stop();
    let [streamed, whole] = &mut clients;
    let (streamed, whole) = (choices(&streamed.answer().events()), choices(&[whole.answer().json()]));
    assert_eq!(streamed, whole);
    assert!(whole.iter().all(|choice| choice.tokens.len() == 500));
    assert!(idle.is_closed());
    server.stop();
}

#[test]
fn the_end_does_not_wait_for_ever() {
    let mut options = ControllerOptions::default();
    options.while_not_serving = WhileNotServing::Queue;
    let mut server = Server::with(Setup { options, drain: Duration::from_millis(300), ..Setup::default() });
    server.handle.run(Operation::Pause(PauseMode::Keep)).unwrap();
    let mut client = server.connect();
    client.send_post(COMPLETIONS, long(false).to_string().as_bytes());
    server.wait_live(1);
    server.begin_stop();
    let given = choices(&[client.answer().json()]);
    assert!(given.iter().all(|choice| choice.finish == "abort"));
    server.stop();
}
