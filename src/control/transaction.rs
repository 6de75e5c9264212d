//! An update whose weights come in one request after another. While it is open the owner serves it alone: the
//! engine is borrowed by the update, and nothing else can be done with it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::machine::{Done, Held, missing_for_update};
use super::operation::Operation;
use super::owner::{Job, Time, answer, begin, conflict, pause, publish, resume};
use super::payload::{Target, bring};
use super::reply::Reply;
use super::response::{Outcome, Report};
use super::shared::Shared;
use super::{ControlError, MissingStep, TransactionId};
use crate::engine::{CommitError, Discarded, Engine, Load, Sleeping, Update, WeightsLoaded};
use crate::weights::UpdateOptions;

/// Begins a transaction and serves it to its end.
pub(super) fn run(
    shared: &Arc<Shared>,
    held: Held,
    options: UpdateOptions,
    idle: Duration,
    reply: Reply,
) -> Held {
    if let Some(missing) = missing_for_update(&held) {
        let error = conflict(shared, "begin", missing);
        answer(shared, reply, Done::failed(error));
        return held;
    }
    let (held, last) = match held {
        Held::WeightsLoaded(mut engine) => {
            let last = match engine.begin_update(options) {
                Ok(update) => serve(shared, update, idle, reply).1,
                Err(error) => Some((reply, Done::failed(error))),
            };
            (Held::WeightsLoaded(engine), last)
        }
        Held::SleepingDiscarded { engine, awaiting } => load(shared, engine, awaiting, options, idle, reply),
        held => (held, Some((reply, Done::failed(ControlError::Stopped)))),
    };
    publish(shared, &held);
    if let Some((reply, done)) = last {
        answer(shared, reply, done);
    }
    held
}

type Last = Option<(Reply, Done)>;

/// The transaction of weights that are awaited: a complete load.
fn load(
    shared: &Arc<Shared>,
    engine: Engine<Sleeping<Discarded>>,
    awaiting: bool,
    options: UpdateOptions,
    idle: Duration,
    reply: Reply,
) -> (Held, Last) {
    if options.partial.is_some() {
        let error = conflict(shared, "a partial update", MissingStep::UpdateWeights);
        return (Held::SleepingDiscarded { engine, awaiting }, Some((reply, Done::failed(error))));
    }
    match engine.begin_load(options.load) {
        Ok(load) => serve(shared, load, idle, reply),
        Err(failed) => {
            let (engine, error) = failed.into_parts();
            (Held::SleepingDiscarded { engine, awaiting }, Some((reply, Done::failed(error))))
        }
    }
}

/// How a transaction ends.
trait Open: Target + Sized {
    /// What is left of it.
    type Left;

    fn commit(self) -> (Self::Left, Result<Report, ControlError>);
    fn abandon(self) -> Self::Left;
}

impl Open for Update<'_> {
    type Left = ();

    fn commit(self) -> ((), Result<Report, ControlError>) {
        ((), Update::commit(self).map(Report::Update).map_err(ControlError::from))
    }

    fn abandon(self) {}
}

impl Open for Load<Discarded> {
    type Left = Held;

    fn commit(self) -> (Held, Result<Report, ControlError>) {
        let loaded: Result<Engine<WeightsLoaded>, _> = Load::commit(self);
        match loaded {
            Ok(engine) => {
                let report = Report::Load(engine.report().clone());
                (Held::WeightsLoaded(engine), Ok(report))
            }
            Err(failed) => {
                let (engine, error): (_, CommitError) = failed.into_parts();
                (Held::SleepingDiscarded { engine, awaiting: true }, Err(error.into()))
            }
        }
    }

    fn abandon(self) -> Held {
        Held::SleepingDiscarded { engine: Load::abandon(self), awaiting: true }
    }
}

/// Answers the begin and serves the transaction until it is over. The last answer is left to the caller, who
/// knows the state after.
fn serve<T: Open>(shared: &Arc<Shared>, mut open: T, idle: Duration, reply: Reply) -> (T::Left, Last) {
    let id = shared.change(|board| {
        let id = TransactionId::from_number(board.counters.next_transaction());
        board.transaction = Some(id);
        id
    });
    answer(shared, reply, Done::ok(false, vec![Report::Begun(id)]));
    let mut last_push = Instant::now();
    loop {
        let Some(job) = shared.next_job(last_push.checked_add(idle)) else {
            let why =
                if shared.board().stopping { "the controller stops" } else { "nothing came for too long" };
            tracing::warn!(transaction = %id, ?idle, "a transaction was abandoned: {why}");
            end(shared, id, &format!("it was abandoned: {why}"));
            return (open.abandon(), None);
        };
        let Job { operation, time, reply } = job;
        let span = reply.span();
        let _entered = span.enter();
        let Some(reply) = begin(shared, reply, time) else { continue };
        match operation {
            Operation::Push { transaction, weights } if transaction == id => {
                let began = Instant::now();
                match bring(&mut open, weights, time) {
                    Ok(()) => {
                        last_push = Instant::now();
                        let pushed = Report::Pushed { transaction, receiving: began.elapsed() };
                        answer(shared, reply, Done::ok(false, vec![pushed]));
                    }
                    Err(error) => {
                        end(shared, id, &format!("a push failed ({error})"));
                        return (open.abandon(), Some((reply, Done::failed(error))));
                    }
                }
            }
            Operation::Commit { transaction } if transaction == id => {
                let (left, committed) = open.commit();
                let how = committed.as_ref().err().map(|error| format!("its commit failed ({error})"));
                end(shared, id, how.as_deref().unwrap_or("it was committed"));
                return (left, Some((reply, Done::of(committed))));
            }
            Operation::Abandon { transaction } if transaction == id => {
                end(shared, id, "it was abandoned");
                let done = Done { outcome: Ok(Outcome::Done), report: vec![Report::Abandoned(id)] };
                return (open.abandon(), Some((reply, done)));
            }
            other => {
                let done = meanwhile(shared, other, id, time);
                answer(shared, reply, done);
            }
        }
    }
}

/// What can be done while a transaction is open: nothing that wants the engine.
fn meanwhile(shared: &Arc<Shared>, operation: Operation, open: TransactionId, time: Time) -> Done {
    match operation {
        Operation::Pause(mode) => pause(shared, false, mode, time),
        Operation::Resume => resume(shared),
        Operation::Push { transaction, .. }
        | Operation::Commit { transaction }
        | Operation::Abandon { transaction } => {
            let over = shared.board().counters.how_ended(transaction);
            Done::failed(ControlError::UnknownTransaction { transaction, over })
        }
        other => Done::failed(conflict(shared, other.name(), MissingStep::EndTransaction(open))),
    }
}

fn end(shared: &Shared, id: TransactionId, how: &str) {
    shared.change(|board| {
        board.transaction = None;
        board.counters.ended(id, how);
    });
}
