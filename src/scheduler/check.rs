//! Verifies the scheduler's lists, and the pool below them.

use super::{Scheduler, SeqId};
use crate::kv::KvFault;

/// Bigger states are not verified after every operation: it would make debug builds quadratic.
const CHECKED_SIZE: usize = 1024;

/// The first thing found wrong with the scheduler's state. A bug of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SchedulerFault {
    /// The blocks are at fault.
    #[error("kv: {0}")]
    Kv(#[from] KvFault),
    /// A sequence neither waits nor runs, or does both, or doesn't exist.
    #[error("{sequences} sequences, {waiting} waiting and {running} running")]
    Lists { sequences: usize, waiting: usize, running: usize },
    /// More sequences run than may.
    #[error("{running} sequences run, at most {max_num_seqs} may")]
    TooManyRun { running: usize, max_num_seqs: usize },
    /// Lengths of a sequence contradict each other.
    #[error(
        "sequence {seq}: {tokens} tokens of {max_tokens}, {computed} computed, {indexed} of {blocks} blocks \
         indexed"
    )]
    Lengths { seq: u64, tokens: usize, max_tokens: usize, computed: usize, indexed: usize, blocks: usize },
    /// A waiting sequence holds blocks unknown to the claims, or the other way round.
    #[error("waiting sequence {seq} holds {blocks} blocks, known as a claim: {claim}")]
    Claim { seq: u64, blocks: usize, claim: bool },
    /// A sequence is part of a step in flight that doesn't exist or doesn't know it.
    #[error("sequence {seq} takes part in a step that is not in flight")]
    NotInFlight { seq: u64 },
    /// A fork to come and its parent don't know each other.
    #[error("{forks} forks to come, their parents know {known}")]
    Forks { forks: usize, known: usize },
}

impl Scheduler {
    /// Verifies everything. Costs O((blocks + sequences) log).
    ///
    /// # Errors
    /// The first [`SchedulerFault`] found.
    pub(crate) fn check(&self) -> Result<(), SchedulerFault> {
        let tables = self.sequences.values().map(|sequence| &sequence.kv.table);
        self.pool.check(tables.chain(self.pins.values().map(|pin| &pin.kv.table)))?;
        let (sequences, waiting, running) = (self.sequences.len(), self.waiting.len(), self.running.len());
        let listed = |seq: &SeqId| self.waiting.contains(seq) != self.running.contains(seq);
        if waiting + running != sequences || !self.sequences.keys().all(listed) {
            return Err(SchedulerFault::Lists { sequences, waiting, running });
        }
        if running > self.max_num_seqs {
            return Err(SchedulerFault::TooManyRun { running, max_num_seqs: self.max_num_seqs });
        }
        self.sequences.keys().try_for_each(|&seq| self.check_sequence(seq))?;
        let known =
            self.sequences.iter().flat_map(|(&id, sequence)| sequence.forks.iter().map(move |f| (f, id)));
        let known = known.filter(|(fork, parent)| self.pending_forks.get(fork) == Some(parent)).count();
        let forks = self.pending_forks.len();
        if known != forks {
            return Err(SchedulerFault::Forks { forks, known });
        }
        Ok(())
    }

    fn check_sequence(&self, seq: SeqId) -> Result<(), SchedulerFault> {
        let sequence = &self.sequences[&seq];
        let kv = &sequence.kv;
        let (tokens, max_tokens, blocks) = (sequence.tokens.len(), sequence.max_tokens, kv.table.len());
        let end = sequence.planned.unwrap_or(kv.computed);
        let fits = kv.computed <= end
            && end <= tokens
            && tokens <= max_tokens
            && self.pool.blocks_for(end) <= blocks
            && kv.indexed * self.pool.block_size() <= end;
        if !fits {
            let (computed, indexed) = (kv.computed, kv.indexed);
            return Err(SchedulerFault::Lengths {
                seq: seq.0,
                tokens,
                max_tokens,
                computed,
                indexed,
                blocks,
            });
        }
        let claim = self.claims.contains(&seq);
        if self.waiting.contains(&seq) && claim == kv.table.is_empty() {
            return Err(SchedulerFault::Claim { seq: seq.0, blocks, claim });
        }
        if sequence.planned.is_some() && !self.in_flight.contains(&seq) {
            return Err(SchedulerFault::NotInFlight { seq: seq.0 });
        }
        Ok(())
    }

    /// Verifies everything after an operation, in debug builds and while that is cheap.
    pub(super) fn debug_check(&self) {
        let small = self.pool.total() + self.sequences.len() <= CHECKED_SIZE;
        if cfg!(debug_assertions)
            && small
            && let Err(fault) = self.check()
        {
            panic!("scheduler bookkeeping is broken: {fault}");
        }
    }
}
