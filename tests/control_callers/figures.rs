//! Counters and gauges: they never go down, and say who did what.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dormouse::control::{
    AbortTarget, ControlRequest, Controller, Generation, Handle, Metrics, Operation, PauseDeadline,
    PauseMode, Report, Tags, WhileNotServing,
};
use dormouse::{InFlight, OnDeadline, SleepOptions};

use crate::common::awake;
use crate::support::{
    Weights, all_of, assert_idle, assert_serves, block_on, buffered, builder, discard, done, ended_by_itself,
    endless, eventually, load, output, request, rest, settled, sleep, spawn, spawn_long, spawn_with, tokens,
    wake, was_aborted, weights,
};

fn counters(metrics: &Metrics) -> Vec<u64> {
    let engine = &metrics.engine;
    let operations = metrics.operations.values().sum();
    vec![
        engine.steps,
        engine.computed_tokens,
        engine.sampled_tokens,
        engine.prompt_tokens,
        engine.cached_tokens,
        engine.preemptions,
        engine.finished,
        engine.aborted,
        metrics.accepted,
        metrics.finished,
        metrics.aborted,
        metrics.failed,
        metrics.received_bytes,
        operations,
        metrics.phases.values().map(|phase| phase.count).sum(),
    ]
}

/// Looks at the counters all the time until it is told to stop; returns how often one went down.
fn watch(handle: Handle, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<usize> {
    std::thread::spawn(move || {
        let (mut down, mut last) = (0, counters(&handle.metrics()));
        while !stop.load(Ordering::Relaxed) {
            let now = counters(&handle.metrics());
            down += usize::from(now.iter().zip(&last).any(|(now, last)| now < last));
            last = now;
            std::thread::yield_now();
        }
        down
    })
}

#[test]
fn b73_counters_never_go_down_over_sleeps_resets_and_the_stop() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    let stop = Arc::new(AtomicBool::new(false));
    let watching = watch(handle.clone(), Arc::clone(&stop));
    for round in 0..30 {
        let generations: Vec<_> = (0..3).map(|seed| handle.submit(request(round + seed)).unwrap()).collect();
        let resets: Vec<_> =
            (0..4).map(|_| handle.control(Operation::ResetPrefixCache { with_requests: true })).collect();
        if round % 3 == 0 {
            done(&handle, sleep(Tags::ALL, [InFlight::Retract, InFlight::Abort][round as usize % 2]));
            done(&handle, wake(Tags::ALL));
        }
        resets.into_iter().for_each(|ticket| assert!(block_on(ticket).is_ok()));
        generations.into_iter().for_each(|generation| drop(output(generation)));
        // What the last step left is what there is.
        assert_idle(&handle);
        if round % 10 == 9 {
            done(&handle, discard(InFlight::Refuse));
            done(&handle, load(all_of(&w0)));
            done(&handle, wake(Tags::KV_CACHE));
        }
    }
    let before = handle.metrics();
    drop(handle.stop().unwrap());
    stop.store(true, Ordering::Relaxed);
    assert_eq!(watching.join().unwrap(), 0);
    let after = handle.metrics();
    let pairs = counters(&before).into_iter().zip(counters(&after));
    assert!(pairs.clone().all(|(before, after)| before <= after), "{before:?} {after:?}");
    assert!(after.engine.steps > 0 && after.engine.sampled_tokens > 0);
    assert_eq!(handle.status().engine.steps, 0, "nothing is awake");
}

#[test]
fn b73_what_an_engine_carried_before_is_not_counted() {
    let w0 = weights(1);
    let engine = awake(builder(), &w0);
    engine.submit(request(1).max_new_tokens(100)).unwrap();
    engine.step().unwrap();
    let asleep = engine.sleep(SleepOptions::default().in_flight(InFlight::Retract)).unwrap();
    let handle = Controller::spawn(asleep.restore_weights().unwrap());
    done(&handle, wake(Tags::KV_CACHE));
    let status = handle.status();
    assert_eq!((status.live_requests, status.engine.live_requests), (0, 0));
    assert_serves(&handle, &w0, &request(2));
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
}

/// Two requests that wait for their readers.
fn two_aside(weights: &Weights) -> (Handle, [Generation; 2]) {
    let handle = spawn_with(buffered(4), weights);
    let generations =
        [1, 2].map(|seed| handle.submit(request(seed).max_new_tokens(60).stream(true)).unwrap());
    eventually(|| handle.status().requests_aside == 2);
    (handle, generations)
}

#[test]
fn c23_the_report_of_a_refused_drain_says_who_drained() {
    let w0 = weights(1);
    let deadline = Duration::from_secs(1);
    let drains = [
        ControlRequest::new(sleep(Tags::ALL, InFlight::Drain { deadline, then: OnDeadline::Refuse })),
        ControlRequest::new(Operation::Pause(PauseMode::Wait { on_deadline: PauseDeadline::Undo }))
            .deadline(deadline),
    ];
    for drain in drains {
        let (handle, [read, unread]) = two_aside(&w0);
        let ticket = handle.control(drain);
        eventually(|| !handle.state().admitting);
        let id = read.id();
        assert!(ended_by_itself(&rest(vec![], read)));
        let response = block_on(ticket);
        assert!(response.outcome.is_err(), "one has not ended");
        let report = settled(&response);
        assert_eq!((report.drained, report.aborted, report.retracted), (vec![id], vec![], vec![]));
        assert!(handle.state().admitting);
        assert!(ended_by_itself(&rest(vec![], unread)));
        assert_idle(&handle);
    }
}

#[test]
fn c04_the_report_of_a_wake_says_who_goes_on() {
    let w0 = weights(1);
    let mut options = buffered(100_000);
    options.while_not_serving = WhileNotServing::Queue;
    let handle = spawn_long(options, &w0);
    let mut begun = [1, 2].map(|seed| handle.submit(endless(seed)).unwrap());
    let read: Vec<_> = begun.iter_mut().map(|generation| tokens(generation, 2)).collect();
    done(&handle, sleep(Tags::ALL, InFlight::Retract));
    // It goes nowhere that it has not begun.
    let queued = handle.submit(request(3)).unwrap();
    let woken = done(&handle, wake(Tags::ALL));
    let resumed = woken.report.iter().find_map(|report| match report {
        Report::Wake(wake) => Some(wake.resumed.clone()),
        _ => None,
    });
    let ids: Vec<_> = begun.iter().map(Generation::id).collect();
    assert_eq!(resumed.unwrap(), ids);
    assert!(ended_by_itself(&output(queued)));
    assert_eq!(handle.abort(AbortTarget::All), ids);
    for (read, generation) in read.into_iter().zip(begun) {
        assert!(was_aborted(&rest(read, generation)));
    }
    assert_idle(&handle);
}
