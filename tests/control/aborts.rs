//! Requests that are given up: they end, hold nothing, and every counter adds up.

use dormouse::InFlight;
use dormouse::control::{
    AbortTarget, ControlError, ControlRequest, Controller, ErrorKind, Operation, PauseMode, SubmitError, Tags,
};

use crate::common::awake;
use crate::support::{
    all_of, already, ask, assert_idle, assert_serves, bits, block_on, buffered, done, endless, eventually,
    expected, gated, long_builder, options, output, queueing, refused, request, rest, run, sleep, spawn,
    spawn_long, spawn_with, tokens, update, wake, was_aborted, weights,
};

#[test]
fn b53_readers_that_go_away_free_their_places_at_once() {
    let w0 = weights(1);
    for streams in [true, false] {
        let engine = awake(long_builder().max_num_seqs(2), &w0);
        let handle = Controller::with(buffered(100_000)).drive(engine);
        let mut long: Vec<_> =
            [1, 2].map(|seed| handle.submit(endless(seed).stream(streams)).unwrap()).into();
        if streams {
            long.iter_mut().for_each(|generation| drop(tokens(generation, 3)));
        } else {
            eventually(|| handle.status().engine.running == 2);
        }
        let third = handle.submit(request(3)).unwrap();
        assert_eq!(handle.metrics().live_requests, 3);
        drop(long);
        assert_eq!(bits(&output(third)), expected(&w0, &request(3)));
        eventually(|| handle.status().live_requests == 0);
        assert_eq!((handle.metrics().aborted, handle.metrics().finished), (2, 1));
        assert_idle(&handle);
    }
}

#[test]
fn b54_a_name_is_taken_as_long_as_its_request_lives_wherever_it_is() {
    let w0 = weights(1);
    let handle = spawn_with(
        {
            let mut options = queueing();
            options.stream_buffer = 10;
            options
        },
        &w0,
    );
    let asked = request(1).max_new_tokens(60).stream(true).id("x");
    let mut first = handle.submit(asked.clone()).unwrap();
    let begun = tokens(&mut first, 1);
    let duplicate = |times| {
        for _ in 0..times {
            let error = handle.submit(request(2).id("x")).unwrap_err();
            assert_eq!((error.kind(), error.kind().is_retryable()), (ErrorKind::Conflict, false));
            assert!(error.to_string().contains('x'), "{error}");
        }
    };
    duplicate(300);
    done(&handle, sleep(Tags::ALL, InFlight::Retract));
    duplicate(300);
    let other = handle.submit(request(2).id("y")).unwrap();
    done(&handle, wake(Tags::ALL));
    duplicate(300);
    assert_eq!(bits(&rest(begun, first)), expected(&w0, &asked));
    assert_eq!(bits(&output(other)), expected(&w0, &request(2)));
    for _ in 0..3 {
        assert_eq!(ask(&handle, &request(2).id("x")).id.as_deref(), Some("x"));
    }
    assert_eq!(handle.metrics().refused[ErrorKind::Conflict.as_str()], 900);
    assert_idle(&handle);
}

#[test]
fn b54_a_control_id_is_taken_until_its_request_is_answered() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn(&w0);
    let named = |operation: Operation| ControlRequest::new(operation).id("mine");
    done(&handle, named(sleep(Tags::KV_CACHE, InFlight::Refuse)));
    let (slow, gate) = gated(&w1);
    let ticket = handle.control(named(update(slow)));
    gate.reached();
    for operation in [wake(Tags::KV_CACHE), Operation::Status, Operation::Abort(AbortTarget::All)] {
        let response = run(&handle, named(operation));
        assert_eq!(response.id, "mine");
        let error = response.outcome.unwrap_err();
        assert!(matches!(&error, ControlError::DuplicateId { id } if id == "mine"));
        assert_eq!((error.kind(), error.missing_step()), (ErrorKind::Conflict, None));
    }
    // One that waits for its turn has its id, too, and ids that are made up are others.
    let waiting = handle.control(ControlRequest::new(Operation::Verify).id("control-4"));
    assert!(matches!(
        refused(&handle, ControlRequest::new(Operation::Status).id("control-4")),
        ControlError::DuplicateId { .. }
    ));
    let made_up: Vec<_> = (0..5).map(|_| run(&handle, Operation::Status).id).collect();
    assert!(made_up.iter().all(|id| id != "control-4" && id != "mine"), "{made_up:?}");
    gate.open();
    let response = block_on(ticket);
    assert!(response.id == "mine" && response.is_ok());
    assert!(block_on(waiting).is_ok());
    done(&handle, named(wake(Tags::KV_CACHE)));
    assert_serves(&handle, &w1, &request(1));
}

#[test]
fn control_ids_have_1_to_256_bytes() {
    let handle = spawn(&weights(1));
    for (id, ok) in [
        (String::new(), false),
        ("x".repeat(256), true),
        ("x".repeat(257), false),
        ("x".repeat(1 << 20), false),
    ] {
        let response = run(&handle, ControlRequest::new(Operation::Status).id(id.clone()));
        assert_eq!(response.is_ok(), ok);
        assert!(response.id.len() <= 300 && (!ok || response.id == id));
        let kind = response.outcome.err().map(|error| error.kind());
        assert_eq!(kind, (!ok).then_some(ErrorKind::InvalidArgument));
    }
}

#[test]
fn b56_many_short_requests_half_of_them_aborted_at_any_stage_leave_nothing() {
    let w0 = weights(1);
    let engine = awake(crate::support::builder().max_num_batched_tokens(16).max_num_seqs(8), &w0);
    let handle = Controller::with(options()).drive(engine);
    let total = 3000;
    let mut live = std::collections::VecDeque::new();
    let (mut aborted, mut dropped) = (0, 0);
    for number in 0..total {
        // Most are still queued when their turn to be aborted comes, some prefill in chunks, decode, have ended.
        let asked = request(number % 50).max_new_tokens(1 + number as usize % 6).stream(number % 5 == 0);
        live.push_back((number, handle.submit(asked.id(format!("{number}"))).unwrap()));
        if live.len() < 12 {
            continue;
        }
        let (number, generation) = live.swap_remove_back(number as usize % 7).unwrap();
        match number % 4 {
            0 => {
                let target = AbortTarget::These { requests: vec![], names: vec![number.to_string()] };
                aborted += handle.abort(target).len();
                drop(output(generation));
            }
            1 => {
                dropped += 1;
                drop(generation);
            }
            _ => {
                let output = output(generation);
                if number % 500 == 2 {
                    let asked = request(number % 50).max_new_tokens(1 + number as usize % 6);
                    assert_eq!(bits(&output), expected(&w0, &asked));
                }
            }
        }
    }
    live.into_iter().for_each(|(_, generation)| drop(output(generation)));
    eventually(|| handle.metrics().live_requests == 0);
    let metrics = handle.metrics();
    assert_eq!((metrics.accepted, metrics.failed), (u64::from(total), 0));
    assert_eq!(metrics.finished + metrics.aborted, u64::from(total));
    assert!(metrics.aborted >= aborted as u64 && metrics.aborted <= (aborted + dropped) as u64);
    assert!(aborted > 0 && metrics.finished > 0);
    already(&handle, Operation::Abort(AbortTarget::All));
    assert_idle(&handle);
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
}

#[test]
fn b73_gauges_fall_with_the_requests_without_another_step() {
    let w0 = weights(1);
    let handle = spawn_long(buffered(100_000), &w0);
    let zeros = [
        "dormouse_requests_live 0\n",
        "dormouse_requests_aside 0\n",
        "dormouse_sequences_running 0\n",
        "dormouse_sequences_waiting 0\n",
        "dormouse_kv_blocks{holds=\"running\"} 0\n",
    ];
    type Settle = fn(&dormouse::control::Handle);
    let settles: [Settle; 4] = [
        |handle| drop(handle.abort(AbortTarget::All)),
        |handle| drop(done(handle, Operation::Pause(PauseMode::Abort))),
        |handle| drop(done(handle, sleep(Tags::ALL, InFlight::Abort))),
        |handle| drop(done(handle, Operation::ClearLoadWeight)),
    ];
    for settle in settles {
        let mut running: Vec<_> = (0..20).map(|seed| handle.submit(endless(seed)).unwrap()).collect();
        running.iter_mut().for_each(|generation| drop(tokens(generation, 1)));
        let text = handle.metrics().render_prometheus();
        assert!(text.contains("dormouse_requests_live 20\n"), "{text}");
        settle(&handle);
        let text = handle.metrics().render_prometheus();
        zeros.iter().for_each(|line| assert!(text.contains(line), "{line} {text}"));
        assert_idle(&handle);
        let metrics = handle.metrics();
        assert_eq!(metrics.aborted, metrics.accepted);
        let steps = metrics.engine.steps;
        let epoch = metrics.state.epoch;
        run(&handle, Operation::Resume);
        if handle.state().lifecycle == dormouse::control::Lifecycle::SleepingDiscarded {
            done(&handle, crate::support::load(all_of(&w0)));
        }
        run(&handle, wake(Tags::ALL));
        assert_eq!(
            handle.metrics().engine.steps,
            steps,
            "counters go on over sleeps, and no step was needed"
        );
        assert!(handle.state().epoch == epoch && handle.state().admitting);
    }
}

#[test]
fn an_abort_ends_what_it_names_and_nothing_else() {
    let w0 = weights(1);
    let handle = spawn_with(buffered(20), &w0);
    let asked = |seed| request(seed).max_new_tokens(60).stream(true).id(format!("{seed}"));
    let running: Vec<_> = (0..6).map(|seed| handle.submit(asked(seed)).unwrap()).collect();
    let target = AbortTarget::These {
        requests: vec![running[0].id(), running[1].id()],
        names: vec!["1".into(), "2".into(), "none".into()],
    };
    let ended = handle.abort(target);
    assert_eq!(ended, [0, 1, 2].map(|at: usize| running[at].id()));
    for (seed, generation) in (0..).zip(running) {
        let output = rest(vec![], generation);
        assert_eq!(was_aborted(&output), seed < 3);
        assert!(seed < 3 || bits(&output) == expected(&w0, &asked(seed)));
    }
    let error = handle.submit(request(1).id("x".repeat(300))).unwrap_err();
    assert!(matches!(error, SubmitError::Request(_)) && error.kind() == ErrorKind::InvalidArgument);
    assert_idle(&handle);
}
