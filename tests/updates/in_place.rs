//! Updates in place: torn weights are known, refused and healed; nothing written is nothing torn.

use std::path::PathBuf;

use dormouse::{
    BeginError, DType, Delta, DeviceError, Engine, LoadOptions, ParkError, PushError, SparseOp, TensorError,
    UpdateError, UpdateOptions, VerifyError, WakeError, WeightsLoaded,
};

use crate::common::{Weights, on_device, parts, tiny_builder};
use crate::cycle::{assert_like_fresh, weights};
use crate::support::{
    EMBEDDING, K, Q, assert_holds, assert_wakes_like_fresh, digest, get, known, loaded, only, spec,
};

fn in_place() -> UpdateOptions {
    UpdateOptions::default().in_place()
}

/// Torn by a tensor of `other`.
fn torn(weights: &Weights, other: &Weights) -> Engine<WeightsLoaded> {
    let mut loaded = loaded(weights);
    let mut update = loaded.begin_update(in_place()).unwrap();
    update.push(K, &get(other, K)).unwrap();
    drop(update);
    loaded
}

const ADD_ONE: Delta<'static> =
    Delta::Sparse { indices: &[1], values: &[0, 0, 128, 63], dtype: DType::F32, op: SparseOp::Add };

#[test]
fn c07_c18_torn_weights_refuse_all_that_needs_whole_ones() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = torn(&w0, &w1);
    let bytes = parts(loaded.memory());
    assert_eq!(loaded.version(), None);
    for _ in 0..2 {
        let TensorError::Torn { last } = loaded.tensor(Q).unwrap_err() else { panic!() };
        assert_eq!((last.counter, last.digest), (1, digest(&w0)));
        assert!(matches!(loaded.verify(), Err(VerifyError::Torn { last: other }) if other == last));
        assert!(matches!(loaded.tensor_digests(), Err(VerifyError::Torn { last: other }) if other == last));
        for options in [UpdateOptions::default(), in_place()] {
            let error = loaded.begin_update(options.clone().partial([Q])).unwrap_err();
            assert!(matches!(&error, BeginError::Torn { last: other } if *other == last), "{error}");
            // A change has nothing to change, in a complete update either.
            let mut update = loaded.begin_update(options).unwrap();
            let error = update.push_delta(Q, &ADD_ONE).unwrap_err();
            assert!(matches!(&error, PushError::NoBase { tensor } if tensor == Q), "{error}");
            assert!(update.push_all(w1.source()).is_err());
        }
        let (back, error) = loaded.wake_up().unwrap_err().into_parts();
        let WakeError::Torn { last: other } = &error else { panic!("{error}") };
        assert_eq!(other, &last);
        assert!(error.to_string().contains("torn"), "{error}");
        loaded = back;
        assert_eq!(parts(loaded.memory()), bytes);
    }
    assert_eq!(loaded.report().version.counter, 1, "what the load did is no secret");
    assert_eq!(loaded.digest_of(w1.source(), LoadOptions::default()).unwrap(), digest(&w1));
    assert!(loaded.check_weights(loaded.expected_weights().tensors()).is_ok());
}

#[test]
fn c18_a_complete_update_in_either_mode_heals() {
    let (w0, w1) = (weights(1), weights(2));
    for options in [UpdateOptions::default(), in_place()] {
        let mut loaded = torn(&w0, &w1);
        // Torn twice, and a staged one that fails in between.
        loaded.update_with(only(&w1, &[Q]), options.clone()).unwrap_err();
        let mut update = loaded.begin_update(in_place()).unwrap();
        update.push(Q, &get(&w1, Q)).unwrap();
        drop(update);
        drop(loaded.begin_update(UpdateOptions::default()).unwrap());
        let report = loaded.update_with(w1.source(), options.clone()).unwrap();
        assert_eq!((report.version.counter, report.previous.counter), (2, 1));
        assert_holds(&loaded, &w1);
        loaded.update_with(only(&w0, &[Q]), options.partial([Q])).unwrap();
        assert_eq!(loaded.version().unwrap().counter, 3);
        let engine = loaded.wake_up().unwrap();
        let engine = engine.sleep(Default::default()).unwrap().restore_weights().unwrap();
        assert_holds(&engine, &crate::support::mix(&w1, &w0, &[Q]));
    }
}

#[test]
fn c18_discarding_leads_out_of_torn_weights() {
    let (w0, w1) = (weights(1), weights(2));
    let loaded = torn(&w0, &w1);
    let bytes = loaded.memory().weights_bytes;
    let asleep = loaded.discard_weights();
    assert_eq!(parts(asleep.memory()).total_bytes(), 0);
    let report = asleep.report();
    assert_eq!((report.freed.weights_bytes, report.version.as_ref().unwrap().counter), (bytes, 1));
    let loaded = asleep.load_weights(w1.source()).unwrap();
    assert_eq!(loaded.report().previous.as_ref().unwrap().digest, digest(&w0));
    assert_eq!(loaded.version().unwrap().counter, 2);
    assert_wakes_like_fresh(loaded, &w1);
    // Whole ones are discarded so as well.
    let asleep = crate::support::loaded(&w0).discard_weights();
    assert_eq!(parts(asleep.memory()).total_bytes(), 0);
    assert_like_fresh(
        &asleep.load_weights(w1.source()).unwrap().wake_up().unwrap(),
        &w1,
        &crate::cycle::request(2),
    );
    drop(torn(&w0, &w1));
}

#[test]
fn c18_torn_weights_are_not_parked() {
    let (w0, w1) = (weights(1), weights(2));
    let loaded = torn(&w0, &w1);
    let bytes = parts(loaded.memory());
    let (mut loaded, error) = loaded.park_weights().unwrap_err().into_parts();
    let ParkError::Torn { last } = &error else { panic!("{error}") };
    assert_eq!((last.counter, last.digest), (1, digest(&w0)));
    assert!(error.to_string().contains("torn"), "{error}");
    assert_eq!((parts(loaded.memory()), loaded.version()), (bytes, None));
    // Whole again, they are; the umbrella error takes the refusal too.
    loaded.update(w1.source()).unwrap();
    let loaded = loaded.park_weights().unwrap().restore_weights().unwrap();
    assert_holds(&loaded, &w1);
    assert_wakes_like_fresh(loaded, &w1);
    let park = || -> Result<_, dormouse::Error> { Ok(torn(&w0, &w1).park_weights()?) };
    assert!(matches!(park(), Err(dormouse::Error::Park(ParkError::Torn { .. }))));
}

#[test]
fn c18_where_nothing_was_written_nothing_is_torn() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let before = known(&loaded);
    drop(loaded.begin_update(in_place()).unwrap());
    let embedding = get(&w1, EMBEDDING);
    let tensor = spec(EMBEDDING, embedding);
    let refusals: [&dyn Fn(&mut dormouse::Update<'_>); 5] = [
        &|update| {
            update.push("x", &embedding).unwrap_err();
        },
        // A few bytes, at the front and further on: not yet a panel, and waiting.
        &|update| {
            update.push_piece(&tensor, 0, &embedding.data[..7]).unwrap();
            update.push_piece(&tensor, 4000, &embedding.data[4000..]).unwrap();
        },
        &|update| update.push_piece(&tensor, 0, &[]).unwrap(),
        &|update| {
            update.push_delta("x", &ADD_ONE).unwrap_err();
        },
        &|update| update.push_all(Weights(vec![]).source()).unwrap(),
    ];
    for refusal in refusals {
        let mut update = loaded.begin_update(in_place()).unwrap();
        refusal(&mut update);
        drop(update);
        assert_eq!(known(&loaded), before);
    }
    loaded.begin_update(in_place().partial(["x"])).unwrap_err();
    loaded.update_with(only(&w1, &[Q]), in_place()).unwrap_err();
    assert_eq!(known(&loaded), before, "an incomplete source is refused before anything is written");
    assert_wakes_like_fresh(loaded, &w0);
}

/// Where the budget holds the weights once and a page.
#[test]
fn b15_without_room_beside_the_weights_an_update_goes_in_place() {
    let (w0, w1) = (weights(1), weights(2));
    let weights_bytes = loaded(&w0).memory().weights_bytes;
    let limit = weights_bytes.next_multiple_of(4096) + 4096;
    let builder = tiny_builder(false, DType::F32).memory_limit_bytes(limit);
    let mut loaded = builder.build_asleep().unwrap().load_weights(w0.source()).unwrap();
    for partial in [false, true] {
        let before = known(&loaded);
        let (names, source) = if partial { (vec![Q], only(&w1, &[Q])) } else { (vec![], w1.source()) };
        let options = |options: UpdateOptions| if partial { options.partial(names.clone()) } else { options };
        let error = loaded.update_with(source, options(UpdateOptions::default())).unwrap_err();
        let UpdateError::Begin(BeginError::NoRoom { source: DeviceError::OutOfMemory { needed_bytes, .. } }) =
            &error
        else {
            panic!("{error}")
        };
        assert!(*needed_bytes >= weights_bytes);
        assert!(error.to_string().contains("in place"), "{error}");
        assert_eq!(known(&loaded), before);
        let source = if partial { only(&w1, &[Q]) } else { w1.source() };
        let report = loaded.update_with(source, options(in_place())).unwrap();
        assert_eq!(report.peak_weights_bytes, weights_bytes);
        assert_holds(&loaded, &w1);
        if !partial {
            loaded.update_with(w0.source(), in_place()).unwrap();
            loaded.update_with(w1.source(), in_place()).unwrap();
            assert_holds(&loaded, &w1);
        }
    }
    // A load in pieces of discarded weights takes them once, and over kept resident ones twice.
    let asleep = loaded.discard_weights();
    let mut load = asleep.begin_load(LoadOptions::default()).unwrap();
    load.push_all(w0.source()).unwrap();
    let loaded = load.commit().unwrap();
    assert_holds(&loaded, &w0);
    loaded.wake_up().expect_err("no room for a KV cache");
}

/// A change in place reads what it then overwrites, part by part of a fused matrix; parts share panels where
/// their rows are no multiple of a panel's.
#[test]
fn b27_c29_each_tensor_of_each_family_changes_alone_in_place_as_beside() {
    for family in ["llama2", "llama3", "smollm2", "mistral", "qwen2", "qwen2_yarn", "qwen3"] {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(family);
        let engines = [UpdateOptions::default(), in_place()].map(|options| {
            let builder =
                on_device(Engine::builder(&directory)).kv_cache(dormouse::KvCapacity::Blocks(16)).threads(2);
            let engine = builder.build().unwrap();
            (engine.sleep(Default::default()).unwrap().restore_weights().unwrap(), options)
        });
        let [(mut beside, staged), (mut above, in_place)] = engines;
        let names: Vec<String> =
            beside.expected_weights().tensors().iter().map(|spec| spec.name.clone()).collect();
        let all = |loaded: &Engine<WeightsLoaded>| -> Vec<_> {
            names.iter().map(|name| loaded.tensor(name).unwrap()).collect()
        };
        let mut expected = all(&beside);
        for (i, name) in names.iter().enumerate() {
            for (loaded, options) in [(&mut beside, &staged), (&mut above, &in_place)] {
                let mut update = loaded.begin_update(options.clone().partial([name.as_str()])).unwrap();
                update.push_delta(name, &ADD_ONE).unwrap();
                update.commit().unwrap();
                loaded.verify().unwrap();
            }
            expected[i] = beside.tensor(name).unwrap();
            assert!(all(&beside) == expected, "{family}: {name} staged");
            assert!(all(&above) == expected, "{family}: {name} in place");
        }
        // All at once, back to what the files hold.
        for loaded in [&mut beside, &mut above] {
            loaded.update(dormouse::Checkpoint::at(&directory)).unwrap();
        }
        let mut update = above.begin_update(in_place).unwrap();
        names.iter().for_each(|name| update.push_delta(name, &ADD_ONE).unwrap());
        update.commit().unwrap();
        assert!(all(&above) == expected, "{family}");
    }
}
