//! Failures on the way: the state after is known, the same again converges, and nothing leaks.

use dormouse::control::{
    AbortTarget, Controller, ErrorKind, Handle, Lifecycle, Operation, Payload, Reload, Report, Tags,
};
use dormouse::{Checkpoint, InFlight, LoadOptions, UpdateOptions};

use crate::faulty::{Fault, Faulty};
use crate::support::{
    Owned, Weights, all_of, assert_idle, assert_serves, awake_bytes, builder, discard, done, load, options,
    output, queueing, refused, request, run, sleep, spawn, spawn_with, update, wake, was_aborted, weights,
};

const FAULTS: [Fault; 8] = [
    Fault::Error,
    Fault::HalfThenError,
    Fault::Panic,
    Fault::HalfThenPanic,
    Fault::Short,
    Fault::Nothing,
    Fault::Long,
    Fault::Finish,
];

fn faulty(weights: &Weights, fault: Fault, at: usize) -> Payload {
    Payload::source(Faulty { inner: Owned(weights.0.clone()), fault, at, reads: 0 })
}

fn in_place(weights: Payload) -> Operation {
    Operation::UpdateWeights { weights, options: UpdateOptions::default().in_place() }
}

fn reload(weights: Payload) -> Operation {
    Operation::UpdateModelWeight { weights: Some(weights), options: LoadOptions::default() }
}

#[test]
fn c13_b48_a_source_that_fails_anywhere_leaves_what_was_there() {
    let (w0, w1) = (weights(1), weights(2));
    let none = InFlight::Refuse;
    type Way = (Vec<Operation>, fn(Payload) -> Operation);
    let ways: Vec<Way> = vec![
        (vec![sleep(Tags::KV_CACHE, none)], update),
        (vec![sleep(Tags::KV_CACHE, none)], load),
        (vec![sleep(Tags::KV_CACHE, none)], reload),
        (vec![sleep(Tags::ALL, none)], load),
        (vec![sleep(Tags::ALL, none)], reload),
        (vec![discard(none)], load),
        (vec![discard(none)], reload),
        (vec![discard(none), wake(Tags::WEIGHTS)], update),
        (vec![discard(none), wake(Tags::WEIGHTS)], in_place),
    ];
    for (way, bring) in ways {
        let handle = spawn(&w0);
        for operation in way {
            done(&handle, operation);
        }
        let before = handle.status();
        for fault in FAULTS {
            for at in [0, 7, w1.0.len() - 1] {
                let error = refused(&handle, bring(faulty(&w1, fault, at)));
                let kind = error.kind();
                assert!(
                    matches!(kind, ErrorKind::InvalidWeights | ErrorKind::Internal),
                    "{fault:?}: {error}"
                );
                let after = handle.status();
                assert_eq!((&after.state, after.memory), (&before.state, before.memory), "{fault:?} at {at}");
            }
        }
        // What is there is the old weights, if anything is.
        if matches!(before.state.lifecycle, Lifecycle::WeightsLoaded | Lifecycle::SleepingKept) {
            done(&handle, wake(Tags::ALL));
            assert_serves(&handle, &w0, &request(1));
            done(&handle, sleep(Tags::ALL, none));
        }
        done(&handle, load(all_of(&w1)));
        done(&handle, wake(Tags::KV_CACHE));
        assert_serves(&handle, &w1, &request(1));
    }
}

#[test]
fn c13_c18_weights_torn_by_a_fault_are_refused_until_a_whole_set_has_come() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn(&w0);
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    let before = handle.status();
    for fault in FAULTS {
        refused(&handle, in_place(faulty(&w1, fault, 7)));
        let state = handle.state();
        assert_eq!((state.lifecycle, &state.version), (Lifecycle::WeightsTorn, &before.state.version));
        for operation in [
            wake(Tags::ALL),
            wake(Tags::KV_CACHE),
            wake(Tags::WEIGHTS),
            sleep(Tags::WEIGHTS, InFlight::Refuse),
            Operation::Verify,
            Operation::ReadTensor { name: crate::support::Q.into() },
        ] {
            let error = refused(&handle, operation);
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
            assert!(error.missing_step().is_some(), "{error}");
        }
        assert_eq!(handle.status().memory, before.memory);
    }
    done(&handle, in_place(all_of(&w1)));
    done(&handle, wake(Tags::KV_CACHE));
    assert_serves(&handle, &w1, &request(1));
    // Or a sleep that drops them.
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    refused(&handle, in_place(faulty(&w0, Fault::Panic, 1)));
    done(&handle, discard(InFlight::Refuse));
    assert_eq!(handle.status().memory.total_bytes(), 0);
    done(&handle, reload(all_of(&w0)));
    assert_serves(&handle, &w0, &request(1));
}

/// A sleeping engine that may take so much memory.
fn limited(bytes: u64) -> Handle {
    Controller::with(queueing()).drive(builder().memory_limit_bytes(bytes).build_asleep().unwrap())
}

#[test]
fn c13_b15_a_wake_without_memory_leaves_the_weights_loaded_and_can_be_tried_again() {
    let w0 = weights(1);
    let bytes = awake_bytes(&w0);
    let handle = limited(bytes.weights_bytes + 4096);
    let queued = handle.submit(request(1)).unwrap();
    let out_of_memory = |operation, state, phases: usize| {
        let failed = run(&handle, operation);
        assert_eq!((failed.state_after.lifecycle, failed.report.len()), (state, phases), "{failed:?}");
        let kind = failed.outcome.unwrap_err().kind();
        assert_eq!((kind, kind.is_retryable()), (ErrorKind::OutOfMemory, true));
        let memory = handle.status().memory;
        assert_eq!((memory.weights_bytes, memory.kv_cache_bytes), (bytes.weights_bytes, 0));
    };
    done(&handle, load(all_of(&w0)));
    for _ in 0..3 {
        out_of_memory(wake(Tags::KV_CACHE), Lifecycle::WeightsLoaded, 0);
        out_of_memory(wake(Tags::ALL), Lifecycle::WeightsLoaded, 0);
    }
    // What was done before the failure is in the report.
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
    out_of_memory(wake(Tags::ALL), Lifecycle::WeightsLoaded, 1);
    done(&handle, discard(InFlight::Refuse));
    let failed = run(&handle, reload(all_of(&w0)));
    assert!(matches!(failed.report[..], [Report::Load(_)]), "{failed:?}");
    assert_eq!(failed.state_after.lifecycle, Lifecycle::WeightsLoaded);
    // A staged update takes the weights twice; one in place does not.
    out_of_memory(update(all_of(&weights(2))), Lifecycle::WeightsLoaded, 0);
    done(&handle, in_place(all_of(&weights(2))));
    assert_eq!(handle.status().requests_aside, 1);
    assert_eq!(handle.abort(AbortTarget::All), [queued.id()]);
    assert!(was_aborted(&output(queued)));
    assert_idle(&handle);
}

#[test]
fn c13_b15_a_load_without_memory_takes_none() {
    let w0 = weights(1);
    let bytes = awake_bytes(&w0);
    let handle = limited(bytes.weights_bytes / 2);
    done(&handle, wake(Tags::WEIGHTS));
    for operation in [load, update, reload] {
        let error = refused(&handle, operation(all_of(&w0)));
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        assert_eq!(handle.status().memory.total_bytes(), 0);
        assert_eq!(handle.state().lifecycle, Lifecycle::AwaitingWeights);
    }
    let begin = Operation::Begin { options: UpdateOptions::default(), idle: None };
    assert_eq!(refused(&handle, begin).kind(), ErrorKind::OutOfMemory);
    assert_eq!(handle.state().transaction, None);
    // What an awake engine has is enough for every cycle.
    let handle = limited(bytes.total_bytes() + 3 * 4096);
    done(&handle, load(all_of(&w0)));
    for seed in [2, 3] {
        done(&handle, wake(Tags::KV_CACHE));
        assert_serves(&handle, &weights(seed - 1), &request(1));
        done(&handle, discard(InFlight::Refuse));
        done(&handle, load(all_of(&weights(seed))));
    }
}

#[test]
fn b19_a_source_that_is_not_there_or_panics_wipes_nothing() {
    let w0 = weights(1);
    let nowhere = || Payload::source(Checkpoint::at("/nonexistent/dormouse"));
    let reloads = [
        (None, ErrorKind::InvalidArgument),
        (Some(Reload::checkpoint("/nonexistent/dormouse")), ErrorKind::NotFound),
        (Some(Reload::new(|| panic!("a closure that panics"))), ErrorKind::Internal),
    ];
    for (reload_from, kind) in reloads {
        let mut options = options();
        options.reload = reload_from;
        let handle = spawn_with(options, &w0);
        done(&handle, sleep(Tags::ALL, InFlight::Refuse));
        let before = handle.status();
        let again = Operation::UpdateModelWeight { weights: None, options: LoadOptions::default() };
        assert_eq!(refused(&handle, again).kind(), kind);
        let error = refused(&handle, load(nowhere()));
        assert!(error.kind() == ErrorKind::NotFound && error.to_string().contains("/nonexistent/dormouse"));
        assert_eq!((handle.state(), handle.status().memory), (before.state, before.memory));
        done(&handle, wake(Tags::ALL));
        assert_serves(&handle, &w0, &request(1));
    }
}
