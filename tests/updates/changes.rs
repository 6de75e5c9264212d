//! Partial updates and changes: digest and output are those of the merged whole, computed here.

use dormouse::{
    BeginError, CommitError, DType, Delta, DeltaError, EngineBuilder, KvCapacity, LoadOptions, LoraAdapter,
    ModelConfig, NameMap, PushError, SafetensorsBytes, SparseOp, TransferError, UpdateError, UpdateOptions,
};

use crate::common::{Tensor, Weights, encode, tiny_weights};
use crate::cycle::weights;
use crate::support::{
    EMBEDDING, GATE, HEAD, K, Q, WAYS, assert_holds, assert_wakes_like_fresh, digest, feed, get, get_mut,
    known, loaded, mix, only, spec, wakes_like_fresh,
};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

fn modes() -> [UpdateOptions; 2] {
    [UpdateOptions::default(), UpdateOptions::default().in_place()]
}

#[test]
fn b27_b28_a_part_of_a_fused_matrix_changes_alone() {
    for dtype in DTYPES {
        let [w0, w1] = [1, 2].map(|seed| tiny_weights(false, dtype, seed));
        for options in modes() {
            let v = "model.layers.0.self_attn.v_proj.weight";
            let up = "model.layers.1.mlp.up_proj.weight";
            let norm = "model.layers.0.input_layernorm.weight";
            let sets: [&[&str]; 11] = [
                &[Q],
                &[K],
                &[v],
                &[GATE],
                &[up],
                &[norm],
                &[EMBEDDING],
                &[HEAD],
                &[Q, v],
                &[K, Q],
                &[up, GATE, Q],
            ];
            for names in sets {
                let mut loaded = loaded(&w0);
                let options = options.clone().partial(names.iter().copied());
                let report = loaded.update_with(only(&w1, names), options).unwrap();
                assert_eq!(report.tensors, names.len());
                let mixed = mix(&w0, &w1, names);
                assert_holds(&loaded, &mixed);
                if dtype == DType::F32 {
                    assert_wakes_like_fresh(loaded, &mixed);
                }
            }
        }
    }
}

#[test]
fn b28_one_matrix_after_the_other_and_then_all() {
    let (w0, w1) = (weights(1), weights(2));
    for ran in [false, true] {
        let mut loaded = loaded(&w0);
        let mut mixed = w0.clone();
        for name in [Q, GATE, EMBEDDING] {
            if ran {
                let engine = wakes_like_fresh(loaded, &mixed);
                loaded = engine.sleep(Default::default()).unwrap().restore_weights().unwrap();
            }
            loaded.update_with(only(&w1, &[name]), UpdateOptions::default().partial([name])).unwrap();
            mixed = mix(&mixed, &w1, &[name]);
            assert_holds(&loaded, &mixed);
        }
        let engine = wakes_like_fresh(loaded, &mixed);
        let mut loaded = engine.sleep(Default::default()).unwrap().restore_weights().unwrap();
        loaded.update(w1.source()).unwrap();
        assert_wakes_like_fresh(loaded, &w1);
    }
}

#[test]
fn c17_a_partial_update_takes_what_it_names_and_nothing_else() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let before = known(&loaded);
    let partial = || UpdateOptions::default().partial([Q, K]);
    let error = loaded.begin_update(UpdateOptions::default().partial([Q, "x", "y"])).unwrap_err();
    assert!(matches!(&error, BeginError::UnknownTensors { unknown } if unknown == &["x", "y"]), "{error}");
    let error = loaded.begin_update(UpdateOptions::default().partial::<&str>([])).unwrap_err();
    assert!(matches!(error, BeginError::NoTensors), "{error}");
    let many: Vec<String> = (0..100).map(|i| format!("unknown.{i}")).collect();
    let error = loaded.begin_update(UpdateOptions::default().partial(many)).unwrap_err();
    assert!(error.to_string().ends_with("unknown.9 and 90 more"), "{error}");
    // One too many, one too few, a change of another.
    let error = loaded.update_with(only(&w1, &[Q, K, GATE]), partial()).unwrap_err();
    let UpdateError::Push(PushError::Mismatch(faults)) = error else { panic!("{error}") };
    assert_eq!((faults.not_asked.as_slice(), faults.num_faults()), (&[GATE.to_owned()][..], 1));
    let error = loaded.update_with(only(&w1, &[Q]), partial()).unwrap_err();
    let UpdateError::Push(PushError::Mismatch(faults)) = error else { panic!("{error}") };
    assert_eq!((faults.missing.as_slice(), faults.num_faults()), (&[K.to_owned()][..], 1));
    let mut update = loaded.begin_update(partial()).unwrap();
    let delta = Delta::Sparse { indices: &[], values: &[], dtype: DType::F32, op: SparseOp::Set };
    let PushError::Mismatch(faults) = update.push_delta(GATE, &delta).unwrap_err() else { panic!() };
    assert_eq!(faults.not_asked, [GATE]);
    drop(update);
    let mut update = loaded.begin_update(partial()).unwrap();
    update.push(Q, &get(&w1, Q)).unwrap();
    let CommitError::Mismatch(faults) = update.commit().unwrap_err() else { panic!() };
    assert_eq!(faults.missing, [K]);
    assert_eq!(known(&loaded), before);
    // A name given twice is one tensor; naming all is a complete update.
    let twice = UpdateOptions::default().partial([Q, Q]);
    assert_eq!(loaded.update_with(only(&w1, &[Q]), twice).unwrap().tensors, 1);
    let all = UpdateOptions::default().partial(w1.0.iter().map(|(name, _)| name.clone()));
    for way in (0..WAYS).step_by(4) {
        let mut update = loaded.begin_update(all.clone()).unwrap();
        feed(way, &mut update, if way % 8 == 0 { &w1 } else { &w0 }).unwrap();
        update.commit().unwrap();
    }
    assert_holds(&loaded, &w1);
}

fn values(tensor: &Tensor) -> Vec<f32> {
    match DType::try_from(tensor.dtype).unwrap() {
        DType::F32 => tensor.data.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        DType::F16 => {
            tensor.data.as_chunks().0.iter().map(|x| half::f16::from_le_bytes(*x).to_f32()).collect()
        }
        DType::Bf16 => {
            tensor.data.as_chunks().0.iter().map(|x| half::bf16::from_le_bytes(*x).to_f32()).collect()
        }
    }
}

/// The definition, on plain values.
fn merged(tensor: &Tensor, delta: &Delta<'_>) -> Tensor {
    let dtype = DType::try_from(tensor.dtype).unwrap();
    let plain = |dtype, data: &[u8]| {
        let data = data.to_vec();
        values(&Tensor { dtype: safetensors::Dtype::from(dtype), shape: vec![], data })
    };
    let mut new = values(tensor);
    match *delta {
        Delta::Sparse { indices, values, dtype, op } => {
            for (&index, value) in indices.iter().zip(plain(dtype, values)) {
                let old = if op == SparseOp::Add { new[index as usize] } else { 0.0 };
                new[index as usize] = if op == SparseOp::Add { old + value } else { value };
            }
        }
        Delta::LowRank { a, b, rank, dtype, scale } => {
            let (a, b) = (plain(dtype, a), plain(dtype, b));
            let columns = tensor.shape[1];
            for (i, element) in new.iter_mut().enumerate() {
                let (row, column) = (i / columns, i % columns);
                let mut sum = 0.0_f32;
                for k in 0..rank {
                    let product = b[row * rank + k] * a[k * columns + column];
                    sum += product;
                }
                let scaled = scale * sum;
                *element += scaled;
            }
        }
        _ => unreachable!("there are two kinds"),
    }
    encode(dtype, tensor.shape.clone(), new)
}

fn some(seed: u32, count: usize) -> Vec<f32> {
    (0..count as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 1e7 - 0.8)
        .collect()
}

#[test]
fn c29_changes_give_the_digest_of_the_merged_whole() {
    for dtype in DTYPES {
        let w0 = tiny_weights(false, dtype, 1);
        for sent in DTYPES {
            let indices: Vec<u64> = (0..500).map(|i| i * 2 + i % 2).collect();
            let elements = encode(sent, vec![], some(1, 500)).data;
            let few = encode(sent, vec![], some(2, 3)).data;
            let a = encode(sent, vec![], some(3, 3 * 32)).data;
            let b = |rows: usize| encode(sent, vec![], some(4, rows * 3)).data;
            let (b32, b16, b48) = (b(32), b(16), b(48));
            let low_rank = |b| Delta::LowRank { a: &a, b, rank: 3, dtype: sent, scale: 0.37 };
            let norm = "model.norm.weight";
            let changes = [
                (Q, low_rank(&b32)),
                (K, low_rank(&b16)),
                (GATE, low_rank(&b48)),
                (
                    EMBEDDING,
                    Delta::Sparse { indices: &indices, values: &elements, dtype: sent, op: SparseOp::Set },
                ),
                (
                    HEAD,
                    Delta::Sparse { indices: &indices, values: &elements, dtype: sent, op: SparseOp::Add },
                ),
                (norm, Delta::Sparse { indices: &[0, 7, 31], values: &few, dtype: sent, op: SparseOp::Add }),
            ];
            let mut expected = w0.clone();
            for (name, delta) in &changes {
                *get_mut(&mut expected, name) = merged(get(&w0, name), delta);
            }
            for options in modes() {
                // Only what changes, and as a part of a complete update.
                let mut changed = loaded(&w0);
                let names = changes.each_ref().map(|(name, _)| *name);
                let partial = options.clone().partial(names);
                let mut update = changed.begin_update(partial).unwrap();
                changes.iter().rev().for_each(|(name, delta)| update.push_delta(name, delta).unwrap());
                assert_eq!(update.commit().unwrap().version.digest, digest(&expected), "{dtype} {sent}");
                assert_holds(&changed, &expected);
                let mut complete = loaded(&w0);
                let mut update = complete.begin_update(options).unwrap();
                for (name, tensor) in &w0.0 {
                    match changes.iter().find(|(other, _)| other == name) {
                        Some((name, delta)) => update.push_delta(name, delta).unwrap(),
                        None => update.push(name, &tensor).unwrap(),
                    }
                }
                update.commit().unwrap();
                assert_holds(&complete, &expected);
                if dtype == sent {
                    assert_wakes_like_fresh(changed, &expected);
                }
            }
        }
    }
}

#[test]
fn c17_a_change_that_does_not_fit_changes_nothing() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let before = known(&loaded);
    let four = [0_u8; 4];
    let sparse = |indices, values| Delta::Sparse { indices, values, dtype: DType::F32, op: SparseOp::Set };
    let bad: [(&str, Delta<'_>); 5] = [
        (Q, sparse(&[1024], &four)),
        (Q, sparse(&[1, 1], &[0; 8])),
        (Q, sparse(&[1], &[0; 3])),
        (Q, Delta::LowRank { a: &four, b: &four, rank: 1, dtype: DType::F32, scale: 1.0 }),
        ("model.norm.weight", Delta::LowRank { a: &four, b: &four, rank: 1, dtype: DType::F32, scale: 1.0 }),
    ];
    for options in modes() {
        for (name, delta) in &bad {
            let mut update = loaded.begin_update(options.clone().partial([*name])).unwrap();
            let PushError::Delta { tensor, source } = update.push_delta(name, delta).unwrap_err() else {
                panic!()
            };
            assert!(tensor == *name && !matches!(source, DeltaError::TensorTooLarge { .. }));
            drop(update);
            assert_eq!(known(&loaded), before, "{delta:?}");
        }
    }
    // Twice, or after the tensor itself.
    for whole in [false, true] {
        let mut update = loaded.begin_update(UpdateOptions::default().partial([Q])).unwrap();
        match whole {
            true => update.push(Q, &get(&w1, Q)).unwrap(),
            false => update.push_delta(Q, &sparse(&[5], &four)).unwrap(),
        }
        assert!(update.push_delta(Q, &sparse(&[6], &four)).is_err());
        drop(update);
        assert_eq!(known(&loaded), before);
    }
    // What it makes is checked as what is sent.
    let infinity = f32::INFINITY.to_le_bytes();
    let mut options = UpdateOptions::from(LoadOptions::default().require_finite());
    options.partial = Some(vec![Q.into()]);
    let mut update = loaded.begin_update(options).unwrap();
    let error = update.push_delta(Q, &sparse(&[40], &infinity)).unwrap_err();
    let PushError::Transfer(TransferError::NonFinite { index, .. }) = error else { panic!("{error}") };
    assert_eq!(index, [1, 8]);
    drop(update);
    assert_eq!(known(&loaded), before);
}

#[test]
fn c29_an_adapter_is_merged_into_what_it_changes() {
    for dtype in DTYPES {
        let w0 = tiny_weights(false, dtype, 1);
        let modules = [(Q, 32, 32), (K, 32, 16), ("model.layers.1.mlp.down_proj.weight", 48, 32)];
        let mut tensors = Vec::new();
        for (i, (name, inputs, outputs)) in modules.into_iter().enumerate() {
            let module = format!("base_model.model.{}", name.strip_suffix(".weight").unwrap());
            let factor = |rows: usize, columns| {
                encode(DType::Bf16, vec![rows, columns], some(i as u32, rows * columns))
            };
            tensors.push((format!("{module}.lora_A.weight"), factor(4, inputs)));
            tensors.push((format!("{module}.lora_B.weight"), factor(outputs, 4)));
        }
        let bytes = safetensors::serialize(tensors.iter().map(|(name, t)| (name.clone(), t)), None).unwrap();
        let adapter = LoraAdapter::read(SafetensorsBytes::new(&bytes), &NameMap::wrappers(), 2.0).unwrap();
        let mut expected = w0.clone();
        for (name, delta) in adapter.deltas() {
            *get_mut(&mut expected, name) = merged(get(&w0, name), &delta);
        }
        for options in modes() {
            let mut loaded = loaded(&w0);
            let mut update = loaded.begin_update(options.partial(adapter.tensor_names())).unwrap();
            update.push_adapter(&adapter).unwrap();
            assert_eq!(update.commit().unwrap().version.digest, digest(&expected), "{dtype}");
            assert_wakes_like_fresh(loaded, &expected);
        }
        // An adapter of another model is refused, and the weights are what they were.
        let mut loaded = loaded(&w0);
        let other = NameMap::wrappers().rename(Q, "model.layers.7.self_attn.q_proj.weight");
        let adapter = LoraAdapter::read(SafetensorsBytes::new(&bytes), &other, 2.0).unwrap();
        let mut update = loaded.begin_update(UpdateOptions::default()).unwrap();
        let PushError::Mismatch(faults) = update.push_adapter(&adapter).unwrap_err() else { panic!() };
        assert_eq!(faults.unknown, ["model.layers.7.self_attn.q_proj.weight"]);
        drop(update);
        assert_holds(&loaded, &w0);
    }
}

/// An adapter of another model: all that is wrong is found before the first tensor is changed, so that even an
/// update in place leaves the weights whole.
#[test]
fn c17_an_adapter_is_checked_whole_before_it_changes_anything() {
    let w0 = weights(1);
    let mut loaded = loaded(&w0);
    let before = known(&loaded);
    let adapter = |modules: &[(&str, usize, usize)]| {
        let tensors = modules.iter().flat_map(|&(module, inputs, outputs)| {
            let factor =
                |shape: [usize; 2]| encode(DType::F32, shape.to_vec(), vec![0.5; shape[0] * shape[1]]);
            [
                (format!("{module}.lora_A.weight"), factor([1, inputs])),
                (format!("{module}.lora_B.weight"), factor([outputs, 1])),
            ]
        });
        let tensors: Vec<_> = tensors.collect();
        let bytes = safetensors::serialize(tensors.iter().map(|(name, t)| (name.clone(), t)), None).unwrap();
        LoraAdapter::read(SafetensorsBytes::new(&bytes), &NameMap::default(), 1.0).unwrap()
    };
    let (q, down) = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj");
    for options in modes() {
        // The first fits, the last does not.
        let mut update = loaded.begin_update(options.clone()).unwrap();
        let error = update.push_adapter(&adapter(&[(q, 32, 32), (down, 48, 33)])).unwrap_err();
        assert!(matches!(&error, PushError::Delta { tensor, .. } if tensor.contains("down")), "{error}");
        assert!(matches!(update.commit(), Err(CommitError::PushFailed)));
        assert_eq!(known(&loaded), before);
        // Every name that doesn't belong here.
        let mut update = loaded.begin_update(options.clone().partial([Q])).unwrap();
        let modules = [(q, 32, 32), (down, 48, 32), ("model.x", 1, 1), ("model.y", 1, 1)];
        let PushError::Mismatch(faults) = update.push_adapter(&adapter(&modules)).unwrap_err() else {
            panic!()
        };
        assert_eq!((faults.unknown.len(), faults.not_asked.len(), faults.num_faults()), (2, 1, 3));
        drop(update);
        assert_eq!(known(&loaded), before);
        // One of which a part has come, too little to be written.
        let mut update = loaded.begin_update(options).unwrap();
        update.push_piece(&spec(Q, get(&w0, Q)), 0, &[0; 4]).unwrap();
        let PushError::Mismatch(faults) = update.push_adapter(&adapter(&[(q, 32, 32)])).unwrap_err() else {
            panic!()
        };
        assert_eq!((faults.duplicate[0].as_str(), faults.num_faults()), (Q, 1));
        drop(update);
        assert_eq!(known(&loaded), before);
    }
}

/// A partial update by pieces, other tensors' pieces between them.
#[test]
fn c29_partial_pieces_in_any_order() {
    let (w0, w1) = (weights(1), weights(2));
    let mut loaded = loaded(&w0);
    let names = [Q, GATE, HEAD];
    for (target, step) in [(&w1, 1), (&w0, 13), (&w1, 999)] {
        let mut update = loaded.begin_update(UpdateOptions::default().partial(names)).unwrap();
        for begin in (0..8192).step_by(step.max(64)).rev() {
            for name in names {
                let tensor = get(target, name);
                let range = begin.min(tensor.data.len())..(begin + step.max(64)).min(tensor.data.len());
                update.push_piece(&spec(name, tensor), range.start, &tensor.data[range]).unwrap();
            }
        }
        update.commit().unwrap();
        assert_holds(&loaded, &mix(&w0, target, &names));
    }
    let all = Weights(w1.0.clone());
    loaded.update(all.source()).unwrap();
    assert_wakes_like_fresh(loaded, &w1);
}

/// Matrices of several blocks, merged by several threads.
#[test]
fn c29_changes_of_large_tensors_have_no_seam() {
    let config = ModelConfig::from_json(
        r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 240,
        "intermediate_size": 30, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 5003,
        "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": true}"#,
    )
    .unwrap();
    let builder = |dtype, threads| {
        EngineBuilder::from_config(config.clone())
            .dtype(dtype)
            .kv_cache(KvCapacity::Blocks(4))
            .threads(threads)
    };
    for dtype in [DType::F32, DType::Bf16] {
        let asleep = builder(dtype, 1).build_asleep().unwrap();
        let tensors = asleep.expected_weights().tensors().iter().enumerate().map(|(i, spec)| {
            let values = some(i as u32, spec.shape.iter().product());
            (spec.name.clone(), encode(dtype, spec.shape.clone(), values))
        });
        let w0 = Weights(tensors.collect());
        let indices: Vec<u64> = (0..5003 * 240).step_by(7).collect();
        let elements = encode(DType::F16, vec![], some(1, indices.len())).data;
        let a = encode(DType::F32, vec![], some(2, 2 * 240)).data;
        let b = encode(DType::F32, vec![], some(3, 5003 * 2)).data;
        let changes = [
            Delta::Sparse { indices: &indices, values: &elements, dtype: DType::F16, op: SparseOp::Add },
            Delta::LowRank { a: &a, b: &b, rank: 2, dtype: DType::F32, scale: -1.5 },
        ];
        for delta in &changes {
            let mut expected = w0.clone();
            *get_mut(&mut expected, EMBEDDING) = merged(get(&w0, EMBEDDING), delta);
            for (options, threads) in modes().into_iter().zip([3, 1]) {
                let asleep = builder(dtype, threads).build_asleep().unwrap();
                let mut loaded = asleep.load_weights(w0.source()).unwrap();
                let mut update = loaded.begin_update(options.partial([EMBEDDING])).unwrap();
                update.push_delta(EMBEDDING, delta).unwrap();
                assert_eq!(update.commit().unwrap().version.digest, digest(&expected));
                assert_holds(&loaded, &expected);
            }
        }
    }
}
