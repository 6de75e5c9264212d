//! Updates in several requests: however one ends, the weights are known and the next one can begin.

use std::time::Duration;

use dormouse::control::{
    AbortTarget, ControlError, ControlRequest, ErrorKind, Handle, Lifecycle, MissingStep, Operation,
    PauseMode, Payload, Report, Tags, TransactionId,
};
use dormouse::{AnyEngine, BucketWriter, InFlight, LoadOptions, SourceError, UpdateOptions};

use crate::faulty::{Fault, Faulty};
use crate::support::{
    Owned, Q, Weights, all_of, already, assert_serves, block_on, bounded, discard, done, eventually, gated,
    output, queueing, refused, request, run, sleep, some_of, spawn, spawn_with, update, wake, weights,
};

fn begin(handle: &Handle, options: UpdateOptions) -> TransactionId {
    let begun = done(handle, Operation::Begin { options, idle: None });
    let [Report::Begun(id)] = begun.report[..] else { panic!("{begun:?}") };
    assert_eq!(handle.state().transaction, Some(id));
    id
}

fn push(transaction: TransactionId, weights: Payload) -> Operation {
    Operation::Push { transaction, weights }
}

fn staged() -> UpdateOptions {
    UpdateOptions::default()
}

/// A controller without a KV cache, and the weights that it is to get.
fn loaded() -> (Handle, Weights, Weights) {
    let (w0, w1) = (weights(1), weights(2));
    let handle = spawn(&w0);
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    (handle, w0, w1)
}

/// The set in parts, none of which has all.
fn parts(weights: &Weights) -> Vec<Vec<&str>> {
    let names: Vec<_> = weights.0.iter().map(|(name, _)| name.as_str()).collect();
    names.chunks(5).map(<[_]>::to_vec).collect()
}

fn bucket(weights: &Weights, names: &[&str]) -> Payload {
    let named = weights.0.iter().filter(|(name, _)| names.contains(&name.as_str()));
    let mut written = Vec::new();
    let mut each = |bytes: Vec<u8>| {
        written.push(bytes);
        Ok::<_, SourceError>(())
    };
    BucketWriter::new(1 << 20).write(&mut Owned(named.cloned().collect()), &mut each).unwrap();
    assert_eq!(written.len(), 1);
    Payload::Bucket(written.remove(0))
}

/// The old weights serve, and a whole update in one go works.
#[track_caller]
fn assert_recovers(handle: &Handle, old: &Weights, new: &Weights) {
    assert_eq!(handle.state().transaction, None);
    if handle.state().lifecycle == Lifecycle::WeightsLoaded {
        done(handle, wake(Tags::KV_CACHE));
        assert_serves(handle, old, &request(1));
        done(handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    } else {
        assert!(refused(handle, wake(Tags::KV_CACHE)).missing_step().is_some());
    }
    done(handle, update(all_of(new)));
    done(handle, wake(Tags::KV_CACHE));
    assert_serves(handle, new, &request(1));
}

/// What is done with a transaction that is over fails, and says how it ended.
#[track_caller]
fn assert_over(handle: &Handle, id: TransactionId, how: &str) {
    for operation in [
        push(id, all_of(&weights(3))),
        Operation::Commit { transaction: id },
        Operation::Abandon { transaction: id },
    ] {
        let error = refused(handle, operation);
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains(how), "{error}");
    }
}

#[test]
fn weights_come_in_parts_of_all_kinds_in_any_order_and_serve_after_the_commit() {
    for awaited in [false, true] {
        for in_place in [false, true] {
            let (handle, _, w1) = loaded();
            if awaited {
                done(&handle, discard(InFlight::Refuse));
                done(&handle, wake(Tags::WEIGHTS));
            }
            let before = handle.state().version;
            let label = LoadOptions::default().label("step 1");
            let options = UpdateOptions::from(label);
            let id = begin(&handle, if in_place { options.in_place() } else { options });
            for (number, names) in parts(&w1).iter().rev().enumerate() {
                let sent = if number % 2 == 0 { some_of(&w1, names) } else { bucket(&w1, names) };
                let pushed = done(&handle, push(id, sent));
                assert!(
                    matches!(pushed.report[..], [Report::Pushed { transaction, .. }] if transaction == id)
                );
                assert_eq!(pushed.state_after.version, before, "not before the commit");
            }
            let committed = done(&handle, Operation::Commit { transaction: id });
            let version = committed.state_after.version.unwrap();
            assert_eq!((version.counter, version.label.as_deref()), (2, Some("step 1")));
            assert_over(&handle, id, "committed");
            done(&handle, wake(Tags::KV_CACHE));
            assert_serves(&handle, &w1, &request(1));
        }
    }
}

#[test]
fn c18_b32_b46_whatever_ends_a_transaction_the_old_weights_stand_or_are_known_to_be_torn() {
    let fault = |fault| {
        let inner = Owned(weights(2).0);
        Payload::source(Faulty { inner, fault, at: 4, reads: 0 })
    };
    type End = (&'static str, Box<dyn Fn(TransactionId) -> Operation>);
    let ends: Vec<End> = vec![
        ("abandoned", Box::new(|transaction| Operation::Abandon { transaction })),
        ("commit failed", Box::new(|transaction| Operation::Commit { transaction })),
        ("push failed", Box::new(move |id| push(id, fault(Fault::HalfThenError)))),
        ("push failed", Box::new(move |id| push(id, fault(Fault::Panic)))),
        ("push failed", Box::new(move |id| push(id, fault(Fault::HalfThenPanic)))),
        ("push failed", Box::new(move |id| push(id, fault(Fault::Short)))),
        ("push failed", Box::new(|id| push(id, Payload::Bucket(b"no bucket".to_vec())))),
        ("push failed", Box::new(|id| push(id, some_of(&weights(2), &[Q])))),
    ];
    for (how, end) in &ends {
        for options in [staged(), staged().in_place()] {
            for awaited in [false, true] {
                let (handle, w0, w1) = loaded();
                if awaited {
                    done(&handle, discard(InFlight::Refuse));
                    done(&handle, wake(Tags::WEIGHTS));
                }
                let before = handle.state();
                let id = begin(&handle, options.clone());
                done(&handle, push(id, some_of(&w1, &[Q])));
                let ended = run(&handle, end(id));
                assert_eq!(ended.is_ok(), *how == "abandoned", "{ended:?}");
                let state = handle.state();
                assert_eq!((&state, &ended.state_after.version), (&ended.state_after, &before.version));
                let torn = !awaited && options.mode == dormouse::UpdateMode::InPlace;
                let expected = if torn { Lifecycle::WeightsTorn } else { before.lifecycle };
                assert_eq!(state.lifecycle, expected, "{how}");
                assert_over(&handle, id, how);
                assert_recovers(&handle, &w0, &w1);
            }
        }
    }
}

#[test]
fn b32_while_one_is_open_nothing_else_has_the_weights_and_an_end_is_named() {
    let (handle, _, w1) = loaded();
    let id = begin(&handle, staged());
    for operation in [
        Operation::Begin { options: staged(), idle: None },
        update(all_of(&w1)),
        wake(Tags::KV_CACHE),
        sleep(Tags::ALL, InFlight::Abort),
        Operation::Verify,
    ] {
        let error = refused(&handle, operation);
        assert_eq!(error.missing_step(), Some(MissingStep::EndTransaction(id)));
        assert!(error.to_string().contains(&id.to_string()), "{error}");
    }
    done(&handle, Operation::Pause(PauseMode::Keep));
    already(&handle, Operation::Abort(AbortTarget::All));
    done(&handle, Operation::Status);
    done(&handle, push(id, all_of(&w1)));
    done(&handle, Operation::Commit { transaction: id });
    done(&handle, wake(Tags::KV_CACHE));
    assert!(handle.state().paused);
    done(&handle, Operation::Resume);
    assert_serves(&handle, &w1, &request(1));
}

#[test]
fn c18_one_that_nothing_is_pushed_to_is_abandoned_whoever_else_asks_for_something() {
    let (handle, w0, w1) = loaded();
    let idle = Some(Duration::from_millis(300));
    for in_place in [false, true] {
        let options = if in_place { staged().in_place() } else { staged() };
        let begun = done(&handle, Operation::Begin { options, idle });
        let id = begun.state_after.transaction.unwrap();
        if in_place {
            done(&handle, push(id, some_of(&w1, &[Q])));
        }
        // Another trainer, that waits for the first to go away.
        eventually(|| {
            let again = run(&handle, Operation::Begin { options: staged(), idle: None });
            let Some(other) = again.state_after.transaction.filter(|_| again.is_ok()) else {
                assert_eq!(again.outcome.unwrap_err().kind(), ErrorKind::Conflict);
                return false;
            };
            done(&handle, Operation::Abandon { transaction: other });
            true
        });
        let error = refused(&handle, push(id, all_of(&w1)));
        assert!(matches!(error, ControlError::UnknownTransaction { .. }), "{error}");
        let torn = Lifecycle::WeightsTorn;
        assert_eq!(handle.state().lifecycle, if in_place { torn } else { Lifecycle::WeightsLoaded });
    }
    assert_recovers(&handle, &w0, &w1);
    // Alone.
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    let id = done(&handle, Operation::Begin { options: staged(), idle }).state_after.transaction.unwrap();
    eventually(|| handle.state().transaction.is_none());
    assert_over(&handle, id, "nothing came");
    assert_recovers(&handle, &w1, &w0);
}

#[test]
fn c18_a_push_that_takes_longer_than_the_idle_time_is_not_idle() {
    let (handle, _, w1) = loaded();
    let idle = Some(Duration::from_millis(500));
    let id = done(&handle, Operation::Begin { options: staged(), idle }).state_after.transaction.unwrap();
    let (slow, gate) = gated(&w1);
    let ticket = handle.control(push(id, slow));
    let commit = handle.control(Operation::Commit { transaction: id });
    gate.reached();
    std::thread::sleep(Duration::from_millis(600));
    gate.open();
    assert!(block_on(ticket).is_ok());
    assert!(block_on(commit).is_ok());
    done(&handle, wake(Tags::KV_CACHE));
    assert_serves(&handle, &w1, &request(1));
}

#[test]
fn c18_c23_a_push_whose_deadline_passes_ends_the_transaction() {
    for in_place in [false, true] {
        let (handle, w0, w1) = loaded();
        let id = begin(&handle, if in_place { staged().in_place() } else { staged() });
        let (slow, gate) = gated(&w1);
        let deadline = Duration::from_millis(20);
        let ticket = handle.control(ControlRequest::new(push(id, slow)).deadline(deadline));
        gate.reached();
        std::thread::sleep(deadline);
        gate.open();
        let error = block_on(ticket).outcome.unwrap_err();
        assert!(matches!(error, ControlError::Deadline { .. }), "{error}");
        assert_over(&handle, id, "push failed");
        let torn = handle.state().lifecycle == Lifecycle::WeightsTorn;
        assert_eq!(torn, in_place);
        assert_recovers(&handle, &w0, &w1);
    }
}

#[test]
fn c18_a_stop_abandons_it_and_gives_back_an_engine_that_knows() {
    for (in_place, pushes, awaited) in
        [(false, true, false), (true, true, false), (true, false, false), (false, true, true)]
    {
        let (handle, _, w1) = loaded();
        if awaited {
            done(&handle, discard(InFlight::Refuse));
            done(&handle, wake(Tags::WEIGHTS));
        }
        let id = begin(&handle, if in_place { staged().in_place() } else { staged() });
        if pushes {
            done(&handle, push(id, some_of(&w1, &[Q])));
        }
        let stopping = handle.clone();
        let engine = bounded(move || stopping.stop().unwrap());
        assert!(matches!(refused(&handle, Operation::Commit { transaction: id }), ControlError::Stopped));
        assert_eq!(handle.state().transaction, None);
        let engine = match engine {
            AnyEngine::WeightsLoaded(mut engine) if !awaited => {
                assert_eq!(engine.version().is_none(), in_place && pushes);
                engine.update_with(w1.source(), staged()).unwrap();
                engine
            }
            AnyEngine::SleepingDiscarded(engine) if awaited => engine.load_weights(w1.source()).unwrap(),
            other => panic!("{other:?}"),
        };
        let handle = dormouse::control::Controller::spawn(engine.wake_up().unwrap());
        assert_serves(&handle, &w1, &request(1));
    }
}

#[test]
fn c18_dropping_the_last_handle_abandons_it_and_answers_what_waits() {
    let w1 = weights(2);
    let handle = spawn_with(queueing(), &weights(1));
    done(&handle, sleep(Tags::KV_CACHE, InFlight::Refuse));
    let id = begin(&handle, staged());
    let (slow, gate) = gated(&w1);
    let under_way = handle.control(push(id, slow));
    gate.reached();
    let waiting = handle.control(Operation::Commit { transaction: id });
    let queued = handle.submit(request(1)).unwrap();
    drop(handle);
    gate.open();
    assert!(block_on(under_way).is_ok(), "an operation under way is finished");
    assert!(matches!(block_on(waiting).outcome, Err(ControlError::Stopped)));
    assert!(crate::support::was_aborted(&output(queued)));
}
