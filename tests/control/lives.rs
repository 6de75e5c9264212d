//! Controllers begin with an engine in any state, and end with it; limits on what waits.

use dormouse::control::{
    AbortTarget, ControlError, Controller, ErrorKind, Generation, Handle, Lifecycle, Operation, SubmitError,
    Tags, Ticket,
};
use dormouse::{AnyEngine, Awake, Engine, InFlight, SleepOptions};

use crate::common::awake;
use crate::support::{
    Weights, all_of, assert_idle, assert_serves, bits, block_on, bounded, buffered, builder, discard, done,
    endless, eventually, expected, gated, load, options, output, queueing, refused, request, rest, run,
    sleep, spawn, spawn_long, spawn_with, tokens, update, wake, was_aborted, weights,
};

fn stop(handle: &Handle) -> AnyEngine {
    let handle = handle.clone();
    bounded(move || handle.stop().unwrap())
}

/// Wakes an engine that came back, whatever its state.
fn awaken(engine: AnyEngine, weights: &Weights) -> Engine<Awake> {
    match engine {
        AnyEngine::Awake(engine) => engine,
        AnyEngine::SleepingKept(engine) => engine.restore_weights().unwrap().wake_up().unwrap(),
        AnyEngine::SleepingDiscarded(engine) => {
            engine.load_weights(weights.source()).unwrap().wake_up().unwrap()
        }
        AnyEngine::WeightsLoaded(engine) => engine.wake_up().unwrap(),
    }
}

#[test]
fn handles_can_be_sent_shared_and_kept() {
    fn is<T: Send + Sync + 'static>() {}
    fn can_be_sent<T: Send + 'static>() {}
    is::<Handle>();
    is::<Ticket>();
    can_be_sent::<Generation>();
    can_be_sent::<Operation>();
    let handle = spawn(&weights(1));
    assert_eq!((handle.limits().vocab_size, handle.limits().max_model_len), (64, 256));
    assert_eq!(handle.expected_weights().tensors().len(), weights(1).0.len());
    let _ = handle.config();
}

#[test]
fn an_engine_is_driven_and_given_back_in_every_state() {
    let w0 = weights(1);
    let whole = expected(&w0, &request(1));
    let engine = || awake(builder(), &w0);
    let retracted = || {
        let engine = engine();
        engine.submit(request(5)).unwrap();
        engine
    };
    let retract = SleepOptions::default().in_flight(InFlight::Retract);
    let abort = SleepOptions::default().in_flight(InFlight::Abort);
    let engines: Vec<(AnyEngine, Lifecycle)> = vec![
        (engine().into(), Lifecycle::Awake),
        (retracted().into(), Lifecycle::Awake),
        (retracted().sleep(retract).unwrap().into(), Lifecycle::SleepingKept),
        (retracted().sleep(abort.resident()).unwrap().into(), Lifecycle::SleepingKept),
        (retracted().sleep_discarding(retract).unwrap().into(), Lifecycle::SleepingDiscarded),
        (builder().build_asleep().unwrap().into(), Lifecycle::SleepingDiscarded),
        (retracted().sleep(abort).unwrap().restore_weights().unwrap().into(), Lifecycle::WeightsLoaded),
        (retracted().sleep(retract).unwrap().restore_weights().unwrap().into(), Lifecycle::WeightsLoaded),
    ];
    for (engine, lifecycle) in engines {
        let (memory, name) = (engine.memory(), engine.state_name());
        let handle = Controller::spawn(engine);
        assert_eq!(handle.state().lifecycle, lifecycle, "known at once");
        assert_eq!((handle.status().memory, handle.status().live_requests), (memory, 0));
        let engine = stop(&handle);
        assert_eq!((engine.memory(), engine.state_name()), (memory, name), "as it came");
        let handle = Controller::spawn(engine);
        if lifecycle == Lifecycle::SleepingDiscarded {
            done(&handle, load(all_of(&w0)));
        }
        run(&handle, wake(Tags::ALL));
        assert_serves(&handle, &w0, &request(1));
        assert_idle(&handle);
        let engine = awaken(stop(&handle), &w0);
        assert!(engine.stats().live_requests == 0, "nothing of earlier lives is in flight");
        assert_eq!(bits(&engine.generate(&[request(1)]).unwrap()[0]), whole);
    }
}

#[test]
fn a_stop_ends_what_is_in_flight_with_the_tokens_it_has_in_every_state() {
    let w0 = weights(1);
    type Way = fn() -> Vec<Operation>;
    let ways: [Way; 5] = [
        Vec::new,
        || vec![Operation::Pause(dormouse::control::PauseMode::Keep)],
        || vec![sleep(Tags::ALL, InFlight::Retract)],
        || vec![discard(InFlight::Retract), wake(Tags::WEIGHTS)],
        || vec![sleep(Tags::KV_CACHE, InFlight::Retract)],
    ];
    for way in ways {
        let mut options = queueing();
        options.stream_buffer = 30;
        let handle = spawn_with(options, &w0);
        let asked = request(1).max_new_tokens(100).stream(true);
        let mut running = handle.submit(asked.clone()).unwrap();
        let begun = tokens(&mut running, 3);
        for operation in way() {
            done(&handle, operation);
        }
        let queued = handle.submit(asked.clone().seed(2)).unwrap();
        let engine = stop(&handle);
        let output = rest(begun, running);
        assert!(was_aborted(&output));
        crate::support::assert_begins(&output, &expected(&w0, &asked));
        assert!(was_aborted(&rest(vec![], queued)));
        assert!(matches!(handle.submit(request(1)), Err(SubmitError::Stopped)));
        assert_eq!(handle.submit(request(1)).unwrap_err().kind(), ErrorKind::Stopped);
        assert!(matches!(refused(&handle, Operation::Resume), ControlError::Stopped));
        assert_idle(&handle);
        let engine = awaken(engine, &w0);
        assert_eq!(engine.stats().blocks_owned, 0);
        assert_eq!(bits(&engine.generate(&[request(1)]).unwrap()[0]), expected(&w0, &request(1)));
    }
}

#[test]
fn one_of_many_stops_has_the_engine_and_all_that_wait_are_answered() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn(&w0);
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    let (slow, gate) = gated(&w1);
    let under_way = handle.control(update(slow));
    gate.reached();
    let waiting: Vec<_> = (0..5).map(|_| handle.control(wake(Tags::KV_CACHE))).collect();
    let (sender, engines) = std::sync::mpsc::channel();
    for _ in 0..4 {
        let (handle, sender) = (handle.clone(), sender.clone());
        std::thread::spawn(move || sender.send(handle.stop()).unwrap());
    }
    eventually(|| matches!(handle.submit(request(1)), Err(SubmitError::Stopped)));
    gate.open();
    assert!(block_on(under_way).is_ok(), "what is under way is finished");
    for ticket in waiting {
        assert!(matches!(block_on(ticket).outcome, Err(ControlError::Stopped)));
    }
    let stopped = (0..4).map(|_| engines.recv_timeout(crate::support::BOUND).unwrap());
    let mut engines: Vec<_> = stopped.filter_map(Result::ok).collect();
    assert_eq!(engines.len(), 1);
    let engine = awaken(engines.remove(0), &w0);
    assert_eq!(bits(&engine.generate(&[request(1)]).unwrap()[0]), expected(&w1, &request(1)));
}

#[test]
fn a_stop_cuts_waits_short_and_says_so() {
    let w0 = weights(1);
    let long = std::time::Duration::from_secs(60);
    let wait = dormouse::control::PauseMode::Wait { on_deadline: dormouse::control::PauseDeadline::Undo };
    let drain = InFlight::Drain { deadline: long, then: dormouse::OnDeadline::Refuse };
    for operation in [Operation::Pause(wait), sleep(Tags::ALL, drain)] {
        let handle = spawn_with(buffered(4), &w0);
        let mut slow = handle.submit(request(1).max_new_tokens(60).stream(true)).unwrap();
        let begun = tokens(&mut slow, 1);
        let ticket = handle.control(operation);
        eventually(|| !handle.state().admitting);
        drop(stop(&handle));
        assert!(matches!(block_on(ticket).outcome, Err(ControlError::Stopped)));
        assert!(was_aborted(&rest(begun, slow)));
    }
}

#[test]
fn when_the_last_handle_goes_everything_is_answered() {
    let w0 = weights(1);
    let handle = spawn_long(options(), &w0);
    let mut running = handle.submit(endless(1)).unwrap();
    let begun = tokens(&mut running, 2);
    let clone = handle.clone();
    drop(handle);
    let other = clone.submit(request(2)).unwrap();
    assert_eq!(bits(&output(other)), expected(&w0, &request(2)), "a clone keeps it going");
    let ticket = clone.control(sleep(Tags::ALL, InFlight::Retract));
    drop(clone);
    let slept = block_on(ticket);
    assert!(matches!(slept.outcome, Ok(_) | Err(ControlError::Stopped)), "{slept:?}");
    assert!(was_aborted(&rest(begun, running)));
}

#[test]
fn requests_beyond_the_limit_are_refused_wherever_the_others_are() {
    let w0 = weights(1);
    let mut options = queueing();
    (options.max_live_requests, options.stream_buffer) = (3, 10);
    let handle = spawn_with(options, &w0);
    let asked = |seed| request(seed).max_new_tokens(60).stream(true);
    let mut live: Vec<_> = (0..2).map(|seed| handle.submit(asked(seed)).unwrap()).collect();
    let begun = tokens(&mut live[0], 1);
    done(&handle, sleep(Tags::ALL, InFlight::Retract));
    live.push(handle.submit(asked(2)).unwrap());
    let full = || {
        let error = handle.submit(request(9)).unwrap_err();
        assert!(matches!(error, SubmitError::QueueFull { live_requests: 3 }), "{error}");
        assert_eq!((error.kind(), error.kind().is_retryable()), (ErrorKind::Overloaded, true));
    };
    full();
    done(&handle, wake(Tags::ALL));
    full();
    assert_eq!(handle.metrics().refused[ErrorKind::Overloaded.as_str()], 2);
    drop(live.pop());
    eventually(|| handle.metrics().live_requests == 2);
    assert_serves(&handle, &w0, &request(9));
    for (seed, generation) in (0..).zip(live) {
        let begun = if seed == 0 { begun.clone() } else { vec![] };
        assert_eq!(bits(&rest(begun, generation)), expected(&w0, &asked(seed)));
    }
    assert_idle(&handle);
}

#[test]
fn control_requests_beyond_the_limit_are_refused_and_looks_and_aborts_never() {
    let (w0, w1) = (weights(1), weights(2));
    let mut options = options();
    options.max_control_requests = 2;
    let handle = spawn_with(options, &w0);
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    let (slow, gate) = gated(&w1);
    let under_way = handle.control(update(slow));
    gate.reached();
    let waiting = [Operation::Verify, wake(Tags::KV_CACHE)].map(|operation| handle.control(operation));
    for operation in [Operation::Resume, wake(Tags::ALL)] {
        let error = refused(&handle, operation);
        assert!(matches!(error, ControlError::QueueFull { limit: 2 }), "{error}");
        assert_eq!((error.kind(), error.kind().is_retryable()), (ErrorKind::Overloaded, true));
    }
    assert_eq!(handle.status().control_queue, 2);
    done(&handle, Operation::Status);
    assert!(handle.abort(AbortTarget::All).is_empty());
    gate.open();
    assert!(block_on(under_way).is_ok());
    waiting.into_iter().for_each(|ticket| assert!(block_on(ticket).is_ok()));
    assert_serves(&handle, &w1, &request(1));
}

#[test]
fn requests_that_are_not_valid_are_refused_in_every_state() {
    let w0 = weights(1);
    let handle = spawn_with(queueing(), &w0);
    let invalid = || [request(1).samples(0), request(1).max_new_tokens(5000), dormouse::Request::new([64])];
    let check = || {
        for request in invalid() {
            let error = handle.submit(request).unwrap_err();
            assert_eq!((error.kind(), error.kind().is_retryable()), (ErrorKind::InvalidArgument, false));
        }
    };
    check();
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
    check();
    assert_eq!(handle.metrics().refused[ErrorKind::InvalidArgument.as_str()], 6);
    assert_idle(&handle);
}
