//! The controller's threads under a model checker: random and adversarial schedules of the real code, with a real
//! engine, at every lock and every wait. `cargo test --features shuttle --test shuttle`.
//!
//! A schedule in which somebody waits for ever is reported as a deadlock, with the seed that replays it.

mod common;

use std::sync::{Arc, LazyLock};

use common::{Weights, awake, fresh, tiny_builder, tiny_weights};
use dormouse::control::{
    AbortTarget, Controller, ControllerOptions, Generation, GenerationError, GenerationEvent, Handle,
    Lifecycle, Operation, PauseMode, Payload, SleepPlan, SleepWeights, SubmitError, Tags, WhileNotServing,
};
use dormouse::{DType, FinishReason, InFlight, Request, RequestOutput, UpdateOptions};
use shuttle::thread;

static OLD: LazyLock<Weights> = LazyLock::new(|| tiny_weights(false, DType::F32, 1));
static NEW: LazyLock<Weights> = LazyLock::new(|| tiny_weights(false, DType::F32, 2));
static OF_OLD: LazyLock<RequestOutput> = LazyLock::new(|| fresh(&OLD, false, &request()));
static OF_NEW: LazyLock<RequestOutput> = LazyLock::new(|| fresh(&NEW, false, &request()));

fn request() -> Request {
    Request::new(vec![1, 2, 3, 4, 5]).max_new_tokens(4).seed(3).ignore_eos(true).stream(true)
}

fn handle(options: ControllerOptions) -> Handle {
    Controller::with(options).drive(awake(tiny_builder(false, DType::F32), &OLD))
}

fn buffer(tokens: usize) -> ControllerOptions {
    let mut options = ControllerOptions::default();
    options.stream_buffer = tokens;
    options
}

/// Runs a scenario under many schedules.
fn check(scenario: impl Fn() + Send + Sync + 'static) {
    LazyLock::force(&OF_OLD);
    LazyLock::force(&OF_NEW);
    let schedules = std::env::var("DORMOUSE_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(1000);
    let scenario = Arc::new(scenario);
    let again = Arc::clone(&scenario);
    shuttle::check_random(move || scenario(), schedules / 2);
    shuttle::check_pct(move || again(), schedules / 2, 3);
}

/// Reads a generation to its end: tokens in order, each once, and those of its output; the output a prefix of the
/// old weights' or the new ones', or of the old ones' and then whatever the new ones make of it.
fn finish(mut generation: Generation) -> Result<RequestOutput, GenerationError> {
    let mut tokens = Vec::new();
    let mut last = None;
    for event in generation.events() {
        assert!(last.is_none(), "nothing comes after the output");
        match event {
            Ok(GenerationEvent::Token(token)) => {
                assert_eq!(token.position, tokens.len());
                tokens.push(token.token);
            }
            Ok(GenerationEvent::Done(output)) => last = Some(Ok(output)),
            Err(error) => last = Some(Err(error)),
        }
    }
    let last = last.expect("each generation ends");
    if let Ok(output) = &last {
        let completion = &output.completions[0];
        assert_eq!(completion.tokens, tokens);
        let first = completion.versions.first().map_or(0, |span| span.tokens.end);
        let whole = |of: &RequestOutput| of.completions[0].tokens.starts_with(&tokens[..first]);
        assert!(whole(&OF_OLD) || whole(&OF_NEW), "{tokens:?} come from no weights");
        if completion.versions.len() < 2 && completion.finish_reason == FinishReason::Length {
            assert!(tokens == OF_OLD.completions[0].tokens || tokens == OF_NEW.completions[0].tokens);
        }
    }
    last
}

fn to_new(handle: &Handle, in_flight: InFlight) {
    let plan = SleepPlan { in_flight, ..SleepPlan::default() };
    handle.run(Operation::Sleep(plan)).expect("an awake engine sleeps");
    let weights = Payload::source(common::Owned(NEW.0.clone()));
    handle.run(Operation::LoadWeights { weights, options: Default::default() }).expect("complete weights");
    let woken = handle.run(Operation::WakeUp { tags: Tags::ALL }).expect("memory for a tiny cache");
    assert_eq!(woken.state_after.lifecycle, Lifecycle::Awake);
}

#[test]
fn c03_c04_submissions_race_a_sleep_and_an_update() {
    for in_flight in [InFlight::Abort, InFlight::Retract] {
        check(move || {
            let handle = handle(ControllerOptions::default());
            let other = handle.clone();
            let submitter = thread::spawn(move || {
                for _ in 0..2 {
                    match other.submit(request()) {
                        Ok(generation) => {
                            let output = finish(generation).expect("no step fails");
                            let aborted = output.completions[0].finish_reason == FinishReason::Abort;
                            assert!(!aborted || in_flight == InFlight::Abort);
                        }
                        Err(SubmitError::NotServing { state, .. }) => assert!(!state.admitting),
                        Err(error) => panic!("{error}"),
                    }
                }
            });
            to_new(&handle, in_flight);
            submitter.join().expect("the submitter's checks");
            let output = finish(handle.submit(request()).expect("serving")).expect("no step fails");
            assert_eq!(output.completions[0].tokens, OF_NEW.completions[0].tokens);
            assert_eq!(handle.status().live_requests, 0);
        });
    }
}

#[test]
fn b53_b69_readers_that_go_away_race_steps_and_sleeps() {
    check(|| {
        let handle = handle(ControllerOptions::default());
        let other = handle.clone();
        let reader = thread::spawn(move || {
            if let Ok(mut generation) = other.submit(request()) {
                generation.next_event();
            }
            if let Ok(generation) = other.submit(request()) {
                drop(generation);
            }
        });
        let asleep = handle.run(Operation::Sleep(SleepPlan::default()));
        reader.join().expect("the reader's checks");
        if asleep.is_ok() {
            handle.run(Operation::WakeUp { tags: Tags::ALL }).expect("kept weights wake");
        }
        // What was dropped is gone without anybody waiting for it: a sleep finds nothing in flight.
        handle.run(Operation::Sleep(SleepPlan::default())).expect("nothing is in flight");
        assert_eq!(handle.status().live_requests, 0);
    });
}

#[test]
fn slow_readers_race_pauses_and_wakes() {
    check(|| {
        let handle = handle(buffer(1));
        let generation = handle.submit(request()).expect("serving");
        let other = handle.clone();
        let control = thread::spawn(move || {
            other.run(Operation::Pause(PauseMode::Keep)).expect("a pause that keeps");
            other.run(Operation::Resume).expect("a resume");
            to_new(&other, InFlight::Retract);
        });
        let output = finish(generation).expect("no step fails");
        assert_eq!(output.completions[0].finish_reason, FinishReason::Length);
        control.join().expect("the control thread's checks");
    });
}

#[test]
fn c15_b08_aborts_race_natural_ends_and_each_other() {
    check(|| {
        let handle = handle(ControllerOptions::default());
        let generations: Vec<_> = (0..2).map(|_| handle.submit(request()).expect("serving")).collect();
        let id = generations[0].id();
        let aborters: Vec<_> =
            [AbortTarget::All, AbortTarget::These { requests: vec![id, id], names: vec!["nobody".into()] }]
                .into_iter()
                .map(|target| {
                    let handle = handle.clone();
                    thread::spawn(move || handle.abort(target).len())
                })
                .collect();
        let aborted = generations
            .into_iter()
            .map(|generation| finish(generation).expect("no step fails"))
            .filter(|output| output.completions[0].finish_reason == FinishReason::Abort)
            .count();
        let claimed: usize = aborters.into_iter().map(|a| a.join().expect("answered")).sum();
        assert!(claimed >= aborted, "{aborted} were aborted, {claimed} of them by a call");
        handle.run(Operation::Pause(PauseMode::Abort)).expect("a pause");
        assert_eq!(handle.status().live_requests, 0);
    });
}

#[test]
fn c18_stopping_races_everything() {
    check(|| {
        let mut options = ControllerOptions::default();
        options.while_not_serving = WhileNotServing::Queue;
        let handle = handle(options);
        let (generating, updating) = (handle.clone(), handle.clone());
        let generator = thread::spawn(move || match generating.submit(request()) {
            Ok(generation) => drop(finish(generation)),
            Err(error) => assert!(matches!(error, SubmitError::Stopped), "{error}"),
        });
        let updater = thread::spawn(move || {
            let plan =
                SleepPlan { tags: Tags::KV_CACHE, weights: SleepWeights::Park, in_flight: InFlight::Retract };
            let sleep = updating.control(Operation::Sleep(plan));
            let begin = updating.control(Operation::Begin { options: UpdateOptions::default(), idle: None });
            let status = updating.control(Operation::Status);
            [sleep, begin, status].into_iter().for_each(|ticket| drop(ticket.wait()));
        });
        let first = handle.stop();
        let second = handle.stop();
        assert!(first.is_ok() && second.is_err(), "the engine comes back once");
        generator.join().expect("the generator's checks");
        updater.join().expect("all are answered");
        assert_eq!(handle.state().lifecycle, Lifecycle::Stopped);
    });
}
