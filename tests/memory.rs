//! Memory of the whole process, measured from outside: one test, so that nothing else runs in it.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod common;
#[path = "common/process.rs"]
mod process;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use common::{Weights, awake, prompt, tiny_builder, tiny_weights};
use dormouse::{
    Awake, Checkpoint, DType, Delta, Engine, EngineBuilder, KvCapacity, LoadOptions, ModelConfig, Request,
    SleepOptions, SourceError, SparseOp, TensorSpec, UpdateOptions, WeightSource, WeightsLoaded,
};
use process::{handles, resident};

const MIB: i64 = 1 << 20;

fn run(engine: &Engine<Awake>) {
    let request = Request::new(prompt(40, 1)).samples(4).max_new_tokens(8).ignore_eos(true).seed(1);
    engine.generate(&[request.clone(), request]).expect("a valid request");
}

fn cycle(engine: Engine<Awake>, kind: usize, weights: &[Weights; 2]) -> Engine<Awake> {
    let next = &weights[kind % 2];
    let options = SleepOptions::default();
    match kind % 5 {
        0 => engine.sleep(options).unwrap().restore_weights().unwrap(),
        1 => engine.sleep(options).unwrap().load_weights(next.source()).unwrap(),
        2 => engine.sleep(options.resident()).unwrap().load_weights(next.source()).unwrap(),
        3 => engine.sleep(options.resident()).unwrap().restore_weights().unwrap(),
        _ => engine.sleep_discarding(options).unwrap().load_weights(next.source()).unwrap(),
    }
    .wake_up()
    .unwrap()
}

/// C26, B62: 100 cycles of every kind.
fn cycles_are_flat() {
    let weights = [1, 2].map(|seed| tiny_weights(false, DType::F32, seed));
    let mut engine = awake(tiny_builder(false, DType::F32).threads(3), &weights[0]);
    let (mut first, mut before) = (0, [0; 3]);
    for kind in 0..100 {
        run(&engine);
        engine = cycle(engine, kind, &weights);
        if kind == 30 {
            (first, before) = (resident(), handles());
        }
    }
    let grown = resident() - first;
    assert!(grown < MIB, "70 cycles grew by {grown} bytes");
    assert_eq!(handles(), before, "descriptors, threads, mappings");
}

/// One update, or an attempt.
fn update(loaded: &mut Engine<WeightsLoaded>, kind: usize, weights: &[Weights; 2]) {
    let next = &weights[kind % 2];
    let (name, tensor) = &next.0[1];
    let partial = UpdateOptions::default().partial([name.as_str()]);
    let mut in_place = |kind| {
        let mut update = loaded.begin_update(UpdateOptions::default().in_place()).unwrap();
        if kind % 2 == 0 {
            update.push(name, &tensor).unwrap();
        }
        drop(update);
        loaded.update_with(next.source(), UpdateOptions::default().in_place()).unwrap();
    };
    match kind % 7 {
        0 => drop(loaded.update(next.source()).unwrap()),
        1 => in_place(kind / 7),
        2 | 3 => {
            let options = if kind % 7 == 3 { partial.in_place() } else { partial };
            let values = 0.5_f32.to_le_bytes();
            let delta =
                Delta::Sparse { indices: &[7], values: &values, dtype: DType::F32, op: SparseOp::Set };
            let mut update = loaded.begin_update(options).unwrap();
            update.push_delta(name, &delta).unwrap();
            update.commit().unwrap();
        }
        4 => {
            // Dropped with pieces that wait, and a tensor that is half there.
            let mut update = loaded.begin_update(UpdateOptions::default()).unwrap();
            let spec = TensorSpec { name: name.clone(), dtype: DType::F32, shape: tensor.shape.clone() };
            update.push_piece(&spec, 0, &tensor.data[..1000]).unwrap();
            for piece in (2000..4000).step_by(50).rev() {
                update.push_piece(&spec, piece, &tensor.data[piece..piece + 7]).unwrap();
            }
        }
        5 => {
            let source = Panics(next.source());
            catch_unwind(AssertUnwindSafe(|| loaded.update(source))).unwrap_err();
        }
        _ => drop(loaded.update(Weights(next.0[1..].to_vec()).source()).unwrap_err()),
    }
}

/// C26, B62: 200 updates of every kind, with wakes and loads in pieces between them.
fn updates_are_flat() {
    std::panic::set_hook(Box::new(|_| {}));
    let weights = [1, 2].map(|seed| tiny_weights(false, DType::F32, seed));
    let builder = tiny_builder(false, DType::F32).threads(2);
    let mut loaded = builder.build_asleep().unwrap().load_weights(weights[0].source()).unwrap();
    let (mut first, mut before) = (0, [0; 3]);
    for kind in 0..200 {
        update(&mut loaded, kind, &weights);
        if kind % 5 == 0 {
            let engine = loaded.wake_up().unwrap();
            run(&engine);
            let asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
            let mut load = asleep.begin_load(LoadOptions::default()).unwrap();
            load.push_all(weights[kind % 2].source()).unwrap();
            loaded = match kind % 2 {
                0 => load.commit().unwrap(),
                _ => load.abandon().restore_weights().unwrap(),
            };
        }
        if kind == 60 {
            (first, before) = (resident(), handles());
        }
    }
    drop(std::panic::take_hook());
    let grown = resident() - first;
    assert!(grown < MIB, "140 updates grew by {grown} bytes");
    assert_eq!(handles(), before, "descriptors, threads, mappings");
}

/// Measures the process at every read.
struct Measured<'a> {
    inner: Generated,
    peak: &'a mut i64,
}

impl WeightSource for Measured<'_> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.inner.index()
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.inner.read(tensor, sink)?;
        *self.peak = (*self.peak).max(resident());
        Ok(())
    }
}

/// B15, C19: an update takes what its report says, and gives it back.
fn updates_take_what_they_say(layers: usize) {
    const SLACK: i64 = 4 * MIB;
    let builder =
        EngineBuilder::from_config(large_config(layers)).kv_cache(KvCapacity::Tokens(512)).threads(1);
    let asleep = builder.build_asleep().unwrap();
    let specs = asleep.expected_weights().tensors().to_vec();
    let mut loaded = asleep.load_weights(Generated(specs.clone())).unwrap();
    let weights = loaded.memory().weights_bytes as i64;
    let first = resident();
    for round in 0..3 {
        for in_place in [false, true] {
            let options = || {
                let options = UpdateOptions::default();
                if in_place { options.in_place() } else { options }
            };
            let before = resident();
            let mut peak = 0;
            let source = Measured { inner: Generated(specs.clone()), peak: &mut peak };
            let report = loaded.update_with(source, options()).unwrap();
            let taken = peak - before;
            let said = report.peak_weights_bytes as i64 - weights;
            assert!((taken - said).abs() < SLACK, "round {round}: took {taken} bytes, said {said}");
            let left = resident() - before;
            assert!(left < SLACK, "round {round}: {left} bytes left after the commit");
            // Given up at the end, and of a partial one at the begin.
            let mut update = loaded.begin_update(UpdateOptions::default()).unwrap();
            update.push_all(Generated(specs[..specs.len() - 1].to_vec())).unwrap();
            assert!((resident() - before - weights).abs() < SLACK);
            drop(update);
            let left = resident() - before;
            assert!(left < SLACK, "round {round}: {left} bytes left after the drop");
            let update = loaded.begin_update(options().partial([specs[1].name.as_str()])).unwrap();
            let taken = resident() - before;
            let expected = if in_place { 0 } else { weights };
            assert!((taken - expected).abs() < SLACK, "round {round}: {taken} bytes of a partial update");
            drop(update);
        }
    }
    let grown = resident() - first;
    assert!(grown < SLACK, "{grown} bytes more after all");
}

struct Panics<S>(S);

impl<S: WeightSource> WeightSource for Panics<S> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.0.index()
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.0.read(tensor, sink)?;
        panic!("a source that panics");
    }
}

/// C18: sources that panic, and engines that are dropped in any state, leave nothing.
fn panics_and_drops_leave_nothing() {
    std::panic::set_hook(Box::new(|_| {}));
    let weights = tiny_weights(false, DType::F32, 1);
    let (mut first, mut before) = (0, [0; 3]);
    for round in 0..90 {
        let engine = awake(tiny_builder(false, DType::F32).threads(2), &weights);
        let options = SleepOptions::default();
        let panicked = catch_unwind(AssertUnwindSafe(|| match round % 3 {
            0 => drop(engine.sleep(options).unwrap().load_weights(Panics(weights.source()))),
            1 => drop(engine.sleep(options.resident()).unwrap().load_weights(Panics(weights.source()))),
            _ => drop(engine.sleep_discarding(options).unwrap().load_weights(Panics(weights.source()))),
        }));
        assert!(panicked.is_err());
        if round == 30 {
            (first, before) = (resident(), handles());
        }
    }
    drop(std::panic::take_hook());
    let grown = resident() - first;
    assert!(grown < MIB, "60 dropped engines left {grown} bytes");
    assert_eq!(handles(), before, "descriptors, threads, mappings");
}

/// A model of about 5 MiB a layer in bf16.
fn large_config(layers: usize) -> ModelConfig {
    ModelConfig::from_json(&format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": {layers}, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "vocab_size": 512, "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": false}}"#,
    ))
    .expect("a valid configuration")
}

/// Tensors made as they are read: the source itself takes no memory.
struct Generated(Vec<TensorSpec>);

impl WeightSource for Generated {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        Ok(self.0.clone())
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let elements: usize = self.0[tensor].shape.iter().product();
        // 0.01 in bf16.
        let piece = [0x24, 0x3c].repeat(512);
        (0..elements / 512).for_each(|_| sink(&piece));
        Ok(())
    }
}

/// C19, B61: what a report says was freed is back with the system.
fn sleep_gives_the_memory_back(layers: usize) {
    let builder =
        || EngineBuilder::from_config(large_config(layers)).kv_cache(KvCapacity::Tokens(512)).threads(1);
    let source = |specs: &[TensorSpec]| Generated(specs.to_vec());
    let before = resident();
    let asleep = builder().build_asleep().unwrap();
    let specs = asleep.expected_weights().tensors().to_vec();
    let mut engine = asleep.load_weights(source(&specs)).unwrap().wake_up().unwrap();
    let request = Request::new(prompt(100, 1)).max_new_tokens(2).ignore_eos(true);
    engine.generate(std::slice::from_ref(&request)).unwrap();
    let serving = resident();
    let weights = engine.memory().weights_bytes as i64;
    assert!(
        weights > 4 * MIB * layers as i64 && serving - before > weights,
        "{weights} bytes of weights are resident"
    );
    for round in 0..3 {
        let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
        let left = resident() - before;
        assert!(left < 4 * MIB, "round {round}: {left} bytes left after sleep_discarding");
        let freed = asleep.report().freed.total_bytes() as i64;
        assert!(freed >= serving - before - 4 * MIB, "round {round}: {freed} bytes reported");
        engine = asleep.load_weights(source(&specs)).unwrap().wake_up().unwrap();
        engine.generate(std::slice::from_ref(&request)).unwrap();
        // Parked weights live on the host while it sleeps, and nowhere once it is awake again.
        let asleep = engine.sleep(SleepOptions::default()).unwrap();
        let parked = resident() - before - weights;
        assert!(parked.abs() < 4 * MIB, "round {round}: {parked} bytes beside the parked weights");
        engine = asleep.restore_weights().unwrap().wake_up().unwrap();
        engine.generate(std::slice::from_ref(&request)).unwrap();
        let more = resident() - serving;
        assert!(more < 4 * MIB, "round {round}: {more} bytes more than before the sleep");
    }
}

/// B63: a load from shards maps nothing that stays, and takes no more than what it fills.
fn a_load_from_files_keeps_no_file() {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/families/llama_linear_sharded");
    let names_it = |line: &str| line.contains("llama_linear_sharded");
    let engine = Engine::builder(&directory).kv_cache(KvCapacity::Blocks(64)).build().unwrap();
    let loaded = engine
        .sleep(SleepOptions::default().resident())
        .unwrap()
        .load_weights(Checkpoint::at(&directory))
        .unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.lines().any(names_it), "no file of the checkpoint is mapped");
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = open.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    assert!(!open.into_iter().any(|path| names_it(&path.to_string_lossy())), "no file is open");
    drop(loaded);
}

fn smollm2() {
    let Some(directory) = std::env::var_os("DORMOUSE_REAL_MODEL").map(PathBuf::from) else {
        eprintln!("SKIPPED: set DORMOUSE_REAL_MODEL=DIR to measure SmolLM2-135M");
        return;
    };
    let before = resident();
    let engine = Engine::builder(&directory).kv_cache(KvCapacity::Tokens(2048)).build().unwrap();
    engine.generate(&[Request::new(prompt(200, 1)).max_new_tokens(8)]).unwrap();
    let serving = resident() - before;
    assert!(serving > 250 * MIB, "{serving} bytes resident");
    let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
    let left = resident() - before;
    eprintln!("SmolLM2-135M: {} MiB serving, {} MiB asleep", serving / MIB, left / MIB);
    assert!(left < 40 * MIB, "{left} bytes left");
    drop(asleep.load_weights(Checkpoint::at(&directory)).unwrap().wake_up().unwrap());
}

#[test]
fn c19_c26_b61_b62_b63_memory_is_flat_and_really_goes() {
    cycles_are_flat();
    updates_are_flat();
    panics_and_drops_leave_nothing();
    // Sizes around what an allocator keeps for itself.
    for layers in [1, 8] {
        sleep_gives_the_memory_back(layers);
        updates_take_what_they_say(layers);
    }
    a_load_from_files_keeps_no_file();
    smollm2();
}
