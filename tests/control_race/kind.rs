//! What the test asks a controller for, in a form that the automaton understands.

use std::time::Duration;

use dormouse::control::{
    AbortTarget, Operation, PauseDeadline, PauseMode, Payload, SleepPlan, SleepWeights, Tags, TransactionId,
};
use dormouse::{
    InFlight, LoadOptions, OnDeadline, SourceError, TensorSpec, UpdateOptions, WeightSource, WeightsDigest,
};

use crate::dice::Dice;
use crate::faulty::{Fault, Faulty};
use crate::oracle::{Oracle, Part, SETS};

#[derive(Debug, Clone)]
pub(crate) enum Kind {
    Pause(PauseMode),
    Resume,
    Sleep(SleepPlan),
    WakeUp(Tags),
    Load(Sent),
    Update { sent: Sent, in_place: bool, partial: bool },
    Begin { set: usize, in_place: bool, partial: bool, idle: Option<Duration> },
    Push { transaction: TransactionId, half: Half, sent: Sent },
    Commit(TransactionId),
    Abandon(TransactionId),
    Abort(AbortTarget),
    ResetPrefixCache { with_requests: bool },
    Status,
    Verify,
    ReadTensor { known: bool },
    ClearLoadWeight,
    UpdateModelWeight(Option<Sent>),
}

/// Weights that are sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    pub(crate) set: usize,
    pub(crate) how: How,
}

/// In what form, and what is wrong with them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum How {
    Source,
    Slow,
    Bucket,
    Missing,
    Faulty(Fault),
    Garbage,
    OtherDigest,
}

/// What a push brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    First,
    Second,
    /// The tensor of a partial update.
    One,
}

/// The source of [`UpdateModelWeight`](Operation::UpdateModelWeight) that brings none.
pub(crate) const RELOAD: Sent = Sent { set: 0, how: How::Source };

impl Sent {
    pub(crate) fn is_good(self) -> bool {
        matches!(self.how, How::Source | How::Slow | How::Bucket)
    }

    fn good(dice: &mut Dice) -> Self {
        let how = dice.pick(&[How::Source, How::Source, How::Slow, How::Bucket]);
        Self { set: dice.below(SETS), how }
    }

    fn any(dice: &mut Dice) -> Self {
        if !dice.one_in(4) {
            return Self::good(dice);
        }
        let fault =
            dice.pick(&[Fault::Error, Fault::HalfThenError, Fault::Short, Fault::Long, Fault::Finish]);
        let bad = [How::Missing, How::Faulty(fault), How::Garbage, How::OtherDigest];
        Self { how: dice.pick(&bad), ..Self::good(dice) }
    }

    fn payload(self, part: Part) -> Payload {
        match self.how {
            How::Source | How::OtherDigest => Payload::source(part),
            How::Slow => Payload::source(Slow(part)),
            How::Bucket => Payload::Bucket(part.bucket()),
            How::Missing => Payload::source(Missing(part)),
            How::Faulty(fault) => Payload::source(Faulty { inner: part, fault, at: 0, reads: 0 }),
            How::Garbage => Payload::Bucket(vec![0x5a; 100]),
        }
    }

    fn load_options(self) -> LoadOptions {
        let options = LoadOptions::default();
        match self.how {
            How::OtherDigest => options.expect_digest(WeightsDigest::from_bytes([7; 32])),
            _ => options,
        }
    }
}

struct Slow(Part);

impl WeightSource for Slow {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.0.index()
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        std::thread::sleep(Duration::from_micros(300));
        self.0.read(tensor, sink)
    }
}

/// Names a tensor that no model has in place of the last.
struct Missing(Part);

impl WeightSource for Missing {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        let mut index = self.0.index()?;
        index.last_mut().expect("a tensor").name = "no such tensor".into();
        Ok(index)
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.0.read(tensor, sink)
    }
}

fn update_options(sent: Sent, in_place: bool, partial: Option<&str>) -> UpdateOptions {
    let mut options = UpdateOptions::from(sent.load_options());
    if in_place {
        options = options.in_place();
    }
    match partial {
        Some(name) => options.partial([name]),
        None => options,
    }
}

fn half(oracle: &Oracle, set: usize, half: Half) -> Part {
    let middle = oracle.tensors() / 2;
    match half {
        Half::First => oracle.part(set, 0..middle),
        Half::Second => oracle.part(set, middle..oracle.tensors()),
        Half::One => oracle.one(set),
    }
}

impl Kind {
    pub(crate) fn operation(&self, oracle: &Oracle) -> Operation {
        let whole = |sent: Sent| sent.payload(oracle.whole(sent.set));
        match self.clone() {
            Self::Pause(mode) => Operation::Pause(mode),
            Self::Resume => Operation::Resume,
            Self::Sleep(plan) => Operation::Sleep(plan),
            Self::WakeUp(tags) => Operation::WakeUp { tags },
            Self::Load(sent) => Operation::LoadWeights { weights: whole(sent), options: sent.load_options() },
            Self::Update { sent, in_place, partial } => {
                let name = partial.then(|| oracle.name_of_one());
                let weights = if partial { sent.payload(oracle.one(sent.set)) } else { whole(sent) };
                Operation::UpdateWeights { weights, options: update_options(sent, in_place, name) }
            }
            Self::Begin { set, in_place, partial, idle } => {
                let name = partial.then(|| oracle.name_of_one());
                let sent = Sent { set, how: How::Source };
                Operation::Begin { options: update_options(sent, in_place, name), idle }
            }
            Self::Push { transaction, half: which, sent } => {
                Operation::Push { transaction, weights: sent.payload(half(oracle, sent.set, which)) }
            }
            Self::Commit(transaction) => Operation::Commit { transaction },
            Self::Abandon(transaction) => Operation::Abandon { transaction },
            Self::Abort(target) => Operation::Abort(target),
            Self::ResetPrefixCache { with_requests } => Operation::ResetPrefixCache { with_requests },
            Self::Status => Operation::Status,
            Self::Verify => Operation::Verify,
            Self::ReadTensor { known: true } => Operation::ReadTensor { name: oracle.name_of_one().into() },
            Self::ReadTensor { known: false } => Operation::ReadTensor { name: "no such tensor".into() },
            Self::ClearLoadWeight => Operation::ClearLoadWeight,
            Self::UpdateModelWeight(sent) => {
                let options = sent.unwrap_or(RELOAD).load_options();
                Operation::UpdateModelWeight { weights: sent.map(whole), options }
            }
        }
    }

    /// Anything but what belongs to a transaction.
    pub(crate) fn any(dice: &mut Dice) -> Self {
        match dice.below(24) {
            0 | 1 => Self::Pause(any_pause(dice)),
            2..=4 => Self::Resume,
            5..=8 => Self::sleep(dice),
            9..=11 => Self::WakeUp(any_tags(dice)),
            12 => Self::Load(Sent::any(dice)),
            13..=15 => {
                Self::Update { sent: Sent::any(dice), in_place: dice.one_in(2), partial: dice.one_in(3) }
            }
            16 => Self::Status,
            17 => Self::Verify,
            18 => Self::ReadTensor { known: !dice.one_in(4) },
            19 => Self::ResetPrefixCache { with_requests: dice.one_in(2) },
            20 => Self::ClearLoadWeight,
            21 => Self::UpdateModelWeight(Some(Sent::any(dice))),
            22 => Self::UpdateModelWeight(None),
            _ => Self::Abort(AbortTarget::All),
        }
    }

    pub(crate) fn sleep(dice: &mut Dice) -> Self {
        Self::Sleep(any_sleep(dice))
    }

    pub(crate) fn update(dice: &mut Dice) -> Self {
        Self::Update { sent: Sent::any(dice), in_place: dice.one_in(2), partial: dice.one_in(3) }
    }

    pub(crate) fn begin(dice: &mut Dice) -> Self {
        let idle = dice.one_in(4).then(|| Duration::from_millis(2));
        Self::Begin { set: dice.below(SETS), in_place: dice.one_in(2), partial: dice.one_in(3), idle }
    }

    pub(crate) fn push(dice: &mut Dice, transaction: TransactionId, half: Half, set: usize) -> Self {
        let how = match Sent::any(dice).how {
            // A part lacks nothing; the digest is not the push's.
            How::OtherDigest => How::Bucket,
            how => how,
        };
        Self::Push { transaction, half, sent: Sent { set, how } }
    }

    /// Whether it may end requests that could go on.
    pub(crate) fn ends_requests(&self) -> bool {
        match self {
            Self::Pause(mode) => {
                matches!(mode, PauseMode::Abort | PauseMode::Wait { on_deadline: PauseDeadline::Abort })
            }
            Self::Sleep(plan) => {
                matches!(plan.in_flight, InFlight::Abort | InFlight::Drain { then: OnDeadline::Abort, .. })
            }
            Self::Abort(_) | Self::ClearLoadWeight => true,
            _ => false,
        }
    }

    /// Whether it is answered without its turn.
    pub(crate) fn is_inline(&self) -> bool {
        matches!(self, Self::Status | Self::Abort(_))
    }
}

fn any_pause(dice: &mut Dice) -> PauseMode {
    let on_deadline = dice.pick(&[PauseDeadline::Undo, PauseDeadline::Abort, PauseDeadline::Keep]);
    let wait = PauseMode::Wait { on_deadline };
    dice.pick(&[PauseMode::Abort, PauseMode::Keep, PauseMode::Keep, wait, wait])
}

fn any_tags(dice: &mut Dice) -> Tags {
    dice.pick(&[Tags::ALL, Tags::WEIGHTS, Tags::KV_CACHE])
}

fn any_sleep(dice: &mut Dice) -> SleepPlan {
    let deadline = dice.pick(&[Duration::ZERO, Duration::from_micros(500), Duration::from_millis(20)]);
    let then = dice.pick(&[OnDeadline::Refuse, OnDeadline::Abort, OnDeadline::Retract]);
    let in_flight = match dice.below(8) {
        0 => InFlight::Abort,
        1 => InFlight::Refuse,
        2 | 3 => InFlight::Drain { deadline, then },
        _ => InFlight::Retract,
    };
    let weights = dice.pick(&[SleepWeights::Park, SleepWeights::Discard]);
    SleepPlan { tags: any_tags(dice), weights, in_flight }
}
