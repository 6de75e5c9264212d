//! Complete updates and loads, and what follows from them.

use dormouse::{
    BeginError, Checkpoint, CommitError, DType, Engine, InFlight, LoadOptions, PushError, Request,
    SleepOptions, SourceError, TensorSpec, UpdateError, UpdateMode, UpdateOptions, WeightSource,
};

use crate::common::{Tensor, awake, bits, fresh, parts, tiny_builder};
use crate::cycle::{assert_like_fresh, engine, request, weights};
use crate::support::{
    EMBEDDING, Feed, WAYS, assert_holds, assert_wakes_like_fresh, digest, feed, get, known, loaded, spec,
    wakes_like_fresh,
};

fn modes() -> [UpdateOptions; 2] {
    [UpdateOptions::default(), UpdateOptions::default().in_place()]
}

#[test]
fn c29_b27_b48_every_way_and_split_gives_the_same_weights() {
    let (w0, w1) = (weights(1), weights(2));
    let digests = [digest(&w0), digest(&w1)];
    for options in modes() {
        let mut loaded = loaded(&w0);
        let weights_bytes = loaded.memory().weights_bytes;
        for way in 0..WAYS {
            for (i, w) in [(1, &w1), (0, &w0)] {
                let mut update = loaded.begin_update(options.clone()).unwrap();
                feed(way, &mut update, w).unwrap_or_else(|error| panic!("way {way}: {error}"));
                let report = update.commit().unwrap_or_else(|error| panic!("way {way}: {error}"));
                assert_eq!(report.version.digest, digests[i], "way {way}");
                assert_eq!(Some(&report.version), loaded.version().as_ref());
                assert_eq!(report.mode, options.mode);
                assert_eq!(report.tensors, w.0.len());
                let sent: usize = w.0.iter().map(|(_, tensor)| tensor.data.len()).sum();
                assert_eq!(report.received_bytes, sent as u64);
                let times = if options.mode == UpdateMode::Staged { 2 } else { 1 };
                assert_eq!(report.peak_weights_bytes, times * weights_bytes);
                // Whole tensors never wait; only reversed pieces and buckets do.
                assert_eq!(
                    report.peak_waiting_bytes > 0,
                    way >= 32 || (18..27).contains(&way) && way % 3 > 0
                );
                assert!(report.peak_waiting_bytes <= report.received_bytes);
                assert!(report.open >= report.receiving);
                assert_holds(&loaded, w);
            }
        }
        assert_eq!(loaded.version().unwrap().counter, 1 + 2 * WAYS as u64);
        assert_eq!(parts(loaded.memory()).total_bytes(), weights_bytes);
        assert_wakes_like_fresh(loaded, &w0);
    }
}

#[test]
fn c29_a_load_in_pieces_from_every_kind_of_sleep_commits_or_leaves_it_as_it_was() {
    let (w0, w1) = (weights(1), weights(2));
    macro_rules! check {
        ($sleep:expr, $recover:expr, $kept:expr) => {
            for way in (0..WAYS).step_by(3) {
                let asleep = $sleep(engine(&w0));
                let memory = parts(asleep.memory());
                // Abandoned, half-way.
                let mut load = asleep.begin_load(LoadOptions::default()).unwrap();
                load.push_piece(&spec(EMBEDDING, get(&w1, EMBEDDING)), 0, &[0; 640]).unwrap();
                let asleep = load.abandon();
                assert_eq!(parts(asleep.memory()), memory);
                // Refused at the commit.
                let mut load = asleep.begin_load(LoadOptions::default()).unwrap();
                load.push(EMBEDDING, &get(&w1, EMBEDDING)).unwrap();
                let (asleep, error) = load.commit().unwrap_err().into_parts();
                let CommitError::Mismatch(faults) = error else { panic!("{error}") };
                assert_eq!(faults.missing.len(), w1.0.len() - 1);
                // After a push that failed.
                let mut load = asleep.begin_load(LoadOptions::default()).unwrap();
                load.push("x", &get(&w1, EMBEDDING)).unwrap_err();
                assert!(matches!(feed(way, &mut load, &w1), Err(PushError::Failed)));
                let (asleep, error) = load.commit().unwrap_err().into_parts();
                assert!(matches!(error, CommitError::PushFailed), "{error}");
                assert_eq!(parts(asleep.memory()), memory);
                let asleep = $recover(asleep);
                // And one that commits.
                let mut load = asleep.begin_load(LoadOptions::default().label("step 7")).unwrap();
                feed(way, &mut load, &w1).unwrap();
                let loaded = load.commit().unwrap();
                assert_holds(&loaded, &w1);
                let version = loaded.version().unwrap();
                assert_eq!((version.counter, version.label.as_deref()), (2, Some("step 7")), "way {way}");
                assert_eq!(&loaded.report().version, &version);
                assert_eq!(loaded.report().previous.as_ref().map(|version| version.counter), Some(1));
                assert_eq!(loaded.report().peak_weights_bytes, $kept * loaded.memory().weights_bytes);
                assert_wakes_like_fresh(loaded, &w1);
            }
            // Dropped: the engine is gone, and nothing else.
            let load = $sleep(engine(&w0)).begin_load(LoadOptions::default()).unwrap();
            drop(load);
        };
    }
    let options = SleepOptions::default();
    check!(|engine: Engine<_>| engine.sleep_discarding(options).unwrap(), |asleep| asleep, 1);
    check!(
        |engine: Engine<_>| engine.sleep(options).unwrap(),
        |asleep: Engine<dormouse::Sleeping>| {
            let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
            assert_like_fresh(&engine, &w0, &request(1));
            engine.sleep(options).unwrap()
        },
        1
    );
    check!(
        |engine: Engine<_>| engine.sleep(options.resident()).unwrap(),
        |asleep: Engine<dormouse::Sleeping>| {
            let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
            assert_like_fresh(&engine, &w0, &request(1));
            engine.sleep(options.resident()).unwrap()
        },
        2
    );
}

#[test]
fn c09_b01_nothing_cached_before_an_update_is_used_after_it() {
    let (w0, w1) = (weights(1), weights(2));
    for options in modes() {
        // Other weights, the same weights, and there and back again.
        for updates in [vec![&w1], vec![&w0], vec![&w1, &w0]] {
            let engine = engine(&w0);
            assert_like_fresh(&engine, &w0, &request(1));
            assert!(engine.stats().blocks_cached >= 5);
            let asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
            let mut loaded = asleep.restore_weights().unwrap();
            for w in &updates {
                loaded.update_with(w.source(), options.clone()).unwrap();
            }
            let engine = loaded.wake_up().unwrap();
            let output = engine.generate(&[request(1)]).unwrap().remove(0);
            assert_eq!(output.completions[0].cached_tokens, 0);
            assert_eq!(bits(&output), bits(&fresh(updates.last().unwrap(), false, &request(1))));
        }
    }
}

#[test]
fn b28_an_engine_that_ran_before_an_update_equals_one_that_never_ran() {
    let (w0, w1) = (weights(1), weights(2));
    for options in modes() {
        let ran = |run: bool| {
            let engine = engine(&w0);
            if run {
                assert_like_fresh(&engine, &w0, &request(1));
            }
            let asleep = engine.sleep(SleepOptions::default()).unwrap();
            let mut loaded = asleep.restore_weights().unwrap();
            loaded.update_with(w1.source(), options.clone()).unwrap();
            let engine = wakes_like_fresh(loaded, &w1);
            bits(&engine.generate(&[request(3)]).unwrap().remove(0))
        };
        assert_eq!(ran(true), ran(false));
    }
}

#[test]
fn c22_b46_versions_only_go_up_and_labels_travel_with_the_tokens() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let first = loaded.version().unwrap();
    assert_eq!((first.counter, first.label.as_deref()), (1, None));
    let labelled = |label: &str| UpdateOptions::from(LoadOptions::default().label(label));
    // Failed ones take no version, whatever they were to be called.
    let mut update = loaded.begin_update(labelled("never")).unwrap();
    update.push(EMBEDDING, &get(&w1, EMBEDDING)).unwrap();
    update.commit().unwrap_err();
    drop(loaded.begin_update(labelled("never")).unwrap());
    assert_eq!(loaded.version().unwrap(), first);
    let report = loaded.update_with(w1.source(), labelled("step 120")).unwrap();
    assert_eq!((report.version.counter, report.previous), (2, first));
    assert_eq!(report.version.label.as_deref(), Some("step 120"));
    assert_eq!(report.version.to_string(), format!("2@{} (step 120)", digest(&w1).short()));
    // The same weights under another name are another version with the same digest.
    let again = loaded.update_with(w1.source(), labelled("step 121")).unwrap();
    assert_eq!((again.version.counter, again.version.digest), (3, report.version.digest));
    let engine = loaded.wake_up().unwrap();
    assert_eq!(engine.version(), again.version);
    let output = engine.generate(&[request(1)]).unwrap().remove(0);
    let spans = &output.completions[0].versions;
    assert_eq!((spans.len(), &spans[0].version, spans[0].tokens.clone()), (1, &again.version, 0..9));
    let json = serde_json::to_string(&output).unwrap();
    assert!(json.contains(r#""label":"step 121""#), "{json}");
    let back: dormouse::RequestOutput = serde_json::from_str(&json).unwrap();
    assert_eq!(back, output);
    // An update without a label has none, also after one that had.
    let mut loaded = engine.sleep(SleepOptions::default()).unwrap().restore_weights().unwrap();
    assert_eq!(loaded.version().unwrap().label.as_deref(), Some("step 121"));
    assert_eq!(loaded.update(w0.source()).unwrap().version.label, None);
    for (label, good) in [("l".repeat(256), true), ("l".repeat(257), false), (String::new(), true)] {
        match loaded.update_with(w0.source(), labelled(&label)) {
            Ok(report) => assert!(good && report.version.label.as_deref() == Some(&label)),
            Err(UpdateError::Begin(BeginError::LabelTooLong { bytes: 257, limit_bytes: 256 })) => {
                assert!(!good);
            }
            Err(error) => panic!("{error}"),
        }
    }
    let label = "l".repeat(257);
    let asleep = loaded.discard_weights();
    let (asleep, error) = asleep.begin_load(LoadOptions::default().label(label)).unwrap_err().into_parts();
    assert!(matches!(error, BeginError::LabelTooLong { .. }), "{error}");
    let loaded = asleep.load_weights(w1.source()).unwrap();
    assert_eq!(loaded.version().unwrap().counter, 7);
}

#[test]
fn c16_c30_b49_a_retracted_request_names_the_weights_of_each_token() {
    let (w0, w1) = (weights(1), weights(2));
    let engine = awake(tiny_builder(false, DType::F32), &w0);
    let asked = Request::new(crate::common::prompt(21, 1)).max_new_tokens(9).ignore_eos(true).samples(2);
    engine.submit(asked).unwrap();
    for _ in 0..4 {
        engine.step().unwrap();
    }
    let before = engine.version();
    let options = SleepOptions::default().in_flight(InFlight::Retract).resident();
    let mut loaded = engine.sleep(options).unwrap().restore_weights().unwrap();
    // One that fails does not lose it.
    let mut update = loaded.begin_update(UpdateOptions::default()).unwrap();
    update.push("x", &get(&w1, EMBEDDING)).unwrap_err();
    drop(update);
    let report = loaded.update(w1.source()).unwrap();
    let engine = loaded.wake_up().unwrap();
    assert_eq!(engine.report().resumed.len(), 1);
    let mut outputs = Vec::new();
    while outputs.is_empty() {
        outputs = engine.step().unwrap().outputs;
    }
    for completion in &outputs[0].completions {
        let spans = &completion.versions;
        assert_eq!(spans.len(), 2, "{spans:?}");
        assert_eq!((&spans[0].version, &spans[1].version), (&before, &report.version));
        assert_eq!((spans[0].tokens.start, spans[1].tokens.end), (0, 9));
    }
}

#[test]
fn c27_an_update_reads_what_the_path_holds_now() {
    let (w0, w1) = (weights(1), weights(2));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let mut loaded = loaded(&w0);
    for w in [&w1, &w0] {
        w.save(&path);
        loaded.update(Checkpoint::at(directory.path())).unwrap();
        assert_holds(&loaded, w);
    }
    struct Overwrites<'a>(Checkpoint, &'a mut dyn FnMut());
    impl WeightSource for Overwrites<'_> {
        fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
            self.0.index()
        }
        fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
            if tensor == 5 {
                (self.1)();
            }
            self.0.read(tensor, sink)
        }
        fn finish(&mut self) -> Result<(), SourceError> {
            self.0.finish()
        }
    }
    w1.save(&path);
    let bytes = std::fs::read(&path).unwrap();
    w0.save(&path);
    let before = known(&loaded);
    let mut overwrite = || std::fs::write(&path, &bytes).unwrap();
    let source = Overwrites(Checkpoint::at(directory.path()), &mut overwrite);
    loaded.update(source).unwrap_err();
    assert_eq!(known(&loaded), before);
    loaded.update(Checkpoint::at(directory.path())).unwrap();
    assert_wakes_like_fresh(loaded, &w1);
}

#[test]
fn b68_nothing_refers_to_the_callers_memory_after_a_push() {
    let (w0, w1) = (weights(1), weights(2));
    for options in modes() {
        let mut loaded = loaded(&w0);
        let mut update = loaded.begin_update(options).unwrap();
        for (i, (name, tensor)) in w1.0.iter().enumerate() {
            let mut sent = tensor.clone();
            match i % 3 {
                0 => update.push(name, &&sent).unwrap(),
                1 => {
                    // The back waits for the front.
                    let (front, back) = sent.data.split_at_mut(40);
                    update.push_piece(&spec(name, tensor), 40, back).unwrap();
                    back.fill(0xab);
                    update.push_piece(&spec(name, tensor), 0, front).unwrap();
                    front.fill(0xab);
                }
                _ => update
                    .push_all(crate::common::Weights(vec![(name.clone(), sent.clone())]).source())
                    .unwrap(),
            }
            sent.data.fill(0xab);
        }
        update.commit().unwrap();
        assert_holds(&loaded, &w1);
    }
}

#[test]
fn b41_tensors_may_lie_at_any_address() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let [w0, w1] = [1, 2].map(|seed| crate::common::tiny_weights(false, dtype, seed));
        for shift in [1, 3, 5, 63] {
            let mut loaded = loaded(&w0);
            let mut update = loaded.begin_update(UpdateOptions::default()).unwrap();
            for (name, tensor) in &w1.0 {
                let mut bytes = vec![0; 64 + shift + tensor.data.len()];
                let at = shift + bytes.as_ptr().align_offset(64);
                bytes[at..at + tensor.data.len()].copy_from_slice(&tensor.data);
                update.push_piece(&spec(name, tensor), 0, &bytes[at..at + tensor.data.len()]).unwrap();
            }
            update.commit().unwrap();
            assert_holds(&loaded, &w1);
        }
    }
}

#[test]
fn b48_an_update_can_demand_a_digest_that_was_computed_elsewhere() {
    let (w0, w1) = (weights(1), weights(2));
    for options in modes() {
        let mut loaded = loaded(&w0);
        let announced = loaded.digest_of(w1.source(), LoadOptions::default()).unwrap();
        assert_eq!(announced, digest(&w1));
        assert_holds(&loaded, &w0);
        let expecting = |digest| {
            let mut options = options.clone();
            options.load = LoadOptions::default().expect_digest(digest);
            options
        };
        loaded.update_with(w1.source(), expecting(announced)).unwrap();
        let error = loaded.update_with(w0.source(), expecting(announced)).unwrap_err();
        let UpdateError::Commit(CommitError::Transfer(error)) = error else { panic!("{error}") };
        assert!(error.to_string().contains(&digest(&w0).to_string()), "{error}");
        if options.mode == UpdateMode::Staged {
            assert_holds(&loaded, &w1);
        } else {
            assert_eq!(loaded.version(), None);
        }
    }
}

/// A push that takes no tensor at all changes nothing, and a set that is pushed twice is refused.
#[test]
fn b42_nothing_twice_and_nothing_at_all() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let mut update = loaded.begin_update(UpdateOptions::default()).unwrap();
    update.push_all(crate::common::Weights(vec![]).source()).unwrap();
    update.push_bucket(&dormouse::Bucket::new(vec![], &[]).unwrap()).unwrap();
    update.all(&mut w1.source()).unwrap();
    let twice = update.all(&mut w1.source());
    let Err(PushError::Mismatch(faults)) = twice else { panic!("{twice:?}") };
    assert_eq!((faults.duplicate.len(), faults.num_faults()), (w1.0.len(), w1.0.len()));
    drop(update);
    assert_holds(&loaded, &w0);
    let update = loaded.begin_update(UpdateOptions::default()).unwrap();
    let CommitError::Mismatch(faults) = update.commit().unwrap_err() else { panic!("nothing arrived") };
    assert_eq!(faults.missing.len(), w1.0.len());
    let tensor: &Tensor = get(&w1, EMBEDDING);
    assert_eq!(tensor.data.len(), 64 * 32 * 4);
}

/// A trainer may feed from any of its threads.
#[test]
fn an_update_and_a_load_can_be_fed_from_another_thread() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let mut update = loaded.begin_update(UpdateOptions::default()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| feed(5, &mut update, &w1).unwrap());
    });
    update.commit().unwrap();
    assert_holds(&loaded, &w1);
    let mut load = loaded.discard_weights().begin_load(LoadOptions::default()).unwrap();
    let w0 = std::sync::Arc::new(w0);
    let set = w0.clone();
    let loaded = std::thread::spawn(move || {
        feed(5, &mut load, &set).unwrap();
        load.commit().unwrap()
    });
    assert_holds(&loaded.join().unwrap(), &w0);
}

/// A caller who only wants `?` gets along with one error.
#[test]
fn every_call_of_an_update_converts_into_the_one_error() {
    fn all(w1: &crate::common::Weights) -> Result<Engine<dormouse::Awake>, dormouse::Error> {
        let config = dormouse::ModelConfig::from_json(&crate::common::tiny_config_json(false))?;
        let asleep = dormouse::EngineBuilder::from_config(config)
            .kv_cache(dormouse::KvCapacity::Blocks(16))
            .build_asleep()?;
        asleep.check_weights(asleep.expected_weights().tensors())?;
        let mut load = asleep.begin_load(LoadOptions::default())?;
        load.push_all(w1.source())?;
        let mut loaded = load.commit()?;
        let digest = loaded.digest_of(w1.source(), LoadOptions::default())?;
        assert_eq!(digest, dormouse::WeightsDigest::of(&mut w1.source())?);
        let mut update = loaded.begin_update(LoadOptions::default().expect_digest(digest))?;
        for (name, tensor) in &w1.0 {
            update.push(name, &tensor)?;
        }
        update.push_bucket(&dormouse::Bucket::new(vec![], &[])?)?;
        update.commit()?;
        loaded.update(w1.source())?;
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("descriptors are left");
        let client = std::thread::spawn({
            let patient = std::time::Duration::from_secs(20);
            move || dormouse::SharedMemoryClient::over(theirs, patient)
        });
        let mut source = dormouse::SharedMemorySource::accept(ours, Default::default())?;
        drop(client.join().expect("no panic")?);
        assert!(source.wait_for_offer(std::time::Duration::ZERO)?, "it is gone");
        loaded.verify()?;
        loaded.tensor(EMBEDDING)?;
        Ok(loaded.wake_up()?)
    }
    let w1 = weights(2);
    assert_eq!(all(&w1).unwrap().version().counter, 3);
    let mut missing = w1.clone();
    missing.0.pop();
    let error = all(&missing).unwrap_err();
    assert!(matches!(error, dormouse::Error::Commit(CommitError::Mismatch(_))), "{error}");
}

/// Weights are large: what holds them says how many there are when it is printed.
#[test]
fn nothing_that_holds_weights_prints_their_bytes() {
    let w = weights(1);
    let mut loaded = loaded(&w);
    let (name, tensor) = &w.0[0];
    assert!(format!("{:?}", loaded.tensor(name).unwrap()).len() < 300);
    let mut update = loaded.begin_update(UpdateOptions::default()).unwrap();
    let empty = format!("{update:?}").len();
    update.push_piece(&spec(name, tensor), 1000, &tensor.data[1000..]).unwrap();
    update.push_piece(&spec(name, tensor), 0, &tensor.data[..500]).unwrap();
    assert!(format!("{update:?}").len() < empty + 300);
}
