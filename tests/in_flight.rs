//! Requests across aborts, drains and sleeps: each ends exactly once, and whatever happened on the
//! way its tokens and logprobs are those of a fresh engine, bit for bit.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod common;
#[path = "common/flight.rs"]
mod flight;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::common::{Weights, awake, bits, fresh, parts, tiny_builder};
use dormouse::{
    Awake, DType, Engine, FinishReason, InFlight, KvCapacity, OnDeadline, Request, RequestError, RequestId,
    RequestOutput, SleepError, SleepOptions, VersionSpan,
};
use flight::{aborted, assert_prefix, ended_by_itself, finish, request, weights};

/// Eight tokens a step: prompts take several steps, and others wait.
fn narrow(weights: &Weights) -> Engine<Awake> {
    awake(tiny_builder(false, DType::F32).max_num_batched_tokens(8), weights)
}

fn engine(weights: &Weights) -> Engine<Awake> {
    awake(tiny_builder(false, DType::F32), weights)
}

fn steps(engine: &Engine<Awake>, count: usize) -> Vec<RequestOutput> {
    (0..count).flat_map(|_| engine.step().expect("the device works").outputs).collect()
}

fn finish_one(engine: &Engine<Awake>) -> RequestOutput {
    let outputs = finish(engine);
    assert_eq!(outputs.len(), 1);
    outputs.into_values().next().expect("one")
}

fn with(policy: InFlight) -> SleepOptions {
    SleepOptions::default().in_flight(policy)
}

fn drain(deadline: Duration, then: OnDeadline) -> SleepOptions {
    with(InFlight::Drain { deadline, then })
}

#[test]
fn c04_what_was_accepted_before_a_sleep_has_exactly_one_answer() {
    let w0 = weights(1);
    let request = request(10, 1);
    // Aborted, and taken while asleep.
    let awake = engine(&w0);
    let id = awake.submit(request.clone()).unwrap();
    let mut asleep = awake.sleep(with(InFlight::Abort)).unwrap();
    assert_eq!(asleep.report().settled.aborted, [id]);
    let settled = asleep.take_settled();
    assert!(settled.len() == 1 && settled[0].request == id && aborted(&settled[0]));
    assert!(asleep.take_settled().is_empty());
    let awake = asleep.restore_weights().unwrap().wake_up().unwrap();
    assert!(finish(&awake).is_empty());
    // Aborted, and handed out by the first step after the wake.
    let id = awake.submit(request.clone()).unwrap();
    let awake = awake.sleep(with(InFlight::Abort)).unwrap().restore_weights().unwrap().wake_up().unwrap();
    assert!(aborted(&finish(&awake)[&id]));
    // Retracted: it goes on by itself.
    let id = awake.submit(request.clone()).unwrap();
    let asleep = awake.sleep(with(InFlight::Retract)).unwrap();
    assert_eq!(asleep.report().settled.retracted, [id]);
    let awake = asleep.restore_weights().unwrap().wake_up().unwrap();
    assert_eq!(awake.report().resumed, [id]);
    let outputs = finish(&awake);
    assert_eq!(bits(&outputs[&id]), bits(&fresh(&w0, false, &request)));
    assert!(finish(&awake).is_empty());
}

#[test]
fn what_a_sleep_carries_survives_a_park_and_a_discard() {
    let (w0, w1) = (weights(1), weights(2));
    let asked = request(10, 1).samples(2).stream(true);
    for (discard, resident) in [(false, true), (true, true), (true, false)] {
        let engine = engine(&w0);
        let ended = engine.submit(request(6, 2).max_new_tokens(1)).unwrap();
        let id = engine.submit(asked.clone()).unwrap();
        // No step of ours: outputs and tokens wait to be handed out.
        engine.generate(&[request(5, 3).max_new_tokens(5)]).unwrap();
        let before = engine.version();
        let options = with(InFlight::Retract);
        let asleep = engine.sleep(if resident { options.resident() } else { options }).unwrap();
        assert_eq!(asleep.report().settled.retracted, [id]);
        let asleep = asleep.restore_weights().unwrap().park_weights().unwrap();
        let loaded = match discard {
            false => asleep.restore_weights().unwrap(),
            true => asleep.discard_weights().load_weights(w1.source()).unwrap(),
        };
        let engine = loaded.wake_up().unwrap();
        assert_eq!(engine.report().resumed, [id]);
        let (mut outputs, mut tokens) = (Vec::new(), 0);
        while outputs.len() < 2 {
            let step = engine.step().unwrap();
            outputs.extend(step.outputs);
            tokens += step.tokens.len();
        }
        assert_eq!((outputs[0].request, outputs[1].request, tokens), (ended, id, 2 * 12));
        assert!(discard || bits(&outputs[1]) == bits(&fresh(&w0, false, &asked)));
        for completion in &outputs[1].completions {
            let versions: Vec<_> = completion.versions.iter().map(|span| &span.version).collect();
            assert_eq!(versions, [&before, &engine.version()][..1 + usize::from(discard)]);
        }
    }
}

#[test]
fn b04_refusing_changes_nothing_and_both_requests_finish() {
    let w0 = weights(1);
    let engine = awake(tiny_builder(false, DType::F32).max_num_seqs(1), &w0);
    let requests = [request(10, 1), request(11, 2)];
    let ids = requests.clone().map(|r| engine.submit(r).unwrap());
    steps(&engine, 3);
    let (stats, version, memory) = (engine.stats(), engine.version(), parts(engine.memory()));
    let (engine, error) = engine.sleep(SleepOptions::default()).unwrap_err().into_parts();
    assert!(matches!(error, SleepError::InFlight { live_requests: 2 }), "{error}");
    let (engine, error) = engine.sleep_discarding(SleepOptions::default()).unwrap_err().into_parts();
    assert!(matches!(error, SleepError::InFlight { live_requests: 2 }), "{error}");
    assert_eq!((engine.stats(), engine.version(), parts(engine.memory())), (stats, version, memory));
    let outputs = finish(&engine);
    for (id, request) in ids.iter().zip(&requests) {
        assert_eq!(bits(&outputs[id]), bits(&fresh(&w0, false, request)));
    }
    assert_eq!(outputs.len(), 2);
}

#[test]
fn c23_a_drain_with_time_enough_ends_everything() {
    let w0 = weights(1);
    let requests = [request(30, 1).samples(3), request(11, 2)];
    for deadline in [Duration::from_secs(3600), Duration::MAX] {
        for then in [OnDeadline::Refuse, OnDeadline::Abort, OnDeadline::Retract] {
            let engine = narrow(&w0);
            let ids = requests.clone().map(|r| engine.submit(r).unwrap());
            steps(&engine, 2);
            let mut asleep = engine.sleep(drain(deadline, then)).unwrap();
            let settled = &asleep.report().settled;
            assert_eq!(settled.drained, ids);
            assert!(settled.aborted.is_empty() && settled.retracted.is_empty());
            let outputs = asleep.take_settled();
            assert_eq!(outputs.len(), 2);
            for output in outputs {
                let request = &requests[usize::from(output.request == ids[1])];
                assert_eq!(bits(&output), bits(&fresh(&w0, false, request)));
            }
        }
    }
}

#[test]
fn c23_a_drain_without_time_does_what_the_caller_chose() {
    let w0 = weights(1);
    let requests = [request(30, 1).samples(3), request(11, 2)];
    let whole = requests.clone().map(|r| fresh(&w0, false, &r));
    let busy = || {
        let engine = narrow(&w0);
        let ids = requests.clone().map(|r| engine.submit(r).unwrap());
        steps(&engine, 6);
        (engine, ids)
    };
    let (engine, ids) = busy();
    let (engine, error) = engine.sleep(drain(Duration::ZERO, OnDeadline::Refuse)).unwrap_err().into_parts();
    assert!(matches!(error, SleepError::DrainDeadline { live_requests: 2, .. }), "{error}");
    let new = engine.submit(requests[1].clone()).expect("it admits again");
    let outputs = finish(&engine);
    assert_eq!(outputs.len(), 3);
    for (id, whole) in [(ids[0], &whole[0]), (ids[1], &whole[1]), (new, &whole[1])] {
        assert_eq!(bits(&outputs[&id]), bits(whole));
    }
    let (engine, ids) = busy();
    let mut asleep = engine.sleep_discarding(drain(Duration::ZERO, OnDeadline::Abort)).unwrap();
    assert_eq!(asleep.report().settled.aborted, ids);
    let outputs = asleep.take_settled();
    assert_eq!(outputs.len(), 2);
    for (output, whole) in outputs.iter().zip(&whole) {
        assert!(aborted(output));
        assert_prefix(output, whole);
    }
    let (engine, ids) = busy();
    let asleep = engine.sleep(drain(Duration::ZERO, OnDeadline::Retract)).unwrap();
    assert_eq!(asleep.report().settled.retracted, ids);
    let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
    let outputs = finish(&engine);
    for (id, whole) in ids.iter().zip(&whole) {
        assert_eq!(bits(&outputs[id]), bits(whole));
    }
}

#[test]
fn c23_a_deadline_ends_a_drain_between_steps() {
    let w0 = weights(1);
    let engine = narrow(&w0);
    let long = request(8, 1).samples(32).max_new_tokens(200);
    // Longer than the cache holds at once: thousands of steps.
    engine.submit(long).unwrap();
    let begin = Instant::now();
    let failed = engine.sleep(drain(Duration::from_millis(20), OnDeadline::Refuse)).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(10), "a step is short");
    let SleepError::DrainDeadline { waited, live_requests: 1 } = failed.error else { panic!("{failed}") };
    assert!(waited >= Duration::from_millis(20));
    assert!(failed.engine.stats().sampled_tokens > 0, "it did work until then");
    assert_eq!(failed.engine.abort_all().aborted.len(), 1);
}

#[test]
fn c30_b49_a_group_retracted_at_any_stage_comes_back_once() {
    let (w0, w1) = (weights(1), weights(2));
    let group = request(30, 1).samples(4);
    let whole = fresh(&w0, false, &group);
    let mut lengths = Vec::new();
    // Waiting, in the middle of the prompt, just forked, decoding.
    for stage in [0, 2, 4, 5, 9, 12] {
        let partial = {
            let engine = narrow(&w0);
            let id = engine.submit(group.clone()).unwrap();
            steps(&engine, stage);
            engine.abort(&[id]).outputs.remove(0)
        };
        let done: Vec<usize> = partial.completions.iter().map(|c| c.tokens.len()).collect();
        lengths.push(done[0]);
        let retract = || {
            let engine = narrow(&w0);
            let id = engine.submit(group.clone().id("group")).unwrap();
            steps(&engine, stage);
            (engine, id)
        };
        // Under the same weights: as if nothing had happened.
        let (engine, id) = retract();
        let before = engine.version();
        let engine =
            engine.sleep(with(InFlight::Retract)).unwrap().restore_weights().unwrap().wake_up().unwrap();
        assert_eq!(engine.find("group"), Some(id));
        let output = finish_one(&engine);
        assert_eq!((output.request, bits(&output)), (id, bits(&whole)), "stage {stage}");
        for completion in &output.completions {
            assert_eq!(completion.versions, [VersionSpan { version: before.clone(), tokens: 0..12 }]);
        }
        // Under other weights: what was there stays, the rest is what those say to it.
        let (engine, id) = retract();
        let asleep = engine.sleep_discarding(with(InFlight::Retract)).unwrap();
        let engine = asleep.load_weights(w1.source()).unwrap().wake_up().unwrap();
        let output = finish_one(&engine);
        assert_eq!(output.request, id);
        assert!(ended_by_itself(&output));
        assert_eq!(
            bits(&output),
            bits(&fresh(&w1, false, &group.resume(&partial).unwrap())),
            "stage {stage}"
        );
        for (index, completion) in output.completions.iter().enumerate() {
            let (after, k) = (engine.version(), done[index]);
            assert_eq!((completion.index, completion.tokens.len()), (index, 12));
            let spans = [
                VersionSpan { version: before.clone(), tokens: 0..k },
                VersionSpan { version: after, tokens: k..12 },
            ];
            assert_eq!(completion.versions, spans[usize::from(k == 0)..].to_vec(), "stage {stage}");
        }
    }
    assert!(lengths[..2] == [0, 0] && lengths[4] > 0 && lengths[5] > lengths[4], "{lengths:?}");
}

#[test]
fn b49_one_running_and_one_waiting_carry_their_own_versions() {
    let (w0, w1) = (weights(1), weights(2));
    let engine = awake(tiny_builder(false, DType::F32).max_num_seqs(1), &w0);
    let v0 = engine.version();
    let (running, waiting) = (engine.submit(request(9, 1)).unwrap(), engine.submit(request(10, 2)).unwrap());
    steps(&engine, 10);
    let asleep = engine.sleep_discarding(with(InFlight::Retract)).unwrap();
    let engine = asleep.load_weights(w1.source()).unwrap().wake_up().unwrap();
    let v1 = engine.version();
    let outputs = finish(&engine);
    let spans = |id: &RequestId| outputs[id].completions[0].versions.clone();
    assert_eq!(
        spans(&running),
        [VersionSpan { version: v0, tokens: 0..10 }, VersionSpan { version: v1.clone(), tokens: 10..12 }]
    );
    assert_eq!(spans(&waiting), [VersionSpan { version: v1, tokens: 0..12 }]);
    assert_eq!(bits(&outputs[&waiting]), bits(&fresh(&w1, false, &request(10, 2))));
}

#[test]
fn b47_every_token_says_which_weights_made_it() {
    let w = [weights(1), weights(2)];
    let mut engine = narrow(&w[0]);
    let requests: Vec<Request> = (0..20).map(|i| request(5 + i as usize % 7, i)).collect();
    let mut sent = BTreeMap::new();
    let mut outputs = Vec::new();
    for (round, chunk) in requests.chunks(5).enumerate() {
        for request in chunk {
            sent.insert(engine.submit(request.clone()).unwrap(), request);
        }
        outputs.extend(steps(&engine, 7));
        let mut asleep = engine.sleep_discarding(with(InFlight::Retract)).unwrap();
        outputs.extend(asleep.take_settled());
        engine = asleep.load_weights(w[(round + 1) % 2].source()).unwrap().wake_up().unwrap();
    }
    outputs.extend(finish(&engine).into_values());
    assert_eq!(outputs.len(), requests.len());
    let mut mixed = 0;
    for output in outputs {
        let completion = &output.completions[0];
        mixed += usize::from(completion.versions.len() > 1);
        // Each span again, on its own weights, from the tokens before it.
        for span in &completion.versions {
            let mut before = output.clone();
            let part = &mut before.completions[0];
            part.tokens.truncate(span.tokens.start);
            part.logprobs.truncate(span.tokens.start);
            part.versions.retain(|other| other.tokens.end <= span.tokens.start);
            part.finish_reason = FinishReason::Abort;
            let request = sent[&output.request].clone().max_new_tokens(span.tokens.end);
            let maker = &w[(span.version.counter as usize + 1) % 2];
            let again = fresh(maker, false, &request.resume(&before).unwrap());
            assert_eq!(again.completions[0].tokens, completion.tokens[..span.tokens.end]);
            assert_eq!(again.completions[0].logprobs, completion.logprobs[..span.tokens.end]);
        }
    }
    assert!(mixed > 5, "{mixed} requests lived through an update");
}

#[test]
fn b07_an_abort_at_any_stage_gives_a_prefix_and_a_resumed_partial_goes_on() {
    let w0 = weights(1);
    let requests =
        [request(30, 1).samples(3).temperature(0.8).top_p(0.9), request(9, 2).repetition_penalty(1.3)];
    for request in &requests {
        let whole = fresh(&w0, false, request);
        for stage in 0..16 {
            let engine = narrow(&w0);
            let id = engine.submit(request.clone()).unwrap();
            steps(&engine, stage);
            let mut ended = engine.abort(&[id, id]);
            let stats = engine.stats();
            assert_eq!((stats.live_requests, stats.running, stats.waiting, stats.blocks_owned), (0, 0, 0, 0));
            if ended.aborted.is_empty() {
                continue; // it had ended, and a step handed it out
            }
            assert_eq!(ended.aborted, [id], "each once, though asked for twice");
            let mut partial = ended.outputs.remove(0);
            assert!(aborted(&partial) && ended.outputs.is_empty());
            assert_prefix(&partial, &whole);
            // Aborted once more on the way, on the same engine and through JSON.
            let json = serde_json::to_string(&request.resume(&partial).unwrap()).unwrap();
            let id = engine.submit(serde_json::from_str(&json).unwrap()).unwrap();
            steps(&engine, 2);
            partial = engine.abort(&[id]).outputs.into_iter().next().unwrap_or(partial);
            assert_prefix(&partial, &whole);
            let output = engine.generate(&[request.resume(&partial).unwrap()]).unwrap().remove(0);
            assert_eq!(bits(&output), bits(&whole), "stage {stage}");
        }
    }
}

#[test]
fn b08_aborts_around_the_natural_end_leave_nothing_behind() {
    let w0 = weights(1);
    let engine = engine(&w0);
    let unknown: RequestId = serde_json::from_str("999999").unwrap();
    let mut ended = 0;
    for i in 0..60 {
        let id = engine.submit(request(5, i).max_new_tokens(1)).unwrap();
        if i % 3 == 0 {
            let gone = engine.abort(&[unknown, id, unknown]);
            assert_eq!(gone.aborted, [id]);
            ended += gone.outputs.len();
        }
        ended += engine.step().unwrap().outputs.len();
        let late = engine.abort(&[id, unknown]);
        assert!(late.aborted.is_empty() && late.outputs.is_empty());
    }
    assert_eq!(ended, 60);
    let mut asleep = engine.sleep(SleepOptions::default()).expect("nothing is in flight");
    assert!(asleep.take_settled().is_empty());
    assert_eq!(asleep.report().settled, Default::default());
}

#[test]
fn b54_a_callers_id_is_unique_among_the_live_and_free_after_the_end() {
    let w0 = weights(1);
    let engine = engine(&w0);
    let x = request(9, 1).id("x");
    let duplicate = RequestError::DuplicateId { id: "x".into() };
    let id = engine.submit(x.clone()).unwrap();
    assert_eq!(engine.submit(x.clone()), Err(duplicate.clone()));
    steps(&engine, 3);
    for _ in 0..1000 {
        assert_eq!(engine.submit(x.clone()), Err(duplicate.clone()));
    }
    // A call is refused whole, and takes none of its other ids with it.
    let y = request(9, 2).id("y");
    assert!(engine.generate(&[y.clone(), x.clone()]).is_err());
    assert!(engine.generate(&[y.clone(), y.clone()]).is_err());
    assert_eq!((engine.find("x"), engine.find("y")), (Some(id), None));
    assert_eq!(bits(&finish(&engine)[&id]), bits(&fresh(&w0, false, &x)));
    assert_eq!(engine.find("x"), None);
    let again = engine.submit(x.clone()).unwrap();
    assert!(again > id, "ids of ours are never used twice");
    // Over a sleep as well.
    let engine = engine.sleep(with(InFlight::Retract)).unwrap().restore_weights().unwrap().wake_up().unwrap();
    assert_eq!(engine.submit(x.clone()), Err(duplicate));
    assert!(engine.submit(y).unwrap() > again);
    assert_eq!(engine.abort_all().outputs.len(), 2);
    assert_eq!(engine.find("x"), None);
    engine.submit(x).unwrap();
    assert_eq!(finish(&engine).len(), 1);
}

#[test]
fn b05_evicted_blocks_are_found_by_nothing() {
    let w0 = weights(1);
    let engine = awake(tiny_builder(false, DType::F32).kv_cache(KvCapacity::Blocks(16)), &w0);
    let run = |seed| {
        let request = request(30, seed);
        let output = engine.generate(std::slice::from_ref(&request)).unwrap().remove(0);
        assert_eq!(bits(&output), bits(&fresh(&w0, false, &request)), "prompt {seed}");
        let stats = engine.stats();
        assert_eq!(stats.blocks_free + stats.blocks_cached + stats.blocks_owned, stats.blocks);
        output.completions[0].cached_tokens
    };
    run(1);
    assert_eq!(run(1), 28);
    (2..8).for_each(|seed| assert_eq!(run(seed), 0));
    assert_eq!(run(1), 0, "it was evicted");
    engine.clear_prefix_cache();
    assert_eq!((engine.stats().blocks_cached, engine.stats().blocks_free), (0, 16));
    assert_eq!((run(1), run(2), run(2)), (0, 0, 28));
}

#[test]
fn b09_a_prefix_cache_of_hardly_any_blocks_only_hits_less() {
    let w0 = weights(1);
    let requests: Vec<Request> = (0..50).map(|i| request(14, i % 9).max_new_tokens(4)).collect();
    let expected: Vec<_> = requests.iter().map(|r| bits(&fresh(&w0, false, r))).collect();
    for limit in 0..3 {
        let engine = awake(tiny_builder(false, DType::F32).prefix_cache_blocks(limit), &w0);
        for size in [1, 8] {
            for (chunk, expected) in requests.chunks(size).zip(expected.chunks(size)) {
                let outputs = engine.generate(chunk).unwrap();
                assert_eq!(outputs.iter().map(bits).collect::<Vec<_>>(), expected);
                assert!(engine.stats().blocks_cached <= limit);
                assert!(limit > 0 || engine.stats().cached_tokens == 0);
            }
        }
    }
}

#[test]
fn b70_b73_after_abort_all_nothing_is_in_flight_and_the_numbers_say_so() {
    let w0 = weights(1);
    let mut engine = narrow(&w0);
    for round in 0..10 {
        for i in 0..20 {
            engine.submit(request(6 + i as usize, i)).unwrap();
        }
        steps(&engine, round);
        let live = engine.stats().live_requests;
        let ended = engine.abort_all();
        assert_eq!(ended.aborted.len(), live, "what had ended was not aborted");
        assert!(ended.outputs.len() == live && live > 10);
        let stats = engine.stats();
        assert_eq!((stats.live_requests, stats.running, stats.waiting, stats.blocks_owned), (0, 0, 0, 0));
        assert_eq!(stats.aborted, live as u64);
        assert_eq!(stats.blocks_free + stats.blocks_cached, stats.blocks);
        engine = engine.sleep(SleepOptions::default()).unwrap().restore_weights().unwrap().wake_up().unwrap();
        let stats = engine.stats();
        assert_eq!((stats.live_requests, stats.blocks_free), (0, stats.blocks));
        assert!(engine.step().unwrap().is_idle());
    }
    let output = engine.generate(&[request(20, 1)]).unwrap().remove(0);
    assert_eq!(bits(&output), bits(&fresh(&w0, false, &request(20, 1))));
}

/// `cached_tokens` is what this run found, not what an earlier one did, nor what samples that had to wait for
/// their turn could have shared.
#[test]
fn cached_tokens_are_of_the_run_that_gave_the_output() {
    let w0 = weights(1);
    let engine = engine(&w0);
    let request = request(21, 1);
    let cached =
        |output: &RequestOutput| output.completions.iter().map(|c| c.cached_tokens).collect::<Vec<_>>();
    engine.generate(std::slice::from_ref(&request)).unwrap();
    let id = engine.submit(request.clone()).unwrap();
    steps(&engine, 2);
    let partial = engine.abort(&[id]).outputs.remove(0);
    assert_eq!((cached(&partial), partial.completions[0].tokens.len()), (vec![20], 2));
    let resumed = request.resume(&partial).unwrap();
    let again = engine.generate(std::slice::from_ref(&resumed)).unwrap().remove(0);
    assert_eq!(cached(&again), [20]);
    engine.clear_prefix_cache();
    assert_eq!(cached(&engine.generate(&[resumed]).unwrap()[0]), [0]);

    for (running, cache, expected) in [(8, false, [0, 21, 21]), (1, true, [0, 20, 20]), (1, false, [0, 0, 0])]
    {
        let engine = awake(tiny_builder(false, DType::F32).max_num_seqs(running).prefix_cache(cache), &w0);
        let output = engine.generate(&[request.clone().samples(3)]).unwrap().remove(0);
        assert_eq!(cached(&output), expected, "{running} at a time, prefix cache: {cache}");
        assert_eq!(engine.stats().cached_tokens, expected.iter().sum::<usize>() as u64);
    }
}

/// Asleep, a trainer may take the retracted requests as they are; they then do not go on.
#[test]
fn retracted_requests_can_be_taken_while_asleep_and_go_on_later() {
    let w0 = weights(1);
    let engine = narrow(&w0);
    let request = request(12, 3).samples(2).max_new_tokens(9);
    let id = engine.submit(request.clone()).unwrap();
    steps(&engine, 5);
    let mut asleep = engine.sleep(with(InFlight::Retract)).unwrap();
    let partial = asleep.abort_retracted().remove(0);
    assert_eq!((partial.request, asleep.abort_retracted().len()), (id, 0));
    let whole = fresh(&w0, false, &request);
    assert_prefix(&partial, &whole);
    let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
    assert!(engine.report().resumed.is_empty() && engine.step().unwrap().is_idle());
    let output = engine.generate(&[request.resume(&partial).unwrap()]).unwrap().remove(0);
    assert_eq!(bits(&output), bits(&whole));
}

/// A partial of an unseeded group that lacks a sample: the missing one is drawn from the group's stream.
#[test]
fn a_sample_missing_from_a_partial_draws_from_its_groups_seed() {
    let w0 = weights(1);
    let engine = engine(&w0);
    let mut request = request(6, 2).samples(3);
    request.params.seed = None;
    let whole = engine.generate(std::slice::from_ref(&request)).unwrap().remove(0);
    let mut partial = whole.clone();
    partial.completions.truncate(1);
    let resumed = engine.generate(&[request.resume(&partial).unwrap()]).unwrap().remove(0);
    assert_eq!(bits(&resumed), bits(&whole));
}
