//! A machine without a GPU, or without a driver: building says so. This program does not load the emulated driver.
#![cfg(feature = "cuda")]

use std::error::Error as _;

use dormouse::{BuildError, CudaError, DType, EngineBuilder, KvCapacity, ModelConfig};

fn builder() -> EngineBuilder {
    let json = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 64,
        "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": false}"#;
    let config = ModelConfig::from_json(json).expect("a valid configuration");
    EngineBuilder::from_config(config).dtype(DType::F32).kv_cache(KvCapacity::Blocks(8)).threads(1)
}

#[test]
fn without_a_driver_building_is_an_error_that_says_so() {
    for _ in 0..2 {
        match builder().cuda(0).build_asleep() {
            Err(BuildError::Cuda(error @ CudaError::NoDriver { .. })) => {
                let text = error.to_string();
                assert!(text.starts_with("no CUDA driver: none of "), "{text}");
                assert!(text.contains("cuda") && text.len() < 200, "{text}");
                assert!(error.source().is_none());
            }
            // A driver without a GPU, or one that is too old.
            Err(BuildError::Cuda(error)) => assert!(!error.to_string().is_empty()),
            Err(error) => panic!("{error}"),
            Ok(asleep) => assert_eq!(asleep.memory().weights_bytes, 0),
        }
    }
}

/// Options are looked at before any driver is.
#[test]
fn bad_options_come_before_a_missing_driver() {
    let error = builder().cuda(0).block_size(0).build_asleep().expect_err("no block holds nothing");
    assert!(matches!(error, BuildError::InvalidOption { option: "block_size", .. }), "{error}");
    let error = builder().cuda(0).build().expect_err("there is no checkpoint");
    assert!(matches!(error, BuildError::NoCheckpoint), "{error}");
}

#[test]
fn a_gpu_that_nobody_has_is_an_error() {
    let error = builder().cuda(u32::MAX).build_asleep().expect_err("no machine has so many");
    assert!(matches!(error, BuildError::Cuda(_)), "{error}");
}

/// The CPU needs no driver, with the feature too.
#[test]
fn the_cpu_goes_on_working() {
    drop(builder().build_asleep().expect("a tiny engine"));
}
