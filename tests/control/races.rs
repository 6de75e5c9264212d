//! Everything at once: each request and each operation is answered once, and the end is one of the legal ones.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

use dormouse::control::{
    AbortTarget, Generation, Handle, Lifecycle, Operation, Outcome, PauseMode, SubmitError, Tags,
};
use dormouse::{InFlight, RequestOutput};

use crate::support::{
    all_of, assert_begins, assert_idle, assert_serves, bits, block_on, discard, done, expected, load,
    options, output, queueing, request, run, sleep, spawn, spawn_with, update, wake, was_aborted, weights,
};

/// Submits from several threads while `meanwhile` runs; those that were accepted, with their seeds.
fn submitting(handle: &Handle, meanwhile: impl FnOnce()) -> (Vec<(u32, Generation)>, usize) {
    let (threads, each) = (4, 50);
    let (barrier, begun) = (Barrier::new(threads + 1), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let submit = |thread: usize| {
            let (barrier, begun) = (&barrier, &begun);
            scope.spawn(move || {
                barrier.wait();
                let mut accepted = Vec::new();
                for number in 0..each {
                    let seed = (thread * each + number) as u32 % 20;
                    begun.fetch_add(1, Ordering::Relaxed);
                    match handle.submit(request(seed)) {
                        Ok(generation) => accepted.push((seed, generation)),
                        Err(SubmitError::NotServing { state, .. }) => assert!(!state.admitting),
                        Err(error) => panic!("{error}"),
                    }
                }
                accepted
            })
        };
        let threads: Vec<_> = (0..threads).map(submit).collect();
        barrier.wait();
        while begun.load(Ordering::Relaxed) < 60 {
            std::hint::spin_loop();
        }
        meanwhile();
        let accepted: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        let refused = 4 * each - accepted.len();
        (accepted, refused)
    })
}

#[test]
fn c03_b06_requests_that_race_a_sleep_are_answered_or_refused_without_a_wake() {
    let w0 = weights(1);
    let whole: Vec<_> = (0..20).map(|seed| expected(&w0, &request(seed))).collect();
    for round in 0..4 {
        let handle = spawn(&w0);
        let tags = [Tags::ALL, Tags::KV_CACHE][round % 2];
        let (accepted, refused) = submitting(&handle, || {
            done(&handle, sleep(tags, InFlight::Abort));
        });
        assert!(handle.metrics().live_requests == 0, "none waits for a wake");
        assert_eq!(handle.metrics().refused.get("not_serving").copied().unwrap_or(0), refused as u64);
        for (seed, generation) in accepted {
            let output = output(generation);
            assert_begins(&output, &whole[seed as usize]);
            assert!(was_aborted(&output) || bits(&output) == whole[seed as usize]);
        }
        done(&handle, wake(Tags::ALL));
        assert_serves(&handle, &w0, &request(1));
        assert_idle(&handle);
    }
}

#[test]
fn c03_b06_requests_that_race_a_sleep_and_are_queued_or_retracted_go_on_after_the_wake() {
    let w0 = weights(1);
    let whole: Vec<_> = (0..20).map(|seed| expected(&w0, &request(seed))).collect();
    for queues in [true, false] {
        let handle = spawn_with(if queues { queueing() } else { options() }, &w0);
        let (accepted, refused) = submitting(&handle, || {
            done(&handle, discard(InFlight::Retract));
            done(&handle, load(all_of(&w0)));
        });
        assert!(!queues || refused == 0);
        done(&handle, wake(Tags::KV_CACHE));
        for (seed, generation) in accepted {
            assert_eq!(bits(&output(generation)), whole[seed as usize]);
        }
        assert_idle(&handle);
    }
}

#[test]
fn requests_that_race_pauses_and_resumes_are_none_the_worse() {
    let w0 = weights(1);
    let whole: Vec<_> = (0..20).map(|seed| expected(&w0, &request(seed))).collect();
    let handle = spawn_with(queueing(), &w0);
    let (accepted, _) = submitting(&handle, || {
        for _ in 0..20 {
            run(&handle, Operation::Pause(PauseMode::Keep));
            run(&handle, Operation::Resume);
        }
    });
    assert_eq!(accepted.len(), 200);
    for (seed, generation) in accepted {
        assert_eq!(bits(&output(generation)), whole[seed as usize]);
    }
    assert_idle(&handle);
}

#[test]
fn c15_operations_from_many_threads_are_carried_out_one_after_another() {
    let sets = [weights(1), weights(2)];
    let whole = [0, 1].map(|set| expected(&sets[set], &request(1)));
    for queues in [false, true] {
        let handle = spawn_with(if queues { queueing() } else { options() }, &sets[0]);
        let operation = |thread: usize, round: usize| match (thread + 5 * round) % 9 {
            0 => sleep(Tags::ALL, InFlight::Retract),
            1 | 2 => wake(Tags::ALL),
            3 => sleep(Tags::KV_CACHE, InFlight::Abort),
            4 => update(all_of(&sets[round % 2])),
            5 => Operation::Abort(AbortTarget::All),
            6 => Operation::Pause(PauseMode::Keep),
            7 => Operation::Resume,
            _ => sleep(Tags::ALL, InFlight::Refuse),
        };
        let (mut slept, mut woken, mut updated) = (0_i32, 0_i32, 0_u64);
        let (mut outputs, mut tickets) = (Vec::new(), 0);
        std::thread::scope(|scope| {
            let (handle, operation) = (&handle, &operation);
            let work = move |thread: usize| {
                let mut answers = Vec::new();
                let mut accepted = Vec::new();
                for round in 0..30 {
                    accepted.extend(handle.submit(request(1)));
                    answers.push(block_on(handle.control(operation(thread, round))));
                }
                (answers, accepted)
            };
            let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || work(thread))).collect();
            for thread in threads {
                let (answers, accepted) = thread.join().unwrap();
                outputs.extend(accepted);
                tickets += answers.len();
                for answer in &answers {
                    let is = |state: Lifecycle| i32::from(state == Lifecycle::Awake);
                    let (before, after) =
                        (is(answer.state_before.lifecycle), is(answer.state_after.lifecycle));
                    let done = matches!(answer.outcome, Ok(Outcome::Done));
                    match answer.operation {
                        "sleep" => slept += before - after,
                        "wakeup" => woken += after - before,
                        "update_weights" => updated += u64::from(done),
                        _ => {}
                    }
                }
            }
        });
        assert_eq!(tickets, 120);
        let state = handle.state();
        assert_eq!(slept - woken, i32::from(state.lifecycle != Lifecycle::Awake), "one after another");
        assert_eq!(state.version.unwrap().counter, 1 + updated);
        run(&handle, Operation::Resume);
        run(&handle, wake(Tags::ALL));
        let outputs: Vec<_> = outputs.into_iter().map(output).collect();
        let of_one_set = |output: &RequestOutput| output.completions[0].versions.len() == 1;
        for output in outputs.iter().filter(|output| of_one_set(output)) {
            let set = output.completions[0].versions[0].version.digest;
            let set = usize::from(set != crate::support::digest(&sets[0]));
            assert_begins(output, &whole[set]);
            assert!(was_aborted(output) || bits(output) == whole[set]);
        }
        assert_idle(&handle);
    }
}
