//! Wakers that panic, look into the controller, or come back to what woke them.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use dormouse::InFlight;
use dormouse::control::{
    AbortTarget, Controller, Generation, GenerationEvent, Handle, Lifecycle, Operation, PauseMode, Tags,
};

use crate::support::{
    all_of, assert_idle, assert_serves, bits, block_on, bounded, builder, done, eventually, expected, gated,
    load, output, queueing, request, run, sleep, spawn, spawn_with, wake, was_aborted, weights,
};

/// Panics when it wakes, or when it goes.
#[derive(Clone, Copy, Debug)]
enum Panics {
    Waking,
    Going,
}

struct PanicWaker(Panics, Arc<AtomicUsize>);

impl PanicWaker {
    /// With the number of its panics.
    fn waker(panics: Panics) -> (Waker, Arc<AtomicUsize>) {
        let count = Arc::default();
        (Waker::from(Arc::new(Self(panics, Arc::clone(&count)))), count)
    }

    fn panic(&self) {
        self.1.fetch_add(1, Ordering::SeqCst);
        panic!("a waker that panics");
    }
}

impl Wake for PanicWaker {
    fn wake(self: Arc<Self>) {
        if let Panics::Waking = self.0 {
            self.panic();
        }
    }
}

impl Drop for PanicWaker {
    fn drop(&mut self) {
        if let Panics::Going = self.0 {
            self.panic();
        }
    }
}

/// Polls until there is nothing; the waker is left with the controller alone.
fn leave(generation: &mut Generation, waker: Waker) {
    let mut context = Context::from_waker(&waker);
    while generation.poll_event(&mut context).is_ready() {}
}

#[test]
fn a_waker_that_panics_on_the_stepper_costs_others_nothing() {
    let w0 = weights(1);
    for panics in [Panics::Waking, Panics::Going] {
        let handle = spawn_with(queueing(), &w0);
        done(&handle, Operation::Pause(PauseMode::Keep));
        let mut bad = handle.submit(request(1).max_new_tokens(200).stream(true)).unwrap();
        let (waker, panicked) = PanicWaker::waker(panics);
        leave(&mut bad, waker);
        done(&handle, Operation::Resume);
        eventually(|| panicked.load(Ordering::SeqCst) == 1);
        assert_serves(&handle, &w0, &request(2));
        assert_eq!(bits(&output(bad)), expected(&w0, &request(1).max_new_tokens(200)), "{panics:?}");
        done(&handle, Operation::Pause(PauseMode::Abort));
        assert_idle(&handle);
        let stopping = handle.clone();
        assert!(bounded(move || stopping.stop().is_ok()));
    }
}

#[test]
fn a_waker_that_panics_on_the_owner_costs_others_nothing() {
    let w0 = weights(1);
    for panics in [Panics::Waking, Panics::Going] {
        let handle = spawn(&w0);
        done(&handle, sleep(Tags::ALL, InFlight::Refuse));
        let (payload, gate) = gated(&w0);
        let mut ticket = handle.control(load(payload));
        let (waker, panicked) = PanicWaker::waker(panics);
        gate.reached();
        assert!(Pin::new(&mut ticket).poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        gate.open();
        eventually(|| panicked.load(Ordering::SeqCst) == 1);
        assert!(block_on(ticket).is_ok(), "{panics:?}");
        assert_eq!(handle.state().lifecycle, Lifecycle::WeightsLoaded);
        done(&handle, wake(Tags::KV_CACHE));
        assert_serves(&handle, &w0, &request(1));
    }
}

struct CountWaker(AtomicUsize);
impl Wake for CountWaker {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_waker_that_panics_loses_nobody_elses_wake() {
    let w0 = weights(1);
    for first in [true, false] {
        let handle = Controller::with(queueing()).drive(builder().build_asleep().unwrap());
        done(&handle, load(all_of(&w0)));
        let [mut one, mut other] = [1, 2].map(|seed| handle.submit(request(seed)).unwrap());
        let (bad, good) = if first { (&mut one, &mut other) } else { (&mut other, &mut one) };
        let (panics, panicked) = PanicWaker::waker(Panics::Waking);
        let count = Arc::new(CountWaker(AtomicUsize::new(0)));
        leave(bad, panics);
        leave(good, Waker::from(Arc::clone(&count)));
        // Both end at once, in one unlocking.
        let ended = handle.abort(AbortTarget::All);
        assert_eq!((panicked.load(Ordering::SeqCst), count.0.load(Ordering::SeqCst)), (1, 1));
        assert_eq!(ended, [one.id(), other.id()]);
        assert!(was_aborted(&output(one)) && was_aborted(&output(other)));
    }
}

/// Reads its generation to the end from within its wakes.
struct Reads(Mutex<(Option<Generation>, usize, bool)>);
impl Reads {
    fn read(self: &Arc<Self>) {
        let (generation, tokens, done) = &mut *self.0.lock().unwrap();
        let waker = Waker::from(Arc::clone(self));
        let mut context = Context::from_waker(&waker);
        let Some(reading) = generation else { return };
        while let Poll::Ready(event) = reading.poll_event(&mut context) {
            match event {
                Some(Ok(GenerationEvent::Token(_))) => *tokens += 1,
                Some(Ok(GenerationEvent::Done(_))) => *done = true,
                None => {
                    *generation = None;
                    return;
                }
                Some(Err(error)) => panic!("{error}"),
            }
        }
    }
}
impl Wake for Reads {
    fn wake(self: Arc<Self>) {
        self.read();
    }
}

#[test]
fn a_waker_may_read_what_woke_it() {
    let w0 = weights(1);
    // Also as a reader that was behind.
    let handle = spawn_with(crate::support::buffered(2), &w0);
    let generation = handle.submit(request(1).max_new_tokens(60).stream(true)).unwrap();
    eventually(|| handle.status().requests_aside == 1);
    let reads = Arc::new(Reads(Mutex::new((Some(generation), 0, false))));
    reads.read();
    eventually(|| reads.0.lock().unwrap().0.is_none());
    let (_, tokens, done) = &*reads.0.lock().unwrap();
    assert_eq!((*tokens, *done), (60, true));
    assert_idle(&handle);
}

/// Looks at the controller, and gives a request up, when the last of it goes.
struct Looks(Handle, Generation);
impl Wake for Looks {
    fn wake(self: Arc<Self>) {}
}
impl Drop for Looks {
    fn drop(&mut self) {
        let _ = (self.0.state(), self.0.metrics());
        let target = AbortTarget::These { requests: vec![self.1.id()], names: vec![] };
        drop(self.0.control(Operation::Abort(target)));
    }
}

#[test]
fn a_waker_that_is_replaced_may_call_the_controller() {
    let w0 = weights(1);
    let handle = Controller::with(queueing()).drive(builder().build_asleep().unwrap());
    let (payload, gate) = gated(&w0);
    let mut loading = handle.control(load(payload));
    gate.reached();
    let asking = handle.clone();
    // The waker's last reference is the controller's.
    let (mut polled, loading) = bounded(move || {
        let looks = || Waker::from(Arc::new(Looks(asking.clone(), asking.submit(request(2)).unwrap())));
        let mut polled = asking.submit(request(1)).unwrap();
        for waker in [looks(), looks(), Waker::noop().clone()] {
            leave(&mut polled, waker.clone());
            assert!(Pin::new(&mut loading).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        (polled, loading)
    });
    assert_eq!((handle.metrics().live_requests, handle.metrics().aborted), (1, 2));
    gate.open();
    assert!(block_on(loading).is_ok());
    leave(&mut polled, Waker::from(Arc::new(Looks(handle.clone(), handle.submit(request(2)).unwrap()))));
    done(&handle, wake(Tags::KV_CACHE));
    assert_eq!(bits(&output(polled)), expected(&w0, &request(1)));
    eventually(|| handle.metrics().live_requests == 0);
    assert!(run(&handle, Operation::Verify).is_ok());
}
