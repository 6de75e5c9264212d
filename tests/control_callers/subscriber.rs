//! A subscriber that asks the controller for its state whenever it is told something.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dormouse::control::{AbortTarget, ControlRequest, Handle, Operation, PauseMode, Tags};
use dormouse::{InFlight, UpdateOptions};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::support::{
    all_of, ask, assert_serves, block_on, bounded, done, gated, lacking, load, output, request, run, sleep,
    spawn, wake, was_aborted, weights,
};

struct Asks;

/// Whom to ask.
static ASKED: Mutex<Option<Handle>> = Mutex::new(None);
static ANSWERS: AtomicUsize = AtomicUsize::new(0);

fn ask_for_all() {
    let handle = ASKED.lock().unwrap().clone();
    if let Some(handle) = handle {
        let _ = (handle.state(), handle.status(), handle.metrics());
        ANSWERS.fetch_add(1, Ordering::Relaxed);
    }
}

impl Subscriber for Asks {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        ask_for_all();
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        ask_for_all();
    }
    fn enter(&self, _: &Id) {
        ask_for_all();
    }
    fn exit(&self, _: &Id) {
        ask_for_all();
    }
    fn clone_span(&self, id: &Id) -> Id {
        ask_for_all();
        id.clone()
    }
    fn try_close(&self, _: Id) -> bool {
        ask_for_all();
        true
    }
}

#[test]
fn c25_a_subscriber_may_ask_for_the_state_whatever_it_is_told() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    *ASKED.lock().unwrap() = Some(handle.clone());
    // Of all threads; the other tests do not mind.
    tracing::subscriber::set_global_default(Asks).unwrap();
    let asking = handle.clone();
    bounded(move || {
        let handle = asking;
        let named = |id: &str| ControlRequest::new(Operation::Status).id(id);
        assert!(run(&handle, named("mine")).is_ok());
        assert!(!run(&handle, named("")).is_ok());
        let aborted = handle.submit(request(1).max_new_tokens(200)).unwrap();
        let retracted = handle.submit(request(2)).unwrap();
        handle.abort(AbortTarget::These { requests: vec![aborted.id()], names: vec![] });
        drop(output(aborted));
        done(&handle, Operation::Pause(PauseMode::Keep));
        done(&handle, Operation::Resume);
        done(&handle, sleep(Tags::ALL, InFlight::Retract));
        assert!(!run(&handle, load(lacking(&w0))).is_ok());
        let (payload, gate) = gated(&w0);
        let slow = handle.control(ControlRequest::new(load(payload)).id("slow"));
        gate.reached();
        assert!(!run(&handle, named("slow")).is_ok());
        let late = ControlRequest::new(Operation::Verify).deadline(Duration::from_millis(1));
        assert!(!run(&handle, late).is_ok());
        gate.open();
        assert!(block_on(slow).is_ok());
        let idle = Some(Duration::from_millis(1));
        done(&handle, Operation::Begin { options: UpdateOptions::default(), idle });
        crate::support::eventually(|| handle.state().transaction.is_none());
        done(&handle, load(all_of(&w0)));
        done(&handle, wake(Tags::ALL));
        assert!(!was_aborted(&output(retracted)));
        assert_serves(&handle, &w0, &request(3));
        drop(ask(&handle, &request(4)));
    });
    assert!(ANSWERS.load(Ordering::Relaxed) > 50);
    let stopping = handle.clone();
    assert!(bounded(move || stopping.stop().is_ok()));
    *ASKED.lock().unwrap() = None;
}
