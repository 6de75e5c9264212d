//! What an awake engine shares between threads: a mailbox, locked for moments, and the executor, locked for a
//! step.
//!
//! Whoever waits for an output takes the executor and runs a step for everybody; there is no thread of our
//! own. The executor's lock is handed over fairly after each step, so that a caller whose output is there
//! gets to see it, and an abort gets its turn.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use parking_lot::{Mutex, MutexGuard};

use super::executor::{Ended, Executor, Progress};
use super::requests::{LiveRequest, Owner};
use super::state::Carried;
use super::{EngineStats, MemoryReport, StepError, StepToken};
use crate::completion::{RequestId, RequestOutput};
use crate::request::RequestError;
use crate::scheduler::PinId;
use crate::weights::ResidentWeights;

/// What comes in between steps, and outputs on their way out.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    submissions: Vec<LiveRequest>,
    unpinned: Vec<PinId>,
    /// Ids that callers chose, of requests that have not ended.
    caller_ids: HashMap<String, RequestId>,
    /// Outputs for the next step's caller, in order of their end.
    finished: Vec<RequestOutput>,
    /// Tokens for the next step's caller, in order.
    streamed: Vec<StepToken>,
    /// Outputs that a call waits for.
    awaited: BTreeMap<RequestId, Ended>,
    /// Calls that stopped waiting: their outputs are dropped.
    abandoned: BTreeSet<RequestId>,
    next_request: u64,
}

impl Mailbox {
    pub(crate) fn new(next_request: u64) -> Self {
        Self { next_request, ..Self::default() }
    }

    /// Takes the next request id, and the caller's id for it.
    pub(crate) fn register(&mut self, caller_id: Option<&str>) -> Result<RequestId, RequestError> {
        let id = RequestId::new(self.next_request);
        if let Some(caller_id) = caller_id {
            if self.caller_ids.contains_key(caller_id) {
                return Err(RequestError::DuplicateId { id: caller_id.to_owned() });
            }
            self.caller_ids.insert(caller_id.to_owned(), id);
        }
        self.next_request += 1;
        Ok(id)
    }

    /// Undoes [`Mailbox::register`] for a request that is not submitted after all.
    pub(crate) fn unregister(&mut self, caller_id: Option<&str>) {
        if let Some(caller_id) = caller_id {
            self.caller_ids.remove(caller_id);
        }
    }

    pub(crate) fn submit(&mut self, request: LiveRequest) {
        self.submissions.push(request);
    }

    pub(crate) fn unpin(&mut self, pin: PinId) {
        self.unpinned.push(pin);
    }

    pub(crate) fn find(&self, caller_id: &str) -> Option<RequestId> {
        self.caller_ids.get(caller_id).copied()
    }

    pub(crate) fn next_request(&self) -> u64 {
        self.next_request
    }

    pub(crate) fn take_awaited(&mut self, id: RequestId) -> Option<Ended> {
        self.awaited.remove(&id)
    }

    pub(crate) fn is_awaited_there(&self, id: RequestId) -> bool {
        self.awaited.contains_key(&id)
    }

    pub(crate) fn take_finished(&mut self) -> Vec<RequestOutput> {
        std::mem::take(&mut self.finished)
    }

    pub(crate) fn take_streamed(&mut self) -> Vec<StepToken> {
        std::mem::take(&mut self.streamed)
    }

    /// Takes the outputs for somebody who does not take tokens: none of theirs come after them.
    pub(crate) fn take_finished_alone(&mut self) -> Vec<RequestOutput> {
        let finished = self.take_finished();
        let ended: BTreeSet<RequestId> = finished.iter().map(|output| output.request).collect();
        self.streamed.retain(|token| !ended.contains(&token.request));
        finished
    }

    fn deliver(&mut self, ended: Vec<Ended>, streamed: Vec<StepToken>) {
        self.streamed.extend(streamed);
        for ended in ended {
            if let Some(caller_id) = &ended.output.id {
                self.caller_ids.remove(caller_id);
            }
            let id = ended.output.request;
            match ended.owner {
                Owner::Stepper => self.finished.push(ended.output),
                Owner::Caller if self.abandoned.remove(&id) => self.unpinned.extend(ended.pin),
                Owner::Caller => {
                    self.awaited.insert(id, ended);
                }
            }
        }
    }
}

/// Mailbox and executor together, for whoever holds both.
#[derive(Debug)]
pub(crate) struct Serving<'a> {
    pub(crate) mailbox: &'a mut Mailbox,
    pub(crate) executor: &'a mut Executor,
}

impl Serving<'_> {
    /// Hands what came in to the executor.
    pub(crate) fn collect(&mut self) {
        for pin in self.mailbox.unpinned.drain(..) {
            self.executor.unpin(pin);
        }
        for request in self.mailbox.submissions.drain(..) {
            self.executor.start(request);
        }
        self.deliver();
    }

    /// Hands what has ended to the mailbox.
    fn deliver(&mut self) {
        let (ended, streamed) = (self.executor.take_ended(), self.executor.take_streamed());
        self.mailbox.deliver(ended, streamed);
    }

    /// Ends requests that were collected; returns those that were live.
    pub(crate) fn abort(&mut self, ids: &[RequestId]) -> Vec<RequestId> {
        let aborted = self.executor.abort(ids);
        self.deliver();
        aborted
    }

    pub(crate) fn step(&mut self, weights: &ResidentWeights) -> Result<Progress, StepError> {
        self.collect();
        let progress = self.executor.step(weights);
        self.deliver();
        progress
    }

    /// Queues what slept: retracted requests first, outputs nobody took.
    pub(crate) fn carry(&mut self, carried: Carried) {
        self.mailbox.finished.extend(carried.settled);
        self.mailbox.streamed.extend(carried.streamed);
        for request in carried.retracted {
            if let Some(caller_id) = request.request.id.as_deref() {
                self.mailbox.caller_ids.insert(caller_id.to_owned(), request.id);
            }
            self.mailbox.submissions.push(request);
        }
        self.collect();
    }
}

/// An awake engine's shared part.
#[derive(Debug)]
pub(crate) struct Shared {
    mailbox: Mutex<Mailbox>,
    executor: Mutex<Executor>,
    memory: MemoryReport,
}

impl Shared {
    pub(crate) fn new(mailbox: Mailbox, executor: Executor) -> Self {
        let memory = executor.memory();
        Self { mailbox: Mutex::new(mailbox), executor: Mutex::new(executor), memory }
    }

    pub(crate) fn into_parts(self) -> (Mailbox, Executor) {
        (self.mailbox.into_inner(), self.executor.into_inner())
    }

    /// Memory of the KV cache and of the activations.
    pub(crate) fn memory(&self) -> MemoryReport {
        self.memory
    }

    pub(crate) fn mailbox(&self) -> MutexGuard<'_, Mailbox> {
        self.mailbox.lock()
    }

    /// Locks the executor for a moment between steps, hands it what came in, and runs `f`.
    pub(crate) fn between_steps<R>(&self, f: impl FnOnce(&mut Serving<'_>) -> R) -> R {
        let mut executor = self.executor.lock();
        let result = {
            let mut mailbox = self.mailbox.lock();
            let mut serving = Serving { mailbox: &mut mailbox, executor: &mut executor };
            serving.collect();
            f(&mut serving)
        };
        MutexGuard::unlock_fair(executor);
        result
    }

    /// Runs one step, unless `done` says, once it is this caller's turn, that none is needed.
    pub(crate) fn step_unless(
        &self,
        weights: &ResidentWeights,
        done: impl FnOnce(&Mailbox) -> bool,
    ) -> Result<Option<Progress>, StepError> {
        let mut executor = self.executor.lock();
        {
            let mut mailbox = self.mailbox.lock();
            if done(&mailbox) {
                drop(mailbox);
                MutexGuard::unlock_fair(executor);
                return Ok(None);
            }
            Serving { mailbox: &mut mailbox, executor: &mut executor }.collect();
        }
        // The mailbox is open while the step runs: submissions don't wait for it.
        let mut progress = executor.step(weights);
        let (ended, streamed) = (executor.take_ended(), executor.take_streamed());
        {
            let mut mailbox = self.mailbox.lock();
            mailbox.deliver(ended, streamed);
            if let Ok(progress) = &mut progress {
                // Those that came while the step ran have not ended either.
                progress.live_requests += mailbox.submissions.len();
            }
        }
        MutexGuard::unlock_fair(executor);
        progress.map(Some)
    }

    /// Ends the wait for these outputs: what is there is dropped, what is still running is aborted.
    pub(crate) fn abandon(&self, ids: &[RequestId]) {
        self.between_steps(|serving| {
            for id in ids {
                if let Some(ended) = serving.mailbox.awaited.remove(id) {
                    serving.mailbox.unpinned.extend(ended.pin);
                } else {
                    serving.mailbox.abandoned.insert(*id);
                }
            }
            serving.abort(ids);
            serving.mailbox.abandoned.clear();
        });
    }

    pub(crate) fn stats(&self) -> EngineStats {
        self.between_steps(|serving| serving.executor.stats())
    }
}
