//! Requests in flight at a sleep, and what was accepted before it: each is answered once, as the policy says.

use std::time::Duration;

use dormouse::control::{
    AbortTarget, ControlError, ErrorKind, Generation, Handle, Lifecycle, Operation, PauseMode, SleepPlan,
    SleepWeights, Tags,
};
use dormouse::{FinishReason, InFlight, OnDeadline, Request, RequestOutput};

use crate::common::{awake, fresh};
use crate::support::{
    Weights, all_of, ask, assert_begins, assert_idle, assert_serves, bits, block_on, buffered, builder,
    discard, done, ended_by_itself, eventually, expected, load, output, queueing, refused, request, rest,
    settled, sleep, spawn, spawn_with, tokens, wake, was_aborted, weights,
};

/// A request that can't end before it is read: it is longer than the buffer of [`paced_controller`].
fn paced(seed: u32) -> Request {
    request(seed).max_new_tokens(150).stream(true)
}

fn paced_controller(weights: &Weights) -> Handle {
    spawn_with(buffered(64), weights)
}

fn drain(deadline: Duration, then: OnDeadline) -> InFlight {
    InFlight::Drain { deadline, then }
}

const LONG: Duration = Duration::from_secs(60);

/// Every kind of sleep of an awake engine.
fn plans(in_flight: InFlight) -> [SleepPlan; 3] {
    let (park, drop) = (SleepWeights::Park, SleepWeights::Discard);
    [(Tags::ALL, park), (Tags::ALL, drop), (Tags::KV_CACHE, park)].map(|(tags, weights)| SleepPlan {
        tags,
        weights,
        in_flight,
    })
}

/// Wakes an engine with these weights, however it sleeps.
fn wake_with(handle: &Handle, weights: &Weights) {
    if handle.state().lifecycle == Lifecycle::SleepingDiscarded {
        done(handle, load(all_of(weights)));
    }
    done(handle, wake(Tags::ALL));
}

#[test]
fn c04_requests_end_now_if_the_sleep_aborts() {
    let w0 = weights(1);
    for policy in [InFlight::Abort, drain(Duration::ZERO, OnDeadline::Abort)] {
        for plan in plans(policy) {
            let handle = paced_controller(&w0);
            let mut running = handle.submit(paced(1).samples(2)).unwrap();
            let waiting = handle.submit(paced(2)).unwrap();
            let ids = [running.id(), waiting.id()];
            let begun = tokens(&mut running, 3);
            let slept = done(&handle, Operation::Sleep(plan));
            assert_eq!(settled(&slept).aborted, ids, "{plan:?}");
            for (generation, begun, seed, samples) in [(running, begun, 1, 2), (waiting, vec![], 2, 1)] {
                let output = rest(begun, generation);
                assert!(was_aborted(&output));
                assert_begins(&output, &expected(&w0, &paced(seed).samples(samples)));
            }
            assert_idle(&handle);
            wake_with(&handle, &w0);
            assert_serves(&handle, &w0, &request(3));
        }
    }
}

#[test]
fn c04_c23_a_sleep_that_refuses_leaves_them_running() {
    let w0 = weights(1);
    for policy in [InFlight::Refuse, drain(Duration::ZERO, OnDeadline::Refuse)] {
        for plan in plans(policy) {
            let handle = paced_controller(&w0);
            let mut generation = handle.submit(paced(1)).unwrap();
            let begun = tokens(&mut generation, 3);
            let before = handle.state();
            let error = refused(&handle, Operation::Sleep(plan));
            match policy {
                InFlight::Refuse => assert!(matches!(error, ControlError::InFlight { live_requests: 1 })),
                _ => assert!(matches!(error, ControlError::Deadline { .. }), "{error}"),
            }
            assert!(error.kind().is_retryable());
            let state = handle.state();
            assert!(state.admitting && state.lifecycle == Lifecycle::Awake && state.epoch > before.epoch);
            assert_serves(&handle, &w0, &request(2));
            assert_eq!(bits(&rest(begun, generation)), expected(&w0, &paced(1)));
            done(&handle, Operation::Sleep(plan));
            assert_idle(&handle);
        }
    }
}

#[test]
fn c04_requests_run_to_their_end_if_the_sleep_drains() {
    let w0 = weights(1);
    for plan in plans(drain(LONG, OnDeadline::Refuse)) {
        let handle = paced_controller(&w0);
        let running: Vec<_> = (0..5).map(|seed| handle.submit(paced(seed)).unwrap()).collect();
        let ids: Vec<_> = running.iter().map(Generation::id).collect();
        let ticket = handle.control(Operation::Sleep(plan));
        for (seed, generation) in (0..).zip(running) {
            assert_eq!(bits(&rest(vec![], generation)), expected(&w0, &paced(seed)));
        }
        let slept = block_on(ticket);
        assert!(slept.is_ok(), "{slept:?}");
        assert_eq!(settled(&slept).drained, ids);
        assert_idle(&handle);
    }
}

#[test]
fn c03_what_comes_during_a_drain_is_not_drained() {
    let w0 = weights(1);
    for queues in [false, true] {
        let mut options = if queues { queueing() } else { buffered(4) };
        options.stream_buffer = 4;
        let handle = spawn_with(options, &w0);
        let mut slow = handle.submit(paced(1)).unwrap();
        let begun = tokens(&mut slow, 1);
        let plan = SleepPlan { in_flight: drain(LONG, OnDeadline::Abort), ..SleepPlan::default() };
        let ticket = handle.control(Operation::Sleep(plan));
        eventually(|| !handle.state().admitting);
        let late = handle.submit(request(2));
        assert_eq!(late.is_ok(), queues);
        let slow_id = slow.id();
        assert_eq!(bits(&rest(begun, slow)), expected(&w0, &paced(1)));
        let slept = block_on(ticket);
        assert_eq!(slept.state_after.lifecycle, Lifecycle::SleepingKept);
        assert_eq!(settled(&slept).drained, [slow_id]);
        done(&handle, wake(Tags::ALL));
        if let Ok(late) = late {
            assert_eq!(bits(&output(late)), expected(&w0, &request(2)));
        }
        assert_idle(&handle);
    }
}

#[test]
fn c04_c16_retracted_requests_go_on_after_the_wake_and_give_each_token_once() {
    let w0 = weights(1);
    for policy in [InFlight::Retract, drain(Duration::ZERO, OnDeadline::Retract)] {
        for plan in plans(policy) {
            let handle = paced_controller(&w0);
            let mut running = handle.submit(paced(1).samples(3)).unwrap();
            let quiet = handle.submit(paced(2).stream(false)).unwrap();
            let begun = tokens(&mut running, 4);
            let slept = done(&handle, Operation::Sleep(plan));
            let retracted = settled(&slept).retracted;
            assert!(retracted.contains(&running.id()));
            assert_eq!(handle.status().requests_aside, retracted.len());
            let steps = handle.metrics().engine.steps;
            wake_with(&handle, &w0);
            assert_eq!(bits(&rest(begun, running)), expected(&w0, &paced(1).samples(3)));
            assert_eq!(bits(&output(quiet)), expected(&w0, &paced(2)));
            assert!(handle.metrics().engine.steps >= steps);
            assert_idle(&handle);
        }
    }
}

/// What came before the weights changed, as the output of a request that was aborted then.
fn until_change(output: &RequestOutput) -> RequestOutput {
    let mut partial = output.clone();
    for completion in &mut partial.completions {
        let first = completion.versions.first().filter(|span| span.version.counter == 1).cloned();
        let end = first.as_ref().map_or(0, |span| span.tokens.end);
        completion.tokens.truncate(end);
        completion.logprobs.truncate(end);
        completion.versions = first.into_iter().collect();
        completion.finish_reason = FinishReason::Abort;
    }
    partial
}

#[test]
fn c30_b47_a_group_that_is_retracted_comes_back_whole_with_the_versions_of_its_tokens() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = paced_controller(&w0);
    let asked = paced(5).samples(4);
    let mut group = handle.submit(asked.clone()).unwrap();
    let mut given_up = handle.submit(paced(6).samples(4)).unwrap();
    let begun = tokens(&mut group, 8);
    let lost = tokens(&mut given_up, 2);
    done(&handle, discard(InFlight::Retract));
    // Aborted while asleep: it ends at once, with what it had.
    let target = AbortTarget::These { requests: vec![given_up.id()], names: vec![] };
    assert_eq!(handle.abort(target), [given_up.id()]);
    let partial = rest(lost, given_up);
    assert!(was_aborted(&partial) && partial.completions.len() == 4);
    assert_begins(&partial, &expected(&w0, &paced(6).samples(4)));
    done(&handle, load(all_of(&w1)));
    done(&handle, wake(Tags::KV_CACHE));
    let version = handle.state().version.unwrap();
    let output = rest(begun, group);
    assert!(ended_by_itself(&output) && output.completions.len() == 4);
    for completion in &output.completions {
        let last = completion.versions.last().unwrap();
        assert_eq!((&last.version, last.tokens.end), (&version, completion.tokens.len()));
    }
    let partial = until_change(&output);
    assert!(partial.completions.iter().any(|completion| !completion.tokens.is_empty()));
    assert_begins(&partial, &expected(&w0, &asked));
    let resumed = asked.resume(&partial).unwrap().stream(false);
    assert_eq!(bits(&fresh(&w1, false, &resumed)), bits(&output), "as a run of the tokens' versions");
    assert_idle(&handle);
}

#[test]
fn c16_b69_a_step_in_flight_at_a_sleep_is_finished_and_none_runs_after_it() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    let whole = expected(&w0, &request(1));
    for round in 0..60 {
        let generation = handle.submit(request(1)).unwrap();
        eventually(|| handle.metrics().engine.sampled_tokens % 9 >= round % 7 || generation_ended(&handle));
        let tags = [Tags::ALL, Tags::KV_CACHE][round as usize % 2];
        let slept = done(&handle, sleep(tags, InFlight::Retract));
        assert!(!slept.state_after.admitting);
        let metrics = handle.metrics();
        assert_eq!((metrics.engine.running, metrics.engine.live_requests), (0, 0));
        assert_eq!(handle.metrics().engine.steps, metrics.engine.steps);
        done(&handle, wake(Tags::ALL));
        assert_eq!(bits(&output(generation)), whole);
    }
    assert_idle(&handle);
}

fn generation_ended(handle: &Handle) -> bool {
    handle.metrics().live_requests == 0
}

#[test]
fn c16_what_was_aborted_at_a_sleep_gives_nothing_after_the_wake() {
    let w0 = weights(1);
    let handle = paced_controller(&w0);
    for seed in 0..8 {
        let mut generation = handle.submit(paced(seed).id("same name")).unwrap();
        let begun = tokens(&mut generation, 1);
        done(&handle, sleep(Tags::ALL, InFlight::Abort));
        let output = rest(begun, generation);
        assert_eq!((was_aborted(&output), output.id.as_deref()), (true, Some("same name")));
        done(&handle, wake(Tags::ALL));
        let again = ask(&handle, &request(seed).id("same name"));
        assert_eq!(bits(&again), expected(&w0, &request(seed)));
    }
}

#[test]
fn b70_after_an_abort_of_all_nothing_is_in_flight() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    for round in 0..20 {
        let running: Vec<_> = (0..32).map(|seed| handle.submit(request(seed)).unwrap()).collect();
        let before = handle.metrics();
        let aborted = handle.abort(AbortTarget::All);
        let status = handle.status();
        assert_eq!((status.live_requests, status.engine.running, status.engine.blocks_owned), (0, 0, 0));
        let slept = done(&handle, sleep(Tags::ALL, InFlight::Refuse));
        assert_eq!(settled(&slept), dormouse::control::SettledReport::default());
        done(&handle, wake(Tags::ALL));
        let outputs: Vec<_> = running.into_iter().map(output).collect();
        assert_eq!(outputs.iter().filter(|output| was_aborted(output)).count(), aborted.len());
        assert!(before.accepted == 32 * (round + 1));
    }
    assert_serves(&handle, &w0, &request(1));
}

#[test]
fn kept_requests_are_settled_by_a_sleep_in_the_pause() {
    let w0 = weights(1);
    for policy in [InFlight::Refuse, InFlight::Abort, InFlight::Retract, drain(LONG, OnDeadline::Abort)] {
        let handle = paced_controller(&w0);
        let mut generation: Generation = handle.submit(paced(1)).unwrap();
        let begun = tokens(&mut generation, 2);
        done(&handle, Operation::Pause(PauseMode::Keep));
        let slept = block_on(handle.control(sleep(Tags::ALL, policy)));
        match (policy, slept.outcome) {
            (InFlight::Refuse, Err(error)) => assert_eq!(error.kind(), ErrorKind::InFlight),
            // No step runs in a pause: a drain would wait for ever.
            (InFlight::Drain { .. }, Err(error)) => {
                assert_eq!(error.missing_step(), Some(dormouse::control::MissingStep::Resume));
            }
            (InFlight::Abort | InFlight::Retract, Ok(_)) => {
                done(&handle, wake(Tags::ALL));
                let state = handle.state();
                assert!(state.paused && !state.admitting, "a pause outlasts a sleep");
            }
            (_, outcome) => panic!("{policy:?}: {outcome:?}"),
        }
        done(&handle, Operation::Resume);
        let output = rest(begun, generation);
        assert_eq!(was_aborted(&output), policy == InFlight::Abort);
        assert_begins(&output, &expected(&w0, &paced(1)));
        assert!(was_aborted(&output) || bits(&output) == expected(&w0, &paced(1)));
    }
}

#[test]
fn output_does_not_depend_on_what_else_is_in_flight() {
    let w0 = weights(1);
    let engine = awake(builder().max_num_seqs(3), &w0);
    let handle = dormouse::control::Controller::spawn(engine);
    let requests: Vec<_> = (0..12).map(|seed| request(seed).samples(1 + seed as usize % 3)).collect();
    let running: Vec<_> = requests.iter().map(|request| handle.submit(request.clone()).unwrap()).collect();
    for (generation, request) in running.into_iter().zip(&requests) {
        assert_eq!(bits(&output(generation)), expected(&w0, request));
    }
}
