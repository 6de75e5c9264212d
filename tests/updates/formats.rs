//! Names, dtypes, padding, tied heads, buffers, families.

use std::path::PathBuf;

use dormouse::{
    Awake, Checkpoint, CommitError, DType, Engine, KvCapacity, LoadError, LoadOptions, NameMap, PushError,
    Request, SleepOptions, TensorSet, TransferError, UpdateError, UpdateOptions, WeightsLoaded,
};

use crate::common::{Tensor, Weights, awake, bits, encode, on_device, prompt, tiny_builder, tiny_weights};
use crate::cycle::{request, weights};
use crate::support::{
    EMBEDDING, HEAD, Q, assert_holds, assert_wakes_like_fresh, digest, get, get_mut, known, loaded,
};

const FAMILIES: [&str; 8] =
    ["llama2", "llama3", "smollm2", "mistral", "qwen2", "qwen2_yarn", "qwen3", "llama_linear_sharded"];

fn family(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(name)
}

fn built(directory: &std::path::Path) -> Engine<Awake> {
    on_device(Engine::builder(directory))
        .kv_cache(KvCapacity::Blocks(64))
        .block_size(4)
        .threads(1)
        .build()
        .unwrap()
}

fn asked() -> Vec<Request> {
    [(40, 0.0), (33, 0.9)]
        .map(|(len, temperature)| {
            Request::new(prompt(len, 3)).temperature(temperature).seed(5).max_new_tokens(12).ignore_eos(true)
        })
        .into()
}

fn says(engine: &Engine<Awake>) -> Vec<Vec<(Vec<u32>, Vec<u32>)>> {
    engine.generate(&asked()).unwrap().iter().map(bits).collect()
}

#[test]
fn c20_c29_every_family_is_read_back_exactly_and_fed_back_to_the_same_digest() {
    for name in FAMILIES {
        let engine = built(&family(name));
        let version = engine.version();
        let expected = says(&engine);
        engine.verify().unwrap();
        // What is in the files is what comes out, awake and loaded.
        let mut source = Checkpoint::at(family(name));
        let specs = dormouse::WeightSource::index(&mut source).unwrap();
        for (i, spec) in specs.iter().enumerate() {
            let mut sent = Vec::new();
            let mut sink = |piece: &[u8]| sent.extend_from_slice(piece);
            dormouse::WeightSource::read(&mut source, i, &mut sink).unwrap();
            let back = engine.tensor(&spec.name).unwrap();
            assert!(back.spec == *spec && back.data == sent, "{name}: {}", spec.name);
        }
        let names: Vec<String> =
            engine.expected_weights().tensors().iter().map(|spec| spec.name.clone()).collect();
        let mut loaded = engine.sleep(SleepOptions::default()).unwrap().restore_weights().unwrap();
        let tensors: Vec<_> = names.iter().map(|name| loaded.tensor(name).unwrap()).collect();
        for options in [UpdateOptions::default(), UpdateOptions::default().in_place()] {
            let set = TensorSet::new(names.iter().cloned().zip(&tensors));
            assert_eq!(loaded.update_with(set, options).unwrap().version.digest, version.digest, "{name}");
            loaded.verify().unwrap();
            let again: Vec<_> = names.iter().map(|name| loaded.tensor(name).unwrap()).collect();
            assert!(again == tensors);
        }
        // Another set, and back from the files.
        let other: Vec<_> = tensors
            .iter()
            .map(|tensor| dormouse::WeightTensor {
                data: tensor.data.chunks(2).flat_map(|pair| [pair[0] ^ 1, pair[1]]).collect(),
                ..tensor.clone()
            })
            .collect();
        let set = TensorSet::new(names.iter().cloned().zip(&other));
        assert_ne!(loaded.update(set).unwrap().version.digest, version.digest);
        let report = loaded.update(Checkpoint::at(family(name))).unwrap();
        assert_eq!((report.version.digest, report.version.counter), (version.digest, 5));
        assert_eq!(says(&loaded.wake_up().unwrap()), expected, "{name}");
    }
}

/// A set in another dtype, rounded by `half`.
fn rounded(weights: &Weights, to: DType) -> Weights {
    let one = |tensor: &Tensor| {
        let wide: Vec<f32> = match tensor.dtype {
            safetensors::Dtype::F32 => {
                tensor.data.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
            }
            safetensors::Dtype::F16 => {
                tensor.data.as_chunks().0.iter().map(|x| half::f16::from_le_bytes(*x).to_f32()).collect()
            }
            _ => tensor.data.as_chunks().0.iter().map(|x| half::bf16::from_le_bytes(*x).to_f32()).collect(),
        };
        encode(to, tensor.shape.clone(), wide)
    };
    Weights(weights.0.iter().map(|(name, tensor)| (name.clone(), one(tensor))).collect())
}

#[test]
fn c17_dtypes_are_converted_if_asked_for_and_refused_otherwise() {
    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
    for to in DTYPES {
        let w0 = tiny_weights(false, to, 1);
        for from in DTYPES {
            let sent = tiny_weights(false, from, 2);
            let expected = rounded(&sent, to);
            for options in [UpdateOptions::default(), UpdateOptions::default().in_place()] {
                let mut loaded = loaded(&w0);
                let before = known(&loaded);
                if from != to {
                    let error = loaded.update_with(sent.source(), options.clone()).unwrap_err();
                    let UpdateError::Push(PushError::Mismatch(faults)) = error else { panic!("{error}") };
                    assert_eq!((faults.wrong_dtype.len(), faults.num_faults()), (sent.0.len(), sent.0.len()));
                    assert_eq!(known(&loaded), before);
                }
                let mut options = options;
                options.load = LoadOptions::default().convert_dtypes().require_finite();
                let announced = loaded.digest_of(sent.source(), options.load.clone()).unwrap();
                assert_eq!(announced, digest(&expected));
                options.load = options.load.expect_digest(announced);
                loaded.update_with(sent.source(), options.clone()).unwrap();
                assert_holds(&loaded, &expected);
                let asleep = loaded.discard_weights();
                let loaded = asleep.load_weights_with(sent.source(), options.load).unwrap();
                assert_holds(&loaded, &expected);
                if options.partial.is_none() && from == DType::F32 {
                    assert_wakes_like_fresh(loaded, &expected);
                }
            }
        }
    }
}

#[test]
fn a_builder_with_a_dtype_converts_its_checkpoint() {
    for (name, to) in
        [("llama2", DType::Bf16), ("qwen2", DType::F32), ("qwen3", DType::F16), ("llama3", DType::F32)]
    {
        let builder = || {
            on_device(Engine::builder(family(name))).kv_cache(KvCapacity::Blocks(64)).block_size(4).threads(1)
        };
        let plain = builder().build().unwrap();
        let names: Vec<String> =
            plain.expected_weights().tensors().iter().map(|spec| spec.name.clone()).collect();
        let original = Weights(
            names
                .iter()
                .map(|name| {
                    let back = plain.tensor(name).unwrap();
                    let dtype = back.spec.dtype.into();
                    (name.clone(), Tensor { dtype, shape: back.spec.shape, data: back.data })
                })
                .collect(),
        );
        let expected = rounded(&original, to);
        let converted = builder().dtype(to).build().unwrap();
        assert!(converted.expected_weights().tensors().iter().all(|spec| spec.dtype == to));
        assert_eq!(converted.version().digest, digest(&expected), "{name}");
        let fresh = builder().dtype(to).build_asleep().unwrap().load_weights(expected.source()).unwrap();
        let said = says(&fresh.wake_up().unwrap());
        assert_eq!(says(&converted), said, "{name}");
        // Later loads convert if they are told to.
        let asleep = converted.sleep_discarding(SleepOptions::default()).unwrap();
        if original.0.iter().all(|(_, tensor)| tensor.dtype != to.into()) {
            let (back, error) = asleep.load_weights(Checkpoint::at(family(name))).unwrap_err().into_parts();
            assert!(
                matches!(&error, LoadError::Mismatch(faults) if !faults.wrong_dtype.is_empty()),
                "{error}"
            );
            let options = LoadOptions::default().convert_dtypes();
            let loaded = back.load_weights_with(Checkpoint::at(family(name)), options).unwrap();
            assert_eq!(says(&loaded.wake_up().unwrap()), said);
        }
    }
}

/// The set under other names.
fn renamed(weights: &Weights, name: impl Fn(&str) -> String) -> Weights {
    Weights(weights.0.iter().map(|(old, tensor)| (name(old), tensor.clone())).collect())
}

#[test]
fn b24_names_of_wrappers_are_mapped_or_refused_and_buffers_are_ignored() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = crate::support::loaded(&w0);
    let before = known(&loaded);
    let wrapped: [&dyn Fn(&str) -> String; 5] = [
        &|name| format!("module.{name}"),
        &|name| format!("_orig_mod.module.module.{name}"),
        &|name| format!("base_model.model.{}", name.replace("_proj.weight", "_proj.base_layer.weight")),
        &|name| name.replace(".layers.", "._fsdp_wrapped_module.layers."),
        &|name| name.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    ];
    for wrap in wrapped {
        let sent = renamed(&w1, wrap);
        let error = loaded.update(sent.source()).unwrap_err();
        let UpdateError::Push(PushError::Mismatch(faults)) = error else { panic!("{error}") };
        let changed = sent.0.iter().filter(|(name, _)| !w1.0.iter().any(|(old, _)| old == name)).count();
        assert_eq!((faults.unknown.len(), faults.missing.len()), (changed, changed));
        assert_eq!(known(&loaded), before);
        let options = LoadOptions::default().names(NameMap::wrappers());
        loaded.update_with(sent.source(), options.clone()).unwrap();
        assert_holds(&loaded, &w1);
        // By partial updates too: the set is in the model's names.
        let mut partial = UpdateOptions::from(options);
        partial.partial = Some(vec![Q.into()]);
        let q = Weights(vec![(wrap(Q), get(&w0, Q).clone())]);
        loaded.update_with(q.source(), partial).unwrap();
        assert_holds(&loaded, &crate::support::mix(&w1, &w0, &[Q]));
        loaded = crate::support::loaded(&w0);
    }
    // Buffers, and what the caller ignores.
    let mut extra = w1.clone();
    for name in ["model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.proj.weight"] {
        extra.0.insert(3, (name.into(), encode(DType::F32, vec![8], vec![1.0; 8])));
    }
    let error = loaded.update(extra.source()).unwrap_err();
    assert!(error.to_string().contains("vision_tower.proj.weight"), "{error}");
    let options = LoadOptions::default().names(NameMap::default().ignore_under("vision_tower"));
    let report = loaded.update_with(extra.source(), options).unwrap();
    assert_eq!(report.tensors, w1.0.len());
    assert_wakes_like_fresh(loaded, &w1);
}

#[test]
fn rows_of_padding_make_no_difference() {
    let (w0, w1) = (weights(1), weights(2));
    let padded = |rows: usize, value: f32| {
        let mut padded = w1.clone();
        for name in [EMBEDDING, HEAD] {
            let tensor = get_mut(&mut padded, name);
            tensor.shape[0] += rows;
            tensor.data.extend(encode(DType::F32, vec![], vec![value; rows * 32]).data);
        }
        padded
    };
    let options = || LoadOptions::default().trim_vocab_padding().require_finite();
    for (rows, value) in [(0, 0.0), (1, f32::NAN), (64, 7.0), (100, f32::INFINITY)] {
        let mut loaded = loaded(&w0);
        let sent = padded(rows, value);
        if rows > 0 {
            let error = loaded.update(sent.source()).unwrap_err();
            let UpdateError::Push(PushError::Mismatch(faults)) = error else { panic!("{error}") };
            assert_eq!((faults.wrong_shape.len(), faults.num_faults()), (2, 2));
        }
        loaded.update_with(sent.source(), options()).unwrap();
        assert_holds(&loaded, &w1);
        assert_wakes_like_fresh(loaded, &w1);
    }
}

fn tied_loaded(weights: &Weights) -> Engine<WeightsLoaded> {
    tiny_builder(true, DType::F32).build_asleep().unwrap().load_weights(weights.source()).unwrap()
}

#[test]
fn c28_b26_an_update_of_a_tied_model_with_without_and_with_another_head() {
    let [w0, w1] = [1, 2].map(|seed| tiny_weights(true, DType::F32, seed));
    let head = |weights: &Weights| (HEAD.to_owned(), get(weights, EMBEDDING).clone());
    let with = |head, first: bool| {
        let mut set = w1.clone();
        set.0.insert(if first { 0 } else { set.0.len() }, head);
        set
    };
    let fresh = {
        let engine = awake(tiny_builder(true, DType::F32).prefix_cache(false), &w1);
        bits(&engine.generate(&[request(1)]).unwrap().remove(0))
    };
    for options in [UpdateOptions::default(), UpdateOptions::default().in_place()] {
        for set in [w1.clone(), with(head(&w1), true), with(head(&w1), false)] {
            let mut loaded = tied_loaded(&w0);
            let report = loaded.update_with(set.source(), options.clone()).unwrap();
            assert_eq!((report.version.digest, report.tensors), (digest(&w1), w1.0.len()));
            assert_holds(&loaded, &w1);
            assert_eq!(loaded.tensor(HEAD).unwrap().data, get(&w1, EMBEDDING).data);
            let engine = loaded.wake_up().unwrap();
            assert_eq!(bits(&engine.generate(&[request(1)]).unwrap().remove(0)), fresh);
        }
        for first in [true, false] {
            let mut loaded = tied_loaded(&w0);
            let error = loaded.update_with(with(head(&w0), first).source(), options.clone()).unwrap_err();
            assert!(error.to_string().contains(HEAD), "{error}");
            let UpdateError::Commit(CommitError::Transfer(TransferError::TiedHeadDiffers)) = error else {
                panic!("{error}")
            };
            if options.mode == dormouse::UpdateMode::Staged {
                assert_holds(&loaded, &w0);
            }
        }
    }
    // The head alone, of a complete update and of partial ones.
    let mut loaded = tied_loaded(&w0);
    let mut set = with(head(&w1), true);
    set.0.retain(|(name, _)| name != EMBEDDING);
    let error = loaded.update(set.source()).unwrap_err();
    let UpdateError::Push(PushError::Mismatch(faults)) = error else { panic!("{error}") };
    assert_eq!((faults.missing.as_slice(), faults.num_faults()), (&[EMBEDDING.to_owned()][..], 1));
    let head_only = Weights(vec![head(&w1)]);
    let error = loaded.update_with(head_only.source(), UpdateOptions::default().partial([Q])).unwrap_err();
    let UpdateError::Push(PushError::Mismatch(faults)) = error else { panic!("{error}") };
    assert_eq!(faults.not_asked, [HEAD]);
    let error =
        loaded.update_with(head_only.source(), UpdateOptions::default().partial([EMBEDDING])).unwrap_err();
    let UpdateError::Push(PushError::Mismatch(faults)) = error else { panic!("{error}") };
    assert_eq!(faults.missing, [EMBEDDING]);
    assert_holds(&loaded, &w0);
    // With its embedding it may come in a partial update.
    let both = Weights(vec![head(&w1), (EMBEDDING.into(), get(&w1, EMBEDDING).clone())]);
    loaded.update_with(both.source(), UpdateOptions::default().partial([EMBEDDING])).unwrap();
    assert_holds(&loaded, &crate::support::mix(&w0, &w1, &[EMBEDDING]));
}

#[test]
fn a_dry_run_accepts_what_a_load_with_the_same_options_would() {
    let mut specs = loaded(&weights(1)).expected_weights().tensors().to_vec();
    for spec in &mut specs {
        spec.name.insert_str(0, "module.");
        spec.dtype = DType::Bf16;
    }
    let embedding = specs.iter_mut().find(|spec| spec.name.ends_with(EMBEDDING)).unwrap();
    embedding.shape[0] += 3;
    let engine = loaded(&weights(1));
    let options = LoadOptions::default().names(NameMap::wrappers()).convert_dtypes().trim_vocab_padding();
    engine.check_weights_with(&specs, &options).unwrap();
    let faults = |options: LoadOptions| engine.check_weights_with(&specs, &options).unwrap_err();
    let names = || LoadOptions::default().names(NameMap::wrappers());
    assert_eq!(faults(names().convert_dtypes()).wrong_shape.len(), 1);
    assert_eq!(faults(names().trim_vocab_padding()).wrong_dtype.len(), specs.len());
    assert_eq!(faults(LoadOptions::default()).unknown.len(), specs.len());
    specs.pop();
    assert_eq!(engine.check_weights_with(&specs, &options).unwrap_err().missing.len(), 1);
}

#[test]
fn c28_a_partial_update_of_a_tied_model_may_name_both() {
    let (w0, w1) = (tiny_weights(true, DType::F32, 1), tiny_weights(true, DType::F32, 2));
    let mut loaded = tied_loaded(&w0);
    let embedding = get(&w1, EMBEDDING);
    for names in [vec![EMBEDDING, HEAD], vec![HEAD], vec![EMBEDDING]] {
        let mut update = loaded.begin_update(UpdateOptions::default().partial(names.clone())).unwrap();
        for name in names.iter().filter(|name| **name == HEAD).chain([&EMBEDDING]) {
            update.push(name, &embedding).unwrap();
        }
        update.commit().unwrap();
        assert_eq!(loaded.tensor(HEAD).unwrap().data, embedding.data);
    }
    // The head alone is not there: the embedding is what is stored.
    let mut update = loaded.begin_update(UpdateOptions::default().partial([HEAD])).unwrap();
    update.push(HEAD, &embedding).unwrap();
    let CommitError::Mismatch(faults) = update.commit().unwrap_err() else { panic!("nothing else is wrong") };
    assert_eq!(faults.missing, [EMBEDDING]);
}
