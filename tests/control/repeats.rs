//! Operations again, and tags in every order: a repeat says so, and changes nothing.

use dormouse::InFlight;
use dormouse::control::{ControlError, ErrorKind, Lifecycle, Operation, Report, TagError, Tags};

use crate::support::{
    all_of, already, ask, assert_idle, assert_serves, bits, discard, done, expected, load, refused, request,
    run, sleep, spawn, wake, weights,
};

const NONE: InFlight = InFlight::Refuse;

#[test]
fn c11_b16_sleeps_and_wakes_again_say_already_and_do_nothing() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    let awake = handle.status().memory;
    done(&handle, sleep(Tags::ALL, NONE));
    let asleep = handle.status();
    assert_eq!(asleep.memory.total_bytes(), asleep.memory.parked_bytes);
    for tags in [Tags::ALL, Tags::WEIGHTS, Tags::KV_CACHE, Tags::ALL] {
        let again = already(&handle, sleep(tags, NONE));
        assert!(again.report.is_empty());
        assert_eq!(handle.status().state, asleep.state);
        assert_eq!(handle.status().memory, asleep.memory);
    }
    let woken = done(&handle, wake(Tags::ALL));
    assert!(matches!(woken.report[..], [Report::Load(_), Report::Wake(_)]), "{woken:?}");
    assert_eq!(handle.status().memory, awake);
    for tags in [Tags::ALL, Tags::WEIGHTS, Tags::KV_CACHE] {
        assert!(already(&handle, wake(tags)).report.is_empty());
    }
    done(&handle, discard(NONE));
    assert_eq!(handle.status().memory.total_bytes(), 0);
    already(&handle, discard(NONE));
    already(&handle, sleep(Tags::ALL, NONE));
    done(&handle, load(all_of(&w0)));
    done(&handle, wake(Tags::ALL));
    assert_eq!(handle.status().memory, awake);
    assert_serves(&handle, &w0, &request(1));
    assert_idle(&handle);
}

#[test]
fn b16_dropped_asleep_or_half_awake_it_goes_quietly() {
    let w0 = weights(1);
    for steps in 0..4 {
        let handle = spawn(&w0);
        let way = [sleep(Tags::ALL, NONE), wake(Tags::WEIGHTS), wake(Tags::KV_CACHE), discard(NONE)];
        way.into_iter().take(steps).for_each(|operation| drop(done(&handle, operation)));
        drop(handle);
    }
}

#[test]
fn c11_b17_a_wake_of_what_is_awake_wipes_nothing() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    done(&handle, sleep(Tags::ALL, NONE));
    done(&handle, wake(Tags::ALL));
    assert_serves(&handle, &w0, &request(1));
    let before = handle.status();
    for tags in [Tags::ALL, Tags::KV_CACHE, Tags::WEIGHTS] {
        already(&handle, wake(tags));
    }
    let after = handle.status();
    assert_eq!((after.engine, after.memory), (before.engine, before.memory));
    let again = ask(&handle, &request(1));
    assert!(again.completions[0].cached_tokens > 0, "the cache is still there");
    assert_eq!(bits(&again), expected(&w0, &request(1)));
}

#[test]
fn c11_b21_each_subset_of_tags_in_each_order_does_its_own_part() {
    let w0 = weights(1);
    let subsets = [Tags::WEIGHTS, Tags::KV_CACHE, Tags::ALL];
    for [a, b, c] in orders(subsets) {
        for [x, y, z] in orders(subsets) {
            let handle = spawn(&w0);
            let mut outcomes = Vec::new();
            for tags in [a, b, c, a, b, c] {
                outcomes.push(run(&handle, sleep(tags, NONE)).is_ok());
            }
            let state = handle.state();
            assert_eq!(state.lifecycle, Lifecycle::SleepingKept, "{a}; {b}; {c}");
            // Only weights before the KV cache are refused.
            assert_eq!(outcomes[0], a.kv_cache());
            assert!(outcomes[3..].iter().all(|ok| *ok), "{outcomes:?}");
            for tags in [x, y, z] {
                let before = handle.state();
                let woken = run(&handle, wake(tags));
                let missing = woken.outcome.is_err();
                let weights = before.lifecycle != Lifecycle::SleepingKept || tags.weights();
                assert_eq!(missing, !weights, "{tags} when {before}");
                assert!(!missing || handle.state() == before);
            }
            if handle.state().lifecycle != Lifecycle::Awake {
                done(&handle, wake(Tags::ALL));
            }
            assert_serves(&handle, &w0, &request(1));
        }
    }
}

fn orders([a, b, c]: [Tags; 3]) -> [[Tags; 3]; 6] {
    [[a, b, c], [a, c, b], [b, a, c], [b, c, a], [c, a, b], [c, b, a]]
}

#[test]
fn c12_b21_b22_tags_that_mean_nothing_are_refused_before_anything_is_done() {
    let read = |names: &[&str]| Tags::from_names(names).map_err(ControlError::from);
    for names in [&["draft"][..], &[], &["weights", "kv"], &["kv_cache", "weights", ""], &["WEIGHTS"]] {
        let error = read(names).unwrap_err();
        assert_eq!((error.kind(), error.missing_step()), (ErrorKind::InvalidArgument, None));
        assert!(!error.kind().is_retryable());
        let unknown = names.iter().find(|name| !["weights", "kv_cache"].contains(name));
        match (&error, unknown) {
            (ControlError::Tags(TagError::Unknown { tag }), Some(name)) => assert_eq!(tag, name),
            (ControlError::Tags(TagError::Empty), None) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(read(&["kv_cache", "kv_cache"]).unwrap(), Tags::KV_CACHE);
    let handle = spawn(&weights(1));
    let before = handle.state();
    let error = refused(&handle, Operation::ReadTensor { name: "x".repeat(1 << 20) });
    assert!(error.kind() == ErrorKind::NotFound && error.to_string().len() < 1000);
    assert_eq!(handle.state(), before);
}
