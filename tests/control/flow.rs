//! The flows that the controller is made for: what is served is what a fresh engine with the weights says.

use dormouse::control::{ErrorKind, Lifecycle, MissingStep, Operation, Payload, Report, SubmitError, Tags};
use dormouse::{FinishReason, InFlight, LoadOptions, Request, SafetensorsBytes};

use crate::support::{
    all_of, ask, assert_idle, assert_serves, bits, discard, done, expected, lacking, load, options, output,
    prompt, queueing, refused, request, settled, sleep, spawn, spawn_with, update, wake, weights,
};

/// Greedy, several blocks of prompt.
fn greedy() -> Request {
    request(1).temperature(0.0)
}

#[test]
fn c08_c09_b18_discard_load_wake_over_cycles_equals_fresh() {
    let sets = [weights(1), weights(2)];
    let handle = spawn(&sets[0]);
    for cycle in 0..4 {
        // The same weights again, then others.
        let (before, after) = (&sets[cycle / 2 % 2], &sets[cycle.div_ceil(2) % 2]);
        assert_serves(&handle, before, &greedy());
        assert!(ask(&handle, &greedy()).completions[0].cached_tokens > 0, "the prefix is cached by now");
        done(&handle, discard(InFlight::Refuse));
        assert_eq!(refused(&handle, wake(Tags::ALL)).missing_step(), Some(MissingStep::UpdateWeights));
        done(&handle, wake(Tags::WEIGHTS));
        done(&handle, update(all_of(after)));
        let woken = done(&handle, wake(Tags::KV_CACHE));
        assert_eq!(woken.state_after.lifecycle, Lifecycle::Awake);
        let first = ask(&handle, &greedy());
        assert_eq!(first.completions[0].cached_tokens, 0, "no KV outlives the weights that made it");
        assert_eq!(bits(&first), expected(after, &greedy()));
    }
    assert_idle(&handle);
}

#[test]
fn c08_c09_every_way_around_equals_fresh() {
    let (w0, w1) = (weights(1), weights(2));
    let bytes = || {
        let tensors = w1.0.iter().map(|(name, tensor)| (name.clone(), tensor));
        Payload::source(SafetensorsBytes::new(safetensors::serialize(tensors, None).unwrap()))
    };
    let reload = |weights| Operation::UpdateModelWeight { weights: Some(weights), options: <_>::default() };
    let none = InFlight::Refuse;
    let ways: Vec<(Vec<Operation>, bool)> = vec![
        (vec![sleep(Tags::ALL, none), wake(Tags::ALL)], false),
        (vec![sleep(Tags::KV_CACHE, none), sleep(Tags::WEIGHTS, none), wake(Tags::WEIGHTS)], false),
        (vec![sleep(Tags::KV_CACHE, none), update(all_of(&w1))], true),
        (vec![sleep(Tags::ALL, none), wake(Tags::WEIGHTS), update(all_of(&w1))], true),
        (vec![sleep(Tags::ALL, none), load(all_of(&w1))], true),
        (vec![sleep(Tags::ALL, none), discard(none), load(bytes())], true),
        (vec![Operation::ClearLoadWeight, reload(all_of(&w1))], true),
        (vec![sleep(Tags::KV_CACHE, none), reload(bytes())], true),
    ];
    for (way, changes) in ways {
        let handle = spawn(&w0);
        let long = request(1).samples(3);
        assert_serves(&handle, &w0, &long);
        for operation in way {
            done(&handle, operation);
        }
        if handle.state().lifecycle != Lifecycle::Awake {
            done(&handle, wake(Tags::KV_CACHE));
        }
        let first = ask(&handle, &long);
        assert_eq!(bits(&first), expected(if changes { &w1 } else { &w0 }, &long));
        assert_eq!(first.completions[0].cached_tokens, 0);
    }
}

#[test]
fn c02_b20_after_a_partial_wake_nothing_is_served_and_no_step_runs() {
    let (w0, w1) = (weights(1), weights(2));
    for queues in [false, true] {
        let handle = spawn_with(if queues { queueing() } else { options() }, &w0);
        assert_serves(&handle, &w0, &request(1));
        let mut queued = Vec::new();
        let steps = handle.metrics().engine.steps;
        let mut meet = |seed, lifecycle| {
            assert_eq!((handle.state().lifecycle, handle.state().admitting), (lifecycle, false));
            match handle.submit(request(seed)) {
                Ok(generation) => queued.push((seed, generation)),
                Err(error @ SubmitError::NotServing { .. }) => {
                    assert!(!queues && error.kind() == ErrorKind::NotServing && error.kind().is_retryable());
                    let SubmitError::NotServing { state, retry_after } = &error else { panic!() };
                    assert!(state.lifecycle == lifecycle && !retry_after.is_zero());
                    assert!(error.to_string().contains(lifecycle.as_str()), "{error}");
                }
                Err(error) => panic!("{error}"),
            }
            assert_eq!(handle.metrics().engine.steps, steps, "no step runs");
        };
        done(&handle, discard(InFlight::Refuse));
        meet(1, Lifecycle::SleepingDiscarded);
        done(&handle, wake(Tags::WEIGHTS));
        meet(2, Lifecycle::AwaitingWeights);
        done(&handle, update(all_of(&w1)));
        meet(3, Lifecycle::WeightsLoaded);
        done(&handle, sleep(Tags::WEIGHTS, InFlight::Refuse));
        meet(4, Lifecycle::SleepingKept);
        done(&handle, wake(Tags::WEIGHTS));
        meet(5, Lifecycle::WeightsLoaded);
        assert_eq!((queued.len(), handle.status().requests_aside), if queues { (5, 5) } else { (0, 0) });
        done(&handle, wake(Tags::KV_CACHE));
        for (seed, generation) in queued {
            assert_eq!(bits(&output(generation)), expected(&w1, &request(seed)));
        }
        assert_serves(&handle, &w1, &request(6));
        assert_idle(&handle);
    }
}

#[test]
fn c07_b18_weights_that_are_not_all_there_never_serve() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn(&w0);
    assert_serves(&handle, &w0, &greedy());
    let last = w1.0.last().unwrap().0.as_str();
    let incomplete = |operation: &dyn Fn() -> Operation| {
        let error = refused(&handle, operation());
        assert_eq!(error.kind(), ErrorKind::InvalidWeights);
        assert!(format!("{error:?}").contains(last), "{error:?}");
        assert!(matches!(handle.submit(greedy()), Err(SubmitError::NotServing { .. })));
    };
    done(&handle, discard(InFlight::Refuse));
    incomplete(&|| load(lacking(&w1)));
    let reload = || Operation::UpdateModelWeight { weights: Some(lacking(&w1)), options: <_>::default() };
    incomplete(&reload);
    assert_eq!(handle.state().lifecycle, Lifecycle::SleepingDiscarded);
    done(&handle, wake(Tags::WEIGHTS));
    incomplete(&|| update(lacking(&w1)));
    incomplete(&|| load(lacking(&w1)));
    assert_eq!(refused(&handle, wake(Tags::KV_CACHE)).missing_step(), Some(MissingStep::UpdateWeights));
    assert_eq!(handle.state().lifecycle, Lifecycle::AwaitingWeights);
    done(&handle, update(all_of(&w1)));
    // What is resident stays whole, too.
    incomplete(&|| update(lacking(&w0)));
    done(&handle, wake(Tags::KV_CACHE));
    assert_serves(&handle, &w1, &greedy());
}

#[test]
fn the_settings_that_arrive_with_weights_are_checked() {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn(&w0);
    done(&handle, discard(InFlight::Refuse));
    let expecting = |weights| {
        let digest = crate::support::digest(weights);
        let options = LoadOptions::default().expect_digest(digest).label("step 7");
        Operation::LoadWeights { weights: all_of(&w1), options }
    };
    assert_eq!(refused(&handle, expecting(&w0)).kind(), ErrorKind::InvalidWeights);
    let loaded = done(&handle, expecting(&w1));
    let [Report::Load(report)] = &loaded.report[..] else { panic!("{loaded:?}") };
    assert_eq!(Some(&report.version), loaded.state_after.version.as_ref());
    assert_eq!(report.version.label.as_deref(), Some("step 7"));
}

#[test]
fn a_prompt_is_scored_and_an_empty_completion_ends_over_a_sleep() {
    let w0 = weights(1);
    let handle = spawn_with(queueing(), &w0);
    let score = Request::new(prompt(20, 3)).max_new_tokens(0).prompt_logprobs(true);
    let scored = ask(&handle, &score);
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
    let waiting = handle.submit(score.clone()).unwrap();
    let aborted = handle.submit(score).unwrap();
    let slept = done(
        &handle,
        Operation::Abort(dormouse::control::AbortTarget::These {
            requests: vec![aborted.id()],
            names: vec![],
        }),
    );
    assert_eq!(settled(&slept).aborted, [aborted.id()]);
    let aborted = output(aborted);
    assert_eq!(aborted.prompt_logprobs, Some(Vec::new()));
    assert_eq!(aborted.completions[0].finish_reason, FinishReason::Abort);
    done(&handle, wake(Tags::ALL));
    assert_eq!(output(waiting).prompt_logprobs, scored.prompt_logprobs);
}
