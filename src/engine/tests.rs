//! Tests of what only the crate can see: faults of the device, addresses, accounting.

mod control;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_sampling;
#[cfg(feature = "cuda")]
mod cuda_ways;
#[cfg(feature = "cuda")]
mod device_check;
mod faults;
mod faulty;
mod updates;

use std::sync::Arc;

use super::awake::default_seed;
use super::{Awake, Discarded, Engine, EngineBuilder, KvCapacity, Sleeping, WeightsLoaded};
use crate::completion::{RequestId, RequestOutput};
use crate::device::Device;
use crate::device::cpu::{CpuDevice, CpuOptions, SimdPath};
use crate::model::ModelConfig;
use crate::request::Request;
use crate::weights::{DType, Manifest, SourceError, TensorSpec, WeightSource};

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "vocab_size": 64, "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": false}"#;

/// Complete weights that depend on a seed.
#[derive(Debug, Clone)]
struct Seeded {
    specs: Vec<TensorSpec>,
    seed: u64,
}

impl Seeded {
    fn new(seed: u64) -> Self {
        let config = ModelConfig::from_json(CONFIG).unwrap();
        Self { specs: Manifest::new(&config, DType::F32).tensors().to_vec(), seed }
    }
}

impl WeightSource for Seeded {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        Ok(self.specs.clone())
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let spec = &self.specs[tensor];
        let mut state = (self.seed * 1000 + tensor as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for _ in 0..spec.shape.iter().product() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let uniform = (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            let value = if spec.name.ends_with("norm.weight") { 1.0 + 0.2 * uniform } else { 0.9 * uniform };
            sink(&value.to_le_bytes());
        }
        Ok(())
    }
}

fn cpu() -> CpuDevice {
    CpuDevice::new(CpuOptions { threads: 1, simd: SimdPath::Auto, memory_limit_bytes: None }).unwrap()
}

fn build_on(device: Arc<dyn Device>) -> Result<Engine<Sleeping<Discarded>>, super::BuildError> {
    build_in_chunks(device, 24)
}

/// With steps of so many tokens at most.
fn build_in_chunks(
    device: Arc<dyn Device>,
    tokens: usize,
) -> Result<Engine<Sleeping<Discarded>>, super::BuildError> {
    let config = ModelConfig::from_json(CONFIG).unwrap();
    let manifest = Manifest::new(&config, DType::F32);
    EngineBuilder::from_config(config.clone())
        .dtype(DType::F32)
        .kv_cache(KvCapacity::Blocks(32))
        .block_size(4)
        .max_num_batched_tokens(tokens)
        .build_on(device, config, manifest)
}

/// Two groups: chunked prefill, forks and copies on write, prefix hits between them.
fn requests() -> Vec<Request> {
    let prompt: Vec<u32> = (0..30).map(|i| 1 + i * 7 % 63).collect();
    vec![
        Request::new(&prompt[..30]).samples(3).max_new_tokens(5).ignore_eos(true).seed(7),
        Request::new(&prompt[..17]).temperature(0.0).max_new_tokens(6).ignore_eos(true),
    ]
}

type Bits = Vec<Vec<(Vec<u32>, Vec<u32>)>>;

fn bits(outputs: &[RequestOutput]) -> Bits {
    let one = |output: &RequestOutput| {
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect();
        output.completions.iter().map(|c| (c.tokens.clone(), bits(&c.logprobs))).collect()
    };
    outputs.iter().map(one).collect()
}

/// What a fresh engine with these weights says to [`requests`].
fn fresh(seed: u64) -> Bits {
    let engine = awake_on(Arc::new(cpu()), seed);
    bits(&engine.generate(&requests()).unwrap())
}

fn loaded_on(device: Arc<dyn Device>, seed: u64) -> Engine<WeightsLoaded> {
    build_on(device).unwrap().load_weights(Seeded::new(seed)).unwrap()
}

fn awake_on(device: Arc<dyn Device>, seed: u64) -> Engine<Awake> {
    loaded_on(device, seed).wake_up().unwrap()
}

#[test]
fn a_request_without_a_seed_draws_from_the_one_of_its_number() {
    let seeds = [(0, 1), (7, 1), (7, 2)].map(|(engine, id)| default_seed(engine, RequestId::new(id)));
    assert_eq!(seeds, [0x2a98_f501_af37_e97f, 0x27e8_ac81_e7bc_3b89, 0xdfd6_4551_e2e1_86eb]);
    let engine = awake_on(Arc::new(cpu()), 1);
    let asked = Request::new(vec![1, 2, 3]).max_new_tokens(4).ignore_eos(true);
    for _ in 0..2 {
        let output = engine.generate(std::slice::from_ref(&asked)).unwrap().remove(0);
        let seed = default_seed(engine.core.parts.limits.seed, output.request);
        assert_eq!(output.completions[0].seed, seed);
        let seeded = engine.generate(&[asked.clone().seed(seed)]).unwrap();
        assert_eq!(bits(&seeded), bits(&[output]));
    }
}
