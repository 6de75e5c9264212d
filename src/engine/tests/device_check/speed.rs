//! Decode and prefill, and the limits that they are compared with, all in one run.

use std::time::{Duration, Instant};

use serde_json::json;

use super::models::Shape;
use super::{Check, gb_per_second, greedy, prompt};
use crate::engine::{Awake, Engine};

/// Bytes a second of a copy within the GPU: what it reads and what it writes.
fn device_bandwidth(engine: &Engine<Awake>, bytes: usize) -> f64 {
    let device = &*engine.core.parts.device;
    let mut arenas = ["from", "to"].map(|label| device.reserve(label, bytes).unwrap());
    arenas.iter_mut().for_each(|arena| arena.commit(bytes).unwrap());
    let [from, mut to] = arenas;
    let mut copy = |times: usize| {
        for _ in 0..times {
            device.copy_bytes(to.view_mut(0, bytes), from.view(0, bytes)).unwrap();
        }
        device.with_host(from.view(0, 1), &mut |_| {}).unwrap();
    };
    copy(1);
    let begin = Instant::now();
    copy(10);
    gb_per_second(20 * bytes as u64, begin.elapsed())
}

/// Seconds that `run` takes, the best of three.
fn best(mut run: impl FnMut()) -> Duration {
    let time = |_| {
        let begin = Instant::now();
        run();
        begin.elapsed()
    };
    (0..3).map(time).min().expect("three runs")
}

/// Time of a decode step at this batch: of long completions, less that of short ones.
fn decode_step(engine: &Engine<Awake>, batch: usize, tokens: usize, vocab: usize) -> Duration {
    let time = |tokens: usize| {
        let requests: Vec<_> = (0..batch).map(|i| greedy(prompt(i, 32, vocab), tokens)).collect();
        best(|| drop(engine.generate(&requests).unwrap()))
    };
    let short = time(2);
    time(2 + tokens).saturating_sub(short) / u32::try_from(tokens).unwrap()
}

pub(super) fn measure(check: &mut Check, shape: Shape) {
    let (batches, tokens, prompt_len, copy_bytes): (&[usize], _, _, _) = match check.emulated {
        true => (&[1, 3], 2, 40, 4096),
        false => (&[1, 8, 32, 128], 32, 2048, 1 << 30),
    };
    let begin = Instant::now();
    let engine = check.engine(shape, 64 * 1024, 1);
    let bytes = engine.memory().weights_bytes;
    let bandwidth = device_bandwidth(&engine, copy_bytes);
    check.note("load", json!({"weights_bytes": bytes, "seconds": begin.elapsed().as_secs_f64()}));
    check.note("device_copy_gb_per_second", json!(bandwidth));
    let vocab = shape.config().vocab_size;
    for &batch in batches {
        let step = decode_step(&engine, batch, tokens, vocab);
        let weights = gb_per_second(bytes, step);
        check.note(
            &format!("decode_batch_{batch}"),
            json!({
                "step_milliseconds": step.as_secs_f64() * 1e3,
                "tokens_per_second": batch as f64 / step.as_secs_f64(),
                "weights_gb_per_second": weights,
                "share_of_copy_bandwidth": weights / bandwidth,
            }),
        );
    }
    let mut asked = 0;
    let time = best(|| {
        // Another prompt each time, as the prefix cache knows the last one.
        asked += 1;
        drop(engine.generate(&[greedy(prompt(1000 + asked, prompt_len, vocab), 1)]).unwrap());
    });
    let per_second = prompt_len as f64 / time.as_secs_f64();
    // Two operations for each weight that a token meets; weights are bf16.
    let flops = per_second * bytes as f64;
    check.note("prefill", json!({"tokens_per_second": per_second, "teraflops": flops / 1e12}));
}
