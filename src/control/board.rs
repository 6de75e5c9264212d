//! The controller's shared state, without its lock: requests and where they are, the engine on loan, what is
//! published. A request ends in [`Board::end`], or with everything in [`Board::collapse`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use super::generation::{GenerationEvent, GenerationToken, Outlet};
use super::metrics::Counters;
use super::owner::{BEFORE_ITS_TURN, Back, Job};
use super::reply::Reply;
use super::response::{Busy, Outcome, Report, SettledReport, Status};
use super::{ControlError, ControlState, GenerationError, Lifecycle, TransactionId};
use crate::completion::{Completion, FinishReason, RequestId, RequestOutput};
use crate::engine::{Awake, Engine, EngineStats, MemoryReport, StepToken};
use crate::request::{Request, SamplingParams};
use crate::weights::WeightVersion;

/// Requests that are started at a time: the lock is free in between.
const START_AT_ONCE: usize = 4;

/// See the module.
pub(super) struct Board {
    // The state as it is published; the owner changes it.
    pub(super) lifecycle: Lifecycle,
    pub(super) paused: bool,
    /// An operation under way keeps requests out.
    pub(super) shut: bool,
    pub(super) epoch: u64,
    /// Requests of the epochs before that ended by themselves since admission was last closed.
    pub(super) drained: Vec<RequestId>,
    pub(super) version: Option<WeightVersion>,
    pub(super) transaction: Option<TransactionId>,
    pub(super) busy: Option<Busy>,
    pub(super) memory: MemoryReport,
    pub(super) counters: Counters,

    // The engine on loan.
    pub(super) engine: Option<Arc<Engine<Awake>>>,
    /// The stepper holds it.
    pub(super) in_use: bool,
    /// No steps are run, only aborts.
    pub(super) frozen: bool,
    pub(super) stats: EngineStats,
    pub(super) step_error: Option<String>,
    /// Steps that failed one after another.
    pub(super) failures: u32,
    /// The engine runs no step any more until it has slept.
    pub(super) broken: bool,

    // Requests that have not ended.
    pub(super) slots: BTreeMap<RequestId, Slot>,
    names: HashMap<String, RequestId>,
    /// From the engine's numbers to ours.
    pub(super) by_engine: HashMap<RequestId, RequestId>,
    /// To be aborted by the stepper.
    pub(super) to_abort: Vec<RequestId>,
    /// Aborts to be answered.
    awaiting_end: Vec<AwaitingEnd>,
    next_request: u64,

    // Control requests.
    pub(super) inbox: VecDeque<Job>,
    /// Ids of control requests that were not answered.
    pub(super) control_ids: HashSet<String>,
    pub(super) next_control: u64,
    pub(super) stopping: bool,
    /// Tasks to be woken when the lock is released: what a waker does is not ours.
    pub(super) wakers: Vec<Waker>,
    /// To be done then, too: answers, log lines, drops of what callers gave.
    pub(super) after: Vec<Box<dyn FnOnce() + Send>>,
    /// The owner wants the engine's figures as they are now.
    pub(super) look: bool,
    /// Who wants the engine when it stops.
    pub(super) back: Vec<Back>,
}

/// A request that has not ended.
pub(super) struct Slot {
    /// The epoch that accepted it.
    epoch: u64,
    request: Arc<Request>,
    outlet: Arc<Outlet>,
    /// By sample: tokens handed out.
    delivered: Vec<usize>,
    pub(super) place: Place,
    /// It is to end; otherwise an abort only sets it aside.
    aborting: bool,
    /// Its reader is too far behind.
    pub(super) overrun: bool,
    /// Why it ends without an output of its own.
    failure: Option<String>,
}

/// Where a request is.
pub(super) enum Place {
    /// In the engine, under this number.
    Engine(RequestId),
    /// Not in the engine, with what it has so far if it had begun.
    Aside { partial: Option<Box<RequestOutput>>, why: Why },
}

/// What a request that was set aside waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// An engine that serves.
    Serving,
    /// Its reader.
    Reader,
}

/// An abort that is answered when these have ended.
struct AwaitingEnd {
    left: BTreeSet<RequestId>,
    aborted: Vec<RequestId>,
    reply: Reply,
}

impl Board {
    pub(super) fn new() -> Self {
        Self {
            lifecycle: Lifecycle::SleepingDiscarded,
            paused: false,
            shut: false,
            epoch: 0,
            drained: Vec::new(),
            version: None,
            transaction: None,
            busy: None,
            memory: MemoryReport::default(),
            counters: Counters::default(),
            engine: None,
            in_use: false,
            frozen: false,
            stats: EngineStats::default(),
            step_error: None,
            failures: 0,
            broken: false,
            slots: BTreeMap::new(),
            names: HashMap::new(),
            by_engine: HashMap::new(),
            to_abort: Vec::new(),
            awaiting_end: Vec::new(),
            next_request: 0,
            inbox: VecDeque::new(),
            control_ids: HashSet::new(),
            next_control: 0,
            stopping: false,
            wakers: Vec::new(),
            after: Vec::new(),
            look: false,
            back: Vec::new(),
        }
    }

    pub(super) fn state(&self) -> ControlState {
        ControlState {
            lifecycle: self.lifecycle,
            broken: self.broken,
            paused: self.paused,
            admitting: self.is_admitting(),
            epoch: self.epoch,
            version: self.version.clone(),
            transaction: self.transaction,
        }
    }

    pub(super) fn status(&self) -> Status {
        Status {
            state: self.state(),
            busy: self.busy.clone(),
            control_queue: self.inbox.len(),
            live_requests: self.slots.len(),
            requests_aside: self.requests_aside(),
            memory: self.memory,
            engine: self.stats,
            step_error: self.step_error.clone(),
        }
    }

    /// Requests that are not in the engine.
    pub(super) fn requests_aside(&self) -> usize {
        self.slots.values().filter(|slot| matches!(slot.place, Place::Aside { .. })).count()
    }

    /// Whether requests go straight to the engine.
    pub(super) fn is_admitting(&self) -> bool {
        self.engine.is_some() && !self.paused && !self.shut && !self.broken && !self.stopping
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.lifecycle == Lifecycle::Stopped
    }

    /// Has something done when the board is unlocked: what is not ours to bound.
    pub(super) fn after(&mut self, work: impl FnOnce() + Send + 'static) {
        self.after.push(Box::new(work));
    }

    /// Makes the engine's state known, unless there is none any more.
    pub(super) fn publish(
        &mut self,
        lifecycle: Lifecycle,
        version: Option<WeightVersion>,
        memory: MemoryReport,
    ) {
        if !self.is_stopped() {
            (self.lifecycle, self.memory) = (lifecycle, memory);
            self.version = version.or(self.version.take());
        }
    }

    /// Keeps requests out, in a new epoch.
    pub(super) fn shut(&mut self) {
        self.shut = true;
        self.epoch += 1;
        self.drained.clear();
    }

    pub(super) fn live_requests(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn next_request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId::new(self.next_request - 1)
    }

    pub(super) fn is_named(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    pub(super) fn named(&self, name: &str) -> Option<RequestId> {
        self.names.get(name).copied()
    }

    /// The engine's number of a request, if it is there.
    pub(super) fn in_engine(&self, id: RequestId) -> Option<RequestId> {
        match self.slots.get(&id)?.place {
            Place::Engine(id) => Some(id),
            Place::Aside { .. } => None,
        }
    }

    /// Takes a request in, set aside; returns the epoch.
    pub(super) fn add(&mut self, id: RequestId, request: Request, outlet: Arc<Outlet>) -> u64 {
        if let Some(name) = &request.id {
            self.names.insert(name.clone(), id);
        }
        let carried = |sample| request.carried(sample).map_or(0, |completion| completion.tokens.len());
        let slot = Slot {
            epoch: self.epoch,
            delivered: (0..request.params.samples).map(carried).collect(),
            request: Arc::new(request),
            outlet,
            place: Place::Aside { partial: None, why: Why::Serving },
            aborting: false,
            overrun: false,
            failure: None,
        };
        self.slots.insert(id, slot);
        self.counters.accepted += 1;
        self.epoch
    }

    /// Gives a request that is aside to the engine, which must be on loan.
    pub(super) fn start(&mut self, id: RequestId) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        let (Some(engine), Place::Aside { partial, .. }) = (&self.engine, &slot.place) else { return };
        let request = match partial {
            None => Ok((*slot.request).clone()),
            Some(partial) => slot.request.resume(partial),
        };
        // Names are looked after here.
        let submitted = request.and_then(|request| engine.submit(Request { id: None, ..request }));
        match submitted {
            Ok(number) => {
                slot.place = Place::Engine(number);
                self.by_engine.insert(number, id);
            }
            Err(error) => {
                // It was valid when it was accepted.
                slot.failure = Some(error.to_string());
                let output = slot.output(id);
                self.end(id, output);
            }
        }
    }

    /// Starts a request that was running: also while no new ones are accepted.
    pub(super) fn start_if_running(&mut self, id: RequestId) {
        if self.engine.is_some() && !self.frozen && !self.broken {
            self.start(id);
        }
    }

    /// Starts some of what waits for an engine that serves, in the order of acceptance; returns those, and which of
    /// them go on with what they have.
    pub(super) fn start_some(&mut self) -> (usize, Vec<RequestId>) {
        if !self.is_admitting() {
            return (0, Vec::new());
        }
        let waiting = self.slots.iter().filter_map(|(id, slot)| match &slot.place {
            Place::Aside { partial, why: Why::Serving } => Some((*id, partial.is_some())),
            _ => None,
        });
        let some: Vec<_> = waiting.take(START_AT_ONCE).collect();
        some.iter().for_each(|(id, _)| self.start(*id));
        (some.len(), some.into_iter().filter(|(_, goes_on)| *goes_on).map(|(id, _)| id).collect())
    }

    /// Ends requests: those that are aside now, those in the engine when the stepper or the owner gets to it.
    pub(super) fn abort(&mut self, ids: &[RequestId]) {
        for &id in ids {
            let Some(slot) = self.slots.get_mut(&id) else { continue };
            slot.aborting = true;
            match slot.place {
                Place::Engine(_) => self.to_abort.push(id),
                Place::Aside { .. } => {
                    let output = slot.output(id);
                    self.end(id, output);
                }
            }
        }
    }

    /// Ends the requests of the epochs before.
    pub(super) fn abort_before(&mut self) -> Vec<RequestId> {
        let ids = self.before();
        self.abort(&ids);
        ids
    }

    /// The requests of the epochs before: those that were accepted before admission was last closed.
    pub(super) fn before(&self) -> Vec<RequestId> {
        let before = self.slots.iter().filter(|(_, slot)| slot.epoch < self.epoch);
        before.map(|(id, _)| *id).collect()
    }

    pub(super) fn live_before(&self) -> usize {
        self.slots.values().filter(|slot| slot.epoch < self.epoch).count()
    }

    /// Whether a request in the engine is about to end.
    pub(super) fn any_aborting(&self) -> bool {
        self.slots.values().any(|slot| slot.aborting)
    }

    /// When the first control request that waits has waited too long.
    pub(super) fn first_due(&self) -> Option<Instant> {
        self.inbox.iter().filter_map(|job| job.time.until).min()
    }

    /// Answers the control requests whose time is over before their turn came.
    pub(super) fn expire(&mut self) {
        let now = Instant::now();
        if self.first_due().is_none_or(|due| due > now) {
            return;
        }
        let over = |job: &Job| job.time.until.is_some_and(|until| until <= now);
        let (over, waiting): (VecDeque<_>, _) = std::mem::take(&mut self.inbox).into_iter().partition(over);
        self.inbox = waiting;
        for Job { operation, mut reply, time } in over {
            self.after(move || drop(operation));
            reply.begin(self);
            reply.answer(self, Err(time.passed(BEFORE_ITS_TURN)), Vec::new());
        }
    }

    /// An id for a control request that has none.
    pub(super) fn next_control_id(&mut self) -> String {
        loop {
            self.next_control += 1;
            let id = format!("control-{}", self.next_control);
            if !self.control_ids.contains(&id) {
                return id;
            }
        }
    }

    /// Ends everything in the engine at once, without asking it.
    pub(super) fn give_up(&mut self, message: &str) {
        let ids: Vec<_> = self.by_engine.values().copied().collect();
        for id in ids {
            let slot = self.slots.get_mut(&id).expect("what is in the engine has a slot");
            slot.failure = Some(message.to_owned());
            let output = slot.output(id);
            self.end(id, output);
        }
        self.to_abort.clear();
    }

    /// Ends everything in the engine for a reason that is not the requests'.
    pub(super) fn fail_all(&mut self, message: &str) {
        for id in self.by_engine.values() {
            let slot = self.slots.get_mut(id).expect("what is in the engine has a slot");
            (slot.aborting, slot.failure) = (true, Some(message.to_owned()));
            self.to_abort.push(*id);
        }
    }

    /// Answers when these have ended.
    pub(super) fn await_end(&mut self, ids: &[RequestId], reply: Reply) {
        // Those that were aside have ended by now.
        let left: BTreeSet<_> = ids.iter().copied().filter(|id| self.slots.contains_key(id)).collect();
        let aborted = ids.iter().copied().filter(|id| !left.contains(id)).collect();
        self.awaiting_end.push(AwaitingEnd { left, aborted, reply });
        self.answer_aborts();
    }

    fn answer_aborts(&mut self) {
        let all = std::mem::take(&mut self.awaiting_end).into_iter();
        let (over, left): (Vec<_>, _) = all.partition(|waiting| waiting.left.is_empty());
        self.awaiting_end = left;
        for AwaitingEnd { aborted, reply, .. } in over {
            let outcome = if aborted.is_empty() { Outcome::Already } else { Outcome::Done };
            let report = vec![Report::Settled(SettledReport { aborted, ..SettledReport::default() })];
            reply.answer(self, Ok(outcome), report);
        }
    }

    /// Hands tokens out.
    pub(super) fn post_tokens(&mut self, tokens: Vec<StepToken>) {
        for StepToken { request, sample, position, token, logprob, top } in tokens {
            let Some(id) = self.by_engine.get(&request) else { continue };
            let slot = self.slots.get_mut(id).expect("what is in the engine has a slot");
            slot.delivered[sample] = position + 1;
            let behind = slot
                .outlet
                .push([GenerationToken { sample, position, token, logprob, top }], &mut self.wakers);
            if behind && !slot.overrun {
                slot.overrun = true;
                self.to_abort.push(*id);
            }
        }
    }

    /// Takes in what the engine gave of requests: ends them, or sets aside those that are to go on.
    pub(super) fn post_outputs(&mut self, outputs: Vec<RequestOutput>) {
        for output in outputs {
            let Some(id) = self.by_engine.remove(&output.request) else { continue };
            let slot = self.slots.get_mut(&id).expect("what was in the engine has a slot");
            let output = RequestOutput { request: id, id: slot.request.id.clone(), ..output };
            slot.deliver_rest(&output, &mut self.wakers);
            if slot.is_cut_off(&output) && !slot.aborting {
                let why = if slot.overrun { Why::Reader } else { Why::Serving };
                slot.place = Place::Aside { partial: Some(Box::new(output)), why };
                if why == Why::Serving {
                    self.start_if_running(id);
                }
            } else {
                self.end(id, output);
            }
        }
    }

    /// The way out, but for a collapse.
    fn end(&mut self, id: RequestId, output: RequestOutput) {
        let slot = self.slots.remove(&id).expect("a request ends once");
        if let Place::Engine(number) = slot.place {
            self.by_engine.remove(&number);
        }
        if let Some(name) = &slot.request.id {
            self.names.remove(name);
        }
        let aborted = slot.is_cut_off(&output);
        for waiting in &mut self.awaiting_end {
            if waiting.left.remove(&id) && aborted {
                waiting.aborted.push(id);
            }
        }
        if !aborted && slot.failure.is_none() && slot.epoch < self.epoch {
            self.drained.push(id);
        }
        let event = match slot.failure {
            Some(message) => {
                self.counters.failed += 1;
                Err(GenerationError::Step { message, partial: Box::new(output) })
            }
            None => {
                *if aborted { &mut self.counters.aborted } else { &mut self.counters.finished } += 1;
                Ok(GenerationEvent::Done(output))
            }
        };
        slot.outlet.close(event, &mut self.wakers);
        self.answer_aborts();
    }

    /// Ends everything when a thread is gone, be it by a panic: nothing is answered twice, nothing waits.
    pub(super) fn collapse(&mut self) {
        self.lifecycle = Lifecycle::Stopped;
        (self.transaction, self.busy) = (None, None);
        self.memory = MemoryReport::default();
        self.fold_stats();
        if let Some(engine) = self.engine.take() {
            self.after(move || drop(engine));
        }
        for (_, slot) in std::mem::take(&mut self.slots) {
            self.counters.failed += 1;
            slot.outlet.close(Err(GenerationError::Stopped), &mut self.wakers);
        }
        self.names.clear();
        self.by_engine.clear();
        self.to_abort.clear();
        let mut replies: Vec<Reply> =
            std::mem::take(&mut self.awaiting_end).into_iter().map(|w| w.reply).collect();
        for Job { operation, reply, .. } in std::mem::take(&mut self.inbox) {
            self.after(move || drop(operation));
            replies.push(reply);
        }
        for reply in replies {
            reply.answer(self, Err(ControlError::Stopped), Vec::new());
        }
        for back in std::mem::take(&mut self.back) {
            self.wakers.extend(back.fill(None));
        }
    }
}

impl Slot {
    /// What it has so far, as its output.
    fn output(&self, id: RequestId) -> RequestOutput {
        match &self.place {
            Place::Aside { partial: Some(partial), .. } => (**partial).clone(),
            _ => {
                let params = &self.request.params;
                let seed = params.seed.unwrap_or_default();
                RequestOutput {
                    request: id,
                    id: self.request.id.clone(),
                    prompt: self.request.prompt.clone(),
                    prompt_logprobs: params.prompt_logprobs.then(Vec::new),
                    completions: (0..params.samples).map(|i| self.nothing_yet(i, seed, params)).collect(),
                }
            }
        }
    }

    /// A sample that was never started: what it carried when it was submitted.
    fn nothing_yet(&self, index: usize, seed: u64, params: &SamplingParams) -> Completion {
        let carried = self.request.carried(index).cloned();
        carried.unwrap_or_else(|| Completion::start(index, seed, params))
    }

    /// Whether an output is not all that the request asks for, through no fault of its own.
    fn is_cut_off(&self, output: &RequestOutput) -> bool {
        let any = |is: fn(&FinishReason) -> bool| output.completions.iter().any(|c| is(&c.finish_reason));
        let scored = output.prompt_logprobs.as_ref().is_none_or(|l| l.len() + 1 >= output.prompt.len());
        any(|why| *why == FinishReason::Abort) || !scored && !any(|why| matches!(why, FinishReason::Error(_)))
    }

    /// Streams the tokens of an output that were not streamed.
    fn deliver_rest(&mut self, output: &RequestOutput, wakers: &mut Vec<Waker>) {
        if !self.request.stream {
            return;
        }
        for completion in &output.completions {
            let delivered = &mut self.delivered[completion.index];
            let from = std::mem::replace(delivered, completion.tokens.len().max(*delivered));
            let tokens = (from..completion.tokens.len()).map(|position| GenerationToken {
                sample: completion.index,
                position,
                token: completion.tokens[position],
                logprob: completion.logprobs[position],
                top: completion.top_logprobs.as_ref().map(|top| top[position].clone()).unwrap_or_default(),
            });
            self.outlet.push(tokens, wakers);
        }
    }
}
