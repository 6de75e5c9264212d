//! Recorded steps over sleeps, updates and wakes.

use super::*;
use crate::engine::SleepOptions;

/// Calls of a function of the driver.
fn calls(gpu: &Gpu, name: &str) -> usize {
    gpu.emulated.call_names(0).iter().filter(|call| **call == name).count()
}

/// One decode after another at one batch size.
fn decodes() -> Vec<Request> {
    vec![Request::new(vec![7, 3, 11]).temperature(0.0).max_new_tokens(9).ignore_eos(true)]
}

#[test]
fn b30_c20_c21_graphs_recorded_before_a_sleep_serve_the_weights_after_it() {
    let gpu = Gpu::new();
    let mut engine = awake_on(gpu.device(), 1);
    assert_eq!(bits(&engine.generate(&decodes()).unwrap()), on_fresh_gpu(1, decodes));
    let recorded = calls(&gpu, "cuGraphInstantiate");
    assert!(recorded > 0, "a decode step that comes again is recorded");
    for seed in [2, 1, 3] {
        let launched = calls(&gpu, "cuGraphLaunch");
        let asleep = engine.sleep(SleepOptions::default()).unwrap();
        let mut loaded = asleep.restore_weights().unwrap();
        loaded.update(Seeded::new(seed)).unwrap();
        engine = loaded.wake_up().unwrap();
        assert_eq!(bits(&engine.generate(&decodes()).unwrap()), on_fresh_gpu(seed, decodes), "seed {seed}");
        assert!(calls(&gpu, "cuGraphLaunch") > launched, "the recorded step was used");
        assert_eq!(calls(&gpu, "cuGraphInstantiate"), recorded, "none was recorded anew");
    }
    drop(engine);
    gpu.assert_clean();
}

#[test]
fn b30_steps_are_the_same_bits_recorded_and_not() {
    let gpu = Gpu::new();
    let engine = awake_on(gpu.device(), 1);
    // One step of each shape only: nothing is recorded.
    let steps: Vec<_> = (0..3)
        .map(|_| {
            let fresh = Gpu::new();
            let engine = awake_on(fresh.device(), 1);
            let said = bits(&engine.generate(&short()).unwrap());
            assert_eq!(calls(&fresh, "cuGraphLaunch"), 0);
            drop(engine);
            fresh.assert_clean();
            said
        })
        .collect();
    for _ in 0..4 {
        engine.clear_prefix_cache();
        assert_eq!(bits(&engine.generate(&short()).unwrap()), steps[0]);
    }
    assert!(calls(&gpu, "cuGraphLaunch") > 0);
    assert!(steps.iter().all(|said| *said == steps[0]));
    drop(engine);
    gpu.assert_clean();
}

/// A prefill and a single decode.
fn short() -> Vec<Request> {
    vec![Request::new(vec![7, 3, 11, 4]).temperature(0.0).max_new_tokens(2).ignore_eos(true)]
}
