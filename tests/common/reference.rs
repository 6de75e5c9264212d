//! Checks an engine against float64 references: prompt logprobs, the logprobs along the reference's tokens,
//! and the greedy tokens.

use std::path::Path;

use dormouse::{Awake, Engine, Request};
use serde::Deserialize;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: Vec<u32>,
    prompt_logprobs: Vec<f32>,
    greedy: Vec<u32>,
    logprobs: Vec<f32>,
    margins: Vec<f32>,
}

/// Largest difference from the reference, nats.
#[derive(Debug, Default)]
pub(crate) struct Worst {
    pub(crate) cases: usize,
    pub(crate) prompt: f32,
    pub(crate) continuation: f32,
    pub(crate) greedy_tokens: usize,
}

/// A step with a smaller lead of the best token over the second may go either way.
const MARGIN: f32 = 1e-3;

pub(crate) fn check(engine: &Engine<Awake>, reference: &Path, tolerance: f32) -> Worst {
    let text = std::fs::read_to_string(reference).expect("the reference is there");
    let reference: Reference = serde_json::from_str(&text).expect("the reference has its form");
    let mut worst = Worst::default();
    for case in &reference.cases {
        let whole = [case.prompt.as_slice(), &case.greedy].concat();
        let scores = engine.score(&[whole]).expect("a valid sequence").remove(0);
        let (prompt, continuation) = scores.split_at(case.prompt.len() - 1);
        worst.prompt = worst.prompt.max(distance(prompt, &case.prompt_logprobs));
        worst.continuation = worst.continuation.max(distance(continuation, &case.logprobs));

        let request = Request::new(case.prompt.clone())
            .max_new_tokens(case.greedy.len())
            .temperature(0.0)
            .ignore_eos(true);
        let output = engine.generate(&[request]).expect("a valid request").remove(0);
        let completion = &output.completions[0];
        let close = case.margins.iter().position(|&margin| margin < MARGIN).unwrap_or(case.greedy.len());
        assert_eq!(completion.tokens[..close], case.greedy[..close], "greedy tokens of {:?}", case.prompt);
        worst.greedy_tokens += close;
        // What was sampled is what is scored, bit for bit.
        let same = completion.tokens.iter().zip(&case.greedy).take_while(|(a, b)| a == b).count();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(
            bits(&completion.logprobs[..same]),
            bits(&continuation[..same]),
            "score equals generation"
        );
        worst.cases += 1;
    }
    assert!(worst.prompt <= tolerance, "prompt logprobs are off by {}", worst.prompt);
    assert!(worst.continuation <= tolerance, "continuation logprobs are off by {}", worst.continuation);
    worst
}

fn distance(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len(), "one logprob for each token");
    got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
