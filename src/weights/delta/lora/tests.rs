//! Adapters as PEFT writes them, as trainers send them, and as made by someone who means harm.

use proptest::prelude::*;

use super::*;
use crate::weights::testing::{Tensor, edit, file};
use crate::weights::{SafetensorsBytes, SourceError};

const A: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
const B: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
const TARGET: &str = "model.layers.0.self_attn.q_proj.weight";
/// Of an adapter `[2, 3]` and `[1, 2]` in bf16.
const PAIR: [Tensor<'_>; 2] = [(A, "BF16", &[2, 3], b"abcdefghijkl"), (B, "BF16", &[1, 2], b"wxyz")];
const CONFIG: &str = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 16}"#;

fn read(tensors: &[Tensor<'_>]) -> Result<LoraAdapter, LoraError> {
    read_with(tensors, &NameMap::wrappers())
}

fn read_with(tensors: &[Tensor<'_>], names: &NameMap) -> Result<LoraAdapter, LoraError> {
    LoraAdapter::read(SafetensorsBytes::new(&file(tensors)), names, 0.5)
}

fn mismatch(tensors: &[Tensor<'_>]) -> LoraMismatch {
    match read(tensors) {
        Err(LoraError::Mismatch(faults)) => *faults,
        other => panic!("{other:?}"),
    }
}

/// An adapter's directory with `PAIR`.
fn from_dir(config: &str, tensors: &[Tensor<'_>]) -> Result<LoraAdapter, LoraError> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), file(tensors)).unwrap();
    LoraAdapter::from_dir(directory.path())
}

fn scales(adapter: &LoraAdapter) -> Vec<f32> {
    let scale = |delta| match delta {
        Delta::LowRank { scale, .. } => scale,
        Delta::Sparse { .. } => panic!("an adapter has no sparse changes"),
    };
    adapter.deltas().map(|(_, delta)| scale(delta)).collect()
}

#[test]
fn a_pair_becomes_a_low_rank_change_of_its_weight() {
    let adapter = read(&PAIR).unwrap();
    assert_eq!(adapter.tensor_names().collect::<Vec<_>>(), [TARGET]);
    let (name, delta) = adapter.deltas().next().unwrap();
    assert_eq!(name, TARGET);
    let Delta::LowRank { a, b, rank, dtype, scale } = delta else { panic!("{delta:?}") };
    assert_eq!((a, b, rank, dtype, scale), (&b"abcdefghijkl"[..], &b"wxyz"[..], 2, DType::Bf16, 0.5));
    let weight = TensorSpec { name: name.into(), dtype: DType::F32, shape: vec![1, 3] };
    assert!(delta.check(&weight).is_ok());
}

#[test]
fn names_as_trainers_send_them_are_understood_in_any_order() {
    let a: &[u8] = &[0; 8];
    let tensors: [Tensor<'_>; 6] = [
        ("module.base_model.model.x.10.lora_B.default.weight", "F32", &[2, 1], a),
        ("base_model.model.x.1.lora_A.default._fsdp_wrapped_module.weight", "F32", &[1, 2], a),
        ("_orig_mod.base_model.model.x.10.lora_A.weight", "F32", &[1, 2], a),
        ("base_model.model._fsdp_wrapped_module.x.1.lora_B.weight", "F32", &[2, 1], a),
        ("base_model.model.rotary_emb.inv_freq", "F32", &[2], a),
        ("base_model.model.tower.lora_A.weight", "F32", &[2], a),
    ];
    let names =
        NameMap::wrappers().ignore("rotary_emb.inv_freq").ignore_under("tower").rename("x.1.weight", "z");
    let adapter = read_with(&tensors, &names).unwrap();
    assert_eq!(adapter.tensor_names().collect::<Vec<_>>(), ["x.10.weight", "z"]);
    // By the weight's name.
    let names = NameMap::wrappers().ignore("x.10.weight").ignore("inv_freq").ignore_under("tower");
    let adapter = read_with(&tensors, &names).unwrap();
    assert_eq!(adapter.tensor_names().collect::<Vec<_>>(), ["x.1.weight"]);
}

#[test]
fn factors_of_two_dtypes_are_widened() {
    let half = half::f16::from_f32(0.1).to_le_bytes();
    let adapter =
        read(&[("x.lora_A.weight", "F16", &[1, 1], &half), ("x.lora_B.weight", "BF16", &[1, 1], b"yz")])
            .unwrap();
    let (_, Delta::LowRank { a, b, dtype: DType::F32, .. }) = adapter.deltas().next().unwrap() else {
        panic!("{adapter:?}");
    };
    assert_eq!(a, half::f16::from_f32(0.1).to_f32().to_le_bytes());
    assert_eq!(b, half::bf16::from_le_bytes(*b"yz").to_f32().to_le_bytes());
}

#[test]
fn b24_everything_that_is_no_pair_is_listed() {
    let half: &[u8] = &[0; 2];
    let faults = mismatch(&[
        ("one.lora_A.weight", "F16", &[1, 1], half),
        ("two.lora_B.weight", "F16", &[1, 1], half),
        ("both.lora_A.weight", "F16", &[1, 1], half),
        ("both.lora_B.weight", "F16", &[1, 1], half),
        ("both.lora_B.default.weight", "F16", &[1, 1], half),
        ("dora.lora_magnitude_vector", "F16", &[1], half),
        ("embed.lora_embedding_A", "F16", &[1, 1], half),
        ("base_model.model.lm_head.weight", "F16", &[1, 1], half),
        ("lora_A.weight", "F16", &[1, 1], half),
        ("other.lora_A.second.weight", "F16", &[1, 1], half),
        ("my_lora_A.weight", "F16", &[1, 1], half),
        ("q.lora_A.weight", "F8_E4M3", &[1, 2], half),
    ]);
    assert_eq!(faults.without_b, ["one.weight"]);
    assert_eq!(faults.without_a, ["two.weight"]);
    assert_eq!(faults.duplicate, ["both.lora_B.default.weight"]);
    let unknown = [
        "base_model.model.lm_head.weight",
        "dora.lora_magnitude_vector",
        "embed.lora_embedding_A",
        "lora_A.weight",
        "my_lora_A.weight",
        "other.lora_A.second.weight",
    ];
    assert_eq!(faults.unknown, unknown);
    assert_eq!(faults.unsupported_dtype.len(), 1);
    assert_eq!(faults.num_faults(), 10);
    let text = faults.to_string();
    assert!(
        text.starts_with("the tensors are no LoRA adapter (10 faults); no lora_B for: one.weight;"),
        "{text}"
    );
}

#[test]
fn shapes_that_do_not_fit_each_other_are_listed() {
    let bytes = vec![0; 1 << 20];
    let shapes: [(&[usize], &[usize]); 7] = [
        (&[2, 3], &[1, 3]),
        (&[2], &[1, 2]),
        (&[2, 3], &[2]),
        (&[2, 3, 1], &[1, 2]),
        (&[0, 3], &[1, 0]),
        (&[4097, 1], &[1, 4097]),
        (&[], &[]),
    ];
    for (a, b) in shapes {
        let cut = |shape: &[usize]| &bytes[..2 * shape.iter().product::<usize>()];
        let faults = mismatch(&[(A, "F16", a, cut(a)), (B, "F16", b, cut(b))]);
        let expected = LoraShapes { name: TARGET.into(), a: a.to_vec(), b: b.to_vec() };
        assert_eq!(faults.wrong_shapes, [expected]);
        assert_eq!(faults.num_faults(), 1);
    }
}

#[test]
fn the_configuration_gives_the_scale() {
    let four: [Tensor<'_>; 2] = [
        ("base_model.model.x.lora_A.weight", "F16", &[4, 1], b"abcdefgh"),
        ("base_model.model.x.lora_B.weight", "F16", &[1, 4], b"abcdefgh"),
    ];
    let both = [PAIR[0], four[0], four[1], PAIR[1]];
    let with = |fields: &str| CONFIG.replace('}', &format!(", {fields}}}"));
    assert_eq!(scales(&from_dir(CONFIG, &PAIR).unwrap()), [8.0]);
    let rslora = with(r#""use_rslora": true"#);
    assert_eq!(scales(&from_dir(&rslora, &PAIR).unwrap()), [(16.0 / 2f64.sqrt()) as f32]);
    let pattern = with(r#""rank_pattern": {"^x$": 4}"#);
    assert_eq!(scales(&from_dir(&pattern, &both).unwrap()), [8.0, 4.0]);
    match from_dir(CONFIG, &both) {
        Err(LoraError::RankNotConfigured { name, rank: 4, configured }) => {
            assert_eq!((name.as_str(), configured.as_slice()), ("x.weight", &[2][..]));
        }
        other => panic!("{other:?}"),
    }
    // What PEFT writes for a plain adapter.
    let plain = r#"{"alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null,
        "auto_mapping": null, "base_model_name_or_path": "x", "bias": "none", "corda_config": null,
        "ensure_weight_tying": false, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,
        "inference_mode": true, "init_lora_weights": true, "layer_replication": null, "layers_pattern": null,
        "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 32.5, "lora_bias": false,
        "lora_dropout": 0.05, "megatron_config": null, "megatron_core": "megatron.core",
        "modules_to_save": null, "peft_type": "LORA", "peft_version": "0.18.0", "qalora_group_size": 16,
        "r": 2, "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"],
        "target_parameters": null, "task_type": "CAUSAL_LM", "trainable_token_indices": null,
        "use_dora": false, "use_qalora": false, "use_rslora": false}"#;
    assert_eq!(scales(&from_dir(plain, &PAIR).unwrap()), [16.25]);
}

#[test]
fn a_configuration_that_asks_for_more_is_refused_by_field() {
    for (field, value) in [
        ("use_dora", "true"),
        ("fan_in_fan_out", "true"),
        ("bias", r#""lora_only""#),
        ("bias", "7"),
        ("lora_bias", "true"),
        ("use_qalora", r#""yes""#),
        ("alpha_pattern", r#"{"q_proj": 3}"#),
        ("modules_to_save", r#"["lm_head"]"#),
        ("layer_replication", "[[0, 4]]"),
        ("init_lora_weights", r#""pissa_niter_4""#),
        ("init_lora_weights", "{}"),
    ] {
        let config = CONFIG.replace('}', &format!(r#", "{field}": {value}}}"#));
        match from_dir(&config, &PAIR) {
            Err(LoraError::Unsupported { field: named, .. }) => assert_eq!(named, field),
            other => panic!("{field} = {value}: {other:?}"),
        }
    }
    let other = CONFIG.replace("LORA", "LOHA");
    assert!(matches!(from_dir(&other, &PAIR), Err(LoraError::Unsupported { field: "peft_type", .. })));
}

#[test]
fn a_malformed_configuration_is_refused() {
    for (from, to, expected) in [
        (r#""r": 2"#, r#""r": 0"#, "r"),
        (r#""r": 2"#, r#""r": 4097"#, "r"),
        (r#""r": 2"#, r#""r": -1"#, "r"),
        (r#""r": 2"#, r#""r": 2.5"#, "r"),
        (r#""r": 2"#, r#""x": 2"#, "r"),
        ("16", r#""16""#, "lora_alpha"),
        ("16", "null", "lora_alpha"),
        ("16", r#"16, "use_rslora": 1"#, "use_rslora"),
        ("16", r#"16, "rank_pattern": [8]"#, "rank_pattern"),
        ("16", r#"16, "rank_pattern": {"q_proj": 0}"#, "rank_pattern"),
    ] {
        match from_dir(&CONFIG.replace(from, to), &PAIR) {
            Err(LoraError::ConfigField { field, .. }) => assert_eq!(field, expected, "{to}"),
            other => panic!("{to}: {other:?}"),
        }
    }
    for text in ["", "[]", "{", r#"{"r": 2, "r": 3}"#, &"[".repeat(10_000)] {
        assert!(matches!(from_dir(text, &PAIR), Err(LoraError::ConfigJson { .. })), "{text}");
    }
    let huge = from_dir(&CONFIG.replace("16", "1e60"), &PAIR).unwrap_err();
    assert!(matches!(huge, LoraError::Scale { scale, .. } if scale.is_infinite()), "{huge}");
    let long = from_dir(&" ".repeat((4 << 20) + 1), &PAIR).unwrap_err();
    assert!(matches!(long, LoraError::ConfigTooLarge { limit_bytes: 4_194_304, .. }), "{long}");
    let absent = LoraAdapter::from_dir("/no/such/adapter").unwrap_err();
    assert!(matches!(absent, LoraError::ConfigIo { .. }), "{absent}");
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), CONFIG).unwrap();
    let no_tensors = LoraAdapter::from_dir(directory.path()).unwrap_err();
    assert!(matches!(no_tensors, LoraError::Source(SourceError::Io { .. })), "{no_tensors}");
}

#[test]
fn a_scale_that_is_no_number_is_refused() {
    for scale in [f32::NAN, f32::INFINITY] {
        let fault = LoraAdapter::read(SafetensorsBytes::new(&file(&PAIR)), &NameMap::wrappers(), scale);
        assert!(matches!(fault, Err(LoraError::Scale { .. })));
    }
}

/// A source that says one thing and does another.
struct Liar {
    specs: Vec<TensorSpec>,
    bytes: usize,
}

impl WeightSource for Liar {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        Ok(self.specs.clone())
    }

    fn read(&mut self, _: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        (0..self.bytes).for_each(|_| sink(&[0]));
        Ok(())
    }
}

fn liar(a: &[usize], b: &[usize], bytes: usize) -> Liar {
    let spec = |name: &str, shape: &[usize]| TensorSpec {
        name: name.into(),
        dtype: DType::F16,
        shape: shape.to_vec(),
    };
    Liar { specs: vec![spec(A, a), spec(B, b)], bytes }
}

#[test]
fn a_source_that_lies_about_lengths_is_refused_without_its_memory() {
    for (a, b, bytes) in [
        (&[2, 3], &[3, 2], 11),
        (&[2, 3], &[3, 2], 13),
        (&[2, 3], &[3, 2], 5_000_000),
        (&[2, 1 << 50], &[1 << 50, 2], 100),
        (&[2, usize::MAX], &[usize::MAX, 2], 100),
    ] {
        match LoraAdapter::read(liar(a, b, bytes), &NameMap::wrappers(), 1.0) {
            Err(LoraError::WrongLength { name, received_bytes, .. }) => {
                assert_eq!((name.as_str(), received_bytes), (A, bytes));
            }
            other => panic!("{other:?}"),
        }
    }
    let mut many = liar(&[1, 1], &[1, 1], 2);
    many.specs = vec![many.specs[0].clone(); MAX_LORA_TENSORS + 1];
    let fault = LoraAdapter::read(&mut many, &NameMap::wrappers(), 1.0).unwrap_err();
    assert!(matches!(fault, LoraError::TooManyTensors { tensors: 65_537, limit: 65_536 }), "{fault}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever is in the files, an adapter that is read can be merged.
    #[test]
    fn any_files_are_an_error_or_an_adapter(
        config_edits in prop::collection::vec((any::<u8>(), any::<usize>(), any::<u8>()), 0..3),
        file_edits in prop::collection::vec((any::<u8>(), any::<usize>(), any::<u8>()), 0..3),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let (mut config, mut tensors) = (CONFIG.as_bytes().to_vec(), file(&PAIR));
        config_edits.into_iter().for_each(|change| edit(&mut config, change));
        file_edits.into_iter().for_each(|change| edit(&mut tensors, change));
        std::fs::write(directory.path().join("adapter_config.json"), config).unwrap();
        std::fs::write(directory.path().join("adapter_model.safetensors"), tensors).unwrap();
        match LoraAdapter::from_dir(directory.path()) {
            Err(fault) => prop_assert!(!fault.to_string().is_empty()),
            Ok(adapter) => for (name, delta) in adapter.deltas() {
                let Delta::LowRank { a, b, rank, dtype, .. } = delta else { panic!("{delta:?}") };
                let size = rank * dtype.size();
                let shape = vec![b.len() / size, a.len() / size];
                let weight = TensorSpec { name: name.into(), dtype: DType::Bf16, shape };
                let prepared = delta.prepare(&weight).unwrap();
                prepared.merge_rows(0, &mut vec![0; weight.checked_bytes().unwrap()]);
            },
        }
    }
}
