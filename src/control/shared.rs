//! What the controller's threads and handles share: one board under one lock.
//!
//! Three parties meet here. *Handles* submit, abort and ask, and never hold the lock for long. The *owner* thread
//! carries control operations out one after another; it owns the engine, and lends it to the *stepper* while it
//! is awake. The stepper runs steps and aborts, without the lock, and posts what came of them. To change the
//! engine's state the owner recalls it: when the stepper has put it down nobody else can have it.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::board::{Board, Place, Why};
use super::caught::quietly;
use super::generation::{Generation, Outlet};
use super::operation::AbortTarget;
use super::options::{ControllerOptions, WhileNotServing};
use super::owner::{Back, Job};
use super::reply::Reply;
use super::sync::{Condvar, Guard, Mutex};
use super::{ControlError, SubmitError};
use crate::completion::RequestId;
use crate::engine::{Awake, Engine, default_seed};
use crate::model::ModelConfig;
use crate::request::{Request, RequestLimits};
use crate::weights::Manifest;

/// A guess when an engine that doesn't serve may serve again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The board, and who waits for what on it.
pub(super) struct Shared {
    board: Mutex<Board>,
    /// Something is in the owner's inbox.
    inbox: Condvar,
    /// There may be something to do for the stepper.
    work: Condvar,
    /// The stepper has put the engine down, or a request has ended.
    progress: Condvar,
    pub(super) fixed: Fixed,
}

/// What never changes.
pub(super) struct Fixed {
    pub(super) options: ControllerOptions,
    pub(super) config: Arc<ModelConfig>,
    pub(super) manifest: Arc<Manifest>,
    pub(super) limits: RequestLimits,
    pub(super) seed: u64,
}

impl Shared {
    pub(super) fn new(board: Board, fixed: Fixed) -> Arc<Self> {
        Arc::new(Self {
            board: Mutex::new(board),
            inbox: Condvar::default(),
            work: Condvar::default(),
            progress: Condvar::default(),
            fixed,
        })
    }

    /// Locks the board for a moment.
    pub(super) fn board(&self) -> Locked<'_> {
        Locked(Some(self.board.lock()))
    }

    // What handles do.

    pub(super) fn submit(self: &Arc<Self>, mut request: Request) -> Result<Generation, SubmitError> {
        let options = &self.fixed.options;
        let valid = request.validate(&self.fixed.limits);
        let mut board = self.board();
        board.accept(options, valid, request.id.as_deref())?;
        let id = board.next_request();
        // Samples that a partial lacks belong to its group: they draw from the group's seed.
        let group = request.resume.as_ref().and_then(|carried| carried.first()).map(|first| first.seed);
        let seed = request.params.seed.or(group).unwrap_or_else(|| default_seed(self.fixed.seed, id));
        request.params.seed = Some(seed);
        let outlet = Outlet::new(options.stream_buffer);
        let epoch = board.add(id, request, Arc::clone(&outlet));
        if board.is_admitting() {
            board.start(id);
            self.work.notify_all();
        }
        drop(board);
        Ok(Generation::new(id, epoch, outlet, Arc::clone(self)))
    }

    /// Ends requests, and answers when they have ended.
    pub(super) fn abort(&self, target: &AbortTarget, mut reply: Reply) {
        let mut board = self.board();
        reply.begin(&board);
        let ids = board.targets(target);
        board.abort(&ids);
        board.await_end(&ids, reply);
        self.notify(&board);
    }

    /// Puts a control request into the owner's inbox, if there is room.
    pub(super) fn post(&self, job: Job) {
        let mut board = self.board();
        let limit = self.fixed.options.max_control_requests.max(1);
        let refusal = match board.inbox.len() {
            _ if board.is_stopped() || board.stopping => ControlError::Stopped,
            waiting if waiting >= limit => ControlError::QueueFull { limit },
            _ => {
                board.inbox.push_back(job);
                self.inbox.notify_all();
                // The stepper keeps the time.
                self.work.notify_all();
                return;
            }
        };
        job.reply.answer(&mut board, Err(refusal), Vec::new());
    }

    /// The reader has room again.
    pub(super) fn reader_caught_up(&self, id: RequestId) {
        let mut board = self.board();
        board.go_on(id);
        self.work.notify_all();
    }

    /// Nobody will read what comes of this request.
    pub(super) fn reader_gone(&self, id: RequestId) {
        let mut board = self.board();
        board.abort(&[id]);
        self.notify(&board);
    }

    /// The last handle is gone, or one of them wants the engine back.
    pub(super) fn stop(&self, back: Option<Back>) {
        let mut board = self.board();
        match back {
            Some(back) if board.is_stopped() => board.wakers.extend(back.fill(None)),
            back => board.back.extend(back),
        }
        board.stopping = true;
        self.inbox.notify_all();
        self.progress.notify_all();
    }

    /// Lets everybody look at what was changed.
    fn notify(&self, _: &Locked<'_>) {
        self.work.notify_all();
        self.progress.notify_all();
    }

    // What the owner does. Nothing is posted to a task while somebody waits with the lock.

    /// Waits for the next control request; `None` if the time has passed or the controller is to stop.
    pub(super) fn next_job(&self, until: Option<Instant>) -> Option<Job> {
        let mut board = self.board.lock();
        loop {
            if board.stopping {
                return None;
            }
            if let Some(job) = board.inbox.pop_front() {
                return Some(job);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return None;
            }
            board = self.inbox.wait_until(board, until);
        }
    }

    /// Lets the stepper have the engine, and starts what was set aside for it; returns what goes on with tokens that
    /// it has.
    pub(super) fn lend(&self, engine: &Arc<Engine<Awake>>) -> Vec<RequestId> {
        self.change(|board| {
            if !board.is_stopped() {
                board.engine = Some(Arc::clone(engine));
            }
        });
        self.start_aside()
    }

    /// Lets requests in again, after an operation that was not done.
    pub(super) fn reopen(&self) {
        self.change(|board| board.shut = false);
        self.start_aside();
    }

    /// Starts what was set aside for an engine that serves, a few at a time; returns what goes on.
    pub(super) fn start_aside(&self) -> Vec<RequestId> {
        let mut resumed = Vec::new();
        loop {
            let (started, going_on) = self.change(Board::start_some);
            resumed.extend(going_on);
            if started == 0 {
                return resumed;
            }
        }
    }

    /// Has the stepper post the engine's figures as they are now: it alone posts them, so they never go back.
    pub(super) fn look(&self) {
        self.change(|board| board.look = board.engine.is_some());
        self.wait_surely(|board| !board.look);
    }

    /// Takes the engine back from the stepper, which finishes what it is at.
    pub(super) fn recall(&self, engine: Arc<Engine<Awake>>) -> Engine<Awake> {
        let mut board = self.board.lock();
        board.engine = None;
        while board.in_use {
            board = self.progress.wait(board);
        }
        drop(board);
        Arc::into_inner(engine)
            .expect("the board has dropped its share, the stepper and the owner have no other")
    }

    /// Waits for what the stepper does without fail.
    pub(super) fn wait_surely(&self, done: impl Fn(&Board) -> bool) {
        let mut board = self.board.lock();
        while !done(&board) && !board.is_stopped() {
            board = self.progress.wait(board);
        }
    }

    /// Waits until `done` says so; returns whether it did before the time had passed, or the controller is to
    /// stop.
    pub(super) fn wait_for(&self, until: Option<Instant>, done: impl Fn(&Board) -> bool) -> bool {
        let mut board = self.board.lock();
        loop {
            if done(&board) {
                return true;
            }
            if board.stopping || until.is_some_and(|until| Instant::now() >= until) {
                return false;
            }
            board = self.progress.wait_until(board, until);
        }
    }

    /// Changes the board, and lets everybody look at it again.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Board) -> R) -> R {
        let mut board = self.board();
        let result = change(&mut board);
        self.notify(&board);
        result
    }

    // What the stepper does.

    /// Waits for something to do; `None` when the controller has stopped. Meanwhile, and between steps, answers
    /// control requests whose time is over: the owner may be at another for long.
    pub(super) fn next_task(&self) -> Option<(Task, Arc<Engine<Awake>>)> {
        loop {
            self.board().expire();
            let mut board = self.board.lock();
            if board.is_stopped() {
                return None;
            }
            if let Some(engine) = board.engine.clone()
                && let Some(task) = board.next_task()
            {
                board.in_use = true;
                return Some((task, engine));
            }
            let due = board.first_due();
            if due.is_none_or(|due| due > Instant::now()) {
                drop(self.work.wait_until(board, due));
            }
        }
    }

    /// The stepper is gone, by a panic: nothing can be done any more.
    pub(super) fn fail(&self) {
        self.change(|board| {
            board.in_use = false;
            board.stopping = true;
            board.collapse();
        });
        self.inbox.notify_all();
    }

    /// Takes in what a task gave; the stepper has put the engine down.
    pub(super) fn task_done(&self, post: impl FnOnce(&mut Board)) {
        let mut board = self.board();
        post(&mut board);
        board.in_use = false;
        self.progress.notify_all();
    }
}

/// The locked board. When it is unlocked answers go out and tasks that were posted to are woken.
pub(super) struct Locked<'a>(Option<Guard<'a, Board>>);

impl Deref for Locked<'_> {
    type Target = Board;

    fn deref(&self) -> &Board {
        self.0.as_ref().expect("it is taken by the drop only")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Board {
        self.0.as_mut().expect("it is taken by the drop only")
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let (wakers, after) = (std::mem::take(&mut self.wakers), std::mem::take(&mut self.after));
        self.0 = None;
        // One that panics is not the others' concern.
        after.into_iter().for_each(quietly);
        wakers.into_iter().for_each(|waker| quietly(|| waker.wake()));
    }
}

/// What the stepper does with the engine.
pub(super) enum Task {
    Step,
    /// Ends these, by the engine's numbers.
    Abort(Vec<RequestId>),
    /// Takes the engine's figures.
    Look,
}

impl Board {
    /// Whether another request is accepted.
    fn accept(
        &mut self,
        options: &ControllerOptions,
        valid: Result<(), crate::RequestError>,
        name: Option<&str>,
    ) -> Result<(), SubmitError> {
        let refusal = if self.is_stopped() || self.stopping {
            SubmitError::Stopped
        } else if let Err(error) = valid {
            error.into()
        } else if !self.is_admitting() && options.while_not_serving == WhileNotServing::Refuse {
            SubmitError::NotServing { state: Box::new(self.state()), retry_after: RETRY_AFTER }
        } else if self.live_requests() >= options.max_live_requests {
            SubmitError::QueueFull { live_requests: self.live_requests() }
        } else if let Some(name) = name.filter(|name| self.is_named(name)) {
            crate::RequestError::DuplicateId { id: name.to_owned() }.into()
        } else {
            return Ok(());
        };
        self.counters.refuse(refusal.kind());
        Err(refusal)
    }

    /// Each once, however often it is named.
    fn targets(&self, target: &AbortTarget) -> Vec<RequestId> {
        let ids: BTreeSet<_> = match target {
            AbortTarget::All => self.slots.keys().copied().collect(),
            AbortTarget::These { requests, names } => {
                let named = names.iter().filter_map(|name| self.named(name));
                requests.iter().copied().filter(|id| self.slots.contains_key(id)).chain(named).collect()
            }
        };
        ids.into_iter().collect()
    }

    fn next_task(&mut self) -> Option<Task> {
        let aborts = std::mem::take(&mut self.to_abort);
        let ids: Vec<_> = aborts.into_iter().filter_map(|id| self.in_engine(id)).collect();
        if !ids.is_empty() {
            return Some(Task::Abort(ids));
        }
        if self.look {
            return Some(Task::Look);
        }
        (!self.frozen && !self.by_engine.is_empty()).then_some(Task::Step)
    }

    /// A request that waited for its reader need not wait for it any more.
    fn go_on(&mut self, id: RequestId) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        slot.overrun = false;
        if let Place::Aside { why: why @ Why::Reader, .. } = &mut slot.place {
            *why = Why::Serving;
            self.start_if_running(id);
        }
    }
}
