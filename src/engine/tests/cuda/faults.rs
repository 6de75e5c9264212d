//! Every driver call of every transition fails once: the state afterwards is what the error says, a retry gives what a
//! fresh engine gives, and nothing leaks.
#![allow(clippy::result_large_err, reason = "a failed attempt hands back its engine")]

use std::cell::Cell;
use std::fmt::Display;

use super::*;
use crate::device::DeviceError;
use crate::device::cuda::emulated::{OUT_OF_MEMORY, UNKNOWN};
use crate::engine::{
    BuildError, Discarded, GenerateError, InFlight, Kept, LoadError, RestoreError, SleepError, SleepOptions,
    Sleeping, StepError, WakeError, WeightsLoaded,
};
use crate::weights::{LoadOptions, TensorSpec, UpdateOptions, WeightSource};

const CODES: [i32; 2] = [OUT_OF_MEMORY, UNKNOWN];

/// A failure in the n-th driver call of what runs under it.
struct Fault {
    emulated: EmulatedDevice,
    n: u64,
    code: i32,
    hit: Cell<bool>,
    /// The call that failed.
    name: Cell<&'static str>,
}

impl Fault {
    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = self.emulated.calls();
        self.emulated.fail_call(self.n, self.code);
        let outcome = work();
        self.hit.set(!self.emulated.take_pending_failure());
        self.name.set(self.emulated.call_names(before).get(self.n as usize - 1).copied().unwrap_or("none"));
        outcome
    }

    /// An error of the device, of the injected kind.
    #[track_caller]
    fn assert_is(&self, error: &impl Display) {
        let text = error.to_string();
        let code = format!("({})", self.code);
        let known = text.contains(&code)
            || (self.code == OUT_OF_MEMORY && text.contains("bytes needed"))
            || (self.code == OUT_OF_MEMORY && text.contains("do not fit the address space"))
            // What a clean-up left to the next try.
            || text.contains("does not take back");
        assert!(known, "call {}, {}: {text}", self.n, self.name.get());
    }
}

/// Calls that end a handle: nobody knows whether one that failed did it, so it is not called again, and what it should
/// have ended is lost.
fn ends_a_handle(name: &str) -> bool {
    name.ends_with("Destroy")
        || ["cuModuleUnload", "cuMemFreeHost", "cuDevicePrimaryCtxRelease", "cuMemRelease"].contains(&name)
}

/// Runs `go` with a fault in the n-th call, for each n until it is not reached; `go` gives the engine back, awake, with
/// the seed of its weights. Returns how many calls failed.
fn every_call_fails_once(step: usize, go: impl Fn(Engine<Awake>, &Fault) -> (Engine<Awake>, u64)) -> u64 {
    let gpu = Gpu::new();
    let mut engine = awake_on(gpu.device(), 1);
    let in_use = gpu.emulated.used();
    assert_eq!(in_use, device_bytes(&engine.memory()));
    let mut faults = 0;
    for (code, first) in CODES.into_iter().zip([1, step.div_ceil(2)]) {
        for n in (first as u64..).step_by(step) {
            let fault =
                Fault { emulated: gpu.emulated, n, code, hit: Cell::default(), name: Cell::new("none") };
            let (back, seed) = go(engine, &fault);
            let name = fault.name.get();
            assert!(
                gpu.emulated.violations().is_empty(),
                "call {n}, {name}: {:?}",
                gpu.emulated.violations()
            );
            assert_serves(&back, seed);
            engine = back;
            if !fault.hit.get() {
                break;
            }
            faults += 1;
            assert!(n < 20_000, "it never ends");
        }
    }
    // What the driver did not take back at once has gone by the next time.
    let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
    let engine = asleep.load_weights(Seeded::new(1)).unwrap().wake_up().unwrap();
    assert_eq!(gpu.emulated.used(), in_use, "after {faults} faults");
    assert_serves_all(&engine, 1);
    drop(engine);
    gpu.assert_clean();
    faults
}

fn sleep_discarding(engine: Engine<Awake>) -> Engine<Sleeping<Discarded>> {
    engine.sleep_discarding(SleepOptions::default()).unwrap()
}

fn sleep_parked(engine: Engine<Awake>) -> Engine<Sleeping<Kept>> {
    engine.sleep(SleepOptions::default()).unwrap()
}

fn sleep_resident(engine: Engine<Awake>) -> Engine<Sleeping<Kept>> {
    engine.sleep(SleepOptions::default().resident()).unwrap()
}

fn rouse(loaded: Engine<WeightsLoaded>) -> Engine<Awake> {
    loaded.wake_up().unwrap()
}

#[test]
fn c13_a_build_that_fails_leaves_nothing_behind() {
    let gpu = Gpu::new();
    for code in CODES {
        for n in 1.. {
            let fault =
                Fault { emulated: gpu.emulated, n, code, hit: Cell::default(), name: Cell::new("none") };
            let live = gpu.emulated.live();
            match fault.during(|| build_on(gpu.device())) {
                Err(BuildError::Device(error)) => fault.assert_is(&error),
                Err(error) => panic!("{error}"),
                Ok(asleep) => drop(asleep),
            }
            assert_eq!((gpu.emulated.live(), gpu.emulated.used()), (live, 0), "call {n}");
            if !fault.hit.get() {
                assert!(n > 6, "{n} calls");
                break;
            }
        }
    }
    gpu.assert_clean();
}

fn load_failing<W: crate::engine::Retention>(
    asleep: Engine<Sleeping<W>>,
    fault: &Fault,
    seed: u64,
    before: u64,
) -> Engine<WeightsLoaded> {
    let memory = asleep.memory();
    fault.during(|| asleep.load_weights(Seeded::new(seed))).unwrap_or_else(|failed| {
        let (asleep, error) = failed.into_parts();
        assert!(matches!(error, LoadError::Device(_) | LoadError::Transfer(_)), "{error}");
        fault.assert_is(&error);
        assert_eq!(asleep.memory(), memory);
        // A fault of a clean-up leaves something that the next try takes along.
        let kept = gpu_kept(fault, before);
        assert!(kept, "call {}, {}: {} bytes for {before}", fault.n, fault.name.get(), fault.emulated.used());
        asleep.load_weights(Seeded::new(seed)).expect("no fault is left")
    })
}

/// Device memory is as it was, or less (the try took along what was left over from before), or the failed call was one
/// of giving it back.
fn gpu_kept(fault: &Fault, before: u64) -> bool {
    fault.emulated.used() <= before || ["cuMemUnmap", "cuMemRelease"].contains(&fault.name.get())
}

#[test]
fn c13_every_call_of_a_load_fails_once() {
    for kind in 0..3 {
        let faults = every_call_fails_once(9, |engine, fault| {
            let seed = 1 + fault.n % 2;
            let loaded = match kind {
                0 => {
                    let asleep = sleep_discarding(engine);
                    let used = fault.emulated.used();
                    load_failing(asleep, fault, seed, used)
                }
                1 => {
                    let asleep = sleep_parked(engine);
                    let used = fault.emulated.used();
                    load_failing(asleep, fault, seed, used)
                }
                _ => {
                    let asleep = sleep_resident(engine);
                    let used = fault.emulated.used();
                    load_failing(asleep, fault, seed, used)
                }
            };
            (rouse(loaded), seed)
        });
        assert!(faults > 20, "{faults} faults");
    }
}

#[test]
fn c13_b13_b14_every_call_of_a_wake_fails_once() {
    let faults = every_call_fails_once(1, |engine, fault| {
        let loaded = sleep_resident(engine).restore_weights().unwrap();
        let (memory, before) = (loaded.memory(), fault.emulated.used());
        let engine = fault.during(|| loaded.wake_up()).unwrap_or_else(|failed| {
            let (loaded, error) = failed.into_parts();
            assert!(matches!(error, WakeError::Device(_)), "{error}");
            fault.assert_is(&error);
            assert_eq!(loaded.memory(), memory);
            assert!(gpu_kept(fault, before), "call {}, {}", fault.n, fault.name.get());
            loaded.verify().unwrap();
            loaded.wake_up().expect("no fault is left")
        });
        (engine, 1)
    });
    assert!(faults > 20, "{faults} faults");
}

#[test]
fn c13_b13_every_call_of_a_restore_fails_once() {
    let faults = every_call_fails_once(1, |engine, fault| {
        let asleep = sleep_parked(engine);
        let (memory, before) = (asleep.memory(), fault.emulated.used());
        let loaded = fault.during(|| asleep.restore_weights()).unwrap_or_else(|failed| {
            let (asleep, error) = failed.into_parts();
            let RestoreError::Device(device) = &error;
            fault.assert_is(device);
            assert_eq!(asleep.memory(), memory);
            assert!(gpu_kept(fault, before), "call {}, {}", fault.n, fault.name.get());
            asleep.restore_weights().expect("no fault is left")
        });
        loaded.verify().unwrap();
        (rouse(loaded), 1)
    });
    assert!(faults > 10, "{faults} faults");
}

#[test]
fn c13_every_call_of_a_sleep_fails_once() {
    for options in [SleepOptions::default(), SleepOptions::default().resident()] {
        let faults = every_call_fails_once(1, |engine, fault| {
            let memory = engine.memory();
            engine.submit(probe().remove(0)).unwrap();
            engine.step().unwrap();
            let options = options.in_flight(InFlight::Retract);
            let asleep = fault.during(|| engine.sleep(options)).unwrap_or_else(|failed| {
                let (engine, error) = failed.into_parts();
                assert!(matches!(error, SleepError::Device(_)), "{error}");
                fault.assert_is(&error);
                let now = engine.memory();
                assert_eq!(
                    (now.weights_bytes, now.kv_cache_bytes),
                    (memory.weights_bytes, memory.kv_cache_bytes)
                );
                assert_eq!(engine.stats().live_requests, 1, "awake, and it serves on");
                engine.step().unwrap();
                engine.sleep(options).expect("no fault is left")
            });
            let mut loaded = asleep.restore_weights().unwrap();
            let retracted = loaded.abort_retracted();
            assert_eq!(retracted.len(), 1);
            (rouse(loaded), 1)
        });
        assert!(faults > 8, "{faults} faults");
    }
    // Nothing of these can be refused: what the driver does not take back, it takes the next time.
    let faults = every_call_fails_once(1, |engine, fault| {
        let asleep = fault.during(|| engine.sleep_discarding(SleepOptions::default())).unwrap();
        (rouse(asleep.load_weights(Seeded::new(1)).unwrap()), 1)
    });
    assert!(faults > 8, "{faults} faults");
}

#[test]
fn c13_every_call_of_parking_and_discarding_fails_once() {
    let faults = every_call_fails_once(1, |engine, fault| {
        let loaded = sleep_resident(engine).restore_weights().unwrap();
        let memory = loaded.memory();
        let asleep = fault.during(|| loaded.park_weights()).unwrap_or_else(|failed| {
            let (loaded, error) = failed.into_parts();
            fault.assert_is(&error);
            assert_eq!(loaded.memory().weights_bytes, memory.weights_bytes);
            loaded.verify().unwrap();
            loaded.park_weights().expect("no fault is left")
        });
        (rouse(asleep.restore_weights().unwrap()), 1)
    });
    assert!(faults > 8, "{faults} faults");
    let faults = every_call_fails_once(1, |engine, fault| {
        let loaded = sleep_resident(engine).restore_weights().unwrap();
        let asleep = fault.during(|| loaded.discard_weights());
        (rouse(asleep.load_weights(Seeded::new(1)).unwrap()), 1)
    });
    assert!(faults > 3, "{faults} faults");
}

/// One tensor of a fused matrix.
struct One(Seeded, usize);

impl One {
    const NAME: &'static str = "model.layers.0.self_attn.k_proj.weight";

    fn new(seed: u64) -> Self {
        let set = Seeded::new(seed);
        let position = set.specs.iter().position(|spec| spec.name == Self::NAME).unwrap();
        Self(set, position)
    }
}

impl WeightSource for One {
    fn index(&mut self) -> Result<Vec<TensorSpec>, crate::weights::SourceError> {
        Ok(vec![self.0.specs[self.1].clone()])
    }
    fn read(&mut self, _: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), crate::weights::SourceError> {
        self.0.read(self.1, sink)
    }
}

#[test]
fn c13_c18_every_call_of_a_staged_update_fails_once_and_old_weights_stand() {
    for partial in [false, true] {
        let faults = every_call_fails_once(if partial { 1 } else { 5 }, |engine, fault| {
            let mut loaded = sleep_resident(engine).restore_weights().unwrap();
            let version = loaded.version();
            let attempt = |loaded: &mut Engine<WeightsLoaded>| match partial {
                // The same values, so that the whole stays comparable.
                true => loaded.update_with(One::new(1), UpdateOptions::default().partial([One::NAME])),
                false => loaded.update(Seeded::new(1)),
            };
            if let Err(error) = fault.during(|| attempt(&mut loaded)) {
                fault.assert_is(&error);
                assert_eq!(loaded.version(), version);
                loaded.verify().unwrap();
                attempt(&mut loaded).expect("no fault is left");
            }
            loaded.verify().unwrap();
            (rouse(loaded), 1)
        });
        assert!(faults > 10, "{faults} faults");
    }
}

#[test]
fn c13_c18_every_call_of_an_update_in_place_fails_once_and_torn_weights_are_known() {
    let faults = every_call_fails_once(9, |engine, fault| {
        let mut loaded = sleep_resident(engine).restore_weights().unwrap();
        let version = loaded.version();
        let in_place = || UpdateOptions::default().in_place();
        if let Err(error) = fault.during(|| loaded.update_with(Seeded::new(2), in_place())) {
            fault.assert_is(&error);
            if loaded.version().is_some() {
                // It failed before anything was written.
                assert_eq!(loaded.version(), version);
                loaded.verify().unwrap();
            } else {
                let (torn, error) = loaded.wake_up().expect_err("torn weights don't serve").into_parts();
                assert!(matches!(error, WakeError::Torn { .. }), "{error}");
                loaded = torn;
            }
            loaded.update_with(Seeded::new(2), in_place()).expect("no fault is left");
        }
        loaded.verify().unwrap();
        loaded.update(Seeded::new(1)).unwrap();
        (rouse(loaded), 1)
    });
    assert!(faults > 10, "{faults} faults");
}

#[test]
fn c13_c18_an_update_that_is_dropped_half_way_gives_its_memory_back() {
    let faults = every_call_fails_once(3, |engine, fault| {
        let mut loaded = sleep_resident(engine).restore_weights().unwrap();
        let mut update = loaded.begin_update(UpdateOptions::default().partial([One::NAME])).unwrap();
        update.push_all(One::new(2)).unwrap();
        fault.during(|| drop(update));
        loaded.verify().unwrap();
        (rouse(loaded), 1)
    });
    assert!(faults > 3, "{faults} faults");
}

#[test]
fn c13_every_call_of_a_load_in_pieces_fails_once() {
    let faults = every_call_fails_once(7, |engine, fault| {
        let asleep = sleep_resident(engine);
        let attempt = |asleep: Engine<Sleeping<Kept>>| {
            let mut load =
                asleep.begin_load(LoadOptions::default()).map_err(|failed| failed.into_parts().0)?;
            if load.push_all(Seeded::new(2)).is_err() {
                return Err(load.abandon());
            }
            load.commit().map_err(|failed| failed.into_parts().0)
        };
        let engine = match fault.during(|| attempt(asleep)) {
            Ok(loaded) => {
                let engine = rouse(loaded);
                assert_serves(&engine, 2);
                rouse(sleep_discarding(engine).load_weights(Seeded::new(1)).unwrap())
            }
            Err(asleep) => rouse(asleep.restore_weights().unwrap()),
        };
        (engine, 1)
    });
    assert!(faults > 10, "{faults} faults");
}

#[test]
fn c13_every_call_of_generating_fails_once_and_nothing_is_lost() {
    let faults = every_call_fails_once(1, |engine, fault| {
        engine.clear_prefix_cache();
        match fault.during(|| engine.generate(&probe())) {
            // A recording that fails is not needed.
            Ok(outputs) => assert_eq!(bits(&outputs), on_fresh_gpu(1, probe)),
            Err(GenerateError::Step(StepError::Device(error))) => {
                assert!(matches!(error, DeviceError::Operation { .. } | DeviceError::OutOfMemory { .. }));
                fault.assert_is(&error);
                let stats = engine.stats();
                assert_eq!((stats.live_requests, stats.blocks_owned), (0, 0));
            }
            Err(error) => panic!("{error}"),
        }
        (engine, 1)
    });
    assert!(faults > 100, "{faults} faults");
}

#[test]
fn c13_steps_that_fail_are_made_again() {
    let gpu = Gpu::new();
    let engine = awake_on(gpu.device(), 1);
    let expected = on_fresh_gpu(1, requests);
    for n in (1..2000).step_by(53) {
        let ids: Vec<_> = requests().into_iter().map(|r| engine.submit(r).unwrap()).collect();
        gpu.emulated.fail_call(n, UNKNOWN);
        let mut outputs = Vec::new();
        for _ in 0..200 {
            match engine.step() {
                Ok(step) => {
                    outputs.extend(step.outputs);
                    if step.live_requests == 0 {
                        break;
                    }
                }
                Err(error) => {
                    assert!(matches!(error, StepError::Device(_)), "{error}");
                    let stats = engine.stats();
                    assert_eq!(stats.live_requests + outputs.len(), ids.len(), "fault {n}");
                }
            }
        }
        let over = gpu.emulated.take_pending_failure();
        outputs.sort_by_key(|output: &crate::completion::RequestOutput| output.request);
        assert_eq!(outputs.iter().map(|o| o.request).collect::<Vec<_>>(), ids, "fault {n}: each once");
        assert_eq!(bits(&outputs), expected, "fault {n}");
        engine.clear_prefix_cache();
        if over {
            break;
        }
    }
    drop(engine);
    gpu.assert_clean();
}

#[test]
fn c13_every_call_of_dropping_fails_once() {
    let mut lost = 0;
    for state in 0..4 {
        for n in (1 + state..).step_by(4) {
            let gpu = Gpu::new();
            let emulated = gpu.emulated;
            let fault = Fault { emulated, n, code: UNKNOWN, hit: Cell::default(), name: Cell::new("none") };
            let engine = awake_on(gpu.device(), 1);
            engine.generate(&probe()).unwrap();
            let Gpu { device, .. } = gpu;
            match state {
                0 => fault.during(|| drop((engine, device))),
                1 => {
                    let asleep = sleep_parked(engine);
                    fault.during(|| drop((asleep, device)));
                }
                2 => {
                    let asleep = sleep_discarding(engine);
                    fault.during(|| drop((asleep, device)));
                }
                _ => {
                    let loaded = sleep_parked(engine).restore_weights().unwrap();
                    fault.during(|| drop((loaded, device)));
                }
            }
            assert!(emulated.violations().is_empty(), "call {n}: {:?}", emulated.violations());
            let name = fault.name.get();
            if ends_a_handle(name) {
                lost += 1;
                assert!(
                    emulated.live().matches(|c: char| c.is_ascii_digit()).count() <= 2,
                    "{}",
                    emulated.live()
                );
            } else {
                assert_eq!((emulated.live(), emulated.used()), (String::new(), 0), "call {n}, {name}");
            }
            if !fault.hit.get() {
                break;
            }
        }
    }
    assert!(lost > 5);
}

/// Two engines on one GPU that has room for one awake: the other's wake fails, and works once the first sleeps.
#[test]
fn c13_b13_without_room_a_wake_is_refused_and_works_once_another_engine_sleeps() {
    let emulated = emulated();
    let (first, second) = (device(emulated, None, true), device(emulated, None, true));
    let mut awake = awake_on(first, 1);
    let one = emulated.used();
    let mut loaded = loaded_on(second, 2);
    let weights = loaded.memory().weights_bytes.next_multiple_of(PAGE);
    emulated.set_memory_limit(one + weights + (one - weights) / 2);
    for _ in 0..3 {
        let before = emulated.used();
        for _ in 0..2 {
            let (back, error) = loaded.wake_up().expect_err("there is no room").into_parts();
            let WakeError::Device(DeviceError::OutOfMemory { needed_bytes, available_bytes, .. }) = error
            else {
                panic!("{error}")
            };
            assert!(available_bytes < needed_bytes, "{available_bytes} of {needed_bytes} bytes");
            assert_eq!(emulated.used(), before);
            back.verify().unwrap();
            loaded = back;
        }
        assert_serves(&awake, 1);
        let asleep = sleep_parked(awake);
        let other = loaded.wake_up().expect("there is room now");
        assert_serves_all(&other, 2);
        loaded = sleep_resident(other).restore_weights().unwrap();
        awake = rouse(asleep.restore_weights().unwrap());
    }
    drop((awake, loaded));
    emulated.assert_clean();
}

/// The builder's limit counts this engine's memory alone.
#[test]
fn b13_a_limit_that_is_too_small_for_the_cache_is_an_error_at_wake() {
    let gpu = Gpu::with(Some(100 << 10), true);
    let loaded = loaded_on(gpu.device(), 1);
    let memory = loaded.memory();
    let (loaded, error) = loaded.wake_up().expect_err("the limit is too small").into_parts();
    let WakeError::Device(DeviceError::OutOfMemory { available_bytes, .. }) = error else {
        panic!("{error}")
    };
    assert!(available_bytes < 100 << 10);
    assert_eq!((loaded.memory(), gpu.emulated.used()), (memory, device_bytes(&memory)));
    drop(loaded);
    gpu.assert_clean();
}
