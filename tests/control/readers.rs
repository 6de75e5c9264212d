//! Readers that fall behind: their requests give the blocks back and go on later, and nobody else notices.

use std::time::{Duration, Instant};

use dormouse::InFlight;
use dormouse::control::{AbortTarget, Generation, GenerationToken, Handle, Operation, PauseMode, Tags};

use crate::support::{
    Weights, assert_begins, assert_idle, assert_serves, bits, block_on, bounded, buffered, done, eventually,
    expected, output, request, rest, run, settled, sleep, spawn_with, tokens, wake, was_aborted, weights,
    what_is_there,
};

const TOKENS: usize = 80;

fn asked(seed: u32) -> dormouse::Request {
    request(seed).max_new_tokens(TOKENS).stream(true)
}

/// A controller, a request that was set aside for its reader, and what was read of it.
fn overrun(weights: &Weights, buffer: usize) -> (Handle, Generation, Vec<GenerationToken>) {
    let handle = spawn_with(buffered(buffer), weights);
    let mut slow = handle.submit(asked(1)).unwrap();
    let begun = tokens(&mut slow, 1);
    eventually(|| handle.status().requests_aside == 1);
    (handle, slow, begun)
}

#[test]
fn a_request_that_is_not_read_holds_no_blocks_and_goes_on_when_it_is() {
    let w0 = weights(1);
    for buffer in [0, 1, 2, 5, 40] {
        let (handle, slow, begun) = overrun(&w0, buffer);
        let status = handle.status();
        assert_eq!((status.engine.blocks_owned, status.live_requests), (0, 1));
        let sampled = status.engine.sampled_tokens;
        for seed in 2..5 {
            assert_serves(&handle, &w0, &request(seed));
        }
        assert_eq!(handle.status().engine.sampled_tokens, sampled + 3 * 9, "it is not computed meanwhile");
        assert_eq!(bits(&rest(begun, slow)), expected(&w0, &asked(1)));
        assert_idle(&handle);
    }
}

#[test]
fn a_reader_that_reads_at_any_speed_gets_every_token() {
    let w0 = weights(1);
    for (buffer, samples) in [(0, 1), (1, 3), (3, 2), (7, 3), (16, 1)] {
        let handle = spawn_with(buffered(buffer), &w0);
        let asked = asked(1).samples(samples);
        let mut generation = handle.submit(asked.clone()).unwrap();
        let mut read = Vec::new();
        // In bursts of all lengths, with and without the request set aside in between.
        for burst in 1..12 {
            read.extend(tokens(&mut generation, burst));
            if burst % 2 == 0 {
                eventually(|| handle.status().requests_aside == 1);
            }
        }
        assert_eq!(bits(&rest(read, generation)), expected(&w0, &asked));
        assert_idle(&handle);
    }
}

#[test]
fn a_reader_a_little_too_slow_reads_while_its_request_is_being_set_aside_and_is_not_forgotten() {
    let w0 = weights(1);
    let handle = spawn_with(buffered(8), &w0);
    let asked = |seed| request(seed).max_new_tokens(200).stream(true);
    let begin = Instant::now();
    output(handle.submit(asked(0).stream(false)).unwrap());
    let step = begin.elapsed() / 200;
    for seed in 1..=16 {
        let mut generation = handle.submit(asked(seed)).unwrap();
        let mut read = Vec::new();
        while read.len() < 200 {
            read.extend(tokens(&mut generation, 1));
            let begin = Instant::now();
            while begin.elapsed() < step * (8 + seed % 8) / 8 {
                std::hint::spin_loop();
            }
        }
        assert_eq!(bits(&rest(read, generation)), expected(&w0, &asked(seed)));
    }
    assert_idle(&handle);
}

#[test]
fn many_readers_none_of_which_reads_leave_the_engine_to_others() {
    let w0 = weights(1);
    let handle = spawn_with(buffered(4), &w0);
    let slow: Vec<_> = (0..30).map(|seed| handle.submit(asked(seed)).unwrap()).collect();
    eventually(|| handle.status().requests_aside == 30);
    assert_serves(&handle, &w0, &request(99));
    for (seed, generation) in (0..).zip(slow) {
        assert_eq!(bits(&rest(Vec::new(), generation)), expected(&w0, &asked(seed)));
    }
    assert_idle(&handle);
}

#[test]
fn a_request_that_does_not_stream_needs_no_reader() {
    let w0 = weights(1);
    let handle = spawn_with(buffered(0), &w0);
    let generation = handle.submit(asked(1).stream(false)).unwrap();
    eventually(|| handle.metrics().finished == 1);
    assert_eq!(bits(&output(generation)), expected(&w0, &asked(1)));
}

#[test]
fn set_aside_for_its_reader_it_is_aborted_slept_on_paused_and_stopped_like_others() {
    let w0 = weights(1);
    let whole = expected(&w0, &asked(1));
    // Abort.
    let (handle, slow, begun) = overrun(&w0, 4);
    assert_eq!(handle.abort(AbortTarget::All), [slow.id()]);
    assert_idle(&handle);
    let output = rest(begun, slow);
    assert!(was_aborted(&output) && output.completions[0].tokens.len() >= 5);
    assert_begins(&output, &whole);
    // Sleeps; it waits for its reader and for the wake.
    for policy in [InFlight::Abort, InFlight::Retract] {
        let (handle, mut slow, mut begun) = overrun(&w0, 4);
        let slept = done(&handle, sleep(Tags::ALL, policy));
        let settled = settled(&slept);
        assert_eq!([settled.aborted.len(), settled.retracted.len()].iter().sum::<usize>(), 1);
        if policy == InFlight::Retract {
            begun.extend(what_is_there(&mut slow));
            assert_eq!(handle.status().requests_aside, 1, "it has caught up, and waits for the wake");
        }
        done(&handle, wake(Tags::ALL));
        let output = rest(begun, slow);
        assert_eq!(was_aborted(&output), policy == InFlight::Abort);
        assert_begins(&output, &whole);
        assert_idle(&handle);
    }
    // Pauses.
    for mode in [PauseMode::Abort, PauseMode::Keep] {
        let (handle, mut slow, mut begun) = overrun(&w0, 4);
        done(&handle, Operation::Pause(mode));
        if mode == PauseMode::Keep {
            begun.extend(what_is_there(&mut slow));
            let steps = handle.metrics().engine.steps;
            assert!(what_is_there(&mut slow).is_empty(), "no step runs in a pause");
            assert_eq!((handle.status().requests_aside, handle.metrics().engine.steps), (1, steps));
        }
        done(&handle, Operation::Resume);
        let output = rest(begun, slow);
        assert_eq!(was_aborted(&output), mode == PauseMode::Abort);
        assert_begins(&output, &whole);
    }
    // A pause that outlasts a sleep: it has caught up, and waits for the resume.
    let (handle, mut slow, mut begun) = overrun(&w0, 4);
    done(&handle, Operation::Pause(PauseMode::Keep));
    done(&handle, sleep(Tags::ALL, InFlight::Retract));
    done(&handle, wake(Tags::ALL));
    let steps = handle.metrics().engine.steps;
    begun.extend(what_is_there(&mut slow));
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!((handle.status().requests_aside, handle.metrics().engine.steps), (1, steps));
    done(&handle, Operation::Resume);
    assert_eq!(bits(&rest(begun, slow)), whole);
    // A refusal, a drop, a stop.
    let (handle, slow, begun) = overrun(&w0, 4);
    assert!(!run(&handle, sleep(Tags::ALL, InFlight::Refuse)).is_ok());
    let stopping = handle.clone();
    drop(bounded(move || stopping.stop().unwrap()));
    assert!(was_aborted(&rest(begun, slow)));
    let (handle, slow, _) = overrun(&w0, 4);
    drop(slow);
    assert_idle(&handle);
}

#[test]
fn a_drain_waits_for_the_reader() {
    let w0 = weights(1);
    let (handle, mut slow, mut begun) = overrun(&w0, 4);
    let long = Duration::from_secs(60);
    let policy = InFlight::Drain { deadline: long, then: dormouse::OnDeadline::Refuse };
    let ticket = handle.control(sleep(Tags::ALL, policy));
    eventually(|| !handle.state().admitting);
    begun.extend(tokens(&mut slow, 30));
    assert_eq!(bits(&rest(begun, slow)), expected(&w0, &asked(1)));
    assert!(block_on(ticket).is_ok());
}
