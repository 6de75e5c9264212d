//! Loads: faulty sets, sources that fail, lie or panic half-way, files that change. The sleeping engine and
//! what it keeps stay as they were. Tests are named after their case.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod common;
#[path = "common/cycle.rs"]
mod cycle;
#[path = "common/faulty.rs"]
mod faulty;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::{
    Tensor, Weights, awake, bits, encode, fresh, on_device, parts, tiny_builder, tiny_weights,
};
use cycle::{Load, assert_like_fresh, engine, load, request, weights};
use dormouse::{
    Checkpoint, DType, Engine, KvCapacity, LoadError, Retention, SleepOptions, Sleeping, SourceError,
    TensorReader, TensorSet, TensorSpec, TransferError, WeightSource, WeightsLoaded,
};
use faulty::{Fault, Faulty};

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
    assert_eq!(parts(asleep.memory()).total_bytes(), 0);
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
        assert_eq!(mismatch.missing, std::slice::from_ref(&missing));
        assert_eq!(mismatch.wrong_shape[0].name, shape);
        assert_eq!(mismatch.wrong_dtype[0].name, dtype);
        assert_eq!(mismatch.duplicate, std::slice::from_ref(&duplicate));
        assert_eq!(mismatch.unknown, std::slice::from_ref(&unknown));
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
        assert_eq!(engine.report().version.counter, 2, "failed loads take no version");
        assert_like_fresh(&engine.wake_up().unwrap(), &w1, &request(1));
    };
    let discarded = engine(&w0).sleep_discarding(SleepOptions::default()).unwrap();
    fails_and_recovers(discarded, &w1, |asleep| loads_w1(load(asleep, &w1)));
    for options in [SleepOptions::default(), SleepOptions::default().resident()] {
        let kept = || engine(&w0).sleep(options).unwrap();
        fails_and_recovers(kept(), &w1, |asleep| {
            let loaded = asleep.restore_weights().unwrap();
            assert_eq!(loaded.report().version.counter, 1);
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

fn save_checkpoint(directory: &std::path::Path, weights: &Weights) {
    std::fs::write(directory.join("config.json"), crate::common::tiny_config_json(false)).unwrap();
    weights.save(&directory.join("model.safetensors"));
}

#[test]
fn c27_a_load_reads_what_the_path_holds_now() {
    let (w0, w1) = (weights(1), weights(2));
    let directory = tempfile::tempdir().unwrap();
    save_checkpoint(directory.path(), &w0);
    let builder = on_device(Engine::builder(directory.path()))
        .kv_cache(KvCapacity::Blocks(64))
        .block_size(4)
        .threads(1);
    let on_disk = builder.build().unwrap();
    assert_eq!(on_disk.version(), engine(&w0).version(), "files and tensors in memory have one digest");
    assert_like_fresh(&on_disk, &w0, &request(1));
    let asleep = on_disk.sleep_discarding(SleepOptions::default()).unwrap();
    save_checkpoint(directory.path(), &w1);
    let loaded = asleep.load_weights(Checkpoint::at(directory.path())).unwrap();
    assert_eq!(loaded.report().version.digest, engine(&w1).version().digest);
    assert_like_fresh(&loaded.wake_up().unwrap(), &w1, &request(1));
}

/// Does something to the files after a number of reads.
struct Meddler<'a> {
    inner: Checkpoint,
    reads_left: usize,
    /// Whether several threads read a tensor, or the source hands it over by itself.
    shared: bool,
    meddle: &'a mut dyn FnMut(),
}

impl Meddler<'_> {
    fn count(&mut self) {
        if self.reads_left == 0 {
            (self.meddle)();
        }
        self.reads_left = self.reads_left.wrapping_sub(1);
    }
}

impl WeightSource for Meddler<'_> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.inner.index()
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.count();
        self.inner.read(tensor, sink)
    }
    fn reader(&mut self, tensor: usize) -> Result<Option<Box<dyn TensorReader + '_>>, SourceError> {
        if !self.shared {
            return Ok(None);
        }
        self.count();
        self.inner.reader(tensor)
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
        for (reads_left, shared) in [(1, false), (10, false), (1, true), (10, true)] {
            save_checkpoint(directory.path(), &w0);
            let asleep = engine(&w0).sleep(SleepOptions::default().resident()).unwrap();
            let meddle: &mut dyn FnMut() = &mut || meddle();
            let inner = Checkpoint::at(directory.path());
            match asleep.load_weights(Meddler { inner, reads_left, shared, meddle }) {
                // The old file, still open, is a whole set as well.
                Ok(loaded) => {
                    assert!(!must_fail && digests.contains(&loaded.report().version.digest), "{what}")
                }
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
