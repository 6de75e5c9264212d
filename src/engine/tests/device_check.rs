//! What a GPU is checked with where there is no Rust: the whole check is this test binary (`tests/device_check`).
//!
//! As a test it runs a short form on the emulated GPU, so that it works the first time it meets a real one. With
//! `DORMOUSE_DEVICE_CHECK=FILE` it runs on GPU 0, or the one that `DORMOUSE_DEVICE_CHECK_GPU` names, and writes what it
//! found into the file, as JSON.
#![allow(clippy::print_stdout, reason = "whoever runs it on a GPU watches")]

mod cycles;
mod models;
mod speed;
mod ways;

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use self::models::Shape;
use crate::completion::RequestOutput;
use crate::device::cuda::emulated::Emulated;
use crate::engine::{Awake, Engine, KvCapacity};
use crate::request::Request;

/// Largest difference of a logprob on the GPU from the CPU's that passes: both work in f32, in other orders.
const LOGPROB_TOLERANCE: f32 = 2e-3;

/// A check in progress.
struct Check {
    ordinal: u32,
    emulated: bool,
    found: Map<String, Value>,
    failures: Vec<String>,
}

impl Check {
    fn note(&mut self, what: &str, found: Value) {
        println!("{}{what}: {found}", if self.emulated { "emulated: " } else { "" });
        self.found.insert(what.to_owned(), found);
    }

    /// Something that must be so.
    fn expect(&mut self, what: &str, holds: bool) {
        if !holds {
            println!("FAILED: {what}");
            self.failures.push(what.to_owned());
        }
    }

    /// An awake engine on the GPU.
    fn engine(&self, shape: Shape, kv_tokens: usize, seed: u64) -> Engine<Awake> {
        let asleep =
            shape.builder().kv_cache(KvCapacity::Tokens(kv_tokens)).cuda(self.ordinal).build_asleep();
        asleep.unwrap().load_weights(shape.weights(seed)).unwrap().wake_up().unwrap()
    }
}

/// Bytes in a time, in 10^9 bytes a second.
fn gb_per_second(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

fn prompt(seed: usize, len: usize, vocab: usize) -> Vec<u32> {
    (0..len).map(|i| ((seed * 7919 + i * 104_729 + i * i * 31) % vocab) as u32).collect()
}

fn greedy(prompt: Vec<u32>, tokens: usize) -> Request {
    Request::new(prompt).temperature(0.0).max_new_tokens(tokens).ignore_eos(true)
}

fn result(output: &RequestOutput) -> (&[u32], Vec<u32>) {
    let completion = &output.completions[0];
    (&completion.tokens, completion.logprobs.iter().map(|logprob| logprob.to_bits()).collect())
}

/// The same tokens as on the CPU, and logprobs as near as f32 is.
fn parity(check: &mut Check, shape: Shape, prompts: &[usize], tokens: usize) {
    let vocab = shape.config().vocab_size;
    let requests: Vec<_> =
        prompts.iter().enumerate().map(|(i, &len)| greedy(prompt(i, len, vocab), tokens)).collect();
    let cpu = shape.builder().kv_cache(KvCapacity::Tokens(4096)).build_asleep().unwrap();
    let cpu = cpu.load_weights(shape.weights(1)).unwrap().wake_up().unwrap();
    let gpu = check.engine(shape, 4096, 1);
    let (mut worst, mut differing) = (0.0_f32, 0);
    for (mine, theirs) in gpu.generate(&requests).unwrap().iter().zip(&cpu.generate(&requests).unwrap()) {
        let (mine, theirs) = (&mine.completions[0], &theirs.completions[0]);
        // Beyond a near tie the two say different things, rightly.
        let same = mine.tokens.iter().zip(&theirs.tokens).take_while(|(a, b)| a == b).count();
        differing += usize::from(same < tokens);
        for (a, b) in mine.logprobs[..same].iter().zip(&theirs.logprobs) {
            worst = worst.max((a - b).abs());
        }
    }
    check.note(
        &format!("parity_{}", shape.name()),
        json!({"sequences": requests.len(), "left_the_cpu_at_a_tie": differing, "worst_logprob_difference": worst}),
    );
    check.expect("logprobs on the GPU are the CPU's", worst <= LOGPROB_TOLERANCE);
    check.expect("most sequences are the CPU's to the end", differing * 2 <= requests.len());
}

/// A request's bits are its own: alone, in batches, after a prefix hit, in chunks.
fn batch_invariance(check: &mut Check, shape: Shape, others: usize, tokens: usize) {
    let engine = check.engine(shape, 64 + (others + 1) * (96 + tokens), 1);
    let vocab = shape.config().vocab_size;
    let asked = greedy(prompt(3, 70, vocab), tokens);
    let alone = engine.generate(std::slice::from_ref(&asked)).unwrap().remove(0);
    for count in [1, 7, 31, 32, others] {
        let mut requests: Vec<_> =
            (0..count).map(|i| greedy(prompt(i + 10, 5 + i % 80, vocab), tokens)).collect();
        requests.insert(count / 2, asked.clone());
        let outputs = engine.generate(&requests).unwrap();
        let same = result(&outputs[count / 2]) == result(&alone);
        check.expect(&format!("bits beside {count} others are those alone"), same);
    }
    check.note(
        &format!("batch_invariance_{}", shape.name()),
        json!({"most_others": others, "tokens": tokens}),
    );
}

fn run(check: &mut Check, small: Shape, large: Shape) {
    let begin = Instant::now();
    let free = |check: &Check| {
        let asleep = Shape::Tiny.builder().cuda(check.ordinal).build_asleep().unwrap();
        asleep.report().device.or_else(|| asleep.core.parts.device.memory()).unwrap()
    };
    let before = free(check);
    check.note("memory", json!({"free_bytes": before.free_bytes, "total_bytes": before.total_bytes}));
    parity(check, Shape::Tiny, &[3, 40, 150], 12);
    parity(check, small, &[5, 60], if check.emulated { 3 } else { 24 });
    batch_invariance(
        check,
        small,
        if check.emulated { 33 } else { 100 },
        if check.emulated { 2 } else { 16 },
    );
    ways::measure(check, small);
    speed::measure(check, large);
    cycles::measure(check, large);
    let after = free(check);
    let kept = before.free_bytes.saturating_sub(after.free_bytes);
    check.note("kept_bytes", json!(kept));
    // Other processes may use the GPU too: what a driver keeps for itself is far less than a model.
    check.expect("no memory is kept when all engines are gone", kept < 256 << 20);
    check.note("seconds", json!(begin.elapsed().as_secs_f64()));
}

#[test]
fn device_check() {
    let Some(file) = std::env::var_os("DORMOUSE_DEVICE_CHECK") else {
        let emulated = Emulated::load().device();
        emulated.set_granularity(4096);
        let ordinal = emulated.ordinal.unsigned_abs();
        let mut check = Check { ordinal, emulated: true, found: Map::new(), failures: Vec::new() };
        run(&mut check, Shape::Tiny, Shape::Tiny);
        assert!(check.failures.is_empty(), "{:?}", check.failures);
        return emulated.assert_clean();
    };
    let ordinal = std::env::var("DORMOUSE_DEVICE_CHECK_GPU").map_or(0, |gpu| gpu.parse().unwrap());
    let mut check = Check { ordinal, emulated: false, found: Map::new(), failures: Vec::new() };
    run(&mut check, Shape::Small, Shape::Large);
    check.found.insert("failures".to_owned(), json!(check.failures));
    std::fs::write(file, serde_json::to_string_pretty(&check.found).unwrap()).unwrap();
    assert!(check.failures.is_empty(), "{:?}", check.failures);
}
