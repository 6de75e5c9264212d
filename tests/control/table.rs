//! The controller against the naive model: every operation in every state, and random sequences of them. After each
//! operation everything that can be seen from outside is what the model says.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use dormouse::control::{
    AbortTarget, ControlError, ControlState, Controller, ErrorKind, Handle, Lifecycle, MissingStep,
    Operation, Outcome, PauseDeadline, PauseMode, Reload, Report, SleepPlan, SleepWeights, Tags,
    TransactionId,
};
use dormouse::{InFlight, LoadOptions, OnDeadline, UpdateOptions};
use proptest::prelude::*;

use crate::faulty::{Fault, Faulty};
use crate::model::{Answer, Mixed, Model, Op, RELOAD};
use crate::support::{
    EMBEDDING, Owned, Q, Weights, all_of, ask, bits, bounded, builder, digest, expected, lacking, options,
    request, run, some_of, weights,
};

static SETS: LazyLock<[Weights; 3]> = LazyLock::new(|| [1, 2, 3].map(weights));

fn mixed(of: Mixed) -> Weights {
    let mut set = SETS[of.others].clone();
    let q = SETS[of.q].0.iter().find(|(name, _)| name == Q).unwrap();
    *set.0.iter_mut().find(|(name, _)| name == Q).unwrap() = q.clone();
    set
}

type Bits = Vec<(Vec<u32>, Vec<u32>)>;

/// What a fresh engine says, computed once for each set.
fn oracle(of: Mixed) -> Bits {
    static KNOWN: LazyLock<Mutex<HashMap<Mixed, Bits>>> = LazyLock::new(Mutex::default);
    KNOWN.lock().unwrap().entry(of).or_insert_with(|| expected(&mixed(of), &request(1))).clone()
}

/// A controller and what the model thinks of it.
struct World {
    handle: Handle,
    model: Model,
    /// The last transaction that was begun.
    transaction: TransactionId,
}

const ELSEWHERE: TransactionId = TransactionId::from_number(u64::MAX);

const IN_FLIGHT: [InFlight; 4] = [
    InFlight::Refuse,
    InFlight::Abort,
    InFlight::Retract,
    InFlight::Drain { deadline: Duration::ZERO, then: OnDeadline::Refuse },
];

impl World {
    fn new(ops: &[Op]) -> Self {
        let mut options = options();
        options.reload = Some(Reload::new(|| all_of(&SETS[RELOAD])));
        let handle = Controller::with(options).drive(builder().build_asleep().unwrap());
        let mut world = Self { handle, model: Model::new(), transaction: TransactionId::from_number(77) };
        world.check();
        ops.iter().for_each(|op| world.apply(*op));
        world
    }

    fn operation(&self, op: Op) -> Operation {
        let transaction = self.transaction;
        let load = LoadOptions::default();
        let whole = UpdateOptions::default();
        match op {
            Op::PauseAbort => Operation::Pause(PauseMode::Abort),
            Op::PauseWait => Operation::Pause(PauseMode::Wait { on_deadline: PauseDeadline::Undo }),
            Op::PauseKeep => Operation::Pause(PauseMode::Keep),
            Op::Resume => Operation::Resume,
            Op::Sleep { tags, discard, how } => {
                let weights = if discard { SleepWeights::Discard } else { SleepWeights::Park };
                Operation::Sleep(SleepPlan { tags, weights, in_flight: IN_FLIGHT[how] })
            }
            Op::Wake(tags) => Operation::WakeUp { tags },
            Op::Load(set) => Operation::LoadWeights { weights: all_of(&SETS[set]), options: load },
            Op::LoadIncomplete => Operation::LoadWeights { weights: lacking(&SETS[1]), options: load },
            Op::Update(set) => Operation::UpdateWeights { weights: all_of(&SETS[set]), options: whole },
            Op::UpdateInPlace(set) => {
                Operation::UpdateWeights { weights: all_of(&SETS[set]), options: whole.in_place() }
            }
            Op::UpdateIncomplete => Operation::UpdateWeights { weights: lacking(&SETS[1]), options: whole },
            Op::UpdateQ(set) => {
                Operation::UpdateWeights { weights: some_of(&SETS[set], &[Q]), options: whole.partial([Q]) }
            }
            Op::Tear => {
                let inner = Owned(SETS[1].0.clone());
                let source = Faulty { inner, fault: Fault::Error, at: 3, reads: 0 };
                let weights = dormouse::control::Payload::source(source);
                Operation::UpdateWeights { weights, options: whole.in_place() }
            }
            Op::Begin { in_place: false } => Operation::Begin { options: whole, idle: None },
            Op::Begin { in_place: true } => Operation::Begin { options: whole.in_place(), idle: None },
            Op::BeginPartial => Operation::Begin { options: whole.partial([Q]), idle: None },
            Op::Push(set) => Operation::Push { transaction, weights: all_of(&SETS[set]) },
            Op::PushElsewhere => Operation::Push { transaction: ELSEWHERE, weights: all_of(&SETS[1]) },
            Op::Commit => Operation::Commit { transaction },
            Op::CommitElsewhere => Operation::Commit { transaction: ELSEWHERE },
            Op::Abandon => Operation::Abandon { transaction },
            Op::AbandonElsewhere => Operation::Abandon { transaction: ELSEWHERE },
            Op::Abort => Operation::Abort(AbortTarget::All),
            Op::ResetPrefixCache { with_requests } => Operation::ResetPrefixCache { with_requests },
            Op::Status => Operation::Status,
            Op::Verify => Operation::Verify,
            Op::ReadTensor => Operation::ReadTensor { name: Q.into() },
            Op::ReadUnknownTensor => Operation::ReadTensor { name: "model.nothing.weight".into() },
            Op::ClearLoadWeight => Operation::ClearLoadWeight,
            Op::UpdateModelWeight => Operation::UpdateModelWeight { weights: None, options: load },
            Op::UpdateModelWeightIncomplete => {
                Operation::UpdateModelWeight { weights: Some(lacking(&SETS[1])), options: load }
            }
        }
    }

    /// Carries the operation out on both sides and compares.
    fn apply(&mut self, op: Op) {
        let before = self.handle.state();
        let response = run(&self.handle, self.operation(op));
        let answer = self.model.apply(op);
        let context = format!("{op:?} in {before}");
        for report in &response.report {
            if let Report::Begun(transaction) = report {
                assert_ne!(*transaction, self.transaction, "{context}");
                self.transaction = *transaction;
            }
        }
        assert_eq!(response.state_before, before, "{context}");
        assert_eq!(response.state_after, self.handle.state(), "{context}");
        match (&response.outcome, answer) {
            (Ok(Outcome::Done), Answer::Done) | (Ok(Outcome::Already), Answer::Already) => {}
            (Err(error), Answer::Missing(missing)) => {
                assert_eq!(error.missing_step(), Some(missing), "{context}: {error}");
                self.check_conflict(error, &before, missing);
            }
            (Err(error), Answer::MissingEnd) => {
                let missing = MissingStep::EndTransaction(self.transaction);
                assert_eq!(error.missing_step(), Some(missing), "{context}: {error}");
                self.check_conflict(error, &before, missing);
            }
            (Err(error), Answer::Failed(kind)) => {
                assert_eq!(error.kind(), kind, "{context}: {error}");
                assert_eq!(error.missing_step(), None, "{context}: {error}");
            }
            (outcome, answer) => panic!("{context}: {outcome:?}, not {answer:?}"),
        }
        assert!(response.state_after.epoch >= before.epoch, "{context}");
        self.check();
    }

    fn check_conflict(&self, error: &ControlError, before: &ControlState, missing: MissingStep) {
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(!error.kind().is_retryable());
        if let ControlError::Conflict { state, .. } = error {
            assert_eq!(**state, *before);
            let text = error.to_string();
            assert!(text.contains(&missing.to_string()) && text.contains(&before.to_string()), "{text}");
        } else {
            assert_eq!(self.model.lifecycle, Lifecycle::WeightsTorn, "{error}");
            assert!(error.to_string().contains("torn"), "{error}");
        }
    }

    /// All that can be seen is as the model says.
    fn check(&self) {
        let (model, state, status) = (&self.model, self.handle.state(), self.handle.status());
        assert_eq!(state.lifecycle, model.lifecycle);
        assert_eq!(state.paused, model.paused);
        assert_eq!(state.transaction, model.open.map(|_| self.transaction));
        let admitting = model.lifecycle == Lifecycle::Awake && !model.paused;
        assert_eq!(state.admitting, admitting);
        let version = state.version.as_ref().map(|version| (version.counter, version.digest));
        assert_eq!(version, model.weights.map(|of| (model.commits, digest(&mixed(of)))));
        assert_eq!(status.state, state);
        assert_eq!(status.busy, None);
        let text = self.handle.metrics().render_prometheus();
        assert!(text.contains(&format!("dormouse_state{{state=\"{}\"}} 1", model.lifecycle.as_str())));
        if !admitting {
            assert!(self.handle.submit(request(1)).is_err());
        }
        let memory = status.memory;
        if model.lifecycle == Lifecycle::Stopped {
            assert_eq!((memory.total_bytes(), status.engine.blocks), (0, 0), "it has no engine");
        }
        if model.open.is_some() || model.lifecycle == Lifecycle::Stopped {
            return;
        }
        let resident = model.lifecycle.has_weights() || model.lifecycle == Lifecycle::WeightsTorn;
        assert_eq!(memory.weights_bytes > 0, resident);
        assert_eq!(memory.parked_bytes > 0, model.lifecycle == Lifecycle::SleepingKept);
        assert_eq!(memory.kv_cache_bytes > 0, model.lifecycle == Lifecycle::Awake);
        assert_eq!(memory.workspace_bytes > 0, model.lifecycle == Lifecycle::Awake);
        assert_eq!(status.engine.blocks > 0, model.lifecycle == Lifecycle::Awake);
        if model.lifecycle.has_weights() {
            let of = model.weights.unwrap();
            self.check_tensor(Q, of.q);
            self.check_tensor(EMBEDDING, of.others);
        }
    }

    fn check_tensor(&self, name: &str, set: usize) {
        let response = run(&self.handle, Operation::ReadTensor { name: name.into() });
        let [Report::Tensor(tensor)] = &response.report[..] else { panic!("{response:?}") };
        let sent = &SETS[set].0.iter().find(|(other, _)| other == name).unwrap().1;
        assert!(tensor.data == sent.data, "{name} is not that of set {set}");
    }

    /// Leads the engine to serve, and compares what it says with a fresh engine.
    fn finish(mut self) {
        if self.model.open.is_some() {
            self.apply(Op::Abandon);
        }
        if self.model.paused {
            self.apply(Op::Resume);
        }
        let way: &[Op] = match self.model.lifecycle {
            Lifecycle::Awake => &[],
            Lifecycle::SleepingKept => &[Op::Wake(Tags::ALL)],
            Lifecycle::WeightsLoaded => &[Op::Wake(Tags::KV_CACHE)],
            Lifecycle::WeightsTorn => &[Op::Update(1), Op::Wake(Tags::KV_CACHE)],
            Lifecycle::AwaitingWeights => &[Op::Update(1), Op::Wake(Tags::ALL)],
            Lifecycle::SleepingDiscarded => {
                &[Op::Wake(Tags::WEIGHTS), Op::Update(1), Op::Wake(Tags::KV_CACHE)]
            }
            Lifecycle::Stopped => return,
        };
        way.iter().for_each(|op| self.apply(*op));
        let of = self.model.weights.expect("an awake engine has weights");
        assert_eq!(bits(&ask(&self.handle, &request(1))), oracle(of));
        let version = self.handle.state().version;
        let said = ask(&self.handle, &request(1));
        assert!(said.completions[0].versions.iter().all(|span| Some(&span.version) == version.as_ref()));
    }
}

/// Every operation, with everything that makes a difference to it.
fn operations() -> Vec<Op> {
    let mut ops = vec![
        Op::PauseAbort,
        Op::PauseWait,
        Op::PauseKeep,
        Op::Resume,
        Op::Load(1),
        Op::LoadIncomplete,
        Op::Update(1),
        Op::UpdateInPlace(1),
        Op::UpdateIncomplete,
        Op::UpdateQ(1),
        Op::Tear,
        Op::Begin { in_place: false },
        Op::Begin { in_place: true },
        Op::BeginPartial,
        Op::Push(1),
        Op::PushElsewhere,
        Op::Commit,
        Op::CommitElsewhere,
        Op::Abandon,
        Op::AbandonElsewhere,
        Op::Abort,
        Op::ResetPrefixCache { with_requests: false },
        Op::ResetPrefixCache { with_requests: true },
        Op::Status,
        Op::Verify,
        Op::ReadTensor,
        Op::ReadUnknownTensor,
        Op::ClearLoadWeight,
        Op::UpdateModelWeight,
        Op::UpdateModelWeightIncomplete,
    ];
    for tags in [Tags::ALL, Tags::WEIGHTS, Tags::KV_CACHE] {
        ops.push(Op::Wake(tags));
        for how in 0..IN_FLIGHT.len() {
            ops.extend([false, true].map(|discard| Op::Sleep { tags, discard, how }));
        }
    }
    ops
}

/// A way to every state, with and without an open transaction.
fn ways() -> Vec<Vec<Op>> {
    let begin = Op::Begin { in_place: false };
    let in_place = Op::Begin { in_place: true };
    let park = Op::Sleep { tags: Tags::WEIGHTS, discard: false, how: 0 };
    let awaiting = Op::Wake(Tags::WEIGHTS);
    vec![
        vec![],
        vec![Op::Load(0), Op::ClearLoadWeight],
        vec![awaiting],
        vec![awaiting, begin],
        vec![awaiting, in_place, Op::Push(1)],
        vec![Op::Load(0)],
        vec![Op::Load(0), begin],
        vec![Op::Load(0), begin, Op::Push(1)],
        vec![Op::Load(0), in_place, Op::Push(1)],
        vec![Op::Load(0), Op::BeginPartial],
        vec![Op::Load(0), Op::Tear],
        vec![Op::Load(0), Op::Tear, begin, Op::Push(1)],
        vec![Op::Load(0), park],
        vec![Op::Load(0), Op::Wake(Tags::KV_CACHE)],
    ]
}

#[test]
fn c05_c06_c07_c11_b75_every_operation_in_every_state_is_as_the_model_says() {
    let mut reached = Vec::new();
    for way in ways() {
        for paused in [false, true] {
            let way = [&way[..], if paused { &[Op::PauseKeep] } else { &[] }].concat();
            for op in operations() {
                let mut world = World::new(&way);
                reached.push(world.model.lifecycle);
                world.apply(op);
                world.finish();
            }
        }
    }
    let missing: Vec<_> = Lifecycle::ALL.into_iter().filter(|state| !reached.contains(state)).collect();
    assert_eq!(missing, [Lifecycle::Stopped], "the next test");
}

#[test]
fn b75_a_stopped_controller_refuses_all_but_a_look() {
    for way in ways() {
        let mut world = World::new(&way);
        let handle = world.handle.clone();
        drop(bounded(move || handle.stop().unwrap()));
        (world.model.lifecycle, world.model.open) = (Lifecycle::Stopped, None);
        operations().into_iter().for_each(|op| world.apply(op));
        let handle = world.handle.clone();
        assert!(matches!(bounded(move || handle.stop()), Err(ControlError::Stopped)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 300, ..ProptestConfig::default() })]

    #[test]
    fn c08_c09_random_sequences_are_as_the_model_says_and_end_like_a_fresh_engine(
        ops in prop::collection::vec(prop::sample::select(operations()), 1..40)
    ) {
        World::new(&ops).finish();
    }
}
