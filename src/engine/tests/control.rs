//! Controllers of engines whose steps fail: what is in flight fails with what it has, and the controller
//! serves on, or says what leads out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::faulty::FaultyDevice;
use super::{Seeded, awake_on, bits, cpu, fresh, requests};
use crate::completion::RequestOutput;
use crate::control::{
    AbortTarget, ControlError, ControlRequest, Controller, ControllerOptions, ErrorKind, Generation,
    GenerationError, GenerationEvent, GenerationToken, Handle, Lifecycle, Operation, Outcome, PauseDeadline,
    PauseMode, Payload, SleepPlan, SleepWeights, SubmitError, Tags, WhileNotServing,
};
use crate::engine::{InFlight, OnDeadline};
use crate::request::Request;
use crate::weights::LoadOptions;

const BOUND: Duration = Duration::from_secs(10);

fn eventually(mut so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(begin.elapsed() < BOUND, "it never is so");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A controller whose readers may be four tokens behind.
fn drive(device: Arc<FaultyDevice>, while_not_serving: WhileNotServing) -> Handle {
    let options = ControllerOptions { stream_buffer: 4, while_not_serving, ..ControllerOptions::default() };
    Controller::with(options).drive(awake_on(device, 1))
}

/// Longer than a reader may be behind.
fn long() -> Request {
    let prompt: Vec<u32> = (0..17).map(|i| 1 + i * 7 % 63).collect();
    Request::new(prompt).max_new_tokens(60).ignore_eos(true).seed(1).stream(true)
}

fn expected(request: Request) -> Vec<(Vec<u32>, Vec<u32>)> {
    let output = awake_on(Arc::new(cpu()), 1).generate(&[request.stream(false)]).unwrap();
    bits(&output).remove(0)
}

fn assert_serves(handle: &Handle) {
    let generations: Vec<_> = requests().into_iter().map(|r| handle.submit(r).unwrap()).collect();
    let outputs: Vec<_> = generations.into_iter().map(|g| output(g).unwrap()).collect();
    assert_eq!(bits(&outputs), fresh(1));
}

/// The next event; `None` after the last.
#[track_caller]
fn next(generation: &mut Generation) -> Option<Result<GenerationEvent, GenerationError>> {
    generation.next_event_timeout(BOUND).expect("it hangs")
}

#[track_caller]
fn output(mut generation: Generation) -> Result<RequestOutput, GenerationError> {
    loop {
        match next(&mut generation).expect("the output is the last") {
            Ok(GenerationEvent::Token(_)) => {}
            Ok(GenerationEvent::Done(output)) => return Ok(output),
            Err(error) => return Err(error),
        }
    }
}

#[track_caller]
fn token(generation: &mut Generation) -> GenerationToken {
    match next(generation) {
        Some(Ok(GenerationEvent::Token(token))) => token,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn run(handle: &Handle, request: impl Into<ControlRequest>) -> Result<Outcome, ControlError> {
    handle.control(request).wait_timeout(BOUND).expect("it hangs").outcome
}

fn sleep(in_flight: InFlight, weights: SleepWeights) -> Operation {
    Operation::Sleep(SleepPlan { tags: Tags::ALL, weights, in_flight })
}

/// A request that waits for its reader.
fn set_aside(handle: &Handle) -> Generation {
    let mut slow = handle.submit(long()).unwrap();
    assert_eq!(token(&mut slow).position, 0);
    eventually(|| handle.status().requests_aside == 1);
    slow
}

#[test]
fn c13_a_step_error_that_is_got_over_costs_nobody_anything() {
    for n in [1, 5, 20, 60] {
        let device = FaultyDevice::new();
        let handle = drive(device.clone(), WhileNotServing::Refuse);
        device.fail_nth(n);
        for _ in 0..3 {
            assert_serves(&handle);
        }
        let (status, metrics) = (handle.status(), handle.metrics());
        assert_eq!((status.step_error, status.state.broken, metrics.failed), (None, false, 0), "fault {n}");
    }
}

#[test]
fn c13_errors_three_times_in_a_row_fail_what_is_in_the_engine_with_what_it_has() {
    let device = FaultyDevice::new();
    let handle = drive(device.clone(), WhileNotServing::Refuse);
    let slow = set_aside(&handle);
    for round in 1..3 {
        let mut failing = handle.submit(long()).unwrap();
        for position in 0..3 {
            assert_eq!(token(&mut failing).position, position);
        }
        run(&handle, Operation::Pause(PauseMode::Keep)).unwrap();
        device.fail_all(true);
        run(&handle, Operation::Resume).unwrap();
        // It may be at its reader's limit: then it fails when it goes on.
        let GenerationError::Step { message, partial } = output(failing).unwrap_err() else {
            panic!("it is the step that failed")
        };
        assert!(message.contains("injected"), "{message}");
        let (tokens, logprobs) = bits(&[(*partial).clone()]).remove(0).remove(0);
        let whole = expected(long()).remove(0);
        assert!(tokens.len() >= 3 && whole.0.starts_with(&tokens) && whole.1.starts_with(&logprobs));
        // It serves, and fails again.
        assert!(handle.state().admitting && !handle.state().broken);
        for request in requests() {
            let error = output(handle.submit(request).unwrap()).unwrap_err();
            assert!(matches!(error, GenerationError::Step { .. }), "{error}");
        }
        assert!(handle.status().step_error.is_some_and(|error| error.contains("injected")));
        assert_eq!(handle.metrics().failed, 3 * round);
        device.fail_all(false);
        assert_serves(&handle);
        assert_eq!(handle.status().step_error, None);
        let resumed = output(handle.submit(long().resume(&partial).unwrap()).unwrap()).unwrap();
        assert_eq!(bits(&[resumed]).remove(0), expected(long()));
    }
    assert_eq!(handle.status().requests_aside, 1, "it was not in the engine");
    assert_eq!(bits(&[output(slow).unwrap()]).remove(0), expected(long()));
}

/// Breaks the engine with one request in it, which fails, and one aside, which does not.
fn broken(while_not_serving: WhileNotServing) -> (Arc<FaultyDevice>, Handle, Generation) {
    let device = FaultyDevice::new();
    let handle = drive(device.clone(), while_not_serving);
    let slow = set_aside(&handle);
    device.panic_nth(20);
    let error = output(handle.submit(long().max_new_tokens(20)).unwrap()).unwrap_err();
    device.panic_nth(0);
    let GenerationError::Step { message, partial } = error else { panic!("{error}") };
    assert_eq!((message.as_str(), partial.completions.len()), ("a step panicked", 1));
    (device, handle, slow)
}

#[test]
fn c13_a_step_that_panics_is_said_to_have_broken_the_engine() {
    let (_device, handle, slow) = broken(WhileNotServing::Refuse);
    let status = handle.status();
    let state = &status.state;
    assert_eq!((state.lifecycle, state.broken, state.admitting), (Lifecycle::Awake, true, false));
    assert!(state.to_string().contains("broken"), "{state}");
    assert_eq!((status.live_requests, status.requests_aside), (1, 1));
    assert_eq!(status.step_error.as_deref(), Some("a step panicked"));
    let error = handle.submit(long()).unwrap_err();
    assert!(matches!(&error, SubmitError::NotServing { state, .. } if state.broken), "{error}");
    assert_eq!(error.kind(), ErrorKind::NotServing);
    drop(slow);
    assert_eq!(handle.metrics().live_requests, 0, "it need not run to be given up");
    assert_eq!((handle.metrics().failed, handle.metrics().aborted), (1, 1));
}

#[test]
fn c13_c24_pauses_and_drains_of_a_broken_engine_are_answered() {
    let (_device, handle, slow) = broken(WhileNotServing::Refuse);
    let wait = |on_deadline| Operation::Pause(PauseMode::Wait { on_deadline });
    let error = run(&handle, wait(PauseDeadline::Undo)).unwrap_err();
    assert!(matches!(&error, ControlError::Broken { message } if message == "a step panicked"), "{error}");
    let drain = InFlight::Drain { deadline: Duration::MAX, then: OnDeadline::Refuse };
    let error = run(&handle, sleep(drain, SleepWeights::Park)).unwrap_err();
    assert!(matches!(error, ControlError::Broken { .. }), "{error}");
    let error = run(&handle, sleep(InFlight::Refuse, SleepWeights::Park)).unwrap_err();
    assert!(matches!(error, ControlError::InFlight { live_requests: 1 }), "{error}");
    let state = handle.state();
    assert!(state.broken && !state.paused && !state.admitting, "{state}");
    for mode in [PauseMode::Keep, PauseMode::Wait { on_deadline: PauseDeadline::Keep }] {
        assert_eq!(run(&handle, Operation::Pause(mode)).unwrap(), Outcome::Done);
        assert!(handle.state().paused);
        run(&handle, Operation::Resume).unwrap();
        let state = handle.state();
        assert!(state.broken && !state.paused && !state.admitting, "a resume mends nothing: {state}");
    }
    run(&handle, Operation::Verify).unwrap();
    run(&handle, Operation::ResetPrefixCache { with_requests: true }).unwrap();
    assert_eq!(run(&handle, Operation::Abort(AbortTarget::All)).unwrap(), Outcome::Done);
    drop(output(slow).unwrap());
    run(&handle, sleep(InFlight::Refuse, SleepWeights::Park)).unwrap();
    run(&handle, Operation::WakeUp { tags: Tags::ALL }).unwrap();
    assert_serves(&handle);
}

#[test]
fn c13_a_sleep_that_aborts_or_retracts_leads_out_of_a_broken_engine() {
    for weights in [SleepWeights::Park, SleepWeights::Discard] {
        for in_flight in [InFlight::Abort, InFlight::Retract] {
            let (_device, handle, slow) = broken(WhileNotServing::Queue);
            let queued = handle.submit(long().stream(false)).unwrap();
            run(&handle, sleep(in_flight, weights)).unwrap();
            let status = handle.status();
            assert!(!status.state.broken && status.step_error.is_none(), "{status:?}");
            if weights == SleepWeights::Discard {
                let weights = Payload::source(Seeded::new(1));
                run(&handle, Operation::LoadWeights { weights, options: LoadOptions::default() }).unwrap();
            }
            run(&handle, Operation::WakeUp { tags: Tags::ALL }).unwrap();
            assert!(handle.state().admitting);
            assert_serves(&handle);
            let ended = [slow, queued].map(|generation| bits(&[output(generation).unwrap()]).remove(0));
            let whole = expected(long());
            for own in ended {
                assert!(whole[0].0.starts_with(&own[0].0) && whole[0].1.starts_with(&own[0].1));
                assert_eq!(own == whole, in_flight == InFlight::Retract);
            }
            assert_eq!((handle.metrics().live_requests, handle.metrics().failed), (0, 1));
        }
    }
}

#[test]
fn c13_a_broken_engine_can_be_stopped_with_requests_aside() {
    let (device, handle, slow) = broken(WhileNotServing::Queue);
    let queued = handle.submit(long()).unwrap();
    let engine = handle.stop().unwrap();
    for generation in [slow, queued] {
        let partial = output(generation).unwrap();
        assert!(expected(long())[0].0.starts_with(&partial.completions[0].tokens));
    }
    let error = handle.submit(long()).unwrap_err();
    assert!(matches!(error, SubmitError::Stopped) && !error.kind().is_retryable());
    drop(engine);
    assert_eq!(device.budget().committed_bytes(), 0);
}

#[test]
fn c13_a_transition_that_panics_stops_the_controller_and_nobody_waits() {
    let device = FaultyDevice::new();
    let handle = drive(device.clone(), WhileNotServing::Refuse);
    let slow = set_aside(&handle);
    // Weights are copied after the requests were settled.
    device.panic_nth(1);
    let asleep = handle.control(sleep(InFlight::Retract, SleepWeights::Park));
    let error = asleep.wait_timeout(BOUND).expect("it hangs").outcome.unwrap_err();
    assert!(matches!(error, ControlError::Stopped), "{error}");
    assert!(matches!(output(slow), Err(GenerationError::Stopped)));
    eventually(|| handle.state().lifecycle == Lifecycle::Stopped);
    assert!(matches!(run(&handle, Operation::Verify), Err(ControlError::Stopped)));
    assert!(matches!(handle.submit(long()), Err(SubmitError::Stopped)));
    assert!(handle.stop().is_err());
    eventually(|| device.budget().committed_bytes() == 0);
}
