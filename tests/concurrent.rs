//! Sessions, and many threads on one engine: whatever the others do, each output is a fresh engine's.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod common;
#[path = "common/flight.rs"]
mod flight;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use crate::common::{awake, bits, fresh, prompt, tiny_builder};
use dormouse::{
    DType, GenerateError, InFlight, KvCapacity, Request, RequestError, RequestOutput, SleepOptions,
};
use flight::{aborted, assert_prefix, ended_by_itself, finish, request, weights};

/// Runs `f` on a thread of its own and panics if it takes longer than it can.
fn bounded<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || drop(sender.send(f())));
    match receiver.recv_timeout(Duration::from_secs(60)) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
    }
}

/// The same parameters on another prompt.
fn with_prompt(prompt: &[u32], request: &Request) -> Request {
    Request::new(prompt).params(request.params.clone())
}

#[test]
fn c16_b69_a_sleep_comes_after_the_step_in_flight() {
    bounded(|| {
        let w0 = weights(1);
        let request = request(12, 1);
        let expected = bits(&fresh(&w0, false, &request));
        let mut engine = awake(tiny_builder(false, DType::F32), &w0);
        for round in 0..100 {
            let shared = Arc::new(engine);
            let id = shared.submit(request.clone()).unwrap();
            let stop = Arc::new(AtomicBool::new(false));
            // The last owner is the one that gets to sleep: no step can be running.
            let steppers: Vec<_> = (0..2)
                .map(|_| {
                    let (engine, stop) = (Arc::clone(&shared), Arc::clone(&stop));
                    std::thread::spawn(move || {
                        let mut outputs = Vec::new();
                        while !stop.load(Ordering::Relaxed) {
                            outputs.extend(engine.step().unwrap().outputs);
                        }
                        (Arc::into_inner(engine), outputs)
                    })
                })
                .collect();
            while shared.stats().sampled_tokens < round % 12 {}
            stop.store(true, Ordering::Relaxed);
            let mut last = Arc::into_inner(shared);
            let mut outputs = Vec::new();
            for stepper in steppers {
                let (engine, handed_out) = stepper.join().unwrap();
                last = last.or(engine);
                outputs.extend(handed_out);
            }
            let awake = last.expect("one of three was the last owner");
            let asleep = awake.sleep(SleepOptions::default().in_flight(InFlight::Retract)).unwrap();
            engine = asleep.restore_weights().unwrap().wake_up().unwrap();
            assert_eq!(engine.stats().steps, 0, "no step ran meanwhile");
            outputs.extend(finish(&engine).into_values());
            assert_eq!(outputs.len(), 1);
            assert_eq!((outputs[0].request, bits(&outputs[0])), (id, expected.clone()));
        }
    });
}

#[test]
fn many_threads_at_once_each_get_what_a_fresh_engine_gives() {
    bounded(|| {
        let w0 = weights(1);
        let requests: Vec<Request> =
            (0..16).map(|i| request(5 + 2 * i as usize, i % 6).samples(1 + i as usize % 3)).collect();
        let whole: Vec<RequestOutput> = requests.iter().map(|r| fresh(&w0, false, r)).collect();
        // Little memory: threads preempt each other.
        let engine = awake(
            tiny_builder(false, DType::F32).kv_cache(KvCapacity::Blocks(40)).max_num_batched_tokens(16),
            &w0,
        );
        let by_id = parking_lot::Mutex::new(BTreeMap::new());
        let answered = AtomicUsize::new(0);
        let take = |outputs: Vec<RequestOutput>| {
            for output in outputs {
                let index: usize = by_id.lock().remove(&output.request).expect("each once");
                match aborted(&output) {
                    true => assert_prefix(&output, &whole[index]),
                    false if ended_by_itself(&output) => assert_eq!(bits(&output), bits(&whole[index])),
                    false => assert_prefix(&output, &whole[index]),
                }
                answered.fetch_add(1, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            for thread in 0..16 {
                let (engine, requests, whole, take, by_id) = (&engine, &requests, &whole, &take, &by_id);
                scope.spawn(move || {
                    for round in 0..6 {
                        let index = (thread * 5 + round * 3) % 16;
                        match (thread + round) % 4 {
                            0 | 1 => {
                                let pair = [requests[index].clone(), requests[15 - index].clone()];
                                let outputs = engine.generate(&pair).unwrap();
                                assert_eq!(bits(&outputs[0]), bits(&whole[index]));
                                assert_eq!(bits(&outputs[1]), bits(&whole[15 - index]));
                            }
                            2 => {
                                let mut map = by_id.lock();
                                map.insert(engine.submit(requests[index].clone()).unwrap(), index);
                                drop(map);
                                (0..4).for_each(|_| take(engine.step().unwrap().outputs));
                            }
                            _ => {
                                let mut map = by_id.lock();
                                let id = engine.submit(requests[index].clone()).unwrap();
                                map.insert(id, index);
                                drop(map);
                                take(engine.step().unwrap().outputs);
                                take(engine.abort(&[id]).outputs);
                            }
                        }
                    }
                });
            }
        });
        take(finish(&engine).into_values().collect());
        assert!(by_id.lock().is_empty(), "every submitted request has ended");
        assert_eq!(answered.into_inner(), 16 * 6 / 2);
        let stats = engine.stats();
        assert_eq!((stats.live_requests, stats.blocks_owned), (0, 0));
        assert!(engine.sleep(SleepOptions::default()).is_ok());
    });
}

/// A step's word that nothing is left takes in what was submitted while it ran.
#[test]
fn what_is_submitted_while_a_step_runs_is_not_overlooked() {
    let engine = awake(tiny_builder(false, DType::F32), &weights(1));
    let (mut hits, begin) = (0, Instant::now());
    while hits < 20 && begin.elapsed() < Duration::from_secs(20) {
        engine.clear_prefix_cache();
        engine.submit(request(200, 1).max_new_tokens(1)).unwrap();
        let gate = Barrier::new(2);
        let (step, started, ended, submitted) = std::thread::scope(|scope| {
            let submitter = scope.spawn(|| {
                gate.wait();
                std::thread::sleep(Duration::from_micros(200));
                engine.submit(request(9, 2).max_new_tokens(1)).unwrap();
                Instant::now()
            });
            gate.wait();
            let started = Instant::now();
            let step = engine.step().unwrap();
            (step, started, Instant::now(), submitter.join().unwrap())
        });
        if submitted < started + (ended - started) / 2 {
            hits += 1;
            assert!(step.outputs.len() == 2 || !step.is_idle(), "one of two requests is still to come");
        }
        finish(&engine);
    }
}

#[test]
fn a_sessions_turns_are_the_bits_of_one_request_with_the_whole_history() {
    let w0 = weights(1);
    let engine = awake(tiny_builder(false, DType::F32).prefix_cache_blocks(0), &w0);
    let mut session = engine.session();
    let mut history = Vec::new();
    for turn in 0..5 {
        let request = request(7 + turn as usize, turn).max_new_tokens(6);
        let output = session.generate(&request).unwrap();
        history.extend_from_slice(&request.prompt);
        assert_eq!(output.prompt, history);
        let whole = with_prompt(&history, &request);
        assert_eq!(bits(&output), bits(&fresh(&w0, false, &whole)), "turn {turn}");
        history.extend_from_slice(&output.completions[0].tokens);
        assert_eq!(session.tokens(), history);
        // All but the last token is computed, and pinned.
        assert_eq!(engine.stats().blocks_owned, (history.len() - 1).div_ceil(4), "turn {turn}");
        let expected = if turn == 0 { 0 } else { output.prompt.len() - (7 + turn as usize) - 1 };
        assert_eq!(output.completions[0].cached_tokens, expected, "the turns before were not computed again");
    }
    // Another conversation is not disturbed, nor disturbs.
    let mut other = engine.session();
    other.generate(&request(9, 9)).unwrap();
    drop(session);
    assert_eq!(engine.stats().blocks_owned, (9 + 12usize - 1).div_ceil(4));
    drop(other);
    let stats = engine.stats();
    assert_eq!((stats.blocks_owned, stats.blocks_free), (0, stats.blocks));
}

#[test]
fn a_turn_that_is_aborted_keeps_what_it_said_and_the_session_goes_on() {
    bounded(|| {
        let w0 = weights(1);
        let engine = awake(tiny_builder(false, DType::F32).kv_cache(KvCapacity::Blocks(2048)), &w0);
        let mut aborts = 0;
        for round in 0..8 {
            let mut session = engine.session();
            session.generate(&request(6, 1).max_new_tokens(3)).unwrap();
            // Others make the turn long enough to be aborted on its way.
            engine.submit(request(5, 4).samples(32).max_new_tokens(200)).unwrap();
            let long = request(5, 2).max_new_tokens(200).id("turn");
            let output = std::thread::scope(|scope| {
                let turn = scope.spawn(|| session.generate(&long).unwrap());
                let id = loop {
                    match engine.find("turn") {
                        Some(id) => break id,
                        None if turn.is_finished() => return turn.join().unwrap(),
                        None => std::thread::yield_now(),
                    }
                };
                let from = engine.stats().sampled_tokens;
                while engine.stats().sampled_tokens < from + 33 * round && !turn.is_finished() {}
                assert!(engine.abort(&[id]).outputs.is_empty(), "the turn's own call returns it");
                turn.join().unwrap()
            });
            aborts += usize::from(aborted(&output));
            engine.abort_all();
            let whole = fresh(&w0, false, &with_prompt(&output.prompt, &long));
            assert_prefix(&output, &whole);
            let next = session.generate(&request(4, 3)).unwrap();
            let mut history = [&output.prompt[..], &output.completions[0].tokens].concat();
            history.extend(prompt(4, 3));
            assert_eq!(next.prompt, history);
            let whole = with_prompt(&history, &request(4, 3));
            assert_eq!(bits(&next), bits(&fresh(&w0, false, &whole)));
            drop(session);
            assert_eq!(engine.stats().blocks_owned, 0);
        }
        assert!(aborts > 3, "{aborts} turns were aborted");
    });
}

/// What a turn carries continues its own prompt: after a history it would be another prompt's.
#[test]
fn a_turn_cannot_resume_what_continues_another_prompt() {
    let w0 = weights(1);
    let engine = awake(tiny_builder(false, DType::F32), &w0);
    let turn = request(6, 1);
    let id = engine.submit(turn.clone()).unwrap();
    (0..3).for_each(|_| drop(engine.step().unwrap()));
    let partial = engine.abort(&[id]).outputs.remove(0);
    let resumed = turn.resume(&partial).unwrap();
    let mut session = engine.session();
    let output = session.generate(&resumed).unwrap();
    assert_eq!(bits(&output), bits(&fresh(&w0, false, &turn)), "the first turn is like any request");
    let before = session.tokens().to_vec();
    let error = session.generate(&resumed).unwrap_err();
    assert!(
        matches!(error, GenerateError::Request { source: RequestError::ResumePrompt { .. }, .. }),
        "{error}"
    );
    assert_eq!(session.tokens(), before);
    session.generate(&turn).unwrap();
}

/// Sessions between turns, whose histories fill the pool together, are in nobody's way: not in one another's,
/// nor in that of a request or a score. Whose blocks went computes them again, to the same bits.
#[test]
fn pinned_histories_make_room_for_who_could_not_run_otherwise() {
    let w0 = weights(1);
    let engine = awake(tiny_builder(false, DType::F32).kv_cache(KvCapacity::Blocks(16)), &w0);
    let mut sessions: Vec<_> = (0..4).map(|_| engine.session()).collect();
    for turn in 0..3 {
        for (i, session) in sessions.iter_mut().enumerate() {
            let before = session.tokens().to_vec();
            let request = request(8, 4 * turn + i as u32).max_new_tokens(6);
            let output = session.generate(&request).unwrap();
            let whole = with_prompt(&[&before[..], &request.prompt].concat(), &request);
            assert_eq!(bits(&output), bits(&fresh(&w0, false, &whole)), "turn {turn} of session {i}");
        }
        let alone = request(50, turn);
        let output = engine.generate(std::slice::from_ref(&alone)).unwrap().remove(0);
        assert_eq!(bits(&output), bits(&fresh(&w0, false, &alone)), "beside {turn} turns");
    }
    drop(sessions);
    assert_eq!(engine.stats().blocks_owned, 0);
}

/// A turn that only adds to the conversation (nothing generated) keeps its KV for the next one.
#[test]
fn a_turn_without_new_tokens_keeps_the_sessions_blocks() {
    let w0 = weights(1);
    let engine = awake(tiny_builder(false, DType::F32).prefix_cache(false), &w0);
    let mut session = engine.session();
    let context = request(9, 1).max_new_tokens(0).prompt_logprobs(true);
    let scored = session.generate(&context).unwrap();
    assert_eq!(scored.prompt_logprobs.as_ref().map(Vec::len), Some(8));
    let question = request(4, 2).max_new_tokens(6);
    let output = session.generate(&question).unwrap();
    assert_eq!(output.completions[0].cached_tokens, 9);
    let whole = with_prompt(&[context.prompt, question.prompt.clone()].concat(), &question);
    assert_eq!(bits(&output), bits(&fresh(&w0, false, &whole)));
    drop(session);
    assert_eq!(engine.stats().blocks_owned, 0);
}
