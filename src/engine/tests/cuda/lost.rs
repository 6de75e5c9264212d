//! A GPU that is lost for good: every call from the n-th on fails, and what was queued never runs.

use super::*;
use crate::device::cuda::emulated::{ILLEGAL_ADDRESS, LAUNCH_FAILED};
use crate::engine::{InFlight, SleepOptions};
use crate::weights::UpdateOptions;

/// A life of an engine, until the first error. Each error is one of the device's; each engine is dropped where it is.
fn live(device: Arc<CudaDevice>) -> Result<Engine<Awake>, String> {
    fn text(error: impl std::fmt::Display) -> String {
        error.to_string()
    }
    let asleep = build_on(device).map_err(text)?;
    let loaded = asleep.load_weights(Seeded::new(1)).map_err(text)?;
    let engine = loaded.wake_up().map_err(text)?;
    engine.generate(&probe()).map_err(text)?;
    engine.submit(probe().remove(0)).unwrap();
    engine.step().map_err(text)?;
    let options = SleepOptions::default().in_flight(InFlight::Retract);
    let loaded = engine.sleep(options).map_err(text)?.restore_weights().map_err(text)?;
    let engine = loaded.wake_up().map_err(text)?;
    engine.step().map_err(text)?;
    engine.abort_all();
    let mut loaded =
        engine.sleep(SleepOptions::default().resident()).map_err(text)?.restore_weights().map_err(text)?;
    loaded.update(Seeded::new(2)).map_err(text)?;
    loaded.update_with(Seeded::new(1), UpdateOptions::default().in_place()).map_err(text)?;
    let loaded = loaded.park_weights().map_err(text)?.restore_weights().map_err(text)?;
    let asleep = loaded.discard_weights();
    let engine = asleep.load_weights(Seeded::new(1)).map_err(text)?.wake_up().map_err(text)?;
    assert_eq!(bits(&engine.generate(&probe()).map_err(text)?), on_fresh_gpu(1, probe));
    Ok(engine)
}

#[test]
fn b14_a_gpu_that_is_lost_at_any_call_is_an_error_and_never_a_panic() {
    let gpu = Gpu::new();
    let before = gpu.emulated.calls();
    let engine = live(gpu.device()).unwrap();
    let calls = gpu.emulated.calls() - before;
    drop(engine);
    gpu.assert_clean();
    assert!(calls > 1000, "{calls} calls in a life");
    for (turn, n) in (1..calls).step_by(17).enumerate() {
        let gpu = Gpu::new();
        let code = [ILLEGAL_ADDRESS, LAUNCH_FAILED][turn % 2];
        let before = gpu.emulated.calls();
        gpu.emulated.lose(n, code);
        match live(gpu.device()).map(drop) {
            Err(error) => assert!(error.contains(&format!("({code})")), "lost at {n}: {error}"),
            // It ended before, or nobody asks any more: what is dropped is called for, too.
            Ok(()) => {
                let made = gpu.emulated.calls() - before;
                assert!(n + 150 > made, "lost at {n} of {made}, {calls} before");
            }
        }
        let emulated = gpu.emulated;
        drop(gpu);
        // What such a GPU holds can't be given back.
        assert!(emulated.violations().is_empty(), "lost at {n}: {:?}", emulated.violations());
        emulated.find_again();
    }
}

/// An engine that hears of it goes on saying so, in every call, and can be dropped.
#[test]
fn b14_every_call_on_a_lost_gpu_is_an_error_again() {
    let gpu = Gpu::new();
    let engine = awake_on(gpu.device(), 1);
    engine.submit(probe().remove(0)).unwrap();
    engine.step().unwrap();
    gpu.emulated.lose(1, ILLEGAL_ADDRESS);
    for _ in 0..3 {
        assert!(engine.step().unwrap_err().to_string().contains("(700)"));
        assert!(engine.generate(&probe()).unwrap_err().to_string().contains("(700)"));
        assert!(engine.score(&[[1, 2, 3]]).is_err());
        assert!(engine.memory().weights_bytes > 0);
        assert_eq!(engine.stats().live_requests, 1);
    }
    let (engine, error) = engine
        .sleep(SleepOptions::default().in_flight(InFlight::Retract))
        .expect_err("weights can't be copied")
        .into_parts();
    assert!(error.to_string().contains("(700)"), "{error}");
    // Without a copy it can sleep; what it gave back is said truly.
    let options = SleepOptions::default().in_flight(InFlight::Abort);
    let asleep = engine.sleep_discarding(options).unwrap();
    let report = asleep.report().clone();
    assert_eq!((report.freed.weights_bytes, report.freed.kv_cache_bytes, report.device), (0, 0, None));
    let (asleep, error) = asleep.load_weights(Seeded::new(1)).expect_err("the GPU is lost").into_parts();
    assert!(error.to_string().contains("(700)"), "{error}");
    drop(asleep);
    let emulated = gpu.emulated;
    drop(gpu);
    assert!(emulated.violations().is_empty(), "{:?}", emulated.violations());
    emulated.find_again();
}
