//! Sources that panic where no error can be given, that are refused, that own a handle.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dormouse::control::{
    ControlError, ControlRequest, ErrorKind, Handle, Lifecycle, Operation, Payload, Report, SubmitError,
    Tags, Ticket, TransactionId,
};
use dormouse::{InFlight, SourceError, TensorSpec, UnsupportedTensor, UpdateOptions, WeightSource};

use crate::support::{
    Gate, Owned, Weights, assert_serves, block_on, bounded, done, eventually, gated, load, request, run,
    sleep, spawn, update, wake, weights,
};

#[derive(Clone, Copy, PartialEq, Debug)]
enum At {
    Index,
    Unsupported,
    Plan,
    Finish,
    Drop,
}

const ALL: [At; 5] = [At::Index, At::Unsupported, At::Plan, At::Finish, At::Drop];

struct Panics {
    inner: Owned,
    at: At,
    dropped: Arc<AtomicUsize>,
}

impl Panics {
    /// With the number of those that were dropped.
    fn payload(weights: &Weights, at: At) -> (Payload, Arc<AtomicUsize>) {
        let dropped = Arc::default();
        let source = Self { inner: Owned(weights.0.clone()), at, dropped: Arc::clone(&dropped) };
        (Payload::source(source), dropped)
    }

    fn reach(&self, at: At) {
        assert!(self.at != at, "a source that panics in {at:?}");
    }
}

impl WeightSource for Panics {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.reach(At::Index);
        self.inner.index()
    }

    fn unsupported(&self) -> &[UnsupportedTensor] {
        self.reach(At::Unsupported);
        &[]
    }

    fn plan(&mut self, tensors: &[usize]) -> Result<(), SourceError> {
        self.reach(At::Plan);
        self.inner.plan(tensors)
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.inner.read(tensor, sink)
    }

    fn finish(&mut self) -> Result<(), SourceError> {
        self.reach(At::Finish);
        self.inner.finish()
    }
}

impl Drop for Panics {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
        if !std::thread::panicking() {
            self.reach(At::Drop);
        }
    }
}

fn begin(handle: &Handle) -> TransactionId {
    let begun = done(handle, Operation::Begin { options: UpdateOptions::default(), idle: None });
    match begun.report[..] {
        [Report::Begun(id)] => id,
        _ => panic!("{begun:?}"),
    }
}

/// Brings weights that panic; the answer tells the state after, and a source that can say so is an error.
#[track_caller]
fn bring(handle: &Handle, at: At, weights: &Weights, how: impl Fn(Payload) -> Operation) {
    let before = handle.state();
    let (payload, dropped) = Panics::payload(weights, at);
    let answer = run(handle, how(payload));
    assert_eq!(answer.state_after, handle.state(), "{at:?}");
    assert_eq!(dropped.load(Ordering::SeqCst), 1, "{at:?}");
    match &answer.outcome {
        Ok(_) => assert_eq!(at, At::Drop),
        Err(error) => {
            assert_ne!(at, At::Drop, "{error}");
            assert!(matches!(error.kind(), ErrorKind::InvalidWeights | ErrorKind::Internal), "{error}");
            assert!(error.to_string().contains("panicked"), "{error}");
            assert_eq!(handle.state().lifecycle, before.lifecycle);
        }
    }
}

#[test]
fn c13_c18_a_source_that_panics_anywhere_leaves_the_controller() {
    let (w0, w1) = (weights(1), weights(2));
    for at in ALL {
        let handle = spawn(&w0);
        done(&handle, sleep(Tags::ALL, InFlight::Refuse));
        bring(&handle, at, &w1, load);
        run(&handle, wake(Tags::WEIGHTS)).outcome.unwrap();
        bring(&handle, at, &w1, update);
        bring(&handle, at, &w1, load);
        let id = begin(&handle);
        bring(&handle, at, &w1, |weights| Operation::Push { transaction: id, weights });
        if at == At::Drop {
            done(&handle, Operation::Commit { transaction: id });
        }
        assert_eq!(handle.state().transaction, None, "{at:?}");
        done(&handle, wake(Tags::KV_CACHE));
        assert_serves(&handle, if at == At::Drop { &w1 } else { &w0 }, &request(1));
    }
}

#[test]
fn c13_a_refused_source_that_panics_as_it_goes_leaves_the_controller() {
    let w0 = weights(1);
    let handle = spawn(&w0);
    // In conflict.
    let (payload, dropped) = Panics::payload(&w0, At::Drop);
    assert_eq!(run(&handle, load(payload)).outcome.unwrap_err().kind(), ErrorKind::Conflict);
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
    let (slow, gate) = gated(&w0);
    let slow = handle.control(ControlRequest::new(load(slow)).id("slow"));
    gate.reached();
    // With an id that is taken, and too late.
    let (payload, dropped) = Panics::payload(&w0, At::Drop);
    let error = run(&handle, ControlRequest::new(load(payload)).id("slow")).outcome.unwrap_err();
    assert!(matches!(error, ControlError::DuplicateId { .. }), "{error}");
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    let (payload, dropped) = Panics::payload(&w0, At::Drop);
    let late = ControlRequest::new(load(payload)).deadline(std::time::Duration::from_millis(1));
    assert_eq!(run(&handle, late).outcome.unwrap_err().kind(), ErrorKind::Deadline);
    eventually(|| dropped.load(Ordering::SeqCst) == 1);
    // When there are too many.
    let waiting: Vec<_> = (0..64).map(|_| handle.control(Operation::Verify)).collect();
    let (payload, dropped) = Panics::payload(&w0, At::Drop);
    assert_eq!(run(&handle, load(payload)).outcome.unwrap_err().kind(), ErrorKind::Overloaded);
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    gate.open();
    assert!(block_on(slow).is_ok());
    assert!(waiting.into_iter().all(|ticket| block_on(ticket).is_ok()));
    done(&handle, wake(Tags::KV_CACHE));
    assert_serves(&handle, &w0, &request(1));
    // When it has stopped.
    drop(handle.stop().unwrap());
    let (payload, dropped) = Panics::payload(&w0, At::Drop);
    assert_eq!(run(&handle, load(payload)).outcome.unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
}

/// Asks for the state as it goes, which may be when the last handle goes, too.
struct Asks(Owned, Handle, std::sync::mpsc::Sender<Lifecycle>);

impl WeightSource for Asks {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.0.index()
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.0.read(tensor, sink)
    }
}

impl Drop for Asks {
    fn drop(&mut self) {
        let _ = self.2.send(self.1.state().lifecycle);
    }
}

/// A load that waits in its source, and behind it one whose source owns a handle.
struct Behind {
    handle: Handle,
    gate: Gate,
    first: Ticket,
    second: Ticket,
    /// What the second source finds when it is dropped.
    states: std::sync::mpsc::Receiver<Lifecycle>,
}

fn behind() -> Behind {
    let w0 = weights(1);
    let handle = spawn(&w0);
    done(&handle, sleep(Tags::ALL, InFlight::Refuse));
    let (payload, gate) = gated(&w0);
    let first = handle.control(load(payload));
    gate.reached();
    let (sender, states) = std::sync::mpsc::channel();
    let asks = Asks(Owned(w0.0.clone()), handle.clone(), sender);
    let second = handle.control(load(Payload::source(asks)));
    Behind { handle, gate, first, second, states }
}

#[test]
fn a_source_that_owns_a_handle_and_waits_is_refused_by_the_stop() {
    let Behind { handle, gate, first, second, states } = behind();
    let stopping = handle.clone();
    let stopper = std::thread::spawn(move || stopping.stop().is_ok());
    eventually(|| matches!(handle.submit(request(1)), Err(SubmitError::Stopped)));
    gate.open();
    assert!(block_on(first).is_ok(), "what is under way is finished");
    assert!(matches!(block_on(second).outcome, Err(ControlError::Stopped)));
    assert!(bounded(move || stopper.join().unwrap()));
    assert_eq!(states.recv().unwrap(), Lifecycle::Stopped);
    assert_eq!(handle.state().lifecycle, Lifecycle::Stopped);
}

#[test]
fn the_last_handle_may_be_a_sources() {
    let Behind { handle, gate, first, second, states } = behind();
    drop(handle);
    gate.open();
    assert!(block_on(first).is_ok());
    assert!(block_on(second).is_ok(), "it was accepted while there was a handle");
    assert_eq!(states.recv().unwrap(), Lifecycle::WeightsLoaded);
}
