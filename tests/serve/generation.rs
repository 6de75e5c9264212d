//! Whole answers, streams and the engine in this process say the same, bit for bit.

use dormouse::Request;
use serde_json::{Value, json};

use crate::client::{Given, Server, bits, choices, ids, oracle};
use crate::common::prompt;

fn given(request: &Request) -> Vec<Given> {
    let given = |completion: dormouse::Completion| Given {
        text: String::new(),
        tokens: completion.tokens,
        logprobs: completion.logprobs.iter().map(|logprob| logprob.to_bits()).collect(),
        finish: completion.finish_reason.as_str().to_owned(),
    };
    oracle(request).completions.into_iter().map(given).collect()
}

/// Requests as the engine and as OpenAI's clients write them.
fn cases() -> Vec<(Request, Value)> {
    let p = |seed| prompt(6 + seed as usize * 5, seed);
    vec![
        (
            Request::new(p(0)).temperature(0.0).max_new_tokens(40),
            json!({"prompt": p(0), "temperature": 0, "max_tokens": 40}),
        ),
        (
            Request::new(p(1)).seed(7).samples(3).max_new_tokens(24),
            json!({"prompt": [p(1)], "seed": 7, "n": 3, "max_tokens": 24, "best_of": 3}),
        ),
        (
            Request::new(p(2))
                .seed(u64::MAX)
                .top_k(5)
                .top_p(0.9)
                .min_p(0.01)
                .temperature(1.3)
                .max_new_tokens(30),
            json!({"prompt": p(2), "seed": -1, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3,
                "max_tokens": 30, "model": "tiny", "user": "u", "metadata": {}, "echo": false, "suffix": null}),
        ),
        (
            Request::new(p(3))
                .seed(3)
                .presence_penalty(0.5)
                .frequency_penalty(-0.25)
                .repetition_penalty(1.2)
                .logit_bias(vec![(5, -100.0), (9, 2.5)])
                .max_new_tokens(30),
            json!({"prompt": p(3), "seed": 3, "presence_penalty": 0.5, "frequency_penalty": -0.25,
                "repetition_penalty": 1.2, "logit_bias": {"5": -100, "9": 2.5}, "max_tokens": 30}),
        ),
        (
            Request::new(p(4))
                .seed(4)
                .ignore_eos(true)
                .stop_token_ids(vec![3, 17, 40])
                .min_new_tokens(4)
                .max_new_tokens(60),
            json!({"prompt": p(4), "seed": 4, "ignore_eos": true, "stop_token_ids": [3, 17, 40], "min_tokens": 4,
                "max_tokens": 60}),
        ),
        (
            Request::new(p(5)).seed(5).allowed_tokens(vec![1, 2, 3]).cache_salt("s").max_new_tokens(12),
            json!({"prompt": p(5), "seed": 5, "allowed_token_ids": [1, 2, 3], "cache_salt": "s", "max_tokens": 12}),
        ),
    ]
}

#[test]
fn answers_streams_and_the_engine_agree() {
    let server = Server::start();
    // All at once: what else runs is nobody's business.
    std::thread::scope(|scope| {
        for (request, mut body) in cases() {
            let server = &server;
            scope.spawn(move || {
                let expected = given(&request);
                body["logprobs"] = json!(2);
                let whole = server.post("/v1/completions", &body);
                assert_eq!(choices(&[whole.json()]), expected, "{body}");
                body["stream"] = json!(true);
                let stream = server.post("/v1/completions", &body).events();
                assert_eq!(choices(&stream), expected, "{body}");
                assert!(stream.last().unwrap()["weight_version"]["counter"] == 1);
            });
        }
    });
}

#[test]
fn prompts_of_one_request_are_answered_in_their_order() {
    let server = Server::start();
    let prompts: Vec<_> = (0..9).map(|seed| prompt(4 + seed as usize, seed)).collect();
    let request = |prompt: &Vec<u32>| Request::new(prompt.clone()).seed(1).samples(2).max_new_tokens(9);
    let expected: Vec<_> = prompts.iter().flat_map(|prompt| given(&request(prompt))).collect();
    let mut body = json!({"prompt": prompts, "seed": 1, "n": 2, "max_tokens": 9, "logprobs": 0});
    let whole = server.post("/v1/completions", &body).json();
    assert_eq!(choices(std::slice::from_ref(&whole)), expected);
    let tokens: usize = expected.iter().map(|given| given.tokens.len()).sum();
    let prompt_tokens: usize = prompts.iter().map(Vec::len).sum();
    assert_eq!(whole["usage"]["prompt_tokens"], json!(prompt_tokens));
    assert_eq!(whole["usage"]["completion_tokens"], json!(tokens));
    assert_eq!(whole["usage"]["total_tokens"], json!(prompt_tokens + tokens));
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body["return_token_ids"] = json!(true);
    let events = server.post("/v1/completions", &body).events();
    assert_eq!(choices(&events), expected);
    let shown: Vec<_> = events.iter().flat_map(|event| event["choices"].as_array().unwrap()).collect();
    for (index, prompt) in prompts.iter().enumerate() {
        let of_sample = shown.iter().filter(|choice| choice["index"] == 2 * index + 1);
        let seen: Vec<_> = of_sample.filter_map(|choice| choice.get("prompt_token_ids")).collect();
        assert_eq!(seen, [&json!(prompt)], "once");
    }
    let last = events.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(tokens)));
    // The first run left the prompts in the cache.
    let cached = last["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 0 && cached < prompt_tokens as u64, "{cached}");
}

#[test]
fn alternatives_are_those_of_the_engine() {
    let server = Server::start();
    let expected = oracle(&Request::new(prompt(5, 1)).seed(2).top_logprobs(3).max_new_tokens(8));
    let expected = &expected.completions[0];
    let body = json!({"prompt": prompt(5, 1), "seed": 2, "logprobs": 3, "max_tokens": 8});
    let logprobs = &server.post("/v1/completions", &body).json()["choices"][0]["logprobs"];
    for (index, top) in expected.top_logprobs.as_ref().unwrap().iter().enumerate() {
        let given = logprobs["top_logprobs"][index].as_object().unwrap();
        for one in top {
            assert_eq!(bits(&given[&format!("token_id:{}", one.token)]), one.logprob.to_bits());
        }
        let chosen = format!("token_id:{}", expected.tokens[index]);
        assert_eq!(logprobs["tokens"][index], json!(chosen));
        assert_eq!(bits(&given[&chosen]), expected.logprobs[index].to_bits());
        assert!(
            given.len() == 3
                || given.len() == 4 && !top.iter().any(|one| one.token == expected.tokens[index])
        );
    }
}

#[test]
fn sglang_says_the_same() {
    let server = Server::start();
    let prompts = [prompt(5, 1), prompt(7, 2)];
    let request =
        |prompt: &Vec<u32>| Request::new(prompt.clone()).seed(9).prompt_logprobs(true).max_new_tokens(20);
    let mut body = json!({"input_ids": prompts, "rid": ["a", "b"], "return_logprob": true, "logprob_start_len": 0,
        "sampling_params": {"sampling_seed": 9, "max_new_tokens": 20}});
    let check = |answer: &Value, index: usize| {
        let output = oracle(&request(&prompts[index]));
        let (completion, meta) = (&output.completions[0], &answer["meta_info"]);
        assert_eq!(ids(&answer["output_ids"]), completion.tokens);
        let triples = |name: &str| {
            let list = meta[name].as_array().unwrap().clone();
            assert!(list.iter().all(|triple| triple.as_array().unwrap().len() == 3 && triple[2].is_null()));
            list
        };
        for (position, triple) in triples("output_token_logprobs").iter().enumerate() {
            assert_eq!(triple[1], json!(completion.tokens[position]));
            assert_eq!(bits(&triple[0]), completion.logprobs[position].to_bits());
        }
        let scored = triples("input_token_logprobs");
        assert!(scored[0][0].is_null() && scored.len() == prompts[index].len());
        for (triple, logprob) in scored[1..].iter().zip(output.prompt_logprobs.as_ref().unwrap()) {
            assert_eq!(bits(&triple[0]), logprob.to_bits());
        }
        assert_eq!(meta["id"], json!(["a", "b"][index]));
        assert_eq!(meta["prompt_tokens"], json!(prompts[index].len()));
        assert_eq!(meta["completion_tokens"], json!(completion.tokens.len()));
        assert_eq!(meta["finish_reason"]["type"], json!(completion.finish_reason.as_str()));
        assert!(meta["weight_version"].as_str().unwrap().starts_with("1@"));
    };
    let whole = server.post("/generate", &body).json();
    assert_eq!(whole.as_array().unwrap().len(), 2);
    (0..2).for_each(|index| check(&whole[index], index));
    body["stream"] = json!(true);
    let events = server.post("/generate", &body).events();
    for index in 0..2 {
        let of_index: Vec<_> = events.iter().filter(|event| event["index"] == index).collect();
        check(of_index.last().unwrap(), index);
        // Each event repeats those before it.
        for pair in of_index.windows(2) {
            assert!(ids(&pair[1]["output_ids"]).starts_with(&ids(&pair[0]["output_ids"])));
        }
    }
    // One prompt is answered by an object, and its name is free again.
    let one = json!({"input_ids": prompts[0], "rid": "a", "sampling_params": {"max_new_tokens": 2}});
    assert_eq!(server.post("/generate", &one).json()["meta_info"]["id"], "a");
}

#[test]
fn a_connection_carries_many_requests() {
    let server = Server::start();
    let mut connection = server.connect();
    for stream in [false, true, false, true] {
        let body = json!({"prompt": [1, 2], "max_tokens": 5, "temperature": 0, "stream": stream});
        let answer = connection.post("/v1/completions", &body);
        let events = if stream { answer.events() } else { vec![answer.json()] };
        let expected = given(&Request::new(vec![1, 2]).temperature(0.0).max_new_tokens(5));
        assert_eq!(choices(&events)[0].tokens, expected[0].tokens);
    }
}

#[test]
fn models_and_health() {
    let server = Server::start();
    let models = server.get("/v1/models").json();
    assert_eq!(
        (&models["data"][0]["id"], &models["data"][0]["max_model_len"]),
        (&json!("tiny"), &json!(512))
    );
    assert_eq!(server.get("/v1/models/tiny").json()["object"], "model");
    assert_eq!(server.get("/v1/models/other").status, 404);
    let body = json!({"model": "other", "prompt": [1]});
    let answer = server.post("/v1/completions", &body);
    assert_eq!(
        (answer.status, answer.error()),
        (404, "the model `other` does not exist; there is `tiny`".into())
    );
    assert_eq!(answer.json()["error"]["code"], "model_not_found");
    assert_eq!((server.get("/health").status, server.get("/health_generate").status), (200, 200));
}
