//! The transitions: what they keep, what they free, and what a failed one gives back. Tests are named after
//! their case; "fresh" is a new engine with the same weights.

mod common;
#[path = "common/trace.rs"]
mod trace;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{Tensor, Weights, awake, bits, encode, fresh, prompt, tiny_builder, tiny_weights};
use dormouse::{
    Awake, Checkpoint, DType, Discarded, Engine, Failed, Kept, KvCapacity, LoadError, Request, Retention,
    SleepOptions, Sleeping, SourceError, TensorSet, TensorSpec, TransferError, WeightSource, WeightsLoaded,
};

fn weights(seed: u64) -> Weights {
    tiny_weights(false, DType::F32, seed)
}

fn engine(weights: &Weights) -> Engine<Awake> {
    awake(tiny_builder(false, DType::F32), weights)
}

/// Several blocks of prompt, some tokens, sampled.
fn request(seed: u32) -> Request {
    Request::new(prompt(21, seed)).max_new_tokens(9).ignore_eos(true).seed(u64::from(seed))
}

#[track_caller]
fn assert_like_fresh(engine: &Engine<Awake>, weights: &Weights, request: &Request) {
    let output = engine.generate(std::slice::from_ref(request)).expect("a valid request").remove(0);
    assert_eq!(bits(&output), bits(&fresh(weights, false, request)));
}

fn load<W>(asleep: Engine<Sleeping<W>>, weights: &Weights) -> Engine<WeightsLoaded>
where
    W: Retention,
    Engine<Sleeping<W>>: Load,
{
    asleep.load(weights.source().into_boxed()).expect("complete weights")
}

/// `load_weights` of both kinds of sleep.
trait Load: Sized {
    fn load(self, source: Box<dyn WeightSource + '_>) -> Result<Engine<WeightsLoaded>, (Self, LoadError)>;
}
impl Load for Engine<Sleeping<Discarded>> {
    fn load(self, source: Box<dyn WeightSource + '_>) -> Result<Engine<WeightsLoaded>, (Self, LoadError)> {
        self.load_weights(source).map_err(Failed::into_parts)
    }
}
impl Load for Engine<Sleeping<Kept>> {
    fn load(self, source: Box<dyn WeightSource + '_>) -> Result<Engine<WeightsLoaded>, (Self, LoadError)> {
        self.load_weights(source).map_err(Failed::into_parts)
    }
}

trait IntoBoxed<'a> {
    fn into_boxed(self) -> Box<dyn WeightSource + 'a>;
}
impl<'a, S: WeightSource + 'a> IntoBoxed<'a> for S {
    fn into_boxed(self) -> Box<dyn WeightSource + 'a> {
        Box::new(self)
    }
}

#[test]
fn c01_a_sleep_settles_then_frees_and_reports_all_of_it() {
    use dormouse::InFlight;
    let w0 = weights(1);
    let engine = awake(tiny_builder(false, DType::F32).max_num_seqs(1), &w0);
    engine.generate(&[request(9)]).expect("leaves cached blocks");
    let ids = [engine.submit(request(1)).unwrap(), engine.submit(request(2)).unwrap()];
    for _ in 0..3 {
        engine.step().unwrap();
    }
    let (before, stats) = (engine.memory(), engine.stats());
    assert_eq!((stats.running, stats.waiting), (1, 1), "{stats:?}");
    let log = trace::Log::default();
    let asleep = tracing::subscriber::with_default(log.clone(), || {
        engine.sleep(SleepOptions::default().in_flight(InFlight::Abort)).expect("aborts")
    });
    let report = asleep.report();
    assert_eq!(report.settled.aborted, ids);
    assert!(report.settled.drained.is_empty() && report.settled.retracted.is_empty());
    // The partly filled block of the aborted request was given up with it; all others held something.
    assert_eq!(report.blocks_dropped, stats.blocks_cached + stats.blocks_owned - 1);
    assert_eq!(report.freed, before, "what was there was freed");
    assert_eq!(report.parked_bytes, before.weights_bytes);
    assert_eq!(asleep.memory().total_bytes(), report.parked_bytes);
    assert_eq!(asleep.memory().parked_bytes, report.parked_bytes);
    let lines = log.lines();
    let at = |text: &str| lines.iter().position(|line| line == text).unwrap_or_else(|| panic!("{lines:?}"));
    assert!(at("enter sleep") < at("requests settled") && at("requests settled") < at("asleep"));
    assert!(at("asleep") < at("exit sleep"));
}

#[test]
fn c07_b18_an_incomplete_load_lists_what_is_missing_and_the_engine_comes_back() {
    let (w0, w1) = (weights(1), weights(2));
    let first_layer_only =
        Weights(w1.0.iter().filter(|(name, _)| !name.contains(".layers.1.")).cloned().collect());
    let missing: Vec<String> =
        w1.0.iter().map(|(name, _)| name.clone()).filter(|name| name.contains(".layers.1.")).collect();
    assert!(missing.len() > 5);
    let check = |error: LoadError| {
        let LoadError::Mismatch(mismatch) = error else { panic!("{error}") };
        let mut expected = missing.clone();
        expected.sort();
        let mut listed = mismatch.missing.clone();
        listed.sort();
        assert_eq!((listed, mismatch.num_faults()), (expected, missing.len()));
        assert!(missing.iter().all(|name| mismatch.to_string().contains(name)), "{mismatch}");
    };
    let asleep = engine(&w0).sleep_discarding(SleepOptions::default()).unwrap();
    let (asleep, error) = asleep.load_weights(first_layer_only.source()).unwrap_err().into_parts();
    check(error);
    assert_eq!(asleep.memory().total_bytes(), 0);
    assert_like_fresh(&load(asleep, &w1).wake_up().unwrap(), &w1, &request(1));
    for options in [SleepOptions::default(), SleepOptions::default().resident()] {
        let asleep = engine(&w0).sleep(options).unwrap();
        let memory = asleep.memory();
        let (asleep, error) = asleep.load_weights(first_layer_only.source()).unwrap_err().into_parts();
        check(error);
        assert_eq!(asleep.memory(), memory);
        assert_like_fresh(&asleep.restore_weights().unwrap().wake_up().unwrap(), &w0, &request(1));
    }
}

#[test]
fn c08_discard_cycle_same_weights_is_bit_identical() {
    let w0 = weights(1);
    let mut engine = engine(&w0);
    for cycle in 1..=3 {
        for (cached, request) in [(0, request(1)), (20, request(1)), (0, request(2))] {
            let request = request.temperature(0.0);
            let output = engine.generate(std::slice::from_ref(&request)).unwrap().remove(0);
            assert_eq!(bits(&output), bits(&fresh(&w0, false, &request)), "cycle {cycle}");
            assert_eq!(output.completions[0].cached_tokens, cached, "cycle {cycle}");
        }
        let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
        engine = load(asleep, &w0).wake_up().unwrap();
        assert_eq!(engine.version().counter, cycle + 1);
    }
}

#[test]
fn c09_b01_under_other_weights_nothing_is_cached_and_all_is_fresh() {
    let (w0, w1) = (weights(1), weights(2));
    let request = request(1);
    assert_ne!(bits(&fresh(&w0, false, &request)), bits(&fresh(&w1, false, &request)), "weights matter");
    let check = |loaded: Engine<WeightsLoaded>| {
        let engine = loaded.wake_up().unwrap();
        let stats = engine.stats();
        assert_eq!((stats.blocks_free, stats.blocks_cached), (stats.blocks, 0));
        let output = engine.generate(std::slice::from_ref(&request)).unwrap().remove(0);
        assert_eq!(output.completions[0].cached_tokens, 0);
        assert_eq!(bits(&output), bits(&fresh(&w1, false, &request)));
        assert_eq!(engine.stats().cached_tokens, 0);
    };
    let warm = || {
        let engine = engine(&w0);
        assert_like_fresh(&engine, &w0, &request);
        assert!(engine.stats().blocks_cached >= 5);
        engine
    };
    check(load(warm().sleep_discarding(SleepOptions::default()).unwrap(), &w1));
    check(load(warm().sleep(SleepOptions::default()).unwrap(), &w1));
    check(load(warm().sleep(SleepOptions::default().resident()).unwrap(), &w1));
}

#[test]
fn c11_b16_sleeping_and_waking_in_every_order_keeps_bytes_and_bits() {
    let w = [weights(1), weights(2)];
    let mut current = 0;
    let mut engine = engine(&w[0]);
    let before = engine.memory();
    for round in 0..36 {
        let loaded = match round % 6 {
            0 => engine.sleep(SleepOptions::default()).unwrap().restore_weights().unwrap(),
            1 => engine.sleep(SleepOptions::default().resident()).unwrap().restore_weights().unwrap(),
            kind => {
                current = (round / 6) % 2;
                let next = &w[current];
                match kind {
                    2 => load(engine.sleep_discarding(SleepOptions::default()).unwrap(), next),
                    3 => load(engine.sleep(SleepOptions::default()).unwrap(), next),
                    4 => load(engine.sleep(SleepOptions::default().resident()).unwrap(), next),
                    _ => load(
                        // Asleep, loaded, awake and asleep again with nothing between.
                        load(engine.sleep_discarding(SleepOptions::default()).unwrap(), next)
                            .wake_up()
                            .unwrap()
                            .sleep(SleepOptions::default())
                            .unwrap(),
                        next,
                    ),
                }
            }
        };
        let memory = loaded.memory();
        assert_eq!(
            (memory.weights_bytes, memory.total_bytes()),
            (before.weights_bytes, before.weights_bytes)
        );
        engine = loaded.wake_up().unwrap();
        assert_eq!(engine.memory(), before, "round {round}");
        assert_like_fresh(&engine, &w[current], &request(round as u32 % 4));
    }
}

#[test]
fn b16_an_engine_can_be_dropped_in_every_state() {
    let w0 = weights(1);
    let busy = || {
        let engine = engine(&w0);
        engine.submit(request(1)).unwrap();
        engine.step().unwrap();
        engine
    };
    let options = SleepOptions::default().in_flight(dormouse::InFlight::Retract);
    drop(busy());
    drop(busy().sleep(options).unwrap());
    drop(busy().sleep(options.resident()).unwrap());
    drop(busy().sleep_discarding(options).unwrap());
    drop(busy().sleep(options).unwrap().restore_weights().unwrap());
    drop(load(busy().sleep_discarding(options).unwrap(), &w0));
    drop(busy().sleep(options).unwrap().restore_weights().unwrap().wake_up().unwrap());
}

/// Every kind of fault at once, and which they are.
fn faulty_set(base: &Weights) -> (Weights, [String; 5]) {
    let mut set = base.clone();
    let (missing, _) = set.0.remove(3);
    let transposed = {
        let (name, tensor) =
            set.0.iter_mut().find(|(_, t)| t.shape.len() == 2 && t.shape[0] != t.shape[1]).expect("a matrix");
        tensor.shape.reverse();
        name.clone()
    };
    let other_dtype = {
        let (name, tensor) =
            set.0.iter_mut().find(|(name, _)| name.ends_with("norm.weight")).expect("a norm");
        *tensor = encode(DType::Bf16, tensor.shape.clone(), vec![1.0; tensor.shape[0]]);
        name.clone()
    };
    let duplicate = set.0.last().expect("not empty").clone();
    set.0.push(duplicate.clone());
    let unknown = "model.layers.7.mlp.up_proj.weight".to_owned();
    set.0.push((unknown.clone(), duplicate.1.clone()));
    (set, [missing, transposed, other_dtype, duplicate.0, unknown])
}

#[test]
fn c17_every_fault_of_a_set_is_listed_and_old_weights_stand() {
    let (w0, w1) = (weights(1), weights(2));
    let (bad, [missing, shape, dtype, duplicate, unknown]) = faulty_set(&w1);
    for options in [SleepOptions::default(), SleepOptions::default().resident()] {
        let asleep = engine(&w0).sleep(options).unwrap();
        let (asleep, error) = asleep.load_weights(bad.source()).unwrap_err().into_parts();
        let LoadError::Mismatch(mismatch) = error else { panic!("{error}") };
        assert_eq!(mismatch.num_faults(), 5, "{mismatch}");
        assert_eq!(mismatch.missing, [missing.clone()]);
        assert_eq!(mismatch.wrong_shape[0].name, shape);
        assert_eq!(mismatch.wrong_dtype[0].name, dtype);
        assert_eq!(mismatch.duplicate, [duplicate.clone()]);
        assert_eq!(mismatch.unknown, [unknown.clone()]);
        assert_like_fresh(&asleep.restore_weights().unwrap().wake_up().unwrap(), &w0, &request(1));
    }
}

#[test]
fn b23_a_wrong_shape_of_any_kind_is_named_and_a_full_load_recovers() {
    let (w0, w1) = (weights(1), weights(2));
    type Reshape = fn(&mut Tensor);
    let kinds: [Reshape; 3] = [
        |t| t.shape.reverse(),
        |t| {
            t.data.extend_from_within(..t.shape[1] * 4);
            t.shape[0] += 1;
        },
        |t| t.shape = vec![t.shape.iter().product()],
    ];
    let mut asleep = engine(&w0).sleep(SleepOptions::default().resident()).unwrap();
    for reshape in kinds {
        let mut bad = w1.clone();
        let (name, tensor) = bad.0.iter_mut().rfind(|(n, _)| n.ends_with("down_proj.weight")).unwrap();
        let expected = tensor.shape.clone();
        reshape(tensor);
        let (name, received) = (name.clone(), tensor.shape.clone());
        let (back, error) = asleep.load_weights(bad.source()).unwrap_err().into_parts();
        let LoadError::Mismatch(mismatch) = error else { panic!("{error}") };
        let wrong = &mismatch.wrong_shape[0];
        assert_eq!((&wrong.name, &wrong.expected, &wrong.received), (&name, &expected, &received));
        asleep = back;
    }
    let engine = load(asleep, &w1).wake_up().unwrap();
    assert_eq!(engine.version().counter, 2, "failed loads take no version");
    assert_like_fresh(&engine, &w1, &request(1));
}

/// What a [`Faulty`] source does at its `at`-th read.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Error,
    HalfThenError,
    Panic,
    HalfThenPanic,
    Short,
    Nothing,
    Long,
    Finish,
}

struct Faulty<S> {
    inner: S,
    fault: Fault,
    at: usize,
    reads: usize,
}

impl<S: WeightSource> WeightSource for Faulty<S> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.inner.index()
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.reads += 1;
        if self.reads != self.at + 1 {
            return self.inner.read(tensor, sink);
        }
        let mut bytes = Vec::new();
        self.inner.read(tensor, &mut |piece| bytes.extend_from_slice(piece))?;
        let half = bytes.len() / 2;
        match self.fault {
            Fault::Error => return Err(SourceError::NoSuchTensor { tensor, count: 0 }),
            Fault::HalfThenError => {
                sink(&bytes[..half]);
                return Err(SourceError::NoSuchTensor { tensor, count: 0 });
            }
            Fault::Panic => panic!("a source that panics"),
            Fault::HalfThenPanic => {
                sink(&bytes[..half]);
                panic!("a source that panics");
            }
            Fault::Short => sink(&bytes[..half]),
            Fault::Nothing => {}
            Fault::Long => {
                sink(&bytes);
                sink(&[0; 4]);
            }
            Fault::Finish => sink(&bytes),
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), SourceError> {
        match self.fault {
            Fault::Finish => Err(SourceError::ChangedDuringRead { path: "gone".into() }),
            _ => self.inner.finish(),
        }
    }
}

/// A load that fails in the middle leaves the sleeping engine as it was, every time.
fn fails_and_recovers<W: Retention>(
    mut asleep: Engine<Sleeping<W>>,
    w1: &Weights,
    then: impl FnOnce(Engine<Sleeping<W>>),
) where
    Engine<Sleeping<W>>: Load,
{
    let memory = asleep.memory();
    let tensors = w1.0.len();
    for fault in
        [Fault::Error, Fault::HalfThenError, Fault::Short, Fault::Nothing, Fault::Long, Fault::Finish]
    {
        for at in [0, 1, tensors / 2, tensors - 1] {
            let source = Faulty { inner: w1.source(), fault, at, reads: 0 };
            let (back, error) = asleep.load(Box::new(source)).expect_err("the source is faulty");
            asleep = back;
            match (fault, &error) {
                (Fault::Error | Fault::HalfThenError | Fault::Finish, LoadError::Transfer(error)) => {
                    assert!(matches!(error, TransferError::Source(_)), "{error}");
                }
                (_, LoadError::Transfer(TransferError::WrongLength { tensor, .. })) => {
                    assert!(w1.0.iter().any(|(name, _)| name == tensor));
                }
                _ => panic!("{fault:?} gave {error}"),
            }
            assert_eq!(asleep.memory(), memory, "{fault:?} at {at}");
        }
    }
    then(asleep);
}

#[test]
fn c18_b32_b33_b46_b48_a_load_that_fails_half_way_changes_nothing() {
    let (w0, w1) = (weights(1), weights(2));
    let loads_w1 = |engine: Engine<WeightsLoaded>| {
        assert_eq!(engine.version().counter, 2, "failed loads take no version");
        assert_like_fresh(&engine.wake_up().unwrap(), &w1, &request(1));
    };
    let discarded = engine(&w0).sleep_discarding(SleepOptions::default()).unwrap();
    fails_and_recovers(discarded, &w1, |asleep| loads_w1(load(asleep, &w1)));
    for options in [SleepOptions::default(), SleepOptions::default().resident()] {
        let kept = || engine(&w0).sleep(options).unwrap();
        fails_and_recovers(kept(), &w1, |asleep| {
            let loaded = asleep.restore_weights().unwrap();
            assert_eq!(loaded.version().counter, 1);
            assert_like_fresh(&loaded.wake_up().unwrap(), &w0, &request(1));
        });
        fails_and_recovers(kept(), &w1, |asleep| loads_w1(load(asleep, &w1)));
    }
}

#[test]
fn c18_a_source_that_panics_takes_its_engine_along_and_nothing_else() {
    let (w0, w1) = (weights(1), weights(2));
    let bystander = engine(&w0);
    for fault in [Fault::Panic, Fault::HalfThenPanic] {
        for options in [None, Some(SleepOptions::default()), Some(SleepOptions::default().resident())] {
            let source = || Faulty { inner: w1.source(), fault, at: 2, reads: 0 };
            let engine = engine(&w0);
            let outcome = catch_unwind(AssertUnwindSafe(|| match options {
                None => {
                    engine.sleep_discarding(SleepOptions::default()).unwrap().load(Box::new(source())).is_ok()
                }
                Some(options) => engine.sleep(options).unwrap().load(Box::new(source())).is_ok(),
            }));
            assert!(outcome.is_err(), "the panic reaches the caller");
        }
    }
    assert_like_fresh(&bystander, &w0, &request(1));
    assert_like_fresh(&engine(&w1), &w1, &request(1));
}

#[test]
fn c20_what_is_not_a_parameter_survives_or_is_rebuilt() {
    // Scaled rotary embeddings, sliding windows, per-head norms, biases.
    for family in ["llama3", "mistral", "qwen2_yarn", "qwen3"] {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(family);
        let build = || {
            let builder =
                Engine::builder(&directory).kv_cache(KvCapacity::Blocks(64)).block_size(4).threads(1);
            builder.build().expect("a valid checkpoint")
        };
        let requests: Vec<Request> = [(40, 0.0), (33, 0.9)]
            .map(|(len, temperature)| {
                let request = Request::new(prompt(len, 3)).temperature(temperature).seed(5);
                request.max_new_tokens(12).ignore_eos(true).repetition_penalty(1.2)
            })
            .into();
        let run = |engine: &Engine<Awake>| -> Vec<_> {
            engine.generate(&requests).expect("valid requests").iter().map(bits).collect()
        };
        let expected = run(&build());
        let mut engine = build();
        for cycle in 0..3 {
            assert_eq!(run(&engine), expected, "{family}, cycle {cycle}");
            let options = SleepOptions::default();
            engine = match cycle {
                0 => engine.sleep(options).unwrap().restore_weights().unwrap(),
                1 => engine
                    .sleep(options.resident())
                    .unwrap()
                    .load_weights(Checkpoint::at(&directory))
                    .unwrap(),
                _ => engine
                    .sleep_discarding(options)
                    .unwrap()
                    .load_weights(Checkpoint::at(&directory))
                    .unwrap(),
            }
            .wake_up()
            .unwrap();
        }
        assert_eq!(run(&engine), expected, "{family}");
    }
}

#[test]
fn c22_b48_a_version_is_what_the_load_returned_and_its_digest_names_the_weights() {
    let (w0, w1) = (weights(1), weights(2));
    let mut engine = engine(&w0);
    let mut versions = vec![engine.version()];
    for next in [&w1, &w0, &w0] {
        let loaded = load(engine.sleep_discarding(SleepOptions::default()).unwrap(), next);
        assert_eq!(loaded.report().previous.as_ref(), versions.last());
        assert_eq!(loaded.report().version, loaded.version());
        versions.push(loaded.version());
        engine = loaded.wake_up().unwrap();
        assert_eq!(
            (engine.version(), engine.report().version),
            (versions[versions.len() - 1], engine.version())
        );
        let output = engine.generate(&[request(1)]).unwrap().remove(0);
        let spans = &output.completions[0].versions;
        assert_eq!((spans.len(), spans[0].version, &spans[0].tokens), (1, engine.version(), &(0..9)));
    }
    assert_eq!(versions.iter().map(|v| v.counter).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let digests: Vec<_> = versions.iter().map(|v| v.digest).collect();
    assert!(digests[0] == digests[2] && digests[2] == digests[3] && digests[0] != digests[1]);
    let kept = engine.sleep(SleepOptions::default()).unwrap().restore_weights().unwrap();
    assert_eq!(kept.version(), versions[3], "a restore is no new version");
}

fn save_checkpoint(directory: &std::path::Path, weights: &Weights) {
    std::fs::write(directory.join("config.json"), common::tiny_config_json(false)).unwrap();
    weights.save(&directory.join("model.safetensors"));
}

#[test]
fn c27_a_load_reads_what_the_path_holds_now() {
    let (w0, w1) = (weights(1), weights(2));
    let directory = tempfile::tempdir().unwrap();
    save_checkpoint(directory.path(), &w0);
    let builder = Engine::builder(directory.path()).kv_cache(KvCapacity::Blocks(64)).block_size(4).threads(1);
    let on_disk = builder.build().unwrap();
    assert_eq!(on_disk.version(), engine(&w0).version(), "files and tensors in memory have one digest");
    assert_like_fresh(&on_disk, &w0, &request(1));
    let asleep = on_disk.sleep_discarding(SleepOptions::default()).unwrap();
    save_checkpoint(directory.path(), &w1);
    let loaded = asleep.load_weights(Checkpoint::at(directory.path())).unwrap();
    assert_eq!(loaded.version().digest, engine(&w1).version().digest);
    assert_like_fresh(&loaded.wake_up().unwrap(), &w1, &request(1));
}

/// Does something to the files after a number of reads.
struct Meddler<'a> {
    inner: Checkpoint,
    reads_left: usize,
    meddle: &'a mut dyn FnMut(),
}

impl WeightSource for Meddler<'_> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.inner.index()
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        if self.reads_left == 0 {
            (self.meddle)();
        }
        self.reads_left = self.reads_left.wrapping_sub(1);
        self.inner.read(tensor, sink)
    }
    fn finish(&mut self) -> Result<(), SourceError> {
        self.inner.finish()
    }
}

#[test]
fn c27_files_that_change_while_they_are_read_are_never_a_mix() {
    let (w0, w1) = (weights(1), weights(2));
    let digests = [&w0, &w1].map(|w| engine(w).version().digest);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let fresh_bytes = {
        w1.save(&path);
        std::fs::read(&path).unwrap()
    };
    let overwrite = || std::fs::write(&path, &fresh_bytes).unwrap();
    let truncate = || std::fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let rename = || {
        let other = directory.path().join("other");
        std::fs::write(&other, &fresh_bytes).unwrap();
        std::fs::rename(&other, &path).unwrap();
    };
    let remove = || std::fs::remove_file(&path).unwrap();
    let meddlers: [(&str, &dyn Fn(), bool); 4] = [
        ("overwritten", &overwrite, true),
        ("truncated", &truncate, true),
        ("replaced", &rename, false),
        ("removed", &remove, false),
    ];
    for (what, meddle, must_fail) in meddlers {
        for reads_left in [1, 10] {
            save_checkpoint(directory.path(), &w0);
            let asleep = engine(&w0).sleep(SleepOptions::default().resident()).unwrap();
            let mut meddle = meddle;
            let meddle: &mut dyn FnMut() = &mut || meddle();
            match asleep.load_weights(Meddler { inner: Checkpoint::at(directory.path()), reads_left, meddle })
            {
                // The old file, still open, is a whole set as well.
                Ok(loaded) => assert!(!must_fail && digests.contains(&loaded.version().digest), "{what}"),
                Err(failed) => {
                    let asleep = failed.into_parts().0;
                    assert_like_fresh(
                        &asleep.restore_weights().unwrap().wake_up().unwrap(),
                        &w0,
                        &request(1),
                    );
                }
            }
        }
    }
}

#[test]
fn c28_b26_a_tied_head_may_be_absent_or_equal_and_nothing_else() {
    let w0 = tiny_weights(true, DType::F32, 1);
    let w1 = tiny_weights(true, DType::F32, 2);
    let embedding =
        |w: &Weights| w.0.iter().find(|(n, _)| n == "model.embed_tokens.weight").unwrap().1.clone();
    let with_head = |head: Tensor| {
        let mut set = w1.clone();
        set.0.push(("lm_head.weight".into(), head));
        set
    };
    let head_only = {
        let mut set = with_head(embedding(&w1));
        set.0.retain(|(name, _)| name != "model.embed_tokens.weight");
        set
    };
    let sleep = |resident: bool| {
        let engine = awake(tiny_builder(true, DType::F32), &w0);
        let options = SleepOptions::default();
        engine.sleep(if resident { options.resident() } else { options }).unwrap()
    };
    let request = request(1);
    let expected = bits(&fresh(&w1, true, &request));
    for resident in [false, true] {
        for good in [&w1, &with_head(embedding(&w1))] {
            let engine = sleep(resident).load_weights(good.source()).unwrap().wake_up().unwrap();
            let output = engine.generate(std::slice::from_ref(&request)).unwrap().remove(0);
            assert_eq!(bits(&output), expected);
        }
        let (asleep, error) =
            sleep(resident).load_weights(with_head(embedding(&w0)).source()).unwrap_err().into_parts();
        assert!(matches!(error, LoadError::Transfer(TransferError::TiedHeadDiffers)), "{error}");
        assert!(error.to_string().contains("lm_head.weight"));
        let (asleep, error) = asleep.load_weights(head_only.source()).unwrap_err().into_parts();
        let LoadError::Mismatch(mismatch) = error else { panic!("{error}") };
        assert_eq!(mismatch.missing, ["model.embed_tokens.weight"]);
        let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
        let output = engine.generate(std::slice::from_ref(&request)).unwrap().remove(0);
        assert_eq!(bits(&output), bits(&fresh(&w0, true, &request)));
    }
}

#[test]
fn b15_a_cycle_needs_no_more_than_the_awake_engine_has() {
    let (w0, w1) = (weights(1), weights(2));
    let needed = engine(&w0).memory().total_bytes();
    let weights_bytes = engine(&w0).memory().weights_bytes;
    // Each part is committed in whole pages.
    let limit = needed + 3 * 4096;
    let mut engine = awake(tiny_builder(false, DType::F32).memory_limit_bytes(limit), &w0);
    for next in [&w1, &w0, &w1] {
        assert_like_fresh(&engine, if next.0[0].1.data == w1.0[0].1.data { &w0 } else { &w1 }, &request(1));
        let loaded = load(engine.sleep_discarding(SleepOptions::default()).unwrap(), next);
        assert_eq!(loaded.report().peak_weights_bytes, weights_bytes);
        engine =
            load(loaded.wake_up().unwrap().sleep(SleepOptions::default()).unwrap(), next).wake_up().unwrap();
    }
    assert_like_fresh(&engine, &w1, &request(1));
    // Below that the wake is refused, says how much is missing, and can be tried again.
    let tight = tiny_builder(false, DType::F32).memory_limit_bytes(weights_bytes + 4096);
    let loaded = load(tight.build_asleep().unwrap(), &w0);
    let (loaded, error) = loaded.wake_up().unwrap_err().into_parts();
    assert!(error.to_string().contains("bytes needed"), "{error}");
    assert_eq!(loaded.memory().total_bytes(), weights_bytes);
    loaded.wake_up().expect_err("as little memory as before");
}

#[test]
fn b19_an_engine_that_never_ran_sleeps_and_a_missing_path_wipes_nothing() {
    let w0 = weights(1);
    let mut engine = engine(&w0);
    for _ in 0..2 {
        let asleep = engine.sleep(SleepOptions::default()).unwrap();
        assert_eq!(asleep.report().blocks_dropped, 0);
        engine = asleep.restore_weights().unwrap().wake_up().unwrap();
    }
    assert_like_fresh(&engine, &w0, &request(1));
    let asleep = engine.sleep(SleepOptions::default()).unwrap();
    let memory = asleep.memory();
    let (asleep, error) =
        asleep.load_weights(Checkpoint::at("/nonexistent/dormouse")).unwrap_err().into_parts();
    assert!(matches!(error, LoadError::Source(_)) && error.to_string().contains("/nonexistent/dormouse"));
    assert_eq!(asleep.memory(), memory);
    assert_like_fresh(&asleep.restore_weights().unwrap().wake_up().unwrap(), &w0, &request(1));
    assert!(Engine::builder("/nonexistent/dormouse").build().is_err());
}

#[test]
fn b28_one_changed_matrix_changes_all_that_derives_from_it() {
    let (w0, w1) = (weights(1), weights(2));
    for changed in
        ["q_proj.weight", "up_proj.weight", "input_layernorm.weight", "embed_tokens.weight", "lm_head"]
    {
        let mut mix = w0.clone();
        let pairs = mix.0.iter_mut().zip(&w1.0).filter(|((name, _), _)| name.contains(changed));
        assert!(pairs.map(|((_, old), (_, new))| *old = new.clone()).count() > 0, "{changed}");
        let engine = engine(&w0);
        assert_like_fresh(&engine, &w0, &request(1));
        let asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
        let engine = load(asleep, &mix).wake_up().unwrap();
        assert_ne!(
            bits(&fresh(&mix, false, &request(1))),
            bits(&fresh(&w0, false, &request(1))),
            "{changed}"
        );
        assert_like_fresh(&engine, &mix, &request(1));
    }
}

#[test]
fn b68_nothing_of_the_callers_is_referred_to_after_a_load() {
    let (w0, w1) = (weights(1), weights(2));
    let asleep = engine(&w0).sleep(SleepOptions::default().resident()).unwrap();
    let mut sent = w1.clone();
    let loaded = asleep.load_weights(sent.source()).unwrap();
    sent.0.iter_mut().for_each(|(_, tensor)| tensor.data.fill(0xab));
    assert_like_fresh(&loaded.wake_up().unwrap(), &w1, &request(1));
    drop(sent);
    // A source's own tensors are dropped with it, when the call returns.
    let shared: Vec<std::sync::Arc<Tensor>> = w1.0.iter().map(|(_, t)| t.clone().into()).collect();
    let views = w1.0.iter().map(|(name, _)| name.clone()).zip(shared.iter().cloned().map(Shared));
    let loaded = load(engine(&w0).sleep_discarding(SleepOptions::default()).unwrap(), &w0);
    let asleep = loaded.wake_up().unwrap().sleep_discarding(SleepOptions::default()).unwrap();
    let loaded = asleep.load_weights(TensorSet::new(views)).unwrap();
    assert!(shared.iter().all(|tensor| std::sync::Arc::strong_count(tensor) == 1));
    assert_like_fresh(&loaded.wake_up().unwrap(), &w1, &request(1));
}

struct Shared(std::sync::Arc<Tensor>);

impl safetensors::View for Shared {
    fn dtype(&self) -> safetensors::Dtype {
        self.0.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.0.shape
    }
    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        (&self.0.data).into()
    }
    fn data_len(&self) -> usize {
        self.0.data.len()
    }
}
