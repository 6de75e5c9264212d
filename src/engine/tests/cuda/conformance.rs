//! Cases of the lifecycle that a GPU decides: what is free after a sleep, as the GPU counts, and what is where.

use std::process::Command;

use super::*;
use crate::engine::{InFlight, KvCapacity, SleepOptions, SleepReport, WeightsLoaded};
use crate::weights::{Checkpoint, DType, LoadOptions, Manifest, TensorSpec, UpdateOptions, WeightSource};

/// What the report says is free is free: as the GPU counts at that moment, to the page.
#[track_caller]
fn assert_freed(gpu: &Gpu, used_before: u64, report: &SleepReport) {
    let used = gpu.emulated.used();
    assert_eq!(used_before - used, device_bytes(&report.freed), "{report:?}");
    let memory = report.device.expect("a GPU counts its memory");
    assert_eq!(memory.total_bytes - memory.free_bytes, used);
}

fn ways(seed: u64, way: usize, engine: Engine<Awake>, gpu: &Gpu) -> Engine<WeightsLoaded> {
    let options = SleepOptions::default();
    let used = gpu.emulated.used();
    match way {
        0 => {
            let asleep = engine.sleep(options).unwrap();
            assert_freed(gpu, used, asleep.report());
            assert_eq!((gpu.emulated.used(), device_bytes(&asleep.memory())), (0, 0));
            asleep.restore_weights().unwrap()
        }
        1 => {
            let asleep = engine.sleep(options.resident()).unwrap();
            assert_freed(gpu, used, asleep.report());
            assert_eq!(gpu.emulated.used(), device_bytes(&asleep.memory()));
            asleep.restore_weights().unwrap()
        }
        2 => {
            let asleep = engine.sleep_discarding(options).unwrap();
            assert_freed(gpu, used, asleep.report());
            assert_eq!(gpu.emulated.used(), 0);
            asleep.load_weights(Seeded::new(seed)).unwrap()
        }
        3 => engine.sleep(options).unwrap().load_weights(Seeded::new(seed)).unwrap(),
        _ => {
            let mut loaded = engine.sleep(options.resident()).unwrap().restore_weights().unwrap();
            loaded.update(Seeded::new(seed)).unwrap();
            loaded
        }
    }
}

#[test]
fn c08_c09_c19_c21_b10_b16_b74_cycles_free_what_they_say_keep_addresses_and_bits() {
    let gpu = Gpu::new();
    let mut engine = awake_on(gpu.device(), 1);
    let addresses = |engine: &Engine<Awake>| {
        let kv = engine.state.shared.between_steps(|serving| serving.executor.kv_address());
        (engine.state.weights.arena().address(), kv)
    };
    let (before, memory, used) = (addresses(&engine), engine.memory(), gpu.emulated.used());
    assert_eq!(used, device_bytes(&memory), "the report sums to what the GPU counts");
    let mut seed = 1;
    for cycle in 0..15 {
        assert_serves_all(&engine, seed);
        // The second time from the prefix cache.
        assert_serves_all(&engine, seed);
        assert!(engine.stats().cached_tokens > 0);
        if cycle % 5 >= 2 {
            seed = 1 + (cycle as u64 / 2) % 2;
        }
        let loaded = ways(seed, cycle % 5, engine, &gpu);
        assert_eq!(gpu.emulated.used(), device_bytes(&loaded.memory()), "cycle {cycle}");
        loaded.verify().unwrap();
        engine = loaded.wake_up().unwrap();
        assert_eq!((addresses(&engine), gpu.emulated.used()), (before, used), "cycle {cycle}");
        let now = engine.memory();
        assert_eq!(
            (now.weights_bytes, now.kv_cache_bytes, now.workspace_bytes),
            (memory.weights_bytes, memory.kv_cache_bytes, memory.workspace_bytes)
        );
        let output = engine.generate(&requests()).unwrap();
        assert_eq!(output[0].completions[0].cached_tokens, 0, "cycle {cycle}: nothing of before is found");
    }
    drop(engine);
    gpu.assert_clean();
}

/// Another user of the GPU takes all that a sleep gave back, at once.
#[test]
fn b10_what_was_freed_can_be_taken_by_another_when_sleep_returns() {
    let gpu = Gpu::new();
    let engine = awake_on(gpu.device(), 1);
    // Work that nobody has waited for.
    engine.submit(requests().remove(0)).unwrap();
    engine.step().unwrap();
    let limit = gpu.emulated.used();
    gpu.emulated.set_memory_limit(limit);
    let options = SleepOptions::default().in_flight(InFlight::Retract);
    let asleep = engine.sleep(options).unwrap();
    let other = device(gpu.emulated, None, true);
    let mut taken = crate::device::Device::reserve(&*other, "trainer", limit as usize).unwrap();
    taken.commit(limit as usize).unwrap();
    assert!(asleep.memory().parked_bytes > 0);
    let (asleep, _) = asleep.restore_weights().expect_err("the trainer has it all").into_parts();
    drop((taken, other));
    let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
    for _ in 0..50 {
        engine.step().unwrap();
    }
    assert_serves_all(&engine, 1);
    drop(engine);
    gpu.assert_clean();
}

/// C10: there is no tier but the GPU's memory and the parked weights, so nothing of the cache can outlive a sleep; the
/// addresses of its blocks are free of memory then (see `unmapped`).
#[test]
fn c10_kv_blocks_have_no_other_tier_to_come_back_from() {
    let gpu = Gpu::new();
    let engine = awake_on(gpu.device(), 1);
    assert_serves_all(&engine, 1);
    let asleep = engine.sleep(SleepOptions::default()).unwrap();
    assert!(asleep.report().blocks_dropped > 0);
    let memory = asleep.memory();
    assert_eq!((memory.kv_cache_bytes, gpu.emulated.used()), (0, 0));
    let engine = asleep.load_weights(Seeded::new(2)).unwrap().wake_up().unwrap();
    let stats = engine.stats();
    assert_eq!((stats.blocks_free, stats.blocks_cached), (stats.blocks, 0));
    assert_serves_all(&engine, 2);
    drop(engine);
    gpu.assert_clean();
}

/// Every source of weights leaves the same behind: nothing, or the weights.
#[test]
fn b11_b12_what_stays_is_the_same_for_every_source_of_weights() {
    let gpu = Gpu::new();
    let folder = tempfile::tempdir().unwrap();
    let files = save(folder.path(), &Seeded::new(1));
    let mut residuals = Vec::new();
    for source in 0..5 {
        let asleep = build_on(gpu.device()).unwrap();
        let mut loaded = match source {
            0 => asleep.load_weights(Seeded::new(1)).unwrap(),
            1 => asleep.load_weights(Checkpoint::at(folder.path())).unwrap(),
            2 => {
                let mut load = asleep.begin_load(LoadOptions::default()).unwrap();
                for (spec, bytes) in &files {
                    for (i, piece) in bytes.chunks(777).enumerate() {
                        load.push_piece(spec, i * 777, piece).unwrap();
                    }
                }
                load.commit().unwrap()
            }
            3 => {
                let options = LoadOptions { convert_dtypes: true, ..LoadOptions::default() };
                asleep.load_weights_with(Seeded::new(1), options).unwrap()
            }
            _ => asleep.load_weights(Seeded::new(2)).unwrap(),
        };
        if source == 4 {
            loaded.update(Seeded::new(2)).unwrap();
            loaded.update_with(Seeded::new(1), UpdateOptions::default().in_place()).unwrap();
        }
        let engine = loaded.wake_up().unwrap();
        assert_serves_all(&engine, 1);
        let awake = gpu.emulated.used();
        assert_eq!(awake, device_bytes(&engine.memory()));
        let asleep = engine.sleep(SleepOptions::default()).unwrap();
        let parked = (gpu.emulated.used(), device_bytes(&asleep.memory()), asleep.memory().parked_bytes);
        let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
        let asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
        let resident = (gpu.emulated.used(), device_bytes(&asleep.memory()));
        let asleep = asleep.discard_weights();
        residuals.push((awake, parked, resident, gpu.emulated.used(), asleep.memory().total_bytes()));
        assert_eq!((parked.0, parked.1, gpu.emulated.used()), (0, 0, 0));
        assert_eq!(resident.0, resident.1);
        drop(asleep);
    }
    residuals.dedup();
    assert_eq!(residuals.len(), 1, "{residuals:?}");
    gpu.assert_clean();
}

/// Writes a checkpoint; returns its tensors.
fn save(folder: &std::path::Path, source: &Seeded) -> Vec<(TensorSpec, Vec<u8>)> {
    std::fs::write(folder.join("config.json"), super::super::CONFIG).unwrap();
    let files = tensors(source);
    let views = files.iter().map(|(spec, bytes)| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, spec.shape.clone(), bytes);
        (spec.name.clone(), view.unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    files
}

fn tensors(source: &Seeded) -> Vec<(TensorSpec, Vec<u8>)> {
    let mut source = source.clone();
    let specs = source.specs.clone();
    let read = |(i, spec): (usize, TensorSpec)| {
        let mut bytes = Vec::new();
        source.read(i, &mut |piece| bytes.extend_from_slice(piece)).unwrap();
        (spec, bytes)
    };
    specs.into_iter().enumerate().map(read).collect()
}

/// Device memory at its peak is what the report says: the weights once or twice, never the cache with them.
#[test]
fn b15_the_peak_of_loads_and_updates_is_the_weights_and_what_is_staged() {
    let gpu = Gpu::new();
    let engine = awake_on(gpu.device(), 1);
    let weights = engine.memory().weights_bytes.next_multiple_of(PAGE);
    // Where pieces land on their way, whatever the size of the weights.
    const BUCKET: u64 = 8 << 20;
    let assert_peak = |expected: u64, what: &str| {
        let peak = gpu.emulated.take_peak();
        assert!((expected..=expected + BUCKET).contains(&peak), "{what}: {peak} bytes for {expected}");
    };
    let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
    gpu.emulated.take_peak();
    let mut loaded = asleep.load_weights(Seeded::new(2)).unwrap();
    assert_peak(weights, "a load into nothing");
    loaded.update_with(Seeded::new(1), UpdateOptions::default().in_place()).unwrap();
    assert_peak(weights, "in place");
    let report = loaded.update(Seeded::new(2)).unwrap();
    assert_peak(2 * weights, "staged");
    assert_eq!(report.peak_weights_bytes, 2 * loaded.memory().weights_bytes);
    let asleep = loaded.park_weights().unwrap();
    gpu.emulated.take_peak();
    let loaded = asleep.load_weights(Seeded::new(1)).unwrap();
    assert_peak(weights, "over parked weights");
    let asleep = loaded.wake_up().unwrap().sleep(SleepOptions::default().resident()).unwrap();
    gpu.emulated.take_peak();
    let loaded = asleep.load_weights(Seeded::new(2)).unwrap();
    assert_peak(2 * weights, "over resident weights");
    // A budget of the weights and the cache suffices for the loop that discards.
    let engine = loaded.wake_up().unwrap();
    gpu.emulated.set_memory_limit(gpu.emulated.used());
    let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
    let mut loaded = asleep.load_weights(Seeded::new(2)).unwrap();
    loaded.update_with(Seeded::new(1), UpdateOptions::default().in_place()).unwrap();
    let engine = loaded.wake_up().unwrap();
    assert_serves_all(&engine, 1);
    drop(engine);
    gpu.assert_clean();
}

/// Sources at odd addresses give the same weights, in every dtype.
#[test]
fn b41_tensors_at_any_alignment_are_the_same_weights() {
    let gpu = Gpu::new();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let mut digests = Vec::new();
        for misalign in [0, 1, 3, 5] {
            let asleep = build_of(dtype, &gpu);
            let mut load =
                asleep.begin_load(LoadOptions { convert_dtypes: false, ..LoadOptions::default() }).unwrap();
            for (spec, bytes) in tensors(&Seeded::new(1)) {
                let spec = TensorSpec { dtype, ..spec };
                let values = bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b));
                let mut source = vec![0; misalign];
                match dtype {
                    DType::F32 => source.extend(&bytes),
                    DType::F16 => source.extend(values.flat_map(|v| half::f16::from_f32(v).to_le_bytes())),
                    DType::Bf16 => source.extend(values.flat_map(|v| half::bf16::from_f32(v).to_le_bytes())),
                }
                load.push_piece(&spec, 0, &source[misalign..]).unwrap();
            }
            let loaded = load.commit().unwrap();
            loaded.verify().unwrap();
            let engine = loaded.wake_up().unwrap();
            let said = bits(&engine.generate(&probe()).unwrap());
            digests.push((engine.version().digest, said));
        }
        digests.dedup();
        assert_eq!(digests.len(), 1, "{dtype}");
    }
    gpu.assert_clean();
}

fn build_of(dtype: DType, gpu: &Gpu) -> Engine<crate::engine::Sleeping<crate::engine::Discarded>> {
    let config = crate::model::ModelConfig::from_json(super::super::CONFIG).unwrap();
    let manifest = Manifest::new(&config, dtype);
    crate::engine::EngineBuilder::from_config(config.clone())
        .dtype(dtype)
        .kv_cache(KvCapacity::Blocks(32))
        .block_size(4)
        .build_on(gpu.device(), config, manifest)
        .unwrap()
}

/// Bad tokens fail their own request alone.
#[test]
fn b39_tokens_outside_the_vocabulary_are_refused_and_healthy_requests_go_on() {
    let gpu = Gpu::new();
    let engine = awake_on(gpu.device(), 1);
    let healthy: Vec<_> = requests().into_iter().map(|request| engine.submit(request).unwrap()).collect();
    for token in [64, 65, 1 << 20, u32::MAX] {
        let error = engine.submit(Request::new(vec![1, token, 2])).unwrap_err();
        assert!(error.to_string().contains(&token.to_string()), "{error}");
        assert!(engine.generate(&[Request::new(vec![token])]).is_err());
        assert!(engine.score(&[[1, token]]).is_err());
    }
    assert!(engine.submit(Request::new(vec![])).is_err());
    assert!(engine.submit(Request::new(vec![1; 10_000])).is_err());
    let mut outputs = Vec::new();
    while outputs.len() < healthy.len() {
        outputs.extend(engine.step().unwrap().outputs);
    }
    outputs.sort_by_key(|output: &crate::completion::RequestOutput| output.request);
    assert_eq!(bits(&outputs), on_fresh_gpu(1, requests));
    drop(engine);
    gpu.assert_clean();
}

const RESIDENT: &str = "DORMOUSE_TEST_RESIDENT_BYTES";

/// Bytes of this process that are resident and its own, or a file's that it shares: the emulated GPU's memory.
fn resident(of: &str) -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(of)).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse::<i64>().unwrap() << 10
}

/// Host memory over ten cycles, in a process of its own. With `keep`, what was pinned at the first sleep stays, and the
/// report says so; without, it goes back at each restore.
fn cycles_of_host_memory(keep: bool) {
    let gpu = Gpu::with(None, keep);
    let mut engine = {
        let loaded = large(&gpu);
        loaded.wake_up().unwrap()
    };
    let weights = engine.memory().weights_bytes as i64;
    assert!(weights > 40 << 20, "{weights} bytes of weights");
    let slack = 4 << 20;
    // What the first step sets up: a buffer of results.
    engine.generate(&[Request::new(vec![1]).max_new_tokens(1).ignore_eos(true)]).unwrap();
    let cycle = |engine: Engine<Awake>| {
        let asleep = engine.sleep(SleepOptions::default()).unwrap();
        let resident = resident("RssAnon:");
        (asleep.restore_weights().unwrap().wake_up().unwrap(), resident)
    };
    let staging = engine.memory().staging_bytes as i64;
    let before = resident("RssAnon:");
    let (back, asleep) = cycle(engine);
    engine = back;
    let first = resident("RssAnon:");
    assert!((asleep - before - weights).abs() < slack, "asleep: {} bytes for {weights}", asleep - before);
    let kept = if keep { weights } else { 0 };
    assert!((first - before - kept).abs() < slack, "awake again: {} bytes for {kept}", first - before);
    let said = engine.memory().staging_bytes as i64 - staging;
    assert!((said - kept).abs() < slack, "the report says {said} bytes");
    for _ in 0..10 {
        let (back, asleep) = cycle(engine);
        engine = back;
        assert!((asleep - before - weights).abs() < slack);
        assert!((resident("RssAnon:") - first).abs() < slack, "it is flat");
    }
    drop(engine);
    gpu.assert_clean();
}

/// A model of 44 MiB.
fn large(gpu: &Gpu) -> Engine<WeightsLoaded> {
    let json = super::super::CONFIG.replace("\"intermediate_size\": 48", "\"intermediate_size\": 57000");
    let config = crate::model::ModelConfig::from_json(&json).unwrap();
    let manifest = Manifest::new(&config, DType::F32);
    let specs = manifest.tensors().to_vec();
    let asleep = crate::engine::EngineBuilder::from_config(config.clone())
        .dtype(DType::F32)
        .kv_cache(KvCapacity::Blocks(8))
        .max_num_batched_tokens(8)
        .build_on(gpu.device(), config, manifest)
        .unwrap();
    asleep.load_weights(Seeded { specs, seed: 1 }).unwrap()
}

#[test]
fn b61_host_memory_is_flat_over_cycles() {
    if let Ok(keep) = std::env::var(RESIDENT) {
        return cycles_of_host_memory(keep == "kept");
    }
    for keep in ["kept", "given back"] {
        let program = std::env::current_exe().unwrap();
        let name = "engine::tests::cuda::conformance::b61_host_memory_is_flat_over_cycles";
        let child = Command::new(program).args(["--exact", name]).env(RESIDENT, keep).output().unwrap();
        let text = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success(), "{keep}: {text}");
        assert!(text.contains("1 passed"), "{text}");
    }
}
