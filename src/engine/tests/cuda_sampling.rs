//! Sampling on the GPU inside the engine: rows in company and alone, scores, and every kind of request.

use std::sync::Arc;

use super::{awake_on, cpu};
use crate::completion::{FinishReason, RequestOutput};
use crate::device::cuda::emulated::{Emulated, EmulatedDevice};
use crate::device::cuda::{CudaDevice, CudaOptions};
use crate::engine::{Awake, Engine};
use crate::request::{Request, SamplingParams};

/// An engine on an emulated GPU of the test's own.
fn engine() -> (EmulatedDevice, Engine<Awake>) {
    let emulated = Emulated::load().adverse_device();
    let ordinal = emulated.ordinal.unsigned_abs();
    let options = CudaOptions { ordinal, memory_limit_bytes: None, keep_parking_memory: true };
    (emulated, awake_on(Arc::new(CudaDevice::open(options, cpu()).unwrap()), 1))
}

/// Requests of all kinds, by twos with the same prompt.
fn mixed() -> Vec<Request> {
    let params = |n: usize, params: SamplingParams| {
        let prompt: Vec<u32> = (0..9 + n as u32 / 2).map(|i| 1 + i * 7 % 63).collect();
        Request { params, ..Request::new(prompt).max_new_tokens(6).ignore_eos(true).seed(n as u64) }
    };
    let base =
        SamplingParams { max_new_tokens: 6, ignore_eos: true, logprobs: true, ..SamplingParams::default() };
    let kinds = [
        SamplingParams { samples: 5, ..base.clone() },
        SamplingParams { temperature: 0.0, top_logprobs: 4, ..base.clone() },
        SamplingParams { top_k: 5, top_logprobs: 70, return_kept_set: true, ..base.clone() },
        SamplingParams { top_p: 0.7, temperature: 1.4, samples: 2, processed_logprobs: true, ..base.clone() },
        SamplingParams { min_p: 0.2, prompt_logprobs: true, ..base.clone() },
        SamplingParams { repetition_penalty: 1.3, presence_penalty: 0.5, samples: 3, ..base.clone() },
        SamplingParams {
            logit_bias: vec![(5, 2.0), (9, f32::NEG_INFINITY)],
            temperature: 0.0,
            ..base.clone()
        },
        SamplingParams { allowed_tokens: Some(vec![3, 4, 50]), return_kept_set: true, ..base.clone() },
        SamplingParams { ignore_eos: false, min_new_tokens: 4, stop_token_ids: vec![8, 9], ..base.clone() },
        SamplingParams { max_new_tokens: 0, prompt_logprobs: true, ..base },
    ];
    let seeded =
        |(n, kind): (usize, SamplingParams)| params(n, SamplingParams { seed: Some(n as u64), ..kind });
    kinds.into_iter().enumerate().map(seeded).collect()
}

/// All of an output but its number and what was cached, in words, so that no two different numbers are the same.
fn words(outputs: &[RequestOutput]) -> Vec<String> {
    let one = |output: &RequestOutput| {
        let mut completions = output.completions.clone();
        completions.iter_mut().for_each(|completion| completion.cached_tokens = 0);
        format!("{completions:?} {:?}", output.prompt_logprobs)
    };
    outputs.iter().map(one).collect()
}

#[test]
fn company_has_no_influence() {
    let (emulated, engine) = engine();
    let together = words(&engine.generate(&mixed()).unwrap());
    let alone = mixed().into_iter().flat_map(|request| words(&engine.generate(&[request]).unwrap()));
    for ((alone, together), request) in alone.zip(&together).zip(mixed()) {
        assert_eq!(&alone, together, "{:?}", request.params);
    }
    let mut turned = mixed();
    turned.reverse();
    let mut turned = words(&engine.generate(&turned).unwrap());
    turned.reverse();
    assert_eq!(turned, together);
    drop(engine);
    emulated.assert_clean();
}

#[test]
fn scores_are_the_logprobs_that_tokens_were_sampled_with() {
    let (emulated, engine) = engine();
    let outputs = engine.generate(&mixed()).unwrap();
    let mut sequences = Vec::new();
    let mut sampled = Vec::new();
    for (request, output) in mixed().iter().zip(&outputs) {
        for completion in &output.completions {
            sequences.push([&request.prompt[..], &completion.tokens].concat());
            sampled.push(completion.logprobs.clone());
        }
    }
    for (scores, logprobs) in engine.score(&sequences).unwrap().iter().zip(&sampled) {
        let scores = &scores[scores.len() - logprobs.len()..];
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(scores), bits(logprobs));
    }
    drop(engine);
    emulated.assert_clean();
}

#[test]
fn a_bias_of_nothing_changes_nothing() {
    let (emulated, engine) = engine();
    for request in mixed() {
        let mut biased = request.clone();
        biased.params.logit_bias.extend([(3, 0.0), (60, 0.0), (200, 1.0)]);
        biased.params.logit_bias.retain(|&(token, _)| token < 64);
        biased.params.processed_logprobs = false;
        let plain = Request {
            params: SamplingParams { processed_logprobs: false, ..request.params.clone() },
            ..request
        };
        assert_eq!(words(&engine.generate(&[plain]).unwrap()), words(&engine.generate(&[biased]).unwrap()));
    }
    drop(engine);
    emulated.assert_clean();
}

#[test]
fn a_request_that_allows_nothing_ends_with_an_error_and_no_other_does() {
    let (emulated, engine) = engine();
    let mut requests = mixed();
    let expected = words(&engine.generate(&requests).unwrap());
    let nothing = SamplingParams {
        allowed_tokens: Some(vec![8]),
        min_new_tokens: 2,
        stop_token_ids: vec![8],
        ..SamplingParams::default()
    };
    requests.insert(3, Request { params: nothing, ..Request::new(vec![1, 2, 3]) });
    let mut outputs = engine.generate(&requests).unwrap();
    let refused = outputs.remove(3);
    assert!(matches!(refused.completions[0].finish_reason, FinishReason::Error(_)), "{refused:?}");
    assert_eq!(words(&outputs), expected);
    drop(engine);
    emulated.assert_clean();
}
