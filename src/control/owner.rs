//! The thread that owns the engine and carries control operations out, one after another.

use std::sync::Arc;
use std::time::Instant;

use super::board::Board;
use super::machine::{self, Done, Held};
use super::operation::{Operation, PauseDeadline, PauseMode};
use super::reply::{OneShot, Reply};
use super::response::{Busy, Outcome, Report, SettledReport};
use super::shared::Shared;
use super::transaction;
use super::{ControlError, MissingStep};
use crate::completion::RequestId;
use crate::engine::AnyEngine;

/// A control request in the owner's inbox.
pub(super) struct Job {
    pub(super) operation: Operation,
    pub(super) time: Time,
    pub(super) reply: Reply,
}

/// What a request waits for that has not begun.
pub(super) const BEFORE_ITS_TURN: &str = "waiting for its turn";

/// Where the engine goes when the controller stops; `None` if there is none any more.
pub(super) type Back = Arc<OneShot<Option<AnyEngine>>>;

/// Takes an engine over and makes its state known.
pub(super) fn take(shared: &Shared, engine: AnyEngine) -> Held {
    let held = Held::from(engine);
    publish(shared, &held);
    if let Held::Awake(engine) = &held {
        let stats = engine.stats();
        shared.change(|board| board.stats = stats);
        let _ = shared.lend(engine);
    }
    held
}

/// Runs the owner until the controller is to stop.
pub(super) fn run(shared: &Arc<Shared>, mut held: Held) {
    let guard = Guard(shared);
    while let Some(job) = shared.next_job(None) {
        held = execute(shared, held, job);
    }
    let engine = stop(shared, held);
    // Whoever asked first; the others get nothing.
    let back = shared.change(|board| (!board.back.is_empty()).then(|| board.back.remove(0)));
    // Whoever has the engine back finds the controller stopped.
    drop(guard);
    if let Some(back) = back {
        // Nobody polls it.
        let _ = back.fill(Some(engine));
    }
}

/// Lets nobody wait for an owner that is gone, be it by a panic.
struct Guard<'a>(&'a Shared);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.change(Board::collapse);
    }
}

/// Ends what is in flight and takes the engine back.
fn stop(shared: &Arc<Shared>, held: Held) -> AnyEngine {
    shared.change(|board| {
        board.shut();
        board.abort_before();
    });
    match held {
        Held::Awake(engine) => {
            let engine = shared.recall(engine);
            let outputs = engine.abort_all().outputs;
            shared.change(|board| board.post_outputs(outputs));
            AnyEngine::Awake(engine)
        }
        Held::SleepingKept(engine) => AnyEngine::SleepingKept(engine),
        Held::SleepingDiscarded { engine, .. } => AnyEngine::SleepingDiscarded(engine),
        Held::WeightsLoaded(engine) => AnyEngine::WeightsLoaded(engine),
    }
}

/// Makes the engine's state known.
pub(super) fn publish(shared: &Shared, held: &Held) {
    let (lifecycle, version, memory) = (held.lifecycle(), held.version(), held.memory());
    shared.change(|board| board.publish(lifecycle, version, memory));
}

/// Carries one operation out and answers it.
fn execute(shared: &Arc<Shared>, held: Held, job: Job) -> Held {
    let Job { operation, time, reply } = job;
    let span = reply.span();
    let _entered = span.enter();
    let Some(reply) = begin(shared, reply, time) else { return held };
    if let Operation::Begin { options, idle } = operation {
        let idle = idle.unwrap_or(shared.fixed.options.transaction_idle);
        return transaction::run(shared, held, options, idle, reply);
    }
    let (held, done) = carry_out(shared, held, operation, time);
    publish(shared, &held);
    answer(shared, reply, done);
    held
}

/// A request's turn has come. If its time is over it is answered, and that is that.
pub(super) fn begin(shared: &Shared, mut reply: Reply, time: Time) -> Option<Reply> {
    shared.change(|board| {
        reply.begin(board);
        let (id, operation) = (reply.id().to_owned(), reply.operation());
        board.busy = Some(Busy { id, operation, since: Instant::now() });
    });
    match time.check(BEFORE_ITS_TURN) {
        Ok(()) => Some(reply),
        Err(error) => {
            answer(shared, reply, Done::failed(error));
            None
        }
    }
}

pub(super) fn answer(shared: &Shared, reply: Reply, done: Done) {
    shared.change(|board| {
        board.busy = None;
        board.counters.phases(&done.report);
        reply.answer(board, done.outcome, done.report);
    });
}

/// When an operation came, and when its time is over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Time {
    pub(super) received: Instant,
    pub(super) until: Option<Instant>,
}

impl Time {
    pub(super) fn is_over(self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    pub(super) fn check(self, during: &'static str) -> Result<(), ControlError> {
        if self.is_over() { Err(self.passed(during)) } else { Ok(()) }
    }

    pub(super) fn passed(self, during: &'static str) -> ControlError {
        ControlError::Deadline { during, waited: self.received.elapsed() }
    }
}

fn carry_out(shared: &Arc<Shared>, held: Held, operation: Operation, time: Time) -> (Held, Done) {
    match operation {
        Operation::Pause(mode) => {
            let done = pause(shared, held.lifecycle().has_kv_cache(), mode, time);
            (held, done)
        }
        Operation::Resume => (held, resume(shared)),
        Operation::Sleep(plan) => machine::sleep(shared, held, plan, time),
        Operation::WakeUp { tags } => machine::wake_up(shared, held, tags),
        Operation::LoadWeights { weights, options } => {
            machine::load_weights(shared, held, weights, options, time)
        }
        Operation::UpdateWeights { weights, options } => {
            machine::update_weights(shared, held, weights, options, time)
        }
        Operation::Push { transaction, .. }
        | Operation::Commit { transaction }
        | Operation::Abandon { transaction } => {
            let over = shared.board().counters.how_ended(transaction);
            (held, Done::failed(ControlError::UnknownTransaction { transaction, over }))
        }
        Operation::ResetPrefixCache { with_requests } => {
            let done = machine::reset_prefix_cache(shared, &held, with_requests);
            (held, done)
        }
        Operation::Verify => {
            let done = machine::verify(shared, &held);
            (held, done)
        }
        Operation::ReadTensor { name } => {
            let done = machine::read_tensor(shared, &held, &name);
            (held, done)
        }
        Operation::ClearLoadWeight => machine::clear_load_weight(shared, held, time),
        Operation::UpdateModelWeight { weights, options } => {
            machine::update_model_weight(shared, held, weights, options, time)
        }
        Operation::Status | Operation::Abort(_) | Operation::Begin { .. } => {
            unreachable!("answered by the handle, or a transaction of its own")
        }
    }
}

/// Keeps requests out and brings the stepper to a stop.
pub(super) fn pause(shared: &Shared, awake: bool, mode: PauseMode, time: Time) -> Done {
    let was_paused = shared.change(|board| {
        board.shut();
        board.paused
    });
    let mut settled = SettledReport::default();
    let undo = |error, settled| {
        shared.reopen();
        Done { outcome: Err(error), report: vec![Report::Settled(settled)] }
    };
    match mode {
        PauseMode::Keep => {}
        PauseMode::Abort => settled.aborted = abort_before(shared),
        PauseMode::Wait { on_deadline } => {
            let live = shared.board().live_before();
            if live > 0 && (was_paused || !awake) {
                let missing = if was_paused { MissingStep::Resume } else { MissingStep::WakeKvCache };
                let error = conflict(shared, "pause", missing);
                return undo(error, settled);
            }
            let (drained, left) = drain(shared, time.until);
            settled.drained = drained;
            match on_deadline {
                _ if left == 0 => {}
                PauseDeadline::Undo => return undo(undrained(shared, time), settled),
                PauseDeadline::Abort => settled.aborted = abort_before(shared),
                PauseDeadline::Keep => {}
            }
        }
    }
    // It is paused once the step that is running now is over, not before: that is what `paused` says.
    shared.change(|board| board.frozen = true);
    shared.wait_surely(|board| !board.in_use);
    shared.change(|board| (board.paused, board.shut) = (true, false));
    settled.kept = shared.board().before();
    let already = was_paused && settled.aborted.is_empty() && settled.drained.is_empty();
    Done::ok(already, vec![Report::Settled(settled)])
}

pub(super) fn resume(shared: &Shared) -> Done {
    let already = shared.change(|board| {
        let already = !board.paused;
        (board.paused, board.frozen) = (false, board.broken);
        already
    });
    shared.start_aside();
    Done::ok(already, Vec::new())
}

/// Ends the requests of the epochs before, and waits until they have ended.
fn abort_before(shared: &Shared) -> Vec<RequestId> {
    let ids = shared.change(Board::abort_before);
    shared.wait_surely(|board| board.live_before() == 0);
    ids
}

/// Waits until no request of the epochs before is in flight, at most until then; returns those that ended by
/// themselves, and how many are left.
pub(super) fn drain(shared: &Shared, until: Option<Instant>) -> (Vec<RequestId>, usize) {
    // A broken engine runs nothing to its end.
    shared.wait_for(until, |board| board.broken || board.live_before() == 0);
    let mut board = shared.board();
    let mut drained = std::mem::take(&mut board.drained);
    drained.sort_unstable();
    (drained, board.live_before())
}

/// Why a drain ended before the requests did.
pub(super) fn undrained(shared: &Shared, time: Time) -> ControlError {
    let board = shared.board();
    if board.stopping {
        return ControlError::Stopped;
    }
    if board.broken {
        return ControlError::Broken { message: board.step_error.clone().unwrap_or_default() };
    }
    time.passed("while requests ran to their end")
}

pub(super) fn conflict(shared: &Shared, operation: &'static str, missing: MissingStep) -> ControlError {
    let state = Box::new(shared.board().state());
    ControlError::Conflict { operation, state, missing }
}

impl Done {
    pub(super) fn ok(already: bool, report: Vec<Report>) -> Self {
        let outcome = if already { Outcome::Already } else { Outcome::Done };
        Self { outcome: Ok(outcome), report }
    }

    pub(super) fn failed(error: impl Into<ControlError>) -> Self {
        Self { outcome: Err(error.into()), report: Vec::new() }
    }
}
