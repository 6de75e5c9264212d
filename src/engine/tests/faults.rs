//! Every operation of every transition and step fails once: the engine comes back as it was, and a retry
//! gives what a fresh engine gives.
#![allow(clippy::result_large_err, reason = "a failed attempt hands back its engine")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::faulty::FaultyDevice;
use super::{Bits, Seeded, awake_on, bits, build_on, fresh, loaded_on, requests};
use crate::completion::RequestId;
use crate::device::DeviceError;
use crate::device::cpu::REFUSE_NEXT;
use crate::engine::{
    Awake, Engine, GenerateError, InFlight, Kept, LoadError, ParkError, RestoreError, SleepError,
    SleepOptions, Sleeping, StepError, WakeError, WeightsLoaded,
};

fn assert_serves(engine: &Engine<Awake>, expected: &Bits) {
    assert_eq!(&bits(&engine.generate(&requests()).expect("no fault is left")), expected);
}

/// Injects a fault into the n-th allocation of `attempt`, for every n until it succeeds; returns what it gave
/// and how many times it failed. `attempt` hands back the engine it failed with.
fn until_it_succeeds<E, T>(
    device: &FaultyDevice,
    mut engine: E,
    attempt: impl Fn(E) -> Result<T, E>,
) -> (T, u64) {
    for n in 1..100 {
        let committed = device.budget().committed_bytes();
        device.budget().fail_nth(n);
        match attempt(engine) {
            Ok(done) => {
                device.budget().fail_nth(0);
                return (done, n - 1);
            }
            Err(back) => {
                assert_eq!(device.budget().committed_bytes(), committed, "fault {n}: nothing leaks");
                engine = back;
            }
        }
    }
    panic!("it never succeeded");
}

fn load_failing(
    device: &FaultyDevice,
    asleep: Engine<Sleeping<Kept>>,
    seed: u64,
) -> (Engine<WeightsLoaded>, u64) {
    let memory = asleep.memory();
    until_it_succeeds(device, asleep, |asleep| {
        asleep.load_weights(Seeded::new(seed)).map_err(|failed| {
            let (asleep, error) = failed.into_parts();
            assert!(matches!(error, LoadError::Device(DeviceError::OutOfMemory { .. })), "{error}");
            assert_eq!(asleep.memory(), memory);
            asleep
        })
    })
}

fn wake_failing(device: &FaultyDevice, loaded: Engine<WeightsLoaded>) -> Engine<Awake> {
    let memory = loaded.memory();
    let (awake, faults) = until_it_succeeds(device, loaded, |loaded| {
        loaded.wake_up().map_err(|failed| {
            let (loaded, error) = failed.into_parts();
            let WakeError::Device(error) = error else { panic!("{error}") };
            assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
            assert_eq!(loaded.memory(), memory);
            loaded
        })
    });
    assert_eq!(faults, 2, "KV cache and workspace");
    awake
}

fn restore_failing(device: &FaultyDevice, asleep: Engine<Sleeping<Kept>>) -> (Engine<WeightsLoaded>, u64) {
    let memory = asleep.memory();
    until_it_succeeds(device, asleep, |asleep| {
        asleep.restore_weights().map_err(|failed| {
            let (asleep, error) = failed.into_parts();
            let RestoreError::Device(error) = error;
            assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
            assert_eq!(asleep.memory(), memory);
            asleep
        })
    })
}

#[test]
fn c13_a_build_that_fails_leaves_nothing_behind() {
    let device = FaultyDevice::new();
    for n in 1..=3 {
        device.refuse_nth_reservation(n);
        build_on(device.clone()).expect_err("a reservation is refused");
        assert_eq!((Arc::strong_count(&device), device.budget().committed_bytes()), (1, 0));
    }
    device.refuse_nth_reservation(4);
    let asleep = build_on(device.clone()).expect("three reservations");
    device.refuse_nth_reservation(0);
    assert_serves(&asleep.load_weights(Seeded::new(1)).unwrap().wake_up().unwrap(), &fresh(1));
}

#[test]
fn c13_b13_b14_every_allocation_of_every_transition_fails_once() {
    let (w0, w1) = (fresh(1), fresh(2));
    assert_ne!(w0, w1);
    let device = FaultyDevice::new();
    let asleep = build_on(device.clone()).unwrap();
    let (loaded, faults) = until_it_succeeds(&device, asleep, |asleep| {
        asleep.load_weights(Seeded::new(1)).map_err(|failed| failed.into_parts().0)
    });
    assert_eq!(faults, 2, "the weights, and putting them in place");
    let mut engine = wake_failing(&device, loaded);
    assert_serves(&engine, &w0);
    let in_use = device.budget().committed_bytes();
    let memory = engine.memory();
    for (options, restores, loads) in
        [(SleepOptions::default(), 1, 2), (SleepOptions::default().resident(), 0, 2)]
    {
        let (loaded, faults) = restore_failing(&device, engine.sleep(options).unwrap());
        assert_eq!(faults, restores, "a restore copies back what was parked");
        engine = wake_failing(&device, loaded);
        assert_serves(&engine, &w0);
        let (loaded, faults) = load_failing(&device, engine.sleep(options).unwrap(), 2);
        assert_eq!(faults, loads, "the new weights, and putting them in place");
        engine = wake_failing(&device, loaded);
        assert_serves(&engine, &w1);
        let (loaded, _) = load_failing(&device, engine.sleep(options).unwrap(), 1);
        engine = wake_failing(&device, loaded);
        assert_serves(&engine, &w0);
    }
    assert_eq!((device.budget().committed_bytes(), engine.memory()), (in_use, memory));
    // Staging has an address range of its own, which may be refused.
    let asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
    device.refuse_nth_reservation(1);
    let (asleep, _) = asleep.load_weights(Seeded::new(2)).unwrap_err().into_parts();
    engine = asleep.restore_weights().unwrap().wake_up().unwrap();
    assert_serves(&engine, &w0);
    drop(engine);
    assert_eq!((Arc::strong_count(&device), device.budget().committed_bytes()), (1, 0));
}

#[test]
fn c21_addresses_are_the_same_after_every_cycle() {
    let device = FaultyDevice::new();
    let mut engine = awake_on(device, 1);
    let addresses = |engine: &Engine<Awake>| {
        let kv = engine.state.shared.between_steps(|serving| serving.executor.kv_address());
        (engine.state.weights.arena().address(), kv)
    };
    let before = addresses(&engine);
    for cycle in 0..10 {
        let options = SleepOptions::default();
        let loaded = match cycle % 5 {
            0 => engine.sleep(options).unwrap().restore_weights().unwrap(),
            1 => engine.sleep(options.resident()).unwrap().restore_weights().unwrap(),
            2 => engine.sleep(options).unwrap().load_weights(Seeded::new(2)).unwrap(),
            3 => engine.sleep(options.resident()).unwrap().load_weights(Seeded::new(3)).unwrap(),
            _ => engine.sleep_discarding(options).unwrap().load_weights(Seeded::new(1)).unwrap(),
        };
        assert_eq!(loaded.state.weights.arena().address(), before.0, "cycle {cycle}");
        engine = loaded.wake_up().unwrap();
        assert_eq!(addresses(&engine), before, "cycle {cycle}");
    }
    assert_serves(&engine, &fresh(1));
}

/// Steps until nothing is live; returns the outputs in order of submission.
fn finish(engine: &Engine<Awake>) -> Vec<crate::completion::RequestOutput> {
    let mut outputs = Vec::new();
    for _ in 0..1000 {
        let step = engine.step().expect("no fault is left");
        outputs.extend(step.outputs);
        if step.live_requests == 0 {
            outputs.sort_by_key(|output| output.request);
            return outputs;
        }
    }
    panic!("1000 steps and no end");
}

#[test]
fn c13_every_operation_of_every_step_fails_once_and_nothing_is_lost() {
    let expected = fresh(1);
    let device = FaultyDevice::new();
    let engine = awake_on(device.clone(), 1);
    for n in 1..10_000 {
        let ids: Vec<RequestId> = requests().into_iter().map(|r| engine.submit(r).unwrap()).collect();
        device.fail_nth(n);
        let mut failed = false;
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
                    assert!(matches!(error, StepError::Device(DeviceError::Operation { .. })), "{error}");
                    failed = true;
                    let stats = engine.stats();
                    assert_eq!(
                        stats.live_requests + outputs.len(),
                        ids.len(),
                        "fault {n}: all are in flight"
                    );
                    assert_eq!(stats.blocks_free, stats.blocks, "fault {n}: no block is held or cached");
                }
            }
        }
        device.fail_nth(0);
        outputs.sort_by_key(|output: &crate::completion::RequestOutput| output.request);
        assert_eq!(outputs.iter().map(|o| o.request).collect::<Vec<_>>(), ids, "fault {n}: each once");
        assert_eq!(bits(&outputs), expected, "fault {n}");
        assert_eq!(engine.stats().blocks_owned, 0);
        if !failed {
            assert!(n > 100, "{n} operations in all");
            return;
        }
        engine.clear_prefix_cache();
    }
    unreachable!("a run has an end");
}

#[test]
fn c13_a_generate_call_that_fails_leaves_nothing_in_flight() {
    let expected = fresh(1);
    let device = FaultyDevice::new();
    let engine = awake_on(device.clone(), 1);
    for n in [1, 5, 20, 40, 80] {
        device.fail_nth(n);
        let bystander = engine.submit(requests().remove(1)).unwrap();
        let error = engine.generate(&requests()).expect_err("the device fails");
        assert!(matches!(error, GenerateError::Step(StepError::Device(_))), "{error}");
        let outputs = finish(&engine);
        assert_eq!(outputs.iter().map(|o| o.request).collect::<Vec<_>>(), [bystander], "fault {n}");
        assert_eq!(bits(&outputs)[0], expected[1]);
        let stats = engine.stats();
        assert_eq!((stats.live_requests, stats.blocks_owned), (0, 0));
        assert_serves(&engine, &expected);
    }
}

#[test]
fn c13_a_drain_whose_step_fails_is_refused_and_all_go_on() {
    let device = FaultyDevice::new();
    let engine = awake_on(device.clone(), 1);
    let ids: Vec<RequestId> = requests().into_iter().map(|r| engine.submit(r).unwrap()).collect();
    device.fail_nth(50);
    let drain =
        InFlight::Drain { deadline: std::time::Duration::MAX, then: crate::engine::OnDeadline::Abort };
    let memory = engine.memory();
    let (engine, error) = engine.sleep(SleepOptions::default().in_flight(drain)).unwrap_err().into_parts();
    assert!(matches!(error, SleepError::Drain(StepError::Device(_))), "{error}");
    assert_eq!((engine.memory(), engine.stats().live_requests), (memory, 2));
    let outputs = finish(&engine);
    assert_eq!(outputs.iter().map(|o| o.request).collect::<Vec<_>>(), ids);
    assert_eq!(bits(&outputs), fresh(1));
}

#[test]
fn a_refused_sleep_copies_no_weights() {
    let device = FaultyDevice::new();
    let engine = awake_on(device.clone(), 1);
    engine.submit(requests().remove(0)).unwrap();
    // The first copy or operation would panic.
    device.panic_nth(1);
    let (engine, error) = engine.sleep(SleepOptions::default()).unwrap_err().into_parts();
    assert!(matches!(error, SleepError::InFlight { live_requests: 1 }), "{error}");
    device.panic_nth(0);
    assert_eq!(bits(&finish(&engine))[0], fresh(1)[0]);
}

#[test]
fn a_session_survives_a_failed_turn_and_pins_nothing_it_lost() {
    let device = FaultyDevice::new();
    let engine = awake_on(device.clone(), 1);
    let turn = &requests()[1];
    for n in [1, 10, 30, 60] {
        let mut session = engine.session();
        session.generate(turn).unwrap();
        let history = session.tokens().to_vec();
        device.fail_nth(n);
        session.generate(turn).expect_err("the device fails");
        assert_eq!(session.tokens(), history, "fault {n}");
        let output = session.generate(turn).unwrap();
        let whole = crate::request::Request { prompt: output.prompt.clone(), ..turn.clone() };
        let single = awake_on(FaultyDevice::new(), 1).generate(&[whole]).unwrap();
        assert_eq!(bits(&[output]), bits(&single), "fault {n}");
        drop(session);
        assert_eq!(engine.stats().blocks_owned, 0, "fault {n}");
    }
}

#[test]
fn a_step_that_panics_poisons_the_engine_and_dropping_it_is_clean() {
    for n in [1, 12, 40, 90] {
        let device = FaultyDevice::new();
        let engine = awake_on(device.clone(), 1);
        engine.submit(requests().remove(0)).unwrap();
        device.panic_nth(n);
        catch_unwind(AssertUnwindSafe(|| {
            (0..100).for_each(|_| drop(engine.step()));
        }))
        .expect_err("the panic reaches the caller");
        device.panic_nth(0);
        for _ in 0..2 {
            assert!(matches!(engine.step(), Err(StepError::Poisoned)), "panic {n}");
        }
        let error = engine.generate(&requests()).expect_err("the engine is poisoned");
        assert!(matches!(error, GenerateError::Step(StepError::Poisoned)), "{error}");
        // It still answers, and ends what was in flight.
        assert_eq!(engine.stats().live_requests, 1);
        assert_eq!(engine.abort_all().outputs.len(), 1, "panic {n}");
        drop(engine);
        assert_eq!((Arc::strong_count(&device), device.budget().committed_bytes()), (1, 0), "panic {n}");
    }
}

/// What a panicked step could have spoilt does not outlive a sleep.
#[test]
fn a_sleep_leads_out_of_a_poisoned_engine() {
    for (policy, n) in [(InFlight::Abort, 12), (InFlight::Abort, 90), (InFlight::Retract, 40)] {
        let device = FaultyDevice::new();
        let engine = awake_on(device.clone(), 1);
        let submitted: Vec<_> = requests().into_iter().map(|r| engine.submit(r).unwrap()).collect();
        device.panic_nth(n);
        catch_unwind(AssertUnwindSafe(|| {
            (0..100).for_each(|_| drop(engine.step()));
        }))
        .expect_err("the panic reaches the caller");
        device.panic_nth(0);
        let mut asleep = engine.sleep(SleepOptions::default().in_flight(policy)).unwrap();
        let settled = asleep.take_settled();
        let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
        if policy == InFlight::Retract {
            assert_eq!(bits(&finish(&engine)), fresh(1));
        } else {
            assert_eq!(settled.len(), submitted.len(), "each is answered once");
        }
        assert_serves(&engine, &fresh(1));
    }
}

#[test]
fn without_host_memory_weights_are_not_parked_and_stay_where_they_are() {
    let device = FaultyDevice::new();
    let engine = awake_on(device.clone(), 1);
    let (memory, committed) = (engine.memory(), device.budget().committed_bytes());
    let needed = memory.weights_bytes;
    REFUSE_NEXT.set(true);
    let (engine, error) = engine.sleep(SleepOptions::default()).unwrap_err().into_parts();
    assert!(matches!(error, SleepError::Park { needed_bytes } if needed_bytes == needed), "{error}");
    assert_eq!((engine.memory(), device.budget().committed_bytes()), (memory, committed));
    assert_serves(&engine, &fresh(1));
    let loaded = engine.sleep(SleepOptions::default().resident()).unwrap().restore_weights().unwrap();
    let committed = device.budget().committed_bytes();
    REFUSE_NEXT.set(true);
    let (loaded, error) = loaded.park_weights().unwrap_err().into_parts();
    assert!(matches!(error, ParkError::NoHostMemory { needed_bytes } if needed_bytes == needed), "{error}");
    assert_eq!((loaded.memory().total_bytes(), device.budget().committed_bytes()), (needed, committed));
    loaded.verify().unwrap();
    let asleep = loaded.park_weights().expect("there is memory now");
    assert_serves(&asleep.restore_weights().unwrap().wake_up().unwrap(), &fresh(1));
}

#[test]
fn a_device_that_panics_in_a_transition_leaks_nothing() {
    for n in [1, 2, 9] {
        for kind in 0..4 {
            let device = FaultyDevice::new();
            let engine = loaded_on(device.clone(), 1).wake_up().unwrap();
            let options = SleepOptions::default();
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                device.panic_nth(if kind == 0 { 1 } else { 0 });
                match kind {
                    0 => drop(engine.sleep(options)),
                    1 => {
                        let asleep = engine.sleep(options).unwrap();
                        device.panic_nth(1);
                        drop(asleep.restore_weights());
                    }
                    2 => {
                        let asleep = engine.sleep(options.resident()).unwrap();
                        device.panic_nth(n);
                        drop(asleep.load_weights(Seeded::new(2)));
                    }
                    _ => {
                        let asleep = engine.sleep_discarding(options).unwrap();
                        device.panic_nth(n);
                        drop(asleep.load_weights(Seeded::new(2)));
                    }
                }
            }));
            outcome.expect_err("the panic reaches the caller");
            device.panic_nth(0);
            assert_eq!((Arc::strong_count(&device), device.budget().committed_bytes()), (1, 0));
        }
    }
}
