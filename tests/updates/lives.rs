//! Random lives of an engine's weights against a naive model: a map from name to bytes, and whether it is torn.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use dormouse::{
    Awake, BeginError, CommitError, DType, Delta, Discarded, Engine, Kept, LoadOptions, ParkError, PushError,
    SleepOptions, Sleeping, SparseOp, TensorError, Update, UpdateOptions, VerifyError, WakeError,
    WeightsLoaded,
};
use proptest::prelude::*;

use crate::common::{Weights, awake, bits, fresh, parts, tiny_builder, tiny_weights};
use crate::cycle::request;
use crate::support::{Feed, WAYS, digest, feed, get, get_mut, only, spec};

const SETS: u64 = 3;

#[derive(Debug, Clone)]
enum Push {
    /// Tensors of a set, each whole.
    Tensors(Vec<usize>),
    /// The back of a tensor, and maybe then the front.
    Halves(usize, bool),
    /// Tensors as one source.
    Source(Vec<usize>),
    /// One element of a tensor becomes the value.
    Change(usize, u64, f32),
    /// Every tensor that is wanted and has not come.
    Rest,
    /// A whole set in one of the ways.
    Everything(usize),
    /// A tensor that is no good.
    Bad(usize, u8),
}

#[derive(Debug, Clone, Copy)]
enum End {
    Commit,
    Drop,
    Panic,
}

#[derive(Debug, Clone)]
enum Op {
    Update { in_place: bool, partial: Option<Vec<usize>>, set: u64, pushes: Vec<Push>, end: End },
    Wake,
    Generate(u32),
    Sleep(u8),
    Load { set: u64, way: usize, bad: bool },
    Discard,
}

fn push() -> impl Strategy<Value = Push> {
    let tensor = || 0..21usize;
    prop_oneof![
        3 => prop::collection::vec(tensor(), 1..4).prop_map(Push::Tensors),
        2 => (tensor(), prop::bool::weighted(0.8)).prop_map(|(tensor, both)| Push::Halves(tensor, both)),
        2 => prop::collection::vec(tensor(), 1..3).prop_map(Push::Source),
        2 => (tensor(), 0..32u64, -1.0..1.0f32).prop_map(|(tensor, at, value)| Push::Change(tensor, at, value)),
        6 => Just(Push::Rest),
        2 => (0..WAYS).prop_map(Push::Everything),
        1 => (tensor(), 0..4u8).prop_map(|(tensor, kind)| Push::Bad(tensor, kind)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let partial = prop::option::of(prop::collection::vec(0..21usize, 1..5));
    let end = prop_oneof![5 => Just(End::Commit), 1 => Just(End::Drop), 1 => Just(End::Panic)];
    let update = (
        any::<bool>(),
        partial,
        0..SETS,
        prop::collection::vec(push(), 0..4),
        end,
        prop::bool::weighted(0.7),
    );
    prop_oneof![
        14 => update.prop_map(|(in_place, partial, set, mut pushes, end, rest)| {
            pushes.extend(rest.then_some(Push::Rest));
            Op::Update { in_place, partial, set, pushes, end }
        }),
        3 => Just(Op::Wake),
        2 => (0..4u32).prop_map(Op::Generate),
        3 => (0..3u8).prop_map(Op::Sleep),
        2 => (0..SETS, 0..WAYS, prop::bool::weighted(0.3)).prop_map(|(set, way, bad)| Op::Load { set, way, bad }),
        1 => Just(Op::Discard),
    ]
}

#[expect(clippy::large_enum_variant, reason = "there is one")]
enum State {
    Awake(Engine<Awake>),
    Loaded(Engine<WeightsLoaded>),
    Kept(Engine<Sleeping<Kept>>),
    Discarded(Engine<Sleeping<Discarded>>),
}

/// What there should be.
struct Model {
    sets: Vec<Weights>,
    /// Of the engine, if they are whole.
    weights: Weights,
    torn: bool,
    counter: u64,
}

impl Model {
    fn name(&self, tensor: usize) -> &str {
        &self.weights.0[tensor].0
    }
}

/// What an update has done to the model so far.
struct Progress {
    wanted: Vec<String>,
    arrived: BTreeMap<String, Vec<u8>>,
    /// Tensors of which the back waits.
    half: Vec<String>,
    failed: bool,
    written: bool,
}

impl Progress {
    /// A tensor that can come now, if there is one; for some numbers any tensor.
    fn pick(&self, number: usize, model: &Model) -> String {
        let open: Vec<&String> = self.wanted.iter().filter(|name| self.takes(name)).collect();
        match open.len() {
            0 => model.name(number).to_owned(),
            _ if number.is_multiple_of(10) => model.name(number).to_owned(),
            len => open[number % len].clone(),
        }
    }

    /// Whether a whole tensor can come now.
    fn takes(&self, name: &str) -> bool {
        !self.failed
            && self.wanted.iter().any(|wanted| wanted == name)
            && !self.arrived.contains_key(name)
            && !self.half.iter().any(|half| half == name)
    }

    fn arrive(&mut self, name: &str, data: &[u8]) {
        self.arrived.insert(name.to_owned(), data.to_vec());
        self.written = true;
    }
}

/// One push, on the update and on the model, which must agree.
fn apply(push: &Push, update: &mut Update<'_>, model: &Model, set: &Weights, progress: &mut Progress) {
    match push {
        Push::Tensors(tensors) => {
            for name in tensors.iter().map(|&tensor| progress.pick(tensor, model)).collect::<Vec<_>>() {
                let name = name.as_str();
                let good = progress.takes(name);
                assert_eq!(update.tensor(name, get(set, name)).is_ok(), good, "{name}");
                progress.failed |= !good;
                if good {
                    progress.arrive(name, &get(set, name).data);
                }
            }
        }
        Push::Halves(tensor, both) => {
            let name = progress.pick(*tensor, model);
            let (name, tensor) = (name.as_str(), get(set, &name));
            let half = tensor.data.len() / 2;
            let good = progress.takes(name);
            assert_eq!(update.piece(&spec(name, tensor), half, &tensor.data[half..]).is_ok(), good);
            progress.failed |= !good;
            if good && *both {
                update.piece(&spec(name, tensor), 0, &tensor.data[..half]).unwrap();
                progress.arrive(name, &tensor.data);
            } else if good {
                progress.half.push(name.to_owned());
            }
        }
        Push::Source(tensors) => {
            let names: Vec<String> = tensors.iter().map(|&tensor| progress.pick(tensor, model)).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let twice = (1..names.len()).any(|i| names[..i].contains(&names[i]));
            let good = !twice && names.iter().all(|name| progress.takes(name));
            assert_eq!(update.all(&mut only(set, &names)).is_ok(), good, "{names:?}");
            progress.failed |= !good;
            if good {
                names.iter().for_each(|name| progress.arrive(name, &get(set, name).data));
            }
        }
        Push::Change(tensor, at, value) => change(update, model, progress, (*tensor, *at, *value)),
        Push::Rest => {
            let wanted = progress.wanted.clone();
            let rest: Vec<&str> =
                wanted.iter().map(String::as_str).filter(|name| progress.takes(name)).collect();
            assert_eq!(update.all(&mut only(set, &rest)).is_ok(), !progress.failed);
            rest.iter().for_each(|name| progress.arrive(name, &get(set, name).data));
        }
        Push::Everything(way) => {
            let good = model.weights.0.iter().all(|(name, _)| progress.takes(name));
            if !good {
                return;
            }
            feed(*way, update, set).unwrap();
            set.0.iter().for_each(|(name, tensor)| progress.arrive(name, &tensor.data));
        }
        Push::Bad(tensor, kind) => {
            push_bad(update, model.name(*tensor), set, *kind);
            progress.failed = true;
        }
    }
}

fn change(
    update: &mut Update<'_>,
    model: &Model,
    progress: &mut Progress,
    (tensor, at, value): (usize, u64, f32),
) {
    let name = progress.pick(tensor, model);
    let name = name.as_str();
    let values = value.to_le_bytes();
    let delta = Delta::Sparse { indices: &[at], values: &values, dtype: DType::F32, op: SparseOp::Set };
    // Of the memory as it is now, where the update is in place: nothing else has touched this tensor.
    let good = progress.takes(name) && !model.torn;
    let pushed = update.push_delta(name, &delta);
    assert_eq!(pushed.is_ok(), good, "{name}: {pushed:?}");
    progress.failed |= !good;
    if good {
        let mut data = get(&model.weights, name).data.clone();
        data[at as usize * 4..][..4].copy_from_slice(&values);
        progress.arrive(name, &data);
    }
}

/// Pushes something wrong, which must be refused.
fn push_bad(update: &mut Update<'_>, name: &str, set: &Weights, kind: u8) {
    let mut bad = get(set, name).clone();
    let pushed = match kind {
        0 => update.tensor("model.layers.9.mlp.up_proj.weight", &bad),
        1 => {
            bad.shape.push(1);
            update.tensor(name, &bad)
        }
        2 => {
            bad.data.pop();
            update.tensor(name, &bad)
        }
        _ => update.piece(&spec(name, &bad), bad.data.len(), &[0]),
    };
    assert!(pushed.is_err());
}

fn update(loaded: &mut Engine<WeightsLoaded>, model: &mut Model, op: &Op) {
    let Op::Update { in_place, partial, set, pushes, end } = op else { unreachable!() };
    let set = &model.sets[*set as usize].clone();
    let mut options = UpdateOptions::from(LoadOptions::default().label(format!("from {}", model.counter)));
    if *in_place {
        options = options.in_place();
    }
    let all = || model.weights.0.iter().map(|(name, _)| name.clone());
    let mut wanted: Vec<String> = all().collect();
    if let Some(partial) = partial {
        wanted = partial.iter().map(|&tensor| model.name(tensor).to_owned()).collect();
        options = options.partial(wanted.clone());
        wanted.sort();
        wanted.dedup();
    }
    let begun = loaded.begin_update(options);
    if partial.is_some() && model.torn {
        assert!(matches!(begun, Err(BeginError::Torn { .. })));
        return;
    }
    let mut update = begun.unwrap();
    let mut progress =
        Progress { wanted, arrived: BTreeMap::new(), half: Vec::new(), failed: false, written: false };
    for push in pushes {
        apply(push, &mut update, model, set, &mut progress);
    }
    let complete = progress.arrived.len() == progress.wanted.len();
    match end {
        End::Drop => drop(update),
        End::Panic => {
            let feeding = AssertUnwindSafe(move || {
                let _update = update;
                std::panic::resume_unwind(Box::new("the feeding code panics"));
            });
            catch_unwind(feeding).unwrap_err();
        }
        End::Commit => match update.commit() {
            Ok(report) => {
                assert!(complete && !progress.failed);
                assert_eq!(report.previous.counter, model.counter_of_whole());
                for (name, data) in progress.arrived {
                    get_mut(&mut model.weights, &name).data = data;
                }
                model.counter += 1;
                model.torn = false;
                assert_eq!(report.version.counter, model.counter);
                return;
            }
            Err(CommitError::PushFailed) => assert!(progress.failed),
            Err(CommitError::Mismatch(faults)) => {
                assert!(!complete && !progress.failed);
                let absent = progress.wanted.len() - progress.arrived.len() - progress.half.len();
                assert_eq!((faults.incomplete.len(), faults.missing.len()), (progress.half.len(), absent));
            }
            Err(error) => panic!("{error}"),
        },
    }
    model.torn |= *in_place && progress.written;
}

impl Model {
    /// Counter of the last whole weights: a torn update takes none.
    fn counter_of_whole(&self) -> u64 {
        self.counter
    }

    fn check(&self, state: &State) {
        let whole = match state {
            State::Awake(engine) => {
                assert_eq!(engine.version().digest, digest(&self.weights));
                assert_eq!(engine.version().counter, self.counter);
                engine.verify().unwrap();
                let name = self.name(self.counter as usize % 21);
                assert!(engine.tensor(name).unwrap().data == get(&self.weights, name).data);
                return;
            }
            State::Loaded(loaded) => loaded,
            State::Kept(asleep) => {
                assert_eq!(
                    parts(asleep.memory()).total_bytes(),
                    asleep.report().parked_bytes.max(asleep.memory().weights_bytes)
                );
                return;
            }
            State::Discarded(asleep) => {
                assert_eq!(parts(asleep.memory()).total_bytes(), 0);
                return;
            }
        };
        if self.torn {
            assert_eq!(whole.version(), None);
            assert!(matches!(whole.verify(), Err(VerifyError::Torn { .. })));
            assert!(matches!(whole.tensor(self.name(0)), Err(TensorError::Torn { .. })));
            return;
        }
        let version = whole.version().unwrap();
        assert_eq!((version.digest, version.counter), (digest(&self.weights), self.counter));
        assert_eq!(whole.verify().unwrap().version, version);
        for (name, tensor) in &self.weights.0 {
            assert!(whole.tensor(name).unwrap().data == tensor.data, "{name}");
        }
    }

    fn loaded(&mut self, set: u64) {
        self.weights = self.sets[set as usize].clone();
        self.torn = false;
        self.counter += 1;
    }
}

macro_rules! load {
    ($asleep:expr, $back:path, $model:expr, $set:expr, $way:expr, $bad:expr) => {{
        let set = $model.sets[$set as usize].clone();
        let mut load = $asleep.begin_load(LoadOptions::default()).unwrap();
        if $bad {
            // Half of it, and then it is given up, or can't be committed.
            load.all(&mut Weights(set.0[..10].to_vec()).source()).unwrap();
            match $way % 2 {
                0 => $back(load.abandon()),
                _ => $back(load.commit().unwrap_err().into_parts().0),
            }
        } else {
            feed($way, &mut load, &set).unwrap();
            let loaded = load.commit().unwrap();
            $model.loaded($set);
            State::Loaded(loaded)
        }
    }};
}

fn step(state: State, model: &mut Model, op: &Op) -> State {
    match (state, op) {
        (State::Loaded(mut loaded), Op::Update { .. }) => {
            update(&mut loaded, model, op);
            State::Loaded(loaded)
        }
        (State::Loaded(loaded), Op::Wake) => match loaded.wake_up() {
            Ok(engine) => {
                assert!(!model.torn);
                State::Awake(engine)
            }
            Err(failed) => {
                let (loaded, error) = failed.into_parts();
                assert!(matches!(error, WakeError::Torn { .. }) && model.torn, "{error}");
                State::Loaded(loaded)
            }
        },
        (State::Loaded(loaded), Op::Sleep(_)) => match loaded.park_weights() {
            Ok(asleep) => {
                assert!(!model.torn);
                State::Kept(asleep)
            }
            Err(failed) => {
                let (loaded, error) = failed.into_parts();
                assert!(matches!(error, ParkError::Torn { .. }) && model.torn, "{error}");
                State::Loaded(loaded)
            }
        },
        (State::Loaded(loaded), Op::Discard | Op::Load { .. }) => State::Discarded(loaded.discard_weights()),
        (State::Awake(engine), Op::Generate(seed)) => {
            let output = engine.generate(&[request(*seed)]).unwrap().remove(0);
            assert_eq!(bits(&output), bits(&fresh(&model.weights, false, &request(*seed))));
            assert_eq!(output.completions[0].versions[0].version, engine.version());
            State::Awake(engine)
        }
        (State::Awake(engine), Op::Sleep(0) | Op::Load { .. }) => {
            State::Discarded(engine.sleep_discarding(SleepOptions::default()).unwrap())
        }
        (State::Awake(engine), Op::Sleep(1)) => State::Kept(engine.sleep(SleepOptions::default()).unwrap()),
        (State::Awake(engine), Op::Sleep(_) | Op::Update { .. }) => {
            State::Kept(engine.sleep(SleepOptions::default().resident()).unwrap())
        }
        (State::Kept(asleep), Op::Load { set, way, bad }) => {
            load!(asleep, State::Kept, model, *set, *way, *bad)
        }
        (State::Kept(asleep), Op::Discard) => State::Discarded(asleep.discard_weights()),
        (State::Kept(asleep), _) => State::Loaded(asleep.restore_weights().unwrap()),
        (State::Discarded(asleep), Op::Load { set, way, bad }) => {
            load!(asleep, State::Discarded, model, *set, *way, *bad)
        }
        (State::Discarded(asleep), Op::Update { set, .. }) => {
            load!(asleep, State::Discarded, model, *set, 27, false)
        }
        (state, _) => state,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::common::cases(96), ..ProptestConfig::default() })]

    #[test]
    fn c13_c15_c18_b28_b48_whatever_happens_the_weights_are_those_that_were_committed(
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let sets: Vec<Weights> = (1..=SETS).map(|seed| tiny_weights(false, DType::F32, seed)).collect();
        let mut model = Model { weights: sets[0].clone(), sets, torn: false, counter: 1 };
        prop_assert_eq!(model.weights.0.len(), 21);
        let mut state = State::Awake(awake(tiny_builder(false, DType::F32), &model.weights));
        for op in &ops {
            state = step(state, &mut model, op);
            model.check(&state);
        }
        // Whatever it came to, a complete update leads out of it.
        if let State::Loaded(mut loaded) = state {
            loaded.update(model.sets[1].source()).unwrap();
            model.loaded(1);
            model.check(&State::Loaded(loaded));
        }
    }
}

/// An error is of the kind that its doc says.
#[test]
fn a_tensor_that_lies_about_its_length_is_an_error_of_the_source() {
    let w0 = tiny_weights(false, DType::F32, 1);
    let mut loaded = crate::support::loaded(&w0);
    let mut update = loaded.begin_update(UpdateOptions::default()).unwrap();
    let mut bad = w0.0[0].1.clone();
    bad.data.pop();
    assert!(matches!(update.tensor(&w0.0[0].0, &bad), Err(PushError::Index(_))));
}
