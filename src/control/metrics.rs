//! Counters and gauges: a plain struct, and the text that Prometheus reads.

use std::collections::BTreeMap;
use std::time::Duration;

use super::board::Board;
use super::response::{ControlResponse, Report};
use super::{ControlState, ErrorKind, TransactionId};
use crate::engine::{EngineStats, MemoryReport};

/// A controller in numbers, at a moment. Counters count from the controller's start, over all sleeps.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Metrics {
    /// The state.
    pub state: ControlState,
    /// Memory by part.
    pub memory: MemoryReport,
    /// Requests, sequences and blocks now; counters of steps and tokens over all sleeps.
    pub engine: EngineStats,
    /// Requests that have not ended, those set aside included.
    pub live_requests: usize,
    /// Of them: set aside for the next wake or resume, or for a slow reader.
    pub requests_aside: usize,
    /// Control requests that wait for their turn.
    pub control_queue: usize,
    /// Requests accepted. Each ends as finished, aborted or failed: what is left is live.
    pub accepted: u64,
    /// Requests that ended by themselves.
    pub finished: u64,
    /// Requests that were aborted.
    pub aborted: u64,
    /// Requests that failed with the engine.
    pub failed: u64,
    /// Requests refused, by kind.
    pub refused: BTreeMap<&'static str, u64>,
    /// Control requests answered, by operation and outcome: `done`, `already`, or a kind of error.
    pub operations: BTreeMap<(&'static str, &'static str), u64>,
    /// Time spent, by phase.
    pub phases: BTreeMap<&'static str, PhaseTime>,
    /// Weights received by loads and updates, bytes.
    pub received_bytes: u64,
    /// How fast the last load or update that received any was, bytes a second, from begin to commit.
    pub received_bytes_per_s: f64,
}

/// Time spent in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PhaseTime {
    /// How often.
    pub count: u64,
    /// In all.
    pub total: Duration,
    /// The last time.
    pub last: Duration,
}

/// What is counted on the way.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) accepted: u64,
    pub(super) finished: u64,
    pub(super) aborted: u64,
    pub(super) failed: u64,
    refused: BTreeMap<&'static str, u64>,
    operations: BTreeMap<(&'static str, &'static str), u64>,
    phases: BTreeMap<&'static str, PhaseTime>,
    received_bytes: u64,
    received_bytes_per_s: f64,
    /// Counters of the engine's earlier times awake.
    before: EngineStats,
    transactions: u64,
    answers: u64,
    /// The last transaction that is over, and how it ended.
    over: Option<(TransactionId, String)>,
}

impl Counters {
    pub(super) fn refuse(&mut self, kind: ErrorKind) {
        *self.refused.entry(kind.as_str()).or_default() += 1;
    }

    /// Counts an answer; returns its serial number.
    pub(super) fn answer(&mut self, response: &ControlResponse) -> u64 {
        let outcome = match &response.outcome {
            Ok(outcome) => outcome.as_str(),
            Err(error) => error.kind().as_str(),
        };
        *self.operations.entry((response.operation, outcome)).or_default() += 1;
        self.phase("queued", response.queued);
        self.phase("executed", response.executed);
        self.answers += 1;
        self.answers
    }

    /// Takes in how long an operation's phases took.
    pub(super) fn phases(&mut self, report: &[Report]) {
        for phase in report {
            match phase {
                Report::Sleep(sleep) => {
                    self.phase("settle", sleep.settle);
                    self.phase("park", sleep.park);
                    self.phase("free", sleep.free);
                }
                Report::Load(load) if load.received_bytes == 0 => self.phase("restore", load.commit),
                Report::Load(load) => {
                    self.received("load", load.received_bytes, load.open, load.receiving, load.commit);
                }
                Report::Update(update) => {
                    self.received(
                        "update",
                        update.received_bytes,
                        update.open,
                        update.receiving,
                        update.commit,
                    );
                }
                Report::Wake(wake) => self.phase("wake", wake.wake),
                Report::Verified(verified) => self.phase("verify", verified.verify),
                _ => {}
            }
        }
    }

    fn received(
        &mut self,
        name: &'static str,
        bytes: u64,
        open: Duration,
        receiving: Duration,
        commit: Duration,
    ) {
        self.phase(name, open + commit);
        self.phase("receive", receiving);
        self.phase("commit", commit);
        self.received_bytes += bytes;
        let seconds = (open + commit).as_secs_f64();
        if seconds > 0.0 {
            self.received_bytes_per_s = bytes as f64 / seconds;
        }
    }

    fn phase(&mut self, name: &'static str, time: Duration) {
        let phase = self.phases.entry(name).or_default();
        phase.count += 1;
        phase.total += time;
        phase.last = time;
    }

    /// The number of a new transaction.
    pub(super) fn next_transaction(&mut self) -> u64 {
        self.transactions += 1;
        self.transactions
    }

    pub(super) fn ended(&mut self, transaction: TransactionId, how: &str) {
        self.over = Some((transaction, how.to_owned()));
    }

    /// How a transaction ended, if it is the last one that did.
    pub(super) fn how_ended(&self, transaction: TransactionId) -> Option<String> {
        self.over.as_ref().filter(|(id, _)| *id == transaction).map(|(_, how)| how.clone())
    }
}

fn plus(now: EngineStats, before: &EngineStats) -> EngineStats {
    EngineStats {
        steps: now.steps + before.steps,
        computed_tokens: now.computed_tokens + before.computed_tokens,
        sampled_tokens: now.sampled_tokens + before.sampled_tokens,
        prompt_tokens: now.prompt_tokens + before.prompt_tokens,
        cached_tokens: now.cached_tokens + before.cached_tokens,
        preemptions: now.preemptions + before.preemptions,
        finished: now.finished + before.finished,
        aborted: now.aborted + before.aborted,
        ..now
    }
}

impl Board {
    /// The engine has gone to sleep: nothing runs, its counters are those of an earlier time.
    pub(super) fn slept(&mut self) {
        self.fold_stats();
        (self.broken, self.failures, self.step_error) = (false, 0, None);
        self.frozen = self.paused;
    }

    /// Keeps the engine's counters, which begin anew with its next wake.
    pub(super) fn fold_stats(&mut self) {
        let stats = std::mem::take(&mut self.stats);
        // What is not a counter is what is there, and nothing is.
        self.counters.before = plus(stats, &self.counters.before);
    }

    pub(super) fn metrics(&self) -> Metrics {
        let counters = &self.counters;
        Metrics {
            state: self.state(),
            memory: self.memory,
            engine: plus(self.stats, &counters.before),
            live_requests: self.slots.len(),
            requests_aside: self.requests_aside(),
            control_queue: self.inbox.len(),
            accepted: counters.accepted,
            finished: counters.finished,
            aborted: counters.aborted,
            failed: counters.failed,
            refused: counters.refused.clone(),
            operations: counters.operations.clone(),
            phases: counters.phases.clone(),
            received_bytes: counters.received_bytes,
            received_bytes_per_s: counters.received_bytes_per_s,
        }
    }
}
