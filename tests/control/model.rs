//! The lifecycle as the documentation has it, in a few lines: what each operation answers in each state, and the
//! state after. It knows of no request.

use dormouse::control::{ErrorKind, Lifecycle, MissingStep, Tags};

/// Which set each tensor comes from: the projection `Q`, and all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Mixed {
    pub(crate) q: usize,
    pub(crate) others: usize,
}

impl Mixed {
    pub(crate) fn whole(set: usize) -> Self {
        Self { q: set, others: set }
    }
}

/// An open transaction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Open {
    in_place: bool,
    /// It takes nothing but `Q`.
    partial: bool,
    /// The complete set that was pushed.
    pushed: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Model {
    pub(crate) lifecycle: Lifecycle,
    pub(crate) paused: bool,
    pub(crate) open: Option<Open>,
    /// The last whole weights; none if there never were any.
    pub(crate) weights: Option<Mixed>,
    pub(crate) commits: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Op {
    PauseAbort,
    PauseWait,
    PauseKeep,
    Resume,
    Sleep {
        tags: Tags,
        discard: bool,
        how: usize,
    },
    Wake(Tags),
    Load(usize),
    LoadIncomplete,
    Update(usize),
    UpdateInPlace(usize),
    UpdateIncomplete,
    UpdateQ(usize),
    /// In place, from a source that fails half-way.
    Tear,
    Begin {
        in_place: bool,
    },
    BeginPartial,
    Push(usize),
    PushElsewhere,
    Commit,
    CommitElsewhere,
    Abandon,
    AbandonElsewhere,
    Abort,
    ResetPrefixCache {
        with_requests: bool,
    },
    Status,
    Verify,
    ReadTensor,
    ReadUnknownTensor,
    ClearLoadWeight,
    UpdateModelWeight,
    UpdateModelWeightIncomplete,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Answer {
    Done,
    Already,
    Missing(MissingStep),
    /// A commit or an abandon of the open transaction.
    MissingEnd,
    Failed(ErrorKind),
}

use Answer::{Already, Done, Failed, Missing, MissingEnd};
use Lifecycle::{
    AwaitingWeights, Awake, SleepingDiscarded, SleepingKept, Stopped, WeightsLoaded, WeightsTorn,
};

/// The set that the controller reloads from.
pub(crate) const RELOAD: usize = 2;

impl Model {
    pub(crate) fn new() -> Self {
        let lifecycle = SleepingDiscarded;
        Self { lifecycle, paused: false, open: None, weights: None, commits: 0 }
    }

    pub(crate) fn apply(&mut self, op: Op) -> Answer {
        match op {
            Op::Status => return Done,
            Op::Abort => return Already,
            _ if self.lifecycle == Stopped => return Failed(ErrorKind::Stopped),
            Op::PauseAbort | Op::PauseWait | Op::PauseKeep => {
                return if std::mem::replace(&mut self.paused, true) { Already } else { Done };
            }
            Op::Resume => return if std::mem::replace(&mut self.paused, false) { Done } else { Already },
            Op::PushElsewhere | Op::CommitElsewhere | Op::AbandonElsewhere => {
                return Failed(ErrorKind::NotFound);
            }
            _ => {}
        }
        match self.open {
            Some(open) => self.in_transaction(open, op),
            None => self.outside(op),
        }
    }

    fn in_transaction(&mut self, open: Open, op: Op) -> Answer {
        let answer = match (op, open.pushed) {
            (Op::Push(set), None) if !open.partial => {
                self.open = Some(Open { pushed: Some(set), ..open });
                return Done;
            }
            // The same tensors again, or others than were announced.
            (Op::Push(_), _) | (Op::Commit, None) => Failed(ErrorKind::InvalidWeights),
            (Op::Commit, Some(set)) => {
                self.open = None;
                return self.commit(Mixed::whole(set));
            }
            (Op::Abandon, _) => Done,
            _ => return MissingEnd,
        };
        self.open = None;
        if open.in_place && open.pushed.is_some() && self.lifecycle == WeightsLoaded {
            self.lifecycle = WeightsTorn;
        }
        answer
    }

    fn outside(&mut self, op: Op) -> Answer {
        match op {
            Op::Sleep { tags, discard, .. } => self.sleep(tags, discard),
            Op::ClearLoadWeight => self.sleep(Tags::ALL, true),
            Op::Wake(tags) => self.wake(tags),
            Op::Load(_) | Op::LoadIncomplete | Op::UpdateModelWeight | Op::UpdateModelWeightIncomplete => {
                match (self.lifecycle, op) {
                    (Awake, _) => Missing(MissingStep::SleepKvCache),
                    (_, Op::Load(set)) => self.commit(Mixed::whole(set)),
                    (_, Op::UpdateModelWeight) => {
                        self.commit(Mixed::whole(RELOAD));
                        self.to(Awake)
                    }
                    _ => Failed(ErrorKind::InvalidWeights),
                }
            }
            Op::ResetPrefixCache { .. } if self.lifecycle == Awake => Done,
            Op::ResetPrefixCache { .. } => Already,
            Op::Verify | Op::ReadTensor | Op::ReadUnknownTensor => match self.lifecycle {
                Awake | WeightsLoaded if op == Op::ReadUnknownTensor => Failed(ErrorKind::NotFound),
                Awake | WeightsLoaded => Done,
                SleepingKept | SleepingDiscarded => Missing(MissingStep::WakeWeights),
                _ => Missing(MissingStep::UpdateWeights),
            },
            Op::Push(_) | Op::Commit | Op::Abandon => Failed(ErrorKind::NotFound),
            update => match self.lifecycle {
                Awake => Missing(MissingStep::SleepKvCache),
                SleepingKept | SleepingDiscarded => Missing(MissingStep::WakeWeights),
                _ => self.update(update),
            },
        }
    }

    fn sleep(&mut self, tags: Tags, discard: bool) -> Answer {
        let asleep = if discard { SleepingDiscarded } else { SleepingKept };
        match self.lifecycle {
            Awake if !tags.kv_cache() => Missing(MissingStep::SleepKvCache),
            Awake if !tags.weights() => self.to(WeightsLoaded),
            Awake => self.to(asleep),
            _ if !tags.weights() => Already,
            WeightsTorn if !discard => Missing(MissingStep::UpdateWeights),
            WeightsLoaded | WeightsTorn => self.to(asleep),
            SleepingKept if discard => self.to(SleepingDiscarded),
            AwaitingWeights => self.to(SleepingDiscarded),
            _ => Already,
        }
    }

    fn wake(&mut self, tags: Tags) -> Answer {
        match self.lifecycle {
            Awake => Already,
            WeightsTorn => Missing(MissingStep::UpdateWeights),
            WeightsLoaded if tags.kv_cache() => self.to(Awake),
            WeightsLoaded => Already,
            SleepingKept | SleepingDiscarded if !tags.weights() => Missing(MissingStep::WakeWeights),
            SleepingKept if tags.kv_cache() => self.to(Awake),
            SleepingKept => self.to(WeightsLoaded),
            _ if tags.kv_cache() => Missing(MissingStep::UpdateWeights),
            SleepingDiscarded => self.to(AwaitingWeights),
            _ => Already,
        }
    }

    /// An update of weights that are there, whole or torn, or awaited.
    fn update(&mut self, op: Op) -> Answer {
        let whole = self.lifecycle == WeightsLoaded;
        match op {
            Op::Update(set) | Op::UpdateInPlace(set) => self.commit(Mixed::whole(set)),
            Op::UpdateQ(_) | Op::BeginPartial if !whole => Missing(MissingStep::UpdateWeights),
            Op::UpdateQ(q) => {
                let others = self.weights.expect("whole weights").others;
                self.commit(Mixed { q, others })
            }
            Op::Begin { in_place } => {
                self.open = Some(Open { in_place, partial: false, pushed: None });
                Done
            }
            Op::BeginPartial => {
                self.open = Some(Open { in_place: false, partial: true, pushed: None });
                Done
            }
            Op::Tear if self.lifecycle != AwaitingWeights => {
                self.lifecycle = WeightsTorn;
                Failed(ErrorKind::InvalidWeights)
            }
            _ => Failed(ErrorKind::InvalidWeights),
        }
    }

    fn commit(&mut self, weights: Mixed) -> Answer {
        self.weights = Some(weights);
        self.commits += 1;
        self.to(WeightsLoaded)
    }

    fn to(&mut self, lifecycle: Lifecycle) -> Answer {
        self.lifecycle = lifecycle;
        Done
    }
}
