//! Waiting with a bound, and being answered while something long goes on.

use std::collections::BTreeSet;
use std::time::Duration;

use dormouse::control::{
    ControlRequest, Controller, ErrorKind, GenerationEvent, Operation, PauseDeadline, PauseMode, SubmitError,
    Tags, TimedOut,
};
use dormouse::{InFlight, Request};

use crate::support::{
    BOUND, all_of, assert_idle, assert_serves, bits, block_on, buffered, done, ended_by_itself, eventually,
    expected, gated, load, long_builder, queueing, request, rest, sleep, spawn, spawn_with, wake, weights,
};

const SHORT: Duration = Duration::from_millis(5);

#[test]
fn events_that_are_late_are_not_lost() {
    let w0 = weights(1);
    let handle = spawn_with(queueing(), &w0);
    done(&handle, Operation::Pause(PauseMode::Keep));
    let mut generation = handle.submit(request(1).stream(true)).unwrap();
    for timeout in [Duration::ZERO, SHORT] {
        assert!(matches!(generation.next_event_timeout(timeout), Err(TimedOut)));
    }
    done(&handle, Operation::Resume);
    let mut tokens = Vec::new();
    let output = loop {
        match generation.next_event_timeout(BOUND) {
            Ok(Some(Ok(GenerationEvent::Token(token)))) => tokens.push(token.token),
            Ok(Some(Ok(GenerationEvent::Done(output)))) => break output,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(tokens, output.completions[0].tokens);
    assert_eq!(bits(&output), expected(&w0, &request(1)));
    for timeout in [Duration::ZERO, SHORT, Duration::MAX] {
        let event = generation.next_event_timeout(timeout);
        assert!(matches!(event, Ok(None)), "the output is the last event");
    }
    let mut other = handle.submit(request(2)).unwrap();
    assert!(matches!(other.next_event_timeout(Duration::MAX), Ok(Some(Ok(GenerationEvent::Done(_))))));
}

#[test]
fn a_ticket_that_is_waited_for_too_shortly_is_given_back() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
    let (payload, gate) = gated(&w0);
    let mut ticket = handle.control(load(payload));
    gate.reached();
    for timeout in [Duration::ZERO, SHORT] {
        ticket = ticket.wait_timeout(timeout).unwrap_err();
    }
    gate.open();
    assert!(ticket.wait_timeout(BOUND).unwrap().is_ok());
    assert!(handle.control(wake(Tags::KV_CACHE)).wait_timeout(Duration::MAX).unwrap().is_ok());
    assert_serves(&handle, &w0, &request(1));
}

#[test]
fn c23_a_queued_request_is_answered_when_its_deadline_passes_whatever_it_waits_for() {
    let w0 = weights(1);
    let handle = spawn_with(buffered(4), &w0);
    let late = || ControlRequest::new(Operation::Verify).deadline(SHORT);
    let is_late = |ticket| {
        let error = block_on::<dormouse::control::Ticket>(ticket).outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Deadline, "{error}");
    };
    // A drain, with steps and without.
    let slow = handle.submit(request(1).max_new_tokens(60).stream(true)).unwrap();
    let wait = PauseMode::Wait { on_deadline: PauseDeadline::Undo };
    let pausing = handle.control(Operation::Pause(wait));
    is_late(handle.control(late()));
    eventually(|| handle.status().requests_aside == 1);
    is_late(handle.control(late()));
    assert_eq!(handle.status().busy.map(|busy| busy.operation), Some("pause"), "it still waits");
    assert!(ended_by_itself(&rest(vec![], slow)));
    assert!(block_on(pausing).is_ok());
    done(&handle, Operation::Resume);
    // A load, asleep.
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
    let (payload, gate) = gated(&w0);
    let loading = handle.control(load(payload));
    gate.reached();
    is_late(handle.control(late()));
    gate.open();
    assert!(block_on(loading).is_ok());
    done(&handle, wake(Tags::KV_CACHE));
    assert_idle(&handle);
    assert_serves(&handle, &w0, &request(1));
}

#[test]
fn c25_others_get_their_turn_while_many_requests_are_started() {
    const MANY: u32 = 300;
    let w0 = weights(1);
    let handle = Controller::with(queueing()).drive(long_builder().build_asleep().unwrap());
    done(&handle, load(all_of(&w0)));
    // Long to start, long to run.
    let asked = |seed| {
        let prompt: Vec<_> = (0..7000).map(|at| 1 + (at * 7 + seed) % 63).collect();
        let request = Request::new(prompt).samples(64).max_new_tokens(1000);
        request.repetition_penalty(1.1).frequency_penalty(0.5)
    };
    let generations: Vec<_> = (0..MANY).map(|seed| handle.submit(asked(seed)).unwrap()).collect();
    let ticket = handle.control(wake(Tags::KV_CACHE));
    let mut seen = BTreeSet::new();
    eventually(|| {
        let aside = handle.status().requests_aside;
        seen.insert(aside);
        aside == 0
    });
    assert!(seen.len() > 3, "it looked between starts: {seen:?}");
    assert!(block_on(ticket).is_ok());
    drop(generations);
    eventually(|| handle.metrics().live_requests == 0);
    assert_idle(&handle);
}

#[test]
fn a_stopped_controller_is_nothing_to_retry() {
    let handle = spawn(&weights(1));
    drop(handle.stop().unwrap());
    let error = handle.submit(request(1)).unwrap_err();
    assert!(matches!(error, SubmitError::Stopped) && !error.kind().is_retryable());
    let error = handle.stop().unwrap_err();
    assert_eq!((error.kind(), error.kind().is_retryable()), (ErrorKind::Stopped, false));
}
