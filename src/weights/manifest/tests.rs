//! Sets that match a model, and every way not to.

use std::time::{Duration, Instant};

use super::*;

fn config(extra: &str, layers: usize) -> ModelConfig {
    ModelConfig::from_json(&format!(
        r#"{{"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": {layers},
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16, "head_dim": 2,
        "eos_token_id": 2 {extra}}}"#
    ))
    .unwrap()
}

fn manifest(extra: &str) -> Manifest {
    Manifest::new(&config(extra, 12), DType::F32)
}

fn tied() -> Manifest {
    manifest(r#", "tie_word_embeddings": true"#)
}

fn spec(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), dtype: DType::F32, shape: shape.to_vec() }
}

fn find<'a>(offered: &'a mut [TensorSpec], name: &str) -> &'a mut TensorSpec {
    offered.iter_mut().find(|spec| spec.name == name).unwrap()
}

#[test]
fn lists_the_tensors_of_each_family() {
    let llama = manifest("");
    assert_eq!(llama.tensors().len(), 3 + 12 * 9);
    let shape = |manifest: &Manifest, name: &str| {
        manifest.position(name).map(|position| manifest.tensors()[position].shape.clone())
    };
    assert_eq!(shape(&llama, "model.layers.11.self_attn.k_proj.weight"), Some(vec![4, 8]));
    assert_eq!(shape(&llama, "model.layers.0.mlp.down_proj.weight"), Some(vec![8, 12]));
    assert_eq!(shape(&llama, "lm_head.weight"), Some(vec![16, 8]));
    assert_eq!(shape(&tied(), "lm_head.weight"), None);
    assert_eq!(shape(&llama, "model.layers.0.self_attn.q_proj.bias"), None);
    let biased = manifest(r#", "attention_bias": true, "mlp_bias": true"#);
    assert_eq!(biased.tensors().len(), 3 + 12 * 16);
    let qwen = |kind: &str| {
        let text = format!(r#"{{"model_type": "{kind}", "num_hidden_layers": 1}}"#);
        Manifest::new(&ModelConfig::from_json(&text).unwrap(), DType::Bf16)
    };
    assert_eq!(shape(&qwen("qwen2"), "model.layers.0.self_attn.v_proj.bias"), Some(vec![4096]));
    assert_eq!(shape(&qwen("qwen2"), "model.layers.0.self_attn.o_proj.bias"), None);
    assert_eq!(shape(&qwen("qwen3"), "model.layers.0.self_attn.k_norm.weight"), Some(vec![128]));
    assert_eq!(llama.bytes(), 4 * (2 * 16 * 8 + 8 + 12 * (2 * 64 + 2 * 32 + 3 * 96 + 2 * 8)));
}

#[test]
fn dtypes_can_differ_by_tensor() {
    let norms_in_f32 = |name: &str| if name.contains("norm") { DType::F32 } else { DType::Bf16 };
    let manifest = Manifest::with_dtypes(&config("", 2), norms_in_f32);
    assert!(manifest.tensors().iter().all(|spec| (spec.dtype == DType::F32) == spec.name.contains("norm")));
    assert!(manifest.check(manifest.tensors()).is_ok());
}

#[test]
fn matches_any_order_and_ignores_buffers() {
    let manifest = manifest("");
    let mut offered = manifest.tensors().to_vec();
    offered.reverse();
    offered.insert(3, spec("model.layers.0.self_attn.rotary_emb.inv_freq", &[1]));
    offered.push(spec("model.rotary_emb.inv_freq", &[1]));
    let matched = manifest.check(&offered).unwrap();
    for (spec, &place) in manifest.tensors().iter().zip(&matched.offered) {
        assert_eq!(spec, &offered[place]);
    }
    assert_eq!(matched.ignored, [3, offered.len() - 1]);
    // Only whole path components count.
    offered.push(spec("model.my_rotary_emb.inv_freq", &[1]));
    assert_eq!(manifest.check(&offered).unwrap_err().unknown, ["model.my_rotary_emb.inv_freq"]);
}

#[test]
fn c17_b23_every_fault_is_listed_in_one_error() {
    let manifest = manifest("");
    let mut offered = manifest.tensors().to_vec();
    find(&mut offered, "model.layers.1.mlp.up_proj.weight").shape.reverse();
    find(&mut offered, "model.layers.10.mlp.up_proj.weight").shape = vec![13, 8];
    find(&mut offered, "model.norm.weight").shape = vec![1, 8];
    find(&mut offered, "lm_head.weight").dtype = DType::F16;
    find(&mut offered, "model.layers.2.input_layernorm.weight").name = "stray".into();
    offered.push(offered[0].clone());
    let faults = manifest.check(&offered).unwrap_err();
    assert_eq!(faults.missing, ["model.layers.2.input_layernorm.weight"]);
    assert_eq!(faults.unknown, ["stray"]);
    assert_eq!(faults.duplicate, [EMBEDDING]);
    let shapes: Vec<_> =
        faults.wrong_shape.iter().map(|fault| (&fault.expected[..], &fault.received[..])).collect();
    assert_eq!(shapes, [(&[12, 8][..], &[8, 12][..]), (&[12, 8], &[13, 8]), (&[8], &[1, 8])]);
    let dtype = WrongDType { name: LM_HEAD.into(), expected: DType::F32, received: DType::F16 };
    assert_eq!(faults.wrong_dtype, [dtype]);
    assert_eq!(faults.num_faults(), 7);
    let text = faults.to_string();
    for part in ["7 faults", "[12, 8]", "[13, 8]", "stray", "f16", "layers.10.mlp"] {
        assert!(text.contains(part), "{text}");
    }
    // The same set in another order gives the same error.
    offered.reverse();
    assert_eq!(manifest.check(&offered).unwrap_err(), faults);
}

#[test]
fn b24_prefixed_names_give_a_bounded_message() {
    let manifest = manifest("");
    let prefixed = |prefix: &str| -> Vec<TensorSpec> {
        let rename =
            |spec: &TensorSpec| TensorSpec { name: format!("{prefix}{}", spec.name), ..spec.clone() };
        manifest.tensors().iter().map(rename).collect()
    };
    for prefix in ["module.", "base_model.model.", &"x".repeat(100_000), &"é".repeat(5000)] {
        let faults = manifest.check(&prefixed(prefix)).unwrap_err();
        assert_eq!((faults.missing.len(), faults.unknown.len()), (111, 111));
        let text = faults.to_string();
        assert!(text.len() < 6000 && text.contains("101 more"), "{text}");
    }
    assert_eq!(manifest.check(&[]).unwrap_err().missing.len(), 111);
    let deep = spec(EMBEDDING, &vec![1; 100_000]);
    assert!(manifest.check(&[deep]).unwrap_err().to_string().len() < 6000);
}

#[test]
fn b26_c28_an_offered_head_of_a_tied_model_is_reported() {
    let manifest = tied();
    let mut offered = manifest.tensors().to_vec();
    assert_eq!(manifest.check(&offered).unwrap().tied_head, None);
    offered.insert(5, spec(LM_HEAD, &[16, 8]));
    let matched = manifest.check(&offered).unwrap();
    assert_eq!(matched.tied_head, Some(TiedHead { offered: 5, embedding: 0 }));
    assert_eq!(matched.offered.len(), manifest.tensors().len());
    offered[5].shape = vec![16, 9];
    assert_eq!(manifest.check(&offered).unwrap_err().wrong_shape[0].name, LM_HEAD);
    offered[5].shape = vec![16, 8];
    offered.push(offered[5].clone());
    assert_eq!(manifest.check(&offered).unwrap_err().duplicate, [LM_HEAD]);
    // A head alone doesn't stand in for the embedding.
    offered.pop();
    offered.retain(|spec| spec.name != EMBEDDING);
    assert_eq!(manifest.check(&offered).unwrap_err().missing, [EMBEDDING]);
}

#[test]
fn b37_an_unsupported_dtype_is_reported_only_if_needed() {
    let manifest = tied();
    let mut offered = manifest.tensors().to_vec();
    let other = |name: &str| UnsupportedTensor { name: name.into(), dtype: "F8_E4M3".into() };
    assert!(manifest.check_all(&offered, &[other("position_ids")]).is_ok());
    offered.remove(1);
    let needed = other(&manifest.tensors()[1].name);
    let faults = manifest.check_all(&offered, &[needed.clone(), other(LM_HEAD)]).unwrap_err();
    assert!(faults.missing.is_empty() && faults.unsupported_dtype.len() == 2);
    assert!(faults.to_string().contains("F8_E4M3"));
    let both = manifest.check_all(manifest.tensors(), &[needed]).unwrap_err();
    assert_eq!(both.duplicate.len(), 1);
}

#[test]
fn a_million_offered_tensors_are_checked_quickly() {
    let manifest = manifest("");
    let offered: Vec<_> = (0..1_000_000).map(|i| spec(&format!("model.layers.{i}.x"), &[1])).collect();
    let start = Instant::now();
    assert_eq!(manifest.check(&offered).unwrap_err().unknown.len(), 1_000_000);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}
