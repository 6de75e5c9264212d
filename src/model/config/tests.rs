//! Configurations as published, rotary frequencies against transformers' own code, and hostile input.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::weights::testing::edit;

mod rope;

/// A small valid configuration.
fn base() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "eos_token_id": 2
    })
}

/// `base` with some keys set; null removes none, it is a value like any other.
fn with(changes: Value) -> Value {
    let mut config = base();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn without(keys: &[&str], changes: Value) -> Value {
    let mut config = with(changes);
    for key in keys {
        config.as_object_mut().unwrap().remove(*key);
    }
    config
}

fn parse(config: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(&config.to_string())
}

fn qwen(family: &str, changes: Value) -> Value {
    let class = if family == "qwen2" { "Qwen2ForCausalLM" } else { "Qwen3ForCausalLM" };
    let mut config = with(changes);
    config["model_type"] = family.into();
    config["architectures"] = json!([class]);
    config
}

#[test]
fn reads_llama_3_2_1b() {
    let config = ModelConfig::from_json(
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}"#,
    )
    .unwrap();
    assert_eq!(config.family(), ModelFamily::Llama);
    assert_eq!((config.q_heads, config.kv_heads, config.head_dim), (32, 8, 64));
    assert_eq!(config.eos_token_ids(), [128_001, 128_008, 128_009]);
    assert_eq!(config.bos_token_id(), Some(128_000));
    assert_eq!(config.dtype(), Some(DType::Bf16));
    assert!(config.tie_word_embeddings && !config.qkv_bias && !config.o_bias && !config.qk_norm);
    assert_eq!(config.rms_norm_eps, 1e-5);
    assert_eq!(config.sliding_windows, vec![None; 16]);
    assert!(matches!(
        config.rope_scaling(),
        RopeScaling::Llama3 { original_max_positions: 8192, factor: 32.0, .. }
    ));
}

#[test]
fn reads_mistral_windows() {
    let mistral = |changes: Value| {
        let mut config = without(&["eos_token_id"], changes);
        config["model_type"] = "mistral".into();
        config["architectures"] = json!(["MistralForCausalLM"]);
        parse(&config)
    };
    assert_eq!(mistral(json!({"sliding_window": 128})).unwrap().sliding_windows, vec![Some(128); 4]);
    assert_eq!(mistral(json!({"sliding_window": null})).unwrap().sliding_windows, vec![None; 4]);
    // Absent: transformers' default.
    assert_eq!(mistral(json!({})).unwrap().sliding_windows, vec![Some(4096); 4]);
    // Nemo: heads that don't divide the hidden size.
    let nemo = mistral(json!({"head_dim": 6, "sliding_window": null})).unwrap();
    assert_eq!(nemo.head_dim, 6);
    assert_eq!(nemo.eos_token_ids(), [2]);
    assert!(mistral(json!({"sliding_window": 0})).is_err());
    assert!(mistral(json!({"layer_types": vec!["full_attention"; 4]})).is_err());
}

#[test]
fn reads_qwen_biases_norms_and_windows() {
    let qwen2 = parse(&qwen("qwen2", json!({"use_sliding_window": false, "sliding_window": 100}))).unwrap();
    assert!(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.qk_norm && qwen2.head_dim == 8);
    assert_eq!(qwen2.sliding_windows, vec![None; 4]);
    let sliding = json!({"use_sliding_window": true, "sliding_window": 100, "max_window_layers": 3});
    let windows = parse(&qwen("qwen2", sliding)).unwrap().sliding_windows;
    assert_eq!(windows, [None, None, None, Some(100)]);

    let qwen3 = parse(&qwen("qwen3", json!({}))).unwrap();
    assert!(!qwen3.qkv_bias && qwen3.qk_norm && qwen3.head_dim == 128);
    let biased = parse(&qwen("qwen3", json!({"attention_bias": true, "head_dim": null}))).unwrap();
    assert!(biased.qkv_bias && biased.o_bias && biased.head_dim == 8);
    let types = json!(["full_attention", "sliding_attention", "full_attention", "sliding_attention"]);
    let mixed = json!({"use_sliding_window": true, "sliding_window": 7, "layer_types": types});
    assert_eq!(parse(&qwen("qwen3", mixed)).unwrap().sliding_windows, [None, Some(7), None, Some(7)]);
    for wrong in [
        json!({"layer_types": types}),
        json!({"layer_types": ["full_attention"]}),
        json!({"layer_types": vec!["linear_attention"; 4]}),
        json!({"layer_types": [1, 2, 3, 4]}),
        json!({"use_sliding_window": true, "sliding_window": null, "layer_types": types}),
    ] {
        assert!(parse(&qwen("qwen3", wrong.clone())).is_err(), "{wrong}");
    }
}

#[test]
fn absent_keys_get_transformers_defaults() {
    let llama = ModelConfig::from_json(r#"{"model_type": "llama"}"#).unwrap();
    assert_eq!((llama.vocab_size(), llama.hidden_size, llama.intermediate_size), (32_000, 4096, 11_008));
    assert_eq!((llama.num_layers(), llama.q_heads, llama.kv_heads, llama.head_dim), (32, 32, 32, 128));
    assert_eq!((llama.max_position_embeddings(), llama.rms_norm_eps), (2048, 1e-6));
    assert_eq!((llama.bos_token_id(), llama.eos_token_ids()), (Some(1), &[2][..]));
    assert_eq!(llama.rope, Rope { theta: 10_000.0, scaling: RopeScaling::None });
    let mistral = ModelConfig::from_json(r#"{"architectures": ["MistralForCausalLM"]}"#).unwrap();
    assert_eq!((mistral.kv_heads, mistral.max_position_embeddings), (8, 131_072));
    let null = ModelConfig::from_json(r#"{"model_type": "mistral", "num_key_value_heads": null}"#).unwrap();
    assert_eq!(null.kv_heads, 32);
    let qwen = ModelConfig::from_json(r#"{"model_type": "qwen2"}"#).unwrap();
    assert!(qwen.eos_token_ids().is_empty() && qwen.bos_token_id().is_none());
    // A default that isn't in a tiny vocabulary is dropped; a given one is an error.
    let tiny = parse(&without(&["eos_token_id"], json!({"vocab_size": 2}))).unwrap();
    assert_eq!((tiny.bos_token_id(), tiny.eos_token_ids().len()), (Some(1), 0));
    assert!(parse(&with(json!({"vocab_size": 2}))).is_err());
}

#[test]
fn from_dir_merges_generation_eos() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    let read = || ModelConfig::from_dir(directory.path());
    assert!(matches!(read(), Err(ConfigError::Read { .. })));
    write("config.json", &base().to_string());
    assert_eq!(read().unwrap().eos_token_ids(), [2]);
    write("generation_config.json", r#"{"eos_token_id": [7, 2, 7], "temperature": 0.6}"#);
    assert_eq!(read().unwrap().eos_token_ids(), [2, 7]);
    write("generation_config.json", r#"{"eos_token_id": 256}"#);
    let fault = read().unwrap_err().to_string();
    assert!(fault.contains("generation_config.json") && fault.contains("256"), "{fault}");
    write("generation_config.json", "{}");
    let huge = format!(r#"{{"model_type": "llama"}}{}"#, " ".repeat(1 << 20));
    write("config.json", &huge);
    assert!(read().unwrap_err().to_string().contains("1048576 at most"));
    assert!(matches!(ModelConfig::from_json(&huge), Err(ConfigError::TooLarge { .. })));
    std::fs::write(directory.path().join("config.json"), b"{\"model_type\": \"\xff\"}").unwrap();
    assert!(read().is_err());
    std::fs::remove_file(directory.path().join("config.json")).unwrap();
    std::fs::create_dir(directory.path().join("config.json")).unwrap();
    assert!(matches!(read(), Err(ConfigError::Read { .. })));
}

#[test]
fn hostile_values_are_errors_that_name_field_and_value() {
    for (key, value) in [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-64)),
        ("hidden_size", json!(64.0)),
        ("hidden_size", json!("64")),
        ("hidden_size", json!(131_073)),
        ("hidden_size", json!(u64::MAX)),
        ("num_hidden_layers", json!(0)),
        ("num_hidden_layers", json!(4097)),
        ("vocab_size", json!(0)),
        ("vocab_size", json!(16_777_217)),
        ("num_attention_heads", json!(0)),
        ("num_attention_heads", json!(7)),
        ("num_key_value_heads", json!(3)),
        ("num_key_value_heads", json!(16)),
        ("num_key_value_heads", json!(0)),
        ("head_dim", json!(7)),
        ("head_dim", json!(0)),
        ("head_dim", json!(2048)),
        ("intermediate_size", json!([128])),
        ("rms_norm_eps", json!(0.0)),
        ("rms_norm_eps", json!(-1e-6)),
        ("rms_norm_eps", json!(1e-60)),
        ("rms_norm_eps", json!(2)),
        ("rms_norm_eps", json!("1e-6")),
        ("rope_theta", json!(0)),
        ("rope_theta", json!(-1)),
        ("rope_theta", json!(1e300)),
        ("rope_theta", json!(3.6e-45)),
        ("max_position_embeddings", json!(0)),
        ("tie_word_embeddings", json!("yes")),
        ("tie_word_embeddings", json!(1)),
        ("hidden_act", json!("gelu")),
        ("torch_dtype", json!("float8_e4m3fn")),
        ("quantization_config", json!({"bits": 4})),
        ("num_experts", json!(8)),
        ("num_local_experts", json!(8)),
        ("partial_rotary_factor", json!(0.5)),
        ("eos_token_id", json!(256)),
        ("eos_token_id", json!(-1)),
        ("eos_token_id", json!([2, "3"])),
        ("eos_token_id", json!({})),
        ("bos_token_id", json!(1_000_000)),
        ("architectures", json!(["MixtralForCausalLM"])),
        ("architectures", json!(["LlamaForCausalLM", "MistralForCausalLM"])),
        ("architectures", json!(["MistralForCausalLM"])),
        ("architectures", json!("LlamaForCausalLM")),
        ("model_type", json!("gemma")),
        ("model_type", json!(5)),
        ("rope_scaling", json!("linear")),
        ("rope_scaling", json!([])),
        ("layer_types", json!(vec!["sliding_attention"; 4])),
    ] {
        let fault = parse(&with(json!({ key: value }))).expect_err(&format!("{key} {value}")).to_string();
        assert!(fault.contains(key), "{key} {value}: {fault}");
        assert!(fault.len() < 400, "{fault}");
    }
    let long = parse(&with(json!({"hidden_act": "x".repeat(100_000)}))).unwrap_err().to_string();
    assert!(long.len() < 400);
    assert!(parse(&without(&["model_type", "architectures"], json!({}))).is_err());
    let large = json!({
        "head_dim": 128, "hidden_size": 131_072, "intermediate_size": 1_048_576, "num_hidden_layers": 4096
    });
    assert!(parse(&with(large)).unwrap_err().to_string().contains("parameters"));
    let two = with(json!({"torch_dtype": "float32", "dtype": "bfloat16"}));
    assert!(matches!(parse(&two), Err(ConfigError::Contradiction { .. })));
    let same = with(json!({"torch_dtype": "torch.float16", "dtype": "float16"}));
    assert_eq!(parse(&same).unwrap().dtype(), Some(DType::F16));
}

#[test]
fn malformed_json_is_an_error() {
    for text in [
        "",
        "null",
        "[]",
        "{",
        "{}",
        r#"{"model_type": "llama", "model_type": "llama"}"#,
        r#"{"model_type": "llama", "rms_norm_eps": NaN}"#,
        r#"{"model_type": "llama", "rope_theta": 1e999}"#,
        r#"{"model_type": "llama"} x"#,
    ] {
        assert!(ModelConfig::from_json(text).is_err(), "{text}");
    }
    let deep = format!(r#"{{"model_type": "llama", "x": {}{}}}"#, "[".repeat(400_000), "]".repeat(400_000));
    assert!(matches!(ModelConfig::from_json(&deep), Err(ConfigError::Json { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn edited_text_never_panics(edits in prop::collection::vec(any::<(u8, usize, u8)>(), 1..6)) {
        let mut text = with(json!({"rope_scaling": {"type": "yarn", "factor": 4.0}})).to_string().into_bytes();
        edits.into_iter().for_each(|change| edit(&mut text, change));
        if let Ok(config) = ModelConfig::from_json(&String::from_utf8_lossy(&text)) {
            let (frequencies, factor) = config.rope_inv_freq();
            prop_assert_eq!(frequencies.len(), config.head_dim / 2);
            prop_assert!(factor.is_finite());
            prop_assert_eq!(config.sliding_windows.len(), config.num_layers);
        }
    }

    #[test]
    fn any_value_of_any_field_never_panics(
        key in prop::sample::select(vec![
            "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "num_hidden_layers", "intermediate_size", "rms_norm_eps", "rope_theta", "eos_token_id",
            "max_position_embeddings", "max_window_layers", "sliding_window",
        ]),
        value in prop_oneof![
            any::<u64>().prop_map(Value::from), any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from), (0..300_u64).prop_map(Value::from),
        ],
        qwen3: bool,
    ) {
        let change = json!({ key: value, "use_sliding_window": true });
        if let Ok(config) = parse(&if qwen3 { qwen("qwen3", change) } else { with(change) }) {
            prop_assert!(config.rope_inv_freq().0.iter().all(|freq| freq.is_finite()));
        }
    }
}
