//! Sleep, update and wake, again and again: what comes back, how fast, and whether the output is a fresh engine's.

use std::time::{Duration, Instant};

use serde_json::json;

use super::models::Shape;
use super::{Check, gb_per_second, greedy, prompt, result};
use crate::engine::{Awake, Engine, SleepOptions};

/// Bytes a second of copies from pinned memory, the limit of a restore.
fn pinned_bandwidth(engine: &Engine<Awake>, bytes: usize) -> f64 {
    let device = &*engine.core.parts.device;
    let mut arena = device.reserve("copy", bytes).unwrap();
    arena.commit(bytes).unwrap();
    let host = device.host_buffer("copy", bytes).unwrap();
    let mut copy = || device.write_bytes(arena.view_mut(0, bytes), host.as_slice()).unwrap();
    copy();
    let begin = Instant::now();
    (0..5).for_each(|_| copy());
    gb_per_second(5 * bytes as u64, begin.elapsed())
}

#[derive(Debug, Default)]
struct Times {
    park: Duration,
    free: Duration,
    restore: Duration,
    update: Duration,
    wake: Duration,
}

pub(super) fn measure(check: &mut Check, shape: Shape) {
    let (cycles, kv_tokens, copy_bytes) = match check.emulated {
        true => (3, 512, 4096),
        false => (21, 256 * 1024, 1 << 30),
    };
    let vocab = shape.config().vocab_size;
    let asked = [greedy(prompt(77, 60, vocab), 8)];
    let sets = [1, 2].map(|seed| shape.weights(seed).made());
    let mut engine = check.engine(shape, kv_tokens, 1);
    let limit = pinned_bandwidth(&engine, copy_bytes);
    let of_first = engine.generate(&asked).unwrap().remove(0);
    let mut times = Times::default();
    let mut free_awake = Vec::new();
    for cycle in 0..cycles {
        let awake = engine.core.parts.device.memory().unwrap();
        free_awake.push(awake.free_bytes);
        let held = engine.memory();
        let asleep = engine.sleep(SleepOptions::default()).unwrap();
        let report = asleep.report().clone();
        let slept = report.device.unwrap();
        let came_back = slept.free_bytes.saturating_sub(awake.free_bytes);
        let said = report.freed.total_bytes();
        check.expect(
            "what the sleep says it freed is free",
            came_back.abs_diff(said) <= said / 100 + (16 << 20),
        );
        check.expect(
            "all of the weights' and the cache's memory goes",
            said >= held.weights_bytes + held.kv_cache_bytes,
        );
        times.park = report.park;
        times.free = report.free;
        let begin = Instant::now();
        let mut loaded = asleep.restore_weights().unwrap();
        times.restore = begin.elapsed();
        let begin = Instant::now();
        loaded.update(&sets[(cycle + 1) % 2]).unwrap();
        times.update = begin.elapsed();
        engine = loaded.wake_up().unwrap();
        times.wake = engine.report().wake;
    }
    let lost = free_awake[1..].iter().map(|free| free_awake[1].saturating_sub(*free)).max().unwrap_or(0);
    check.expect("memory is flat over cycles", lost < 64 << 20);
    let last = engine.generate(&asked).unwrap().remove(0);
    drop(engine);
    let fresh = check.engine(shape, 1024, 2).generate(&asked).unwrap().remove(0);
    check.expect(
        "after all cycles the output is a fresh engine's, bit for bit",
        result(&last) == result(&fresh),
    );
    check.expect("other weights say something else", result(&of_first) != result(&fresh));
    let bytes = sets[0].bytes();
    check.note(
        "cycles",
        json!({
            "cycles": cycles,
            "weights_bytes": bytes,
            "pinned_copy_gb_per_second": limit,
            "park_gb_per_second": gb_per_second(bytes, times.park),
            "restore_gb_per_second": gb_per_second(bytes, times.restore),
            "restore_share_of_pinned_copy": gb_per_second(bytes, times.restore) / limit,
            "update_gb_per_second": gb_per_second(bytes, times.update),
            "free_milliseconds": times.free.as_secs_f64() * 1e3,
            "wake_milliseconds": times.wake.as_secs_f64() * 1e3,
            "lost_bytes": lost,
        }),
    );
}
