//! The automaton's table: state and operation to legal answers.

use dormouse::control::{ControlState, ErrorKind, Lifecycle, PauseMode, SleepPlan, SleepWeights, Tags};
use dormouse::{InFlight, OnDeadline};

use crate::automaton::{Automaton, Edge, Open};
use crate::kind::{Half, Kind};

use Edge::{Already, Done, Failed, Refused};
use ErrorKind::{Conflict, Deadline, NotFound};
use Lifecycle::{
    AwaitingWeights, Awake, SleepingDiscarded, SleepingKept, Stopped, WeightsLoaded, WeightsTorn,
};

impl Automaton<'_> {
    /// The legal answers, but for those of a deadline.
    pub(crate) fn edges(&self, kind: &Kind, before: &ControlState) -> Vec<Edge> {
        match (kind, &self.open) {
            (Kind::Pause(mode), _) => pause(*mode, before),
            (Kind::Resume, _) => vec![if before.paused { Done(before.lifecycle) } else { Already }],
            (Kind::Push { transaction: id, .. } | Kind::Commit(id) | Kind::Abandon(id), open) => {
                match open.as_ref().filter(|open| open.id == *id) {
                    Some(open) => self.ends(open, kind, before),
                    None => vec![Refused(NotFound)],
                }
            }
            (_, Some(_)) => vec![Refused(Conflict)],
            (Kind::Sleep(plan), None) => sleep(*plan, before),
            (Kind::ClearLoadWeight, None) => {
                let (weights, in_flight) = (SleepWeights::Discard, InFlight::Abort);
                sleep(SleepPlan { tags: Tags::ALL, weights, in_flight }, before)
            }
            (Kind::WakeUp(tags), None) => vec![wake_up(*tags, before.lifecycle)],
            _ => self.weights(kind, before),
        }
    }

    /// What brings or reads weights.
    fn weights(&self, kind: &Kind, before: &ControlState) -> Vec<Edge> {
        let lifecycle = before.lifecycle;
        let partial_misses = |partial: bool| partial && lifecycle != WeightsLoaded;
        match kind {
            Kind::Load(_) | Kind::UpdateModelWeight(_) if lifecycle == Awake => vec![Refused(Conflict)],
            Kind::Load(sent) if sent.is_good() => vec![Done(WeightsLoaded)],
            Kind::UpdateModelWeight(sent) if sent.is_none_or(|sent| sent.is_good()) => vec![Done(Awake)],
            Kind::Load(_) | Kind::UpdateModelWeight(_) => vec![Failed(lifecycle)],
            Kind::Update { partial, .. } | Kind::Begin { partial, .. }
                if !is_open_to_updates(lifecycle) || partial_misses(*partial) =>
            {
                vec![Refused(Conflict)]
            }
            Kind::Begin { .. } => vec![Done(lifecycle)],
            Kind::Update { sent, .. } if sent.is_good() => vec![Done(WeightsLoaded)],
            Kind::Update { .. } => self.fallen(kind, before).map(Failed).collect(),
            Kind::Verify | Kind::ReadTensor { known: true } if lifecycle.has_weights() => {
                vec![Done(lifecycle)]
            }
            Kind::ReadTensor { known: false } if lifecycle.has_weights() => vec![Refused(NotFound)],
            Kind::ReadTensor { known: false } if lifecycle == WeightsTorn => {
                vec![Refused(NotFound), Refused(Conflict)]
            }
            Kind::Verify | Kind::ReadTensor { .. } => vec![Refused(Conflict)],
            Kind::ResetPrefixCache { .. } if lifecycle != Awake => vec![Already],
            Kind::ResetPrefixCache { with_requests: true } => vec![Done(Awake)],
            Kind::ResetPrefixCache { with_requests: false } => {
                vec![Done(Awake), Refused(ErrorKind::InFlight)]
            }
            _ => unreachable!("no operation of the owner's that brings or reads weights: {kind:?}"),
        }
    }

    /// What names the open transaction.
    fn ends(&self, open: &Open, kind: &Kind, before: &ControlState) -> Vec<Edge> {
        let complete = match open.partial {
            true => open.there.contains(&Half::One),
            false => open.there.contains(&Half::First) && open.there.contains(&Half::Second),
        };
        match kind {
            Kind::Push { half, sent, .. } if sent.is_good() && !open.there.contains(half) => {
                vec![Done(before.lifecycle)]
            }
            Kind::Commit(_) if complete => vec![Done(WeightsLoaded)],
            Kind::Abandon(_) => self.fallen(kind, before).map(Done).collect(),
            _ => self.fallen(kind, before).map(Failed).collect(),
        }
    }

    /// The lifecycles that weights which don't come in whole may leave.
    pub(crate) fn fallen(
        &self,
        kind: &Kind,
        before: &ControlState,
    ) -> impl Iterator<Item = Lifecycle> + use<> {
        let open = self.open.as_ref();
        let pushed = open.is_some_and(|open| open.in_place && !open.there.is_empty());
        let may_tear = match kind {
            Kind::Update { in_place, .. } => *in_place,
            Kind::Push { .. } => open.is_some_and(|open| open.in_place),
            _ => pushed,
        };
        let whole = before.lifecycle == WeightsLoaded;
        let torn = (may_tear && whole).then_some(WeightsTorn);
        let same = (!(pushed && whole) || before.transaction.is_none()).then_some(before.lifecycle);
        torn.into_iter().chain(same)
    }
}

fn pause(mode: PauseMode, before: &ControlState) -> Vec<Edge> {
    let mut edges = vec![Done(before.lifecycle)];
    if before.paused {
        edges.push(Already);
    }
    if matches!(mode, PauseMode::Wait { .. }) && (before.paused || before.lifecycle != Awake) {
        edges.push(Refused(Conflict));
    }
    edges
}

fn sleep(plan: SleepPlan, before: &ControlState) -> Vec<Edge> {
    let discard = plan.weights == SleepWeights::Discard;
    let asleep = match (plan.tags.weights(), discard) {
        (true, true) => SleepingDiscarded,
        (true, false) => SleepingKept,
        (false, _) => WeightsLoaded,
    };
    match before.lifecycle {
        Awake if !plan.tags.kv_cache() => vec![Refused(Conflict)],
        Awake => {
            let mut edges = vec![Done(asleep)];
            match plan.in_flight {
                InFlight::Refuse => edges.push(Refused(ErrorKind::InFlight)),
                InFlight::Drain { .. } if before.paused => edges.push(Refused(Conflict)),
                InFlight::Drain { then: OnDeadline::Refuse, .. } => edges.push(Refused(Deadline)),
                _ => {}
            }
            edges
        }
        _ if !plan.tags.weights() => already_but_for_requests(plan, before),
        WeightsTorn if !discard => vec![Refused(Conflict)],
        WeightsLoaded | WeightsTorn => vec![Done(asleep)],
        SleepingKept if discard => vec![Done(SleepingDiscarded)],
        AwaitingWeights => vec![Done(SleepingDiscarded)],
        SleepingKept | SleepingDiscarded => already_but_for_requests(plan, before),
        Stopped => vec![],
    }
}

/// Parts that sleep already; requests that were set aside may be what there is to abort.
fn already_but_for_requests(plan: SleepPlan, before: &ControlState) -> Vec<Edge> {
    match plan.in_flight {
        InFlight::Abort => vec![Already, Done(before.lifecycle)],
        _ => vec![Already],
    }
}

fn wake_up(tags: Tags, lifecycle: Lifecycle) -> Edge {
    match (lifecycle, tags.weights(), tags.kv_cache()) {
        (WeightsTorn, ..) | (SleepingDiscarded | AwaitingWeights, _, true) => Refused(Conflict),
        (SleepingKept, false, _) => Refused(Conflict),
        (SleepingKept | WeightsLoaded, _, true) => Done(Awake),
        (SleepingKept, true, false) => Done(WeightsLoaded),
        (SleepingDiscarded, ..) => Done(AwaitingWeights),
        (Awake | WeightsLoaded | AwaitingWeights, ..) => Already,
        (Stopped, ..) => Refused(ErrorKind::Stopped),
    }
}

/// Whether the weights are awake, or awaited, and the KV cache asleep.
fn is_open_to_updates(lifecycle: Lifecycle) -> bool {
    matches!(lifecycle, AwaitingWeights | WeightsLoaded | WeightsTorn)
}
