//! Pauses: no step after the answer, all modes with and without requests, in every state.

use std::time::Duration;

use dormouse::InFlight;
use dormouse::control::{
    AbortTarget, ControlError, ControlRequest, ErrorKind, MissingStep, Operation, Outcome, PauseDeadline,
    PauseMode, SubmitError, Tags,
};

use crate::support::{
    already, ask, assert_begins, assert_idle, assert_serves, bits, block_on, buffered, done, ended_by_itself,
    endless, eventually, expected, options, output, queueing, refused, request, rest, run, settled, sleep,
    spawn, spawn_long, spawn_with, tokens, wake, was_aborted, weights,
};

fn pause(mode: PauseMode) -> Operation {
    Operation::Pause(mode)
}

fn wait(on_deadline: PauseDeadline) -> Operation {
    pause(PauseMode::Wait { on_deadline })
}

#[test]
fn c24_no_step_runs_after_a_pause_and_all_go_on_after_the_resume() {
    let w0 = weights(1);
    let handle = spawn_long(options(), &w0);
    let mut running = handle.submit(endless(1)).unwrap();
    let mut others: Vec<_> = (2..5).map(|seed| handle.submit(request(seed)).unwrap()).collect();
    let mut begun = tokens(&mut running, 3);
    for round in 0..10 {
        let paused = done(&handle, pause(PauseMode::Keep));
        assert!(settled(&paused).kept.contains(&running.id()));
        let before = handle.metrics();
        assert_eq!(settled(&paused).kept.len(), before.live_requests);
        already(&handle, pause(PauseMode::Keep));
        let error = handle.submit(request(9)).unwrap_err();
        let SubmitError::NotServing { state, .. } = error else { panic!("{error}") };
        assert!(state.paused && !state.admitting);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(handle.metrics().engine, before.engine, "no step runs, nothing moves");
        done(&handle, Operation::Resume);
        already(&handle, Operation::Resume);
        begun.extend(tokens(&mut running, 3));
        assert_eq!(begun.len(), 3 * (round + 2));
    }
    for (seed, generation) in (2..).zip(others.drain(..)) {
        assert_eq!(bits(&output(generation)), expected(&w0, &request(seed)));
    }
    handle.abort(AbortTarget::All);
    let output = rest(begun, running);
    assert!(was_aborted(&output));
    let whole = expected(&w0, &request(1).max_new_tokens(60));
    assert_eq!(bits(&output)[0].0[..33], whole[0].0[..33], "as if there had been no pause");
    assert_idle(&handle);
}

#[test]
fn b07_a_pause_that_aborts_answers_with_the_tokens_so_far_also_right_after_an_abort() {
    let w0 = weights(1);
    for _ in 0..10 {
        let handle = spawn_with(buffered(20), &w0);
        let asked = |seed| request(seed).max_new_tokens(100).stream(true);
        let mut running: Vec<_> = (0..3).map(|seed| handle.submit(asked(seed)).unwrap()).collect();
        let begun: Vec<_> = running.iter_mut().map(|generation| tokens(generation, 5)).collect();
        let one = AbortTarget::These { requests: vec![running[0].id()], names: vec![] };
        let abort = handle.control(Operation::Abort(one));
        let paused = handle.control(pause(PauseMode::Abort));
        assert!(block_on(abort).is_ok());
        let paused = block_on(paused);
        assert!(matches!(paused.outcome, Ok(Outcome::Done)));
        assert!(paused.state_after.paused);
        for (seed, (begun, generation)) in (0..).zip(begun.into_iter().zip(running)) {
            let output = rest(begun, generation);
            assert!(was_aborted(&output) && output.completions[0].tokens.len() >= 5);
            assert_begins(&output, &expected(&w0, &asked(seed)));
        }
        assert_idle(&handle);
        done(&handle, Operation::Resume);
        assert_serves(&handle, &w0, &request(7));
    }
}

#[test]
fn b08_aborts_around_the_natural_end_leave_nothing_behind() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    for round in 0..150 {
        let generation = handle.submit(request(round).max_new_tokens(1).id(format!("{round}"))).unwrap();
        let these = |requests, names| AbortTarget::These { requests, names };
        let target = match round % 4 {
            0 => these(vec![generation.id()], vec![]),
            1 => these(vec![], vec![format!("{round}"), "nobody".into(), format!("{round}")]),
            2 => these(vec![generation.id(), generation.id()], vec![format!("{round}")]),
            _ => AbortTarget::All,
        };
        if round % 3 == 0 {
            eventually(|| handle.metrics().live_requests == 0);
        }
        let id = generation.id();
        let ended = handle.abort(target.clone());
        let output = output(generation);
        assert_eq!(ended == [id], was_aborted(&output), "{ended:?}");
        already(&handle, Operation::Abort(target));
        let paused = done(&handle, pause(if round % 2 == 0 { PauseMode::Abort } else { PauseMode::Keep }));
        assert_eq!(settled(&paused), Default::default());
        done(&handle, Operation::Resume);
        assert_idle(&handle);
    }
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
}

#[test]
fn a_pause_that_waits_lets_requests_end_and_keeps_others_out() {
    let w0 = weights(1);
    for queues in [false, true] {
        let mut options = if queues { queueing() } else { options() };
        options.stream_buffer = 8;
        let handle = spawn_with(options, &w0);
        let asked = request(1).max_new_tokens(60).stream(true);
        let mut slow = handle.submit(asked.clone()).unwrap();
        let (begun, id) = (tokens(&mut slow, 1), slow.id());
        let paused = handle.control(wait(PauseDeadline::Undo));
        eventually(|| !handle.state().admitting);
        assert!(!handle.state().paused, "not yet");
        let late = handle.submit(request(2));
        assert_eq!(late.is_ok(), queues);
        assert_eq!(bits(&rest(begun, slow)), expected(&w0, &asked));
        let paused = block_on(paused);
        assert_eq!((settled(&paused).drained, paused.state_after.paused), (vec![id], true));
        let (steps, live) = (handle.metrics().engine.steps, handle.metrics().live_requests);
        assert_eq!(live, usize::from(queues));
        done(&handle, Operation::Resume);
        if let Ok(late) = late {
            assert_eq!(bits(&output(late)), expected(&w0, &request(2)));
            assert!(handle.metrics().engine.steps > steps);
        }
        assert_idle(&handle);
    }
}

#[test]
fn c23_a_pause_whose_deadline_passes_does_what_was_asked_for() {
    let w0 = weights(1);
    for then in [PauseDeadline::Undo, PauseDeadline::Abort, PauseDeadline::Keep] {
        let handle = spawn_with(buffered(8), &w0);
        let asked = request(1).max_new_tokens(60).stream(true);
        let mut slow = handle.submit(asked.clone()).unwrap();
        let (begun, id) = (tokens(&mut slow, 1), slow.id());
        let deadline = Duration::from_millis(30);
        let paused = run(&handle, ControlRequest::new(wait(then)).deadline(deadline));
        assert!(paused.queued + paused.executed >= deadline);
        let state = paused.state_after.clone();
        assert_eq!(state, handle.state());
        match then {
            PauseDeadline::Undo => {
                let error = paused.outcome.unwrap_err();
                assert!(matches!(error, ControlError::Deadline { .. }), "{error}");
                assert!(state.admitting && !state.paused);
                assert_serves(&handle, &w0, &request(2));
            }
            PauseDeadline::Abort => {
                assert_eq!((settled(&paused).aborted, state.paused), (vec![id], true));
                assert_idle(&handle);
            }
            PauseDeadline::Keep => {
                assert_eq!((settled(&paused).kept, state.paused), (vec![id], true));
                // A wait would never end now.
                let again = refused(&handle, wait(then));
                assert_eq!(again.missing_step(), Some(MissingStep::Resume));
                assert_eq!(settled(&already(&handle, pause(PauseMode::Keep))).kept, [id]);
            }
        }
        run(&handle, Operation::Resume);
        let output = rest(begun, slow);
        assert_eq!(ended_by_itself(&output), then != PauseDeadline::Abort);
        assert_begins(&output, &expected(&w0, &asked));
    }
}

#[test]
fn c24_a_pause_that_was_undone_is_no_pause_on_retry() {
    let w0 = weights(1);
    let handle = spawn_with(buffered(8), &w0);
    let asked = request(1).max_new_tokens(60).stream(true);
    let mut slow = handle.submit(asked.clone()).unwrap();
    let begun = tokens(&mut slow, 1);
    for _ in 0..3 {
        let short = Duration::from_millis(2);
        let error = refused(&handle, ControlRequest::new(wait(PauseDeadline::Undo)).deadline(short));
        assert_eq!(error.kind(), ErrorKind::Deadline);
    }
    done(&handle, pause(PauseMode::Keep));
    done(&handle, Operation::Resume);
    assert_eq!(bits(&rest(begun, slow)), expected(&w0, &asked));
}

#[test]
fn a_pause_while_asleep_settles_what_waits_for_the_wake() {
    let w0 = weights(1);
    for mode in [PauseMode::Abort, PauseMode::Keep, PauseMode::Wait { on_deadline: PauseDeadline::Undo }] {
        let handle = spawn_with(buffered(8), &w0);
        let asked = request(1).max_new_tokens(60).stream(true);
        let mut retracted = handle.submit(asked.clone()).unwrap();
        let (begun, id) = (tokens(&mut retracted, 1), retracted.id());
        done(&handle, sleep(Tags::ALL, InFlight::Retract));
        let paused = run(&handle, pause(mode));
        match mode {
            PauseMode::Abort => assert_eq!(settled(&paused).aborted, [id]),
            PauseMode::Keep => assert_eq!(settled(&paused).kept, [id]),
            // It would wait for a wake.
            PauseMode::Wait { .. } => {
                assert_eq!(paused.outcome.unwrap_err().missing_step(), Some(MissingStep::WakeKvCache));
                assert!(!paused.state_after.paused);
            }
        }
        let steps = handle.metrics().engine.steps;
        done(&handle, wake(Tags::ALL));
        if mode == PauseMode::Keep {
            assert_eq!((handle.metrics().engine.steps, handle.state().admitting), (steps, false));
        }
        run(&handle, Operation::Resume);
        let output = rest(begun, retracted);
        assert_eq!(was_aborted(&output), mode == PauseMode::Abort);
        assert_begins(&output, &expected(&w0, &asked));
        assert_serves(&handle, &w0, &request(2));
    }
}

#[test]
fn b03_a_reset_of_the_prefix_cache_is_refused_or_done_but_never_ignored() {
    let w0 = weights(1);
    let handle = spawn_with(buffered(20), &w0);
    let asked = request(1).max_new_tokens(100).stream(true);
    ask(&handle, &asked);
    let mut running = handle.submit(asked.clone()).unwrap();
    let begun = tokens(&mut running, 3);
    let error = refused(&handle, Operation::ResetPrefixCache { with_requests: false });
    assert!(matches!(error, ControlError::InFlight { live_requests: 1 }), "{error}");
    assert!(handle.status().engine.blocks_cached > 0, "the cache is untouched");
    done(&handle, Operation::ResetPrefixCache { with_requests: true });
    let again = ask(&handle, &request(1));
    assert_eq!(again.completions[0].cached_tokens, 0);
    assert_eq!(bits(&rest(begun, running)), expected(&w0, &asked));
    done(&handle, Operation::ResetPrefixCache { with_requests: false });
    assert_eq!(handle.status().engine.blocks_cached, 0);
    assert_eq!(ask(&handle, &request(1)).completions[0].cached_tokens, 0);
    assert!(ask(&handle, &request(1)).completions[0].cached_tokens > 0);
}
