//! Generations: as an iterator, a future, a stream; their tokens are the output's, each once, whatever happens.

use std::future::Future as _;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use dormouse::control::{AbortTarget, Generation, GenerationEvent, Handle, Operation, PauseMode, Tags};
use dormouse::{InFlight, Request};

use crate::support::{
    assert_begins, assert_idle, assert_serves, bits, block_on, bounded, buffered, done, eventually, expected,
    next, request, rest, sleep, spawn, spawn_with, tokens, wake, was_aborted, weights, what_is_there,
};

fn streamed(seed: u32) -> Request {
    request(seed).max_new_tokens(40).stream(true).samples(2)
}

#[test]
fn a_generation_is_an_iterator_a_future_and_a_stream() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    let whole = expected(&w0, &streamed(1));
    let submit = || handle.submit(streamed(1)).unwrap();
    assert_eq!(bits(&rest(Vec::new(), submit())), whole);
    assert_eq!(bits(&block_on(submit().output()).unwrap()), whole);
    let generation = submit();
    assert_eq!(bits(&bounded(move || generation.wait().unwrap())), whole);
    let mut generation = submit();
    let events = bounded(move || generation.events().collect::<Vec<_>>());
    assert_eq!(events.len(), 2 * 40 + 1);
    assert!(matches!(events.last(), Some(Ok(GenerationEvent::Done(output))) if bits(output) == whole));
    // As a stream.
    let mut generation = submit();
    let mut poll = |context: &mut Context<'_>| futures_poll(&mut generation, context);
    let mut events = 0;
    while block_on(std::future::poll_fn(&mut poll)).is_some() {
        events += 1;
    }
    assert_eq!(events, 2 * 40 + 1);
    assert_idle(&handle);
}

fn futures_poll(
    generation: &mut Generation,
    context: &mut Context<'_>,
) -> std::task::Poll<Option<Result<GenerationEvent, dormouse::control::GenerationError>>> {
    futures_core::Stream::poll_next(Pin::new(generation), context)
}

#[test]
fn numbers_names_and_options_come_back() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    let asked = streamed(1).id("mine").top_logprobs(3);
    let mut generation = handle.submit(asked).unwrap();
    let (id, epoch) = (generation.id(), generation.epoch());
    assert_eq!(epoch, handle.state().epoch);
    let begun = tokens(&mut generation, 5);
    assert!(begun.iter().all(|token| token.top.len() == 3));
    let output = rest(begun, generation);
    assert_eq!((output.request, output.id.as_deref()), (id, Some("mine")));
    // Without a seed it gets one, which the output names.
    let mut unseeded = request(3);
    unseeded.params.seed = None;
    let outputs = [1, 2].map(|_| crate::support::ask(&handle, &unseeded));
    let seeds = outputs.each_ref().map(|output| output.completions[0].seed);
    assert_ne!(seeds[0], seeds[1]);
    assert_eq!(bits(&outputs[1]), expected(&w0, &unseeded.clone().seed(seeds[1])));
}

#[test]
fn streams_are_whole_over_pauses_sleeps_aborts_and_readers_that_wait() {
    let w0 = weights(1);
    let asked = |seed| request(seed).max_new_tokens(120).stream(true).samples(2).top_logprobs(2);
    for seed in 0..12 {
        let handle = spawn_with(buffered(16), &w0);
        let mut generation = handle.submit(asked(seed)).unwrap();
        let mut begun = tokens(&mut generation, 1 + seed as usize);
        done(&handle, Operation::Pause(PauseMode::Keep));
        begun.extend(what_is_there(&mut generation));
        done(&handle, Operation::Resume);
        begun.extend(tokens(&mut generation, 10));
        for tags in [Tags::ALL, Tags::KV_CACHE] {
            done(&handle, sleep(tags, InFlight::Retract));
            begun.extend(what_is_there(&mut generation));
            done(&handle, wake(Tags::ALL));
            begun.extend(tokens(&mut generation, 10));
        }
        if seed % 3 == 0 {
            handle.abort(AbortTarget::All);
        }
        let whole = expected(&w0, &asked(seed));
        let output = rest(begun, generation);
        assert_eq!(was_aborted(&output), seed % 3 == 0);
        assert_begins(&output, &whole);
        assert!(was_aborted(&output) || bits(&output) == whole);
        assert_idle(&handle);
    }
}

#[test]
fn a_request_that_resumes_another_streams_only_what_is_new() {
    let w0 = weights(1);
    let handle = spawn_with(buffered(8), &w0);
    let mut generation = handle.submit(request(1).max_new_tokens(60).stream(true)).unwrap();
    let begun = tokens(&mut generation, 4);
    handle.abort(AbortTarget::All);
    let partial = rest(begun, generation);
    let had = partial.completions[0].tokens.len();
    let resumed = request(1).max_new_tokens(60).stream(true).resume(&partial).unwrap();
    // Also over a sleep.
    let mut generation = handle.submit(resumed).unwrap();
    let GenerationEvent::Token(first) = next(&mut generation) else { panic!("it has ended") };
    assert_eq!(first.position, had);
    done(&handle, sleep(Tags::ALL, InFlight::Retract));
    done(&handle, wake(Tags::ALL));
    let mut positions = vec![first.position];
    let output = loop {
        match next(&mut generation) {
            GenerationEvent::Token(token) => positions.push(token.position),
            GenerationEvent::Done(output) => break output,
        }
    };
    assert_eq!(positions, (had..60).collect::<Vec<_>>());
    assert_eq!(bits(&output), expected(&w0, &request(1).max_new_tokens(60)));
}

#[test]
fn dropping_a_generation_in_any_state_ends_its_request() {
    let w0 = weights(1);
    let handle = spawn_with(crate::support::queueing(), &w0);
    let paced = || request(1).max_new_tokens(200);
    // Running, paused, asleep, queued while asleep, ended.
    drop(handle.submit(paced()).unwrap());
    eventually(|| handle.metrics().live_requests == 0);
    let running = handle.submit(paced()).unwrap();
    done(&handle, Operation::Pause(PauseMode::Keep));
    drop(running);
    eventually(|| handle.metrics().live_requests == 0);
    drop(handle.submit(paced()).unwrap());
    assert_eq!(handle.metrics().live_requests, 0, "it had not begun");
    done(&handle, Operation::Resume);
    let running = handle.submit(paced()).unwrap();
    done(&handle, sleep(Tags::ALL, InFlight::Retract));
    drop(running);
    assert_eq!(handle.metrics().live_requests, 0);
    drop(handle.submit(paced()).unwrap());
    done(&handle, wake(Tags::ALL));
    let ended = handle.submit(request(2)).unwrap();
    eventually(|| handle.metrics().live_requests == 0);
    drop(ended);
    assert_idle(&handle);
    assert_serves(&handle, &w0, &request(3));
}

/// Calls back into the controller, as an executor does that polls on waking.
struct CallsBack(Handle, Mutex<Option<Generation>>);
impl Wake for CallsBack {
    fn wake(self: Arc<Self>) {
        let _ = (self.0.status(), self.0.metrics());
        drop(self.0.submit(request(7)));
        drop(self.1.lock().unwrap().take());
    }
}

#[test]
fn wakers_may_call_back_into_the_controller() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    for seed in 0..4 {
        let other = handle.submit(request(9).max_new_tokens(200)).unwrap();
        let waker = Waker::from(Arc::new(CallsBack(handle.clone(), Mutex::new(Some(other)))));
        let mut context = Context::from_waker(&waker);
        let mut generation = handle.submit(streamed(seed)).unwrap();
        let mut ticket =
            pin!(handle.control(Operation::Pause(PauseMode::Wait { on_deadline: <_>::default() })));
        let mut output = None;
        eventually(|| {
            if let Poll::Ready(Some(event)) = generation.poll_event(&mut context)
                && let Ok(GenerationEvent::Done(done)) = event
            {
                output = Some(done);
            }
            output.is_some()
        });
        eventually(|| ticket.as_mut().poll(&mut context).is_ready());
        assert_eq!(bits(&output.unwrap()), expected(&w0, &streamed(seed)));
        done(&handle, Operation::Resume);
        eventually(|| handle.metrics().live_requests == 0);
    }
    drop(handle.abort(AbortTarget::All));
}
