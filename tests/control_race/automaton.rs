//! The lifecycle once more, naively: which answers are legal in which state, and which states they lead to.

use dormouse::control::{
    ControlError, ControlState, ErrorKind, Lifecycle, Outcome, PauseMode, TransactionId,
};
use dormouse::{InFlight, WeightVersion};

use crate::kind::{Half, Kind, RELOAD};
use crate::oracle::{Mix, Oracle};
use crate::world::Asked;

use Lifecycle::{Awake, WeightsLoaded, WeightsTorn};

/// What is known beside the state of the answers.
pub(crate) struct Automaton<'a> {
    oracle: &'a Oracle,
    pub(crate) open: Option<Open>,
    /// Every version that was current, the last one last.
    pub(crate) versions: Vec<WeightVersion>,
    /// Any wait may be cut short by a stop.
    pub(crate) stops: bool,
    /// Answers that nobody took brought versions that nobody saw.
    pub(crate) missed: bool,
}

/// An open transaction.
pub(crate) struct Open {
    pub(crate) id: TransactionId,
    pub(crate) in_place: bool,
    pub(crate) partial: bool,
    pub(crate) set: usize,
    pub(crate) there: Vec<Half>,
    pub(crate) idles: bool,
}

/// A legal answer: how, and the lifecycle after. What it does to the rest is the same for all of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Edge {
    Done(Lifecycle),
    Already,
    Refused(ErrorKind),
    /// Any error, and this lifecycle after.
    Failed(Lifecycle),
}

impl<'a> Automaton<'a> {
    pub(crate) fn new(oracle: &'a Oracle, first: &ControlState, stops: bool) -> Self {
        Self { oracle, open: None, versions: first.version.iter().cloned().collect(), stops, missed: false }
    }

    /// Takes a state up as it is, after an answer that nobody took.
    pub(crate) fn resync(&mut self, now: &ControlState) {
        let last = self.versions.last().map_or(0, |last| last.counter);
        if let Some(version) = now.version.clone().filter(|version| version.counter > last) {
            self.missed |= version.counter > last + 1;
            self.versions.push(version);
        }
        self.open.take_if(|open| now.transaction != Some(open.id));
    }

    /// Checks what happens without an answer: a transaction may be abandoned for want of pushes.
    pub(crate) fn between(&mut self, after: &ControlState, before: &ControlState) {
        let mut expected = after.clone();
        if before.transaction.is_none()
            && let Some(open) = self.open.take_if(|open| open.idles)
        {
            expected.transaction = None;
            if open.in_place && !open.there.is_empty() && after.lifecycle == WeightsLoaded {
                expected.lifecycle = WeightsTorn;
            }
        }
        if self.stops {
            expected.admitting = before.admitting;
        }
        assert_eq!(before, &expected, "the state before is the state after the answer before");
    }

    /// Checks one answer of the owner's, the next in order.
    pub(crate) fn step(&mut self, asked: &Asked) {
        let (before, after) = (&asked.response.state_before, &asked.response.state_after);
        let outcome = &asked.response.outcome;
        let mut edges = self.edges(&asked.kind, before);
        let late = asked.deadline || self.stops && matches!(asked.kind, Kind::Pause(_));
        if late && matches!(edges[..], [Edge::Done(_), ..]) && takes_time(&asked.kind) {
            edges.extend(self.fallen(&asked.kind, before).map(Edge::Failed));
        }
        let not_begun =
            matches!(outcome, Err(ControlError::Deadline { during, .. }) if during.contains("turn"));
        if not_begun && asked.deadline {
            assert_eq!(before, after, "nothing was begun: {asked:?}");
            return;
        }
        let is = |edge: &Edge| match (*edge, outcome) {
            (Edge::Done(lifecycle), Ok(Outcome::Done)) => after.lifecycle == lifecycle,
            (Edge::Already, Ok(Outcome::Already)) => after.lifecycle == before.lifecycle,
            (Edge::Refused(kind), Err(error)) => error.kind() == kind && after.lifecycle == before.lifecycle,
            (Edge::Failed(lifecycle), Err(error)) => {
                error.kind() != ErrorKind::Conflict && after.lifecycle == lifecycle
            }
            _ => false,
        };
        assert!(edges.iter().any(is), "{asked:#?} is none of {edges:?}");
        self.check_rest(asked, before, after);
    }

    /// What the lifecycle says nothing of: pause, transaction, version, epoch.
    fn check_rest(&mut self, asked: &Asked, before: &ControlState, after: &ControlState) {
        let ok = asked.response.is_ok();
        let paused = match asked.kind {
            Kind::Pause(_) if ok => true,
            Kind::Resume if ok => false,
            _ => before.paused,
        };
        assert_eq!(after.paused, paused, "{asked:?}");
        let admitting = after.lifecycle == Awake && !paused;
        assert!(after.admitting == admitting || self.stops && !after.admitting, "{asked:?}");
        let shut = match &asked.kind {
            Kind::Pause(_) => true,
            Kind::Sleep(plan) if before.transaction.is_none() => {
                let settles = before.lifecycle == Awake && plan.tags.kv_cache();
                settles || before.lifecycle != Awake && plan.in_flight == InFlight::Abort
            }
            Kind::ClearLoadWeight => before.transaction.is_none(),
            _ => false,
        };
        assert_eq!(after.epoch, before.epoch + u64::from(shut), "{asked:?}");
        self.check_version(asked, before, after);
        self.check_transaction(asked, before, after);
    }

    fn check_transaction(&mut self, asked: &Asked, before: &ControlState, after: &ControlState) {
        let ok = asked.response.is_ok();
        match &asked.kind {
            &Kind::Begin { set, in_place, partial, idle } if ok => {
                let id = after.transaction.expect("one is open");
                let there = Vec::new();
                self.open = Some(Open { id, in_place, partial, set, there, idles: idle.is_some() });
            }
            Kind::Push { transaction, half, .. } if before.transaction == Some(*transaction) => {
                match (&mut self.open, ok) {
                    (Some(open), true) => open.there.push(*half),
                    _ => self.open = None,
                }
            }
            Kind::Commit(id) | Kind::Abandon(id) if before.transaction == Some(*id) => self.open = None,
            _ => {}
        }
        assert_eq!(after.transaction, self.open.as_ref().map(|open| open.id), "{asked:?}");
    }

    fn check_version(&mut self, asked: &Asked, before: &ControlState, after: &ControlState) {
        let mix = if asked.response.is_ok() { self.brought(asked, before) } else { None };
        let Some(mix) = mix else {
            assert_eq!(after.version, before.version, "no new weights: {asked:?}");
            return;
        };
        let version = after.version.as_ref().expect("there are weights");
        assert_eq!(self.oracle.mix(&version.digest), Some(mix), "{asked:?}");
        let last = self.versions.last().map_or(0, |last| last.counter);
        assert_eq!(version.counter, last + 1, "each commit is one version: {asked:?}");
        self.versions.push(version.clone());
    }

    /// The weights after an operation that succeeded and brought any.
    fn brought(&self, asked: &Asked, before: &ControlState) -> Option<Mix> {
        let base = || {
            let version = before.version.as_ref().expect("weights that a part is a part of");
            self.oracle.mix(&version.digest).expect("of a known set").base
        };
        let mix = |set, partial| if partial { Mix { base: base(), one: set } } else { Mix::of(set) };
        match &asked.kind {
            Kind::Load(sent) => Some(Mix::of(sent.set)),
            Kind::Update { sent, partial, .. } => Some(mix(sent.set, *partial)),
            Kind::UpdateModelWeight(sent) => Some(Mix::of(sent.unwrap_or(RELOAD).set)),
            Kind::Commit(_) => self.open.as_ref().map(|open| mix(open.set, open.partial)),
            _ => None,
        }
    }
}

/// Whether it can fail for its deadline once it has begun.
fn takes_time(kind: &Kind) -> bool {
    match kind {
        Kind::Load(_) | Kind::Update { .. } | Kind::UpdateModelWeight(_) | Kind::Push { .. } => true,
        Kind::Pause(mode) => matches!(mode, PauseMode::Wait { .. }),
        _ => false,
    }
}
