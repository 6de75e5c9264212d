//! Deadlines, and what can be asked for while something slow is under way.

use std::time::{Duration, Instant};

use dormouse::control::{
    AbortTarget, ControlError, ControlRequest, ErrorKind, Handle, Lifecycle, Operation, Outcome,
    PauseDeadline, PauseMode, Payload, Report, SubmitError, Tags,
};
use dormouse::{InFlight, LoadOptions, OnDeadline, UpdateOptions};

use crate::support::{
    Gate, Weights, all_of, assert_idle, assert_serves, bits, block_on, buffered, discard, done, eventually,
    expected, gated, load, output, queueing, refused, request, rest, sleep, spawn, spawn_with, tokens,
    update, wake, was_aborted, weights,
};

const SHORT: Duration = Duration::from_millis(20);

type Slow = fn(Payload) -> Operation;

fn in_place(weights: Payload) -> Operation {
    Operation::UpdateWeights { weights, options: UpdateOptions::default().in_place() }
}

fn reload(weights: Payload) -> Operation {
    Operation::UpdateModelWeight { weights: Some(weights), options: LoadOptions::default() }
}

/// Ways to bring weights that may be slow, with the way to the state they begin in.
fn slow_ones() -> Vec<(Vec<Operation>, Slow)> {
    let none = InFlight::Refuse;
    let loaded = || vec![sleep(Tags::KV_CACHE, none)];
    let awaiting = || vec![discard(none), wake(Tags::WEIGHTS)];
    vec![
        (loaded(), update),
        (loaded(), in_place),
        (loaded(), load),
        (loaded(), reload),
        (awaiting(), update),
        (awaiting(), reload),
        (vec![sleep(Tags::ALL, none)], load),
        (vec![discard(none)], load),
        (vec![discard(none)], reload),
    ]
}

#[test]
fn c23_weights_that_come_too_late_are_not_taken() {
    let (w0, w1) = (weights(1), weights(2));
    for (way, slow) in slow_ones() {
        let handle = spawn(&w0);
        for operation in way {
            done(&handle, operation);
        }
        let before = handle.status();
        let (payload, gate) = gated(&w1);
        let ticket = handle.control(ControlRequest::new(slow(payload)).deadline(SHORT));
        gate.reached();
        std::thread::sleep(SHORT);
        gate.open();
        let response = block_on(ticket);
        let Err(ControlError::Deadline { waited, .. }) = response.outcome else { panic!("{response:?}") };
        assert!(waited >= SHORT);
        let after = handle.status();
        assert_eq!(response.state_after, after.state);
        assert_eq!((after.busy, after.control_queue), (None, 0), "nothing goes on");
        if slow as usize == in_place as Slow as usize {
            assert_eq!(after.state.lifecycle, Lifecycle::WeightsTorn);
        } else {
            assert_eq!((after.state, after.memory), (before.state, before.memory));
        }
        // The same again, with time.
        let again = load(all_of(&w1));
        done(&handle, ControlRequest::new(again).deadline(Duration::from_secs(60)));
        done(&handle, wake(Tags::KV_CACHE));
        assert_serves(&handle, &w1, &request(1));
    }
}

/// An update that waits in its source, and one request that is aside.
fn busy(handle: &Handle, weights: &Weights) -> (dormouse::control::Ticket, Gate) {
    let (payload, gate) = gated(weights);
    let ticket = handle.control(ControlRequest::new(update(payload)).id("slow"));
    gate.reached();
    (ticket, gate)
}

#[test]
fn c23_what_waits_too_long_for_its_turn_is_not_begun() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn(&w0);
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    let (slow, gate) = busy(&handle, &w1);
    let late: Vec<_> = [
        sleep(Tags::WEIGHTS, InFlight::Refuse),
        wake(Tags::KV_CACHE),
        Operation::Pause(PauseMode::Keep),
        Operation::ClearLoadWeight,
        Operation::Begin { options: UpdateOptions::default(), idle: None },
        load(all_of(&w0)),
    ]
    .into_iter()
    .map(|operation| handle.control(ControlRequest::new(operation).deadline(SHORT)))
    .collect();
    let in_time = handle.control(ControlRequest::new(Operation::Verify).deadline(Duration::from_secs(60)));
    // They are answered when their time is over, not when the slow one is.
    for ticket in late {
        let response = block_on(ticket);
        assert_eq!(response.state_before, response.state_after);
        let error = response.outcome.unwrap_err();
        assert!(error.to_string().contains("turn"), "{error}");
        assert_eq!((error.kind(), error.kind().is_retryable()), (ErrorKind::Deadline, true));
    }
    assert_eq!(handle.status().control_queue, 1);
    gate.open();
    assert!(block_on(slow).is_ok());
    assert!(block_on(in_time).is_ok());
    let state = handle.state();
    assert!(state.lifecycle == Lifecycle::WeightsLoaded && !state.paused && state.transaction.is_none());
    done(&handle, wake(Tags::KV_CACHE));
    assert_serves(&handle, &w1, &request(1));
}

#[test]
fn c23_a_drain_whose_time_is_over_ends_as_the_policy_says() {
    let w0 = weights(1);
    let long = Duration::from_secs(60);
    for then in [OnDeadline::Refuse, OnDeadline::Abort, OnDeadline::Retract] {
        // The policy's own deadline, or the request's.
        for (own, deadline) in [(SHORT, long), (long, SHORT)] {
            let handle = spawn_with(buffered(4), &w0);
            let asked = request(1).max_new_tokens(60).stream(true);
            let mut slow = handle.submit(asked.clone()).unwrap();
            let begun = tokens(&mut slow, 1);
            let begin = Instant::now();
            let policy = InFlight::Drain { deadline: own, then };
            let request = ControlRequest::new(sleep(Tags::ALL, policy)).deadline(deadline);
            let slept = block_on(handle.control(request));
            assert!(begin.elapsed() >= SHORT);
            let state = handle.state();
            assert_eq!(slept.state_after, state);
            if then == OnDeadline::Refuse {
                assert!(matches!(slept.outcome, Err(ControlError::Deadline { .. })), "{slept:?}");
                assert!(state.admitting && state.lifecycle == Lifecycle::Awake);
                assert_serves(&handle, &w0, &crate::support::request(2));
            } else {
                assert!(matches!(slept.outcome, Ok(Outcome::Done)));
                assert!(!state.admitting && state.lifecycle == Lifecycle::SleepingKept);
                done(&handle, wake(Tags::ALL));
            }
            let output = rest(begun, slow);
            assert_eq!(was_aborted(&output), then == OnDeadline::Abort);
            assert!(was_aborted(&output) || bits(&output) == expected(&w0, &asked));
            assert_idle(&handle);
        }
    }
}

#[test]
fn c23_a_deadline_of_nothing_begins_nothing() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    let before = handle.state();
    for operation in [
        sleep(Tags::ALL, InFlight::Refuse),
        Operation::Pause(PauseMode::Wait { on_deadline: PauseDeadline::Abort }),
        Operation::ClearLoadWeight,
    ] {
        let error = refused(&handle, ControlRequest::new(operation).deadline(Duration::ZERO));
        assert_eq!(error.kind(), ErrorKind::Deadline);
    }
    assert_eq!(handle.state(), before);
    // One beyond all clocks is none.
    done(&handle, ControlRequest::new(sleep(Tags::ALL, InFlight::Refuse)).deadline(Duration::MAX));
    done(&handle, wake(Tags::ALL));
    assert_serves(&handle, &w0, &request(1));
}

#[test]
fn c25_while_an_update_is_slow_all_that_does_not_want_the_engine_is_answered() {
    let (w0, w1) = (weights(1), weights(2));
    for queues in [false, true] {
        let mut options = if queues { queueing() } else { buffered(64) };
        options.stream_buffer = 64;
        let handle = spawn_with(options, &w0);
        let long = |seed| request(seed).max_new_tokens(150).stream(true);
        let mut retracted: Vec<_> = (0..3).map(|seed| handle.submit(long(seed)).unwrap()).collect();
        let begun: Vec<_> = retracted.iter_mut().map(|generation| tokens(generation, 1)).collect();
        done(&handle, sleep(Tags::KV_CACHE, InFlight::Retract));
        let (slow, gate) = busy(&handle, &w1);
        let waiting = handle.control(wake(Tags::KV_CACHE));
        let begin = Instant::now();

        let status = handle.status();
        let busy = status.busy.as_ref().unwrap();
        assert_eq!((busy.id.as_str(), busy.operation), ("slow", "update_weights"));
        assert_eq!((status.control_queue, status.live_requests, status.requests_aside), (1, 3, 3));
        let asked = block_on(handle.control(Operation::Status));
        assert!(matches!(&asked.report[..], [Report::Status(again)] if **again == status));
        let text = handle.metrics().render_prometheus();
        assert!(text.contains("dormouse_control_queue 1\n"), "{text}");
        match handle.submit(request(9)) {
            Ok(generation) => assert!(queues && was_aborted(&aborted(&handle, generation))),
            Err(SubmitError::NotServing { .. }) => assert!(!queues),
            Err(error) => panic!("{error}"),
        }
        let third = AbortTarget::These { requests: vec![retracted[2].id()], names: vec![] };
        assert_eq!(handle.abort(third), [retracted[2].id()]);
        drop(retracted.remove(1));
        assert_eq!(handle.metrics().live_requests, 1);

        assert!(begin.elapsed() < Duration::from_secs(5));
        assert_eq!(handle.status().busy, status.busy, "it is still under way");
        gate.open();
        assert!(block_on(slow).is_ok() && block_on(waiting).is_ok());
        let mut begun = begun.into_iter();
        let kept = rest(begun.next().unwrap(), retracted.remove(0));
        assert!(!was_aborted(&kept));
        assert!(was_aborted(&rest(begun.nth(1).unwrap(), retracted.remove(0))));
        assert_serves(&handle, &w1, &request(1));
        assert_idle(&handle);
    }
}

fn aborted(handle: &Handle, generation: dormouse::control::Generation) -> dormouse::RequestOutput {
    let target = AbortTarget::These { requests: vec![generation.id()], names: vec![] };
    assert_eq!(handle.abort(target), [generation.id()]);
    output(generation)
}

#[test]
fn c25_while_a_sleep_drains_or_a_pause_waits_aborts_let_it_end() {
    let w0 = weights(1);
    let long = Duration::from_secs(60);
    let drain = sleep(Tags::ALL, InFlight::Drain { deadline: long, then: OnDeadline::Refuse });
    let wait = Operation::Pause(PauseMode::Wait { on_deadline: PauseDeadline::Undo });
    for operation in [drain, wait] {
        let handle = spawn_with(buffered(4), &w0);
        let asked = request(1).max_new_tokens(60).stream(true);
        let mut slow: Vec<_> = (0..3).map(|_| handle.submit(asked.clone()).unwrap()).collect();
        let begun = tokens(&mut slow[0], 1);
        let ticket = handle.control(operation);
        eventually(|| handle.status().busy.is_some() && !handle.state().admitting);
        drop(slow.pop());
        let middle = slow.pop().unwrap();
        // The third may be on its way out.
        let ended = handle.abort(AbortTarget::All);
        assert!([slow[0].id(), middle.id()].iter().all(|id| ended.contains(id)));
        assert!(was_aborted(&rest(vec![], middle)) && was_aborted(&rest(begun, slow.remove(0))));
        let response = block_on(ticket);
        assert!(response.is_ok());
        assert!(crate::support::settled(&response).drained.is_empty(), "none ran to its end");
        assert_idle(&handle);
    }
}
