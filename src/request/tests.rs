//! JSON forms and validation of requests.

use super::*;
use crate::completion::{FinishReason, RequestId, StopCause, VersionSpan};
use crate::weights::{WeightVersion, WeightsDigest};
use proptest::prelude::*;

const LIMITS: RequestLimits = RequestLimits { vocab_size: 100, max_model_len: 64 };

fn parse(json: &str) -> serde_json::Result<Request> {
    serde_json::from_str(json)
}

fn round_trip(request: &Request) -> Request {
    parse(&serde_json::to_string(request).unwrap()).unwrap()
}

fn version(counter: u64) -> WeightVersion {
    WeightVersion { counter, digest: WeightsDigest::from_bytes([counter as u8 ^ 0xa5; 32]), label: None }
}

fn completion(index: usize, tokens: &[TokenId], finish_reason: FinishReason) -> Completion {
    let mut completion = Completion::start(index, 7, &SamplingParams::default());
    for (position, &token) in tokens.iter().enumerate() {
        completion.tokens.push(token);
        completion.logprobs.push(-0.1 * (position + 1) as f32);
        VersionSpan::push(&mut completion.versions, &version(position as u64 / 2));
    }
    completion.finish_reason = finish_reason;
    completion
}

fn partial(completions: Vec<Completion>) -> RequestOutput {
    RequestOutput {
        request: RequestId::new(3),
        id: None,
        prompt: vec![1, 2],
        prompt_logprobs: None,
        completions,
    }
}

#[test]
fn a_line_as_frameworks_send_it_parses() {
    let line = r#"{"prompt": [1,2], "max_new_tokens": 48, "temperature": 0, "ignore_eos": true, "seed": 1, "n": 2,
        "logprobs": true, "score": true, "top_k": -1, "allowed_token_ids": [4], "logit_bias": {"5": 1.5, "6": null}}"#;
    let expected = Request::new([1, 2])
        .max_new_tokens(48)
        .temperature(0.0)
        .ignore_eos(true)
        .seed(1)
        .samples(2)
        .logprobs(true)
        .prompt_logprobs(true)
        .allowed_tokens([4])
        .logit_bias(vec![(5, 1.5), (6, f32::NEG_INFINITY)]);
    assert_eq!(parse(line).unwrap(), expected);
    assert_eq!(parse(r#"{"prompt": [1]}"#).unwrap(), Request::new([1]));
    let other_names = r#"{"prompt": [1], "samples": 3, "max_tokens": 5, "min_tokens": 2, "allowed_tokens": [1],
        "prompt_logprobs": true, "logit_bias": [[5, -1], [6, null]], "seed": 18446744073709551615}"#;
    let request = parse(other_names).unwrap();
    assert_eq!(
        (request.params.samples, request.params.max_new_tokens, request.params.min_new_tokens),
        (3, 5, 2)
    );
    assert_eq!(request.params.logit_bias, [(5, -1.0), (6, f32::NEG_INFINITY)]);
    assert_eq!(request.params.seed, Some(u64::MAX));
}

#[test]
fn json_that_is_no_request_is_an_error() {
    for json in [
        "",
        "null",
        "[]",
        "{}",
        r#"{"prompt": null}"#,
        r#"{"prompt": "text"}"#,
        r#"{"prompt": [-1]}"#,
        r#"{"prompt": [4294967296]}"#,
        r#"{"prompt": [1.5]}"#,
        r#"{"prompt": [1], "temprature": 1}"#,
        r#"{"prompt": [1], "stop": ["text"]}"#,
        r#"{"prompt": [1], "n": 1, "samples": 1}"#,
        r#"{"prompt": [1], "n": -1}"#,
        r#"{"prompt": [1], "top_k": -2}"#,
        r#"{"prompt": [1], "temperature": 1e999}"#,
        r#"{"prompt": [1], "temperature": null}"#,
        r#"{"prompt": [1], "logit_bias": {"x": 1}}"#,
        r#"{"prompt": [1], "logit_bias": {"-1": 1}}"#,
        r#"{"prompt": [1], "logit_bias": [[1]]}"#,
        r#"{"prompt": [1], "resume": [{}]}"#,
        r#"{"prompt": [1], "params": {}}"#,
    ] {
        assert!(parse(json).is_err(), "{json}");
    }
}

#[test]
fn requests_survive_json() {
    let request = Request::new([1, 2])
        .id("a \"quoted\" id")
        .cache_salt("tenant")
        .samples(4)
        .max_new_tokens(8)
        .min_new_tokens(1)
        .temperature(0.7)
        .top_k(5)
        .top_p(0.9)
        .min_p(0.01)
        .seed(u64::MAX)
        .stop_token_ids([3])
        .stop_sequences(vec![vec![4, 5]])
        .repetition_penalty(1.1)
        .presence_penalty(0.1)
        .frequency_penalty(-0.1)
        .logit_bias(vec![(9, f32::NEG_INFINITY), (8, 0.1)])
        .allowed_tokens([6, 7])
        .processed_logprobs(true)
        .top_logprobs(2)
        .return_kept_set(true);
    assert_eq!(round_trip(&request), request);
    assert_eq!(request.validate(&LIMITS), Ok(()));
    let params: SamplingParams =
        serde_json::from_str(&serde_json::to_string(&request.params).unwrap()).unwrap();
    assert_eq!(params, request.params);
    assert!(serde_json::to_string(&Request::new([1]).logit_bias(vec![(1, f32::NAN)])).is_err());
}

#[test]
fn bad_requests_are_refused_with_the_number() {
    use RequestError as E;
    let ok = || Request::new([1, 2]);
    let outside = |list, index, token| E::TokenOutOfVocabulary { list, index, token, vocab_size: 100 };
    let too_long = |list, len, limit| E::ListTooLong { list, len, limit };
    let inf = f32::INFINITY;
    let cases = [
        (Request::new([]), E::EmptyPrompt),
        (Request::new([1, 100]), outside(TokenList::Prompt, 1, 100)),
        (Request::new([u32::MAX]), outside(TokenList::Prompt, 0, u32::MAX)),
        (ok().max_new_tokens(63), E::TooLong { prompt_tokens: 2, max_new_tokens: 63, max_model_len: 64 }),
        (
            ok().max_new_tokens(usize::MAX),
            E::TooLong { prompt_tokens: 2, max_new_tokens: usize::MAX, max_model_len: 64 },
        ),
        (ok().samples(0), E::SampleCount { samples: 0, limit: 1024 }),
        (ok().samples(1025), E::SampleCount { samples: 1025, limit: 1024 }),
        (ok().max_new_tokens(0), E::NothingToDo),
        (ok().min_new_tokens(17), E::MinOverMax { min_new_tokens: 17, max_new_tokens: 16 }),
        (ok().temperature(-0.1), E::Temperature { value: -0.1 }),
        (ok().temperature(inf), E::Temperature { value: inf }),
        (ok().top_p(0.0), E::TopP { value: 0.0 }),
        (ok().top_p(1.1), E::TopP { value: 1.1 }),
        (ok().min_p(-0.1), E::MinP { value: -0.1 }),
        (ok().min_p(1.1), E::MinP { value: 1.1 }),
        (ok().repetition_penalty(0.0), E::RepetitionPenalty { value: 0.0 }),
        (ok().repetition_penalty(inf), E::RepetitionPenalty { value: inf }),
        (ok().presence_penalty(inf), E::PresencePenalty { value: inf }),
        (ok().frequency_penalty(-inf), E::FrequencyPenalty { value: -inf }),
        (ok().logit_bias(vec![(1, inf)]), E::LogitBias { token: 1, value: inf }),
        (ok().logit_bias(vec![(1, 0.0), (100, 0.0)]), outside(TokenList::LogitBias, 1, 100)),
        (ok().logit_bias(vec![(1, 0.0); 4097]), too_long(TokenList::LogitBias, 4097, 4096)),
        (ok().stop_token_ids([100]), outside(TokenList::StopTokenIds, 0, 100)),
        (ok().stop_token_ids(vec![999; 1_000_000]), too_long(TokenList::StopTokenIds, 1_000_000, 4096)),
        (ok().stop_sequences(vec![vec![1]; 257]), too_long(TokenList::StopSequences, 257, 256)),
        (ok().stop_sequences(vec![vec![1], vec![]]), E::StopSequenceLength { index: 1, len: 0, limit: 256 }),
        (ok().stop_sequences(vec![vec![1; 257]]), E::StopSequenceLength { index: 0, len: 257, limit: 256 }),
        (ok().stop_sequences(vec![vec![1, 100]]), outside(TokenList::StopSequences, 1, 100)),
        (ok().allowed_tokens([]), E::NoAllowedTokens),
        (ok().allowed_tokens([5, 100]), outside(TokenList::AllowedTokens, 1, 100)),
        (ok().allowed_tokens(vec![1; 101]), too_long(TokenList::AllowedTokens, 101, 100)),
        (ok().top_logprobs(257), E::TopLogprobs { count: 257, limit: 256 }),
        (ok().cache_salt("x".repeat(257)), E::SaltTooLong { bytes: 257, limit: 256 }),
        (ok().id("x".repeat(257)), E::IdTooLong { bytes: 257, limit: 256 }),
    ];
    for (request, expected) in cases {
        assert_eq!(request.validate(&LIMITS), Err(expected));
    }
    for nan in [
        ok().temperature(f32::NAN),
        ok().top_p(f32::NAN),
        ok().min_p(f32::NAN),
        ok().repetition_penalty(f32::NAN),
        ok().presence_penalty(f32::NAN),
        ok().frequency_penalty(f32::NAN),
        ok().logit_bias(vec![(1, f32::NAN)]),
    ] {
        assert!(nan.validate(&LIMITS).is_err(), "{nan:?}");
    }
    for good in [
        ok(),
        ok().max_new_tokens(62),
        ok().max_new_tokens(0).prompt_logprobs(true),
        ok().samples(1024).temperature(0.0).top_k(usize::MAX).top_p(f32::from_bits(1)).min_p(1.0),
        ok().temperature(f32::MAX).presence_penalty(f32::MIN).stop_token_ids(vec![1; 4096]),
        ok().logit_bias(vec![(99, f32::NEG_INFINITY)]).allowed_tokens((0..100).collect::<Vec<_>>()),
    ] {
        assert_eq!(good.validate(&LIMITS), Ok(()), "{good:?}");
    }
}

#[test]
fn a_partial_goes_on_over_the_wire() {
    let request = Request::new([1, 2]).samples(4).max_new_tokens(4);
    let output = partial(vec![
        completion(0, &[5, 6, 7], FinishReason::Abort),
        completion(1, &[5, 9], FinishReason::Stop { by: StopCause::Eos(9) }),
        completion(3, &[5, 6, 7, 8], FinishReason::Length),
    ]);
    let travelled: RequestOutput = serde_json::from_str(&serde_json::to_string(&output).unwrap()).unwrap();
    assert_eq!(travelled, output);
    let resumed = round_trip(&request.resume(&travelled).unwrap());
    assert_eq!(resumed.validate(&LIMITS), Ok(()));
    let finished = |r: &Request, sample| r.carried(sample).map(|c| c.already_finished(&r.params));
    assert_eq!(finished(&resumed, 0), Some(None));
    assert_eq!(finished(&resumed, 1), Some(Some(FinishReason::Stop { by: StopCause::Eos(9) })));
    assert_eq!(finished(&resumed, 2), None, "starts anew");
    assert_eq!(finished(&resumed, 3), Some(Some(FinishReason::Length)));
    assert_eq!(resumed.carried(0), Some(&output.completions[0]));
    let longer = resumed.max_new_tokens(5);
    assert_eq!(finished(&longer, 3), Some(None), "goes on once there is room");
    assert_eq!(Request::new([1, 3, 4]).resume(&output), Err(RequestError::ResumePrompt { index: 1 }));
}

#[test]
fn bad_partials_are_refused() {
    use RequestError as E;
    let check = |request: Request, change: &dyn Fn(&mut Vec<Completion>)| {
        let mut completions = vec![completion(0, &[5, 6, 7], FinishReason::Abort)];
        change(&mut completions);
        request.resume(&partial(completions)).unwrap().validate(&LIMITS).unwrap_err()
    };
    let ok = || Request::new([1, 2]);
    let index = |position, index| E::ResumeIndex { position, index, samples: 1 };
    assert_eq!(check(ok(), &|c| c[0].index = 1), index(0, 1));
    assert_eq!(check(ok(), &|c| c.push(c[0].clone())), index(1, 0));
    assert_eq!(check(ok(), &|c| c[0].index = usize::MAX), index(0, usize::MAX));
    assert_eq!(
        check(ok().max_new_tokens(2), &|_| ()),
        E::ResumeTooLong { index: 0, tokens: 3, max_new_tokens: 2 }
    );
    assert_eq!(
        check(ok().processed_logprobs(true), &|_| ()),
        E::ResumeField { index: 0, field: "processed_logprobs", wanted: true }
    );
    assert_eq!(
        check(ok(), &|c| c[0].kept = Some(vec![])),
        E::ResumeField { index: 0, field: "kept", wanted: false }
    );
    assert_eq!(
        check(ok().top_logprobs(1), &|c| c[0].top_logprobs = Some(vec![])),
        E::ResumeLength { index: 0, field: "top_logprobs", len: 0, tokens: 3 }
    );
    assert_eq!(
        check(ok(), &|c| c[0].logprobs.truncate(2)),
        E::ResumeLength { index: 0, field: "logprobs", len: 2, tokens: 3 }
    );
    assert!(matches!(
        check(ok(), &|c| c[0].logprobs[1] = f32::NAN),
        E::ResumeLogprob { index: 0, position: 1, .. }
    ));
    assert_eq!(
        check(ok(), &|c| c[0].tokens[2] = 100),
        E::TokenOutOfVocabulary { list: TokenList::Resume, index: 2, token: 100, vocab_size: 100 }
    );
    let versions = |covered| E::ResumeVersions { index: 0, covered, tokens: 3 };
    assert_eq!(check(ok(), &|c| c[0].versions.clear()), versions(0));
    assert_eq!(check(ok(), &|c| c[0].versions[1].tokens = 1..3), versions(2));
    assert_eq!(check(ok(), &|c| c[0].versions[1].tokens.end = usize::MAX), versions(2));
    assert_eq!(check(ok(), &|c| c[0].versions[0].tokens.end = 0), versions(0));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_json_value_panics(
        name in prop::sample::select(vec![
            "prompt", "id", "n", "seed", "top_k", "temperature", "logit_bias", "stop_sequences", "resume",
            "allowed_token_ids", "max_new_tokens", "cache_salt",
        ]),
        value in prop::sample::select(vec![
            "null", "true", "-1", "0", "1e400", "-1e40", "1e-400", "18446744073709551616", "\"\"", "\"\\ud800\"",
            "[]", "[[]]", "[[1, 1e39]]", "[[1, 2, 3]]", "{}", "{\"1\": 1e39}", "[{\"index\": 0}]", "[null]",
            "{\"4294967296\": 0}", "[4294967295]",
        ]),
    ) {
        for json in [
            format!(r#"{{"prompt": [1], "{name}": {value}}}"#),
            format!(r#"{{"{name}": {value}}}"#),
        ] {
            if let Ok(request) = parse(&json) {
                let _ = request.validate(&LIMITS);
            }
        }
    }
}
