//! The transitions: what they keep, what they free, and what they report. Tests are named after their case;
//! "fresh" is a new engine with the same weights.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod common;
#[path = "common/cycle.rs"]
mod cycle;
#[path = "common/trace.rs"]
mod trace;

use crate::common::{awake, bits, fresh, on_device, parts, prompt, tiny_builder};
use cycle::{assert_like_fresh, engine, load, request, weights};
use dormouse::{
    Awake, Checkpoint, DType, Engine, InFlight, KvCapacity, LoadError, MemoryReport, Request, SleepOptions,
    WeightsLoaded,
};

#[test]
fn c01_a_sleep_settles_then_frees_and_reports_all_of_it() {
    let w0 = weights(1);
    let engine = awake(tiny_builder(false, DType::F32).max_num_seqs(1), &w0);
    engine.generate(&[request(9)]).expect("leaves cached blocks");
    let ids = [engine.submit(request(1)).unwrap(), engine.submit(request(2)).unwrap()];
    for _ in 0..3 {
        engine.step().unwrap();
    }
    let (before, stats) = (parts(engine.memory()), engine.stats());
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
    assert_eq!(parts(asleep.memory()).total_bytes(), report.parked_bytes);
    assert_eq!(asleep.memory().parked_bytes, report.parked_bytes);
    assert_eq!(asleep.reserved(), before, "an awake engine uses all that it has reserved");
    let lines = log.lines();
    let at = |text: &str| lines.iter().position(|line| line == text).unwrap_or_else(|| panic!("{lines:?}"));
    assert!(at("enter sleep") < at("requests settled") && at("requests settled") < at("asleep"));
    assert!(at("asleep") < at("exit sleep"));
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
    let before = parts(engine.memory());
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
        let memory = parts(loaded.memory());
        assert_eq!(
            (memory.weights_bytes, memory.total_bytes()),
            (before.weights_bytes, before.weights_bytes)
        );
        engine = loaded.wake_up().unwrap();
        assert_eq!(parts(engine.memory()), before, "round {round}");
        assert_like_fresh(&engine, &w[current], &request(round as u32 % 4));
    }
}

#[test]
fn loaded_weights_are_parked_and_restored_bit_for_bit() {
    let (w0, w1) = (weights(1), weights(2));
    let engine = engine(&w0);
    let before = parts(engine.memory());
    let parked_bytes = before.weights_bytes;
    let mut loaded = engine.sleep(SleepOptions::default().resident()).unwrap().restore_weights().unwrap();
    for (round, next) in [&w0, &w1, &w0].into_iter().enumerate() {
        let asleep = loaded.park_weights().unwrap();
        let report = asleep.report();
        assert_eq!(report.version.as_ref().unwrap().counter, round as u64 + 1);
        assert_eq!(report.freed, MemoryReport { weights_bytes: parked_bytes, ..MemoryReport::default() });
        assert_eq!((report.parked_bytes, report.blocks_dropped), (parked_bytes, 0));
        assert_eq!(parts(asleep.memory()), MemoryReport { parked_bytes, ..MemoryReport::default() });
        loaded = asleep.restore_weights().unwrap();
        assert_eq!(loaded.report().taken_bytes, parked_bytes);
        assert_eq!(parts(loaded.memory()).total_bytes(), parked_bytes);
        loaded.verify().unwrap();
        let (current, version) = (if round == 2 { &w1 } else { &w0 }, loaded.version());
        let engine = loaded.wake_up().unwrap();
        assert_eq!((parts(engine.memory()), Some(engine.version())), (before, version));
        assert_like_fresh(&engine, current, &request(round as u32));
        loaded = engine.sleep(SleepOptions::default()).unwrap().restore_weights().unwrap();
        loaded.update(next.source()).unwrap();
    }
    assert_like_fresh(&loaded.wake_up().unwrap(), &w0, &request(1));
}

#[test]
fn kept_weights_are_discarded_and_what_held_them_is_free() {
    let (w0, w1) = (weights(1), weights(2));
    for kind in 0..3 {
        let engine = engine(&w0);
        let (bytes, version) = (engine.memory().weights_bytes, engine.version());
        let asleep = match kind {
            0 => engine.sleep(SleepOptions::default().resident()).unwrap(),
            1 => engine.sleep(SleepOptions::default()).unwrap(),
            _ => {
                let asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
                asleep.restore_weights().unwrap().park_weights().unwrap()
            }
        };
        let held = parts(asleep.memory());
        let (weights_bytes, parked_bytes) = if kind == 0 { (bytes, 0) } else { (0, bytes) };
        assert_eq!(held, MemoryReport { weights_bytes, parked_bytes, ..MemoryReport::default() });
        let asleep = asleep.discard_weights();
        assert_eq!((asleep.report().freed, asleep.report().version.as_ref()), (held, Some(&version)));
        assert_eq!((asleep.report().parked_bytes, parts(asleep.memory()).total_bytes()), (0, 0));
        assert_eq!(asleep.state_name(), "sleeping, weights discarded");
        let loaded = load(asleep, &w1);
        assert_eq!((loaded.report().previous.as_ref(), loaded.report().taken_bytes), (Some(&version), bytes));
        assert_eq!(loaded.report().version.counter, 2);
        assert_like_fresh(&loaded.wake_up().unwrap(), &w1, &request(1));
    }
}

#[test]
fn the_limits_are_the_same_in_every_state() {
    let w0 = weights(1);
    let engine = engine(&w0);
    let limits = engine.limits();
    let asleep = engine.sleep(SleepOptions::default()).unwrap();
    assert_eq!(asleep.limits(), limits);
    let asleep = asleep.discard_weights();
    assert_eq!(asleep.limits(), limits);
    let loaded = load(asleep, &w0);
    assert_eq!(loaded.limits(), limits);
    assert!(request(1).validate(&limits).is_ok(), "a request is checked without an engine that is awake");
    assert_eq!(loaded.wake_up().unwrap().limits(), limits);
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
    let options = SleepOptions::default().in_flight(InFlight::Retract);
    drop(busy());
    drop(busy().sleep(options).unwrap());
    drop(busy().sleep(options.resident()).unwrap());
    drop(busy().sleep_discarding(options).unwrap());
    drop(busy().sleep(options).unwrap().restore_weights().unwrap());
    drop(load(busy().sleep_discarding(options).unwrap(), &w0));
    drop(busy().sleep(options).unwrap().restore_weights().unwrap().park_weights().unwrap());
    drop(busy().sleep(options).unwrap().discard_weights());
    drop(busy().sleep(options).unwrap().restore_weights().unwrap().wake_up().unwrap());
}

#[test]
fn c20_what_is_not_a_parameter_survives_or_is_rebuilt() {
    // Scaled rotary embeddings, sliding windows, per-head norms, biases.
    for family in ["llama3", "mistral", "qwen2_yarn", "qwen3"] {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(family);
        let build = || {
            let builder = on_device(Engine::builder(&directory))
                .kv_cache(KvCapacity::Blocks(64))
                .block_size(4)
                .threads(1);
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
        assert_eq!(Some(&loaded.report().version), loaded.version().as_ref());
        versions.push(loaded.report().version.clone());
        engine = loaded.wake_up().unwrap();
        assert_eq!(
            (&engine.version(), &engine.report().version),
            (&versions[versions.len() - 1], &engine.version())
        );
        let output = engine.generate(&[request(1)]).unwrap().remove(0);
        let spans = &output.completions[0].versions;
        assert_eq!((spans.len(), &spans[0].version, &spans[0].tokens), (1, &engine.version(), &(0..9)));
    }
    assert_eq!(versions.iter().map(|v| v.counter).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let digests: Vec<_> = versions.iter().map(|v| v.digest).collect();
    assert!(digests[0] == digests[2] && digests[2] == digests[3] && digests[0] != digests[1]);
    let kept = engine.sleep(SleepOptions::default()).unwrap().restore_weights().unwrap();
    assert_eq!(kept.version().as_ref(), versions.last(), "a restore is no new version");
}

#[test]
fn b15_a_cycle_needs_no_more_than_the_awake_engine_has() {
    let (w0, w1) = (weights(1), weights(2));
    let needed = parts(engine(&w0).memory()).total_bytes();
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
    assert_eq!(parts(loaded.memory()).total_bytes(), weights_bytes);
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
