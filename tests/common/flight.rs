//! Requests on their way, as tests of them share it.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::collections::BTreeMap;

use dormouse::{Awake, DType, Engine, FinishReason, Request, RequestId, RequestOutput};

use crate::common::{Weights, bits, prompt, tiny_weights};

pub fn weights(seed: u64) -> Weights {
    tiny_weights(false, DType::F32, seed)
}

pub fn request(len: usize, seed: u32) -> Request {
    Request::new(prompt(len, seed)).max_new_tokens(12).ignore_eos(true).seed(u64::from(seed))
}

/// Steps until nothing is live; the outputs by id, each once.
pub fn finish(engine: &Engine<Awake>) -> BTreeMap<RequestId, RequestOutput> {
    let mut outputs = BTreeMap::new();
    for _ in 0..2000 {
        let step = engine.step().expect("the device works");
        for output in step.outputs {
            assert!(outputs.insert(output.request, output).is_none(), "each output is handed out once");
        }
        if step.live_requests == 0 {
            return outputs;
        }
    }
    panic!("2000 steps and no end");
}

/// Every sample of `partial` is the beginning of the same sample of `whole`.
#[track_caller]
pub fn assert_prefix(partial: &RequestOutput, whole: &RequestOutput) {
    assert_eq!(partial.completions.len(), whole.completions.len());
    for ((tokens, logprobs), (all_tokens, all_logprobs)) in bits(partial).iter().zip(&bits(whole)) {
        assert!(all_tokens.starts_with(tokens) && all_logprobs.starts_with(logprobs));
        assert_eq!(tokens.len(), logprobs.len());
    }
}

pub fn ended_by_itself(output: &RequestOutput) -> bool {
    output.completions.iter().all(|c| matches!(c.finish_reason, FinishReason::Length))
}

pub fn aborted(output: &RequestOutput) -> bool {
    output.completions.iter().all(|c| matches!(c.finish_reason, FinishReason::Abort))
}
