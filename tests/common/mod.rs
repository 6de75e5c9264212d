//! Tiny models with deterministic weights, and a fresh engine as the oracle.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

#[cfg(feature = "cuda")]
#[path = "gpu.rs"]
mod gpu;

use std::path::Path;

use dormouse::{
    Awake, Completion, DType, Engine, EngineBuilder, FinishReason, KvCapacity, MemoryReport, ModelConfig,
    Request, RequestOutput, TensorSet,
};
use safetensors::{Dtype, View};

/// A tensor in memory.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

impl View for &Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        (&self.data).into()
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}

/// A complete set of weights, by name.
#[derive(Debug, Clone)]
pub struct Weights(pub Vec<(String, Tensor)>);

impl Weights {
    pub fn source(&self) -> TensorSet<&Tensor> {
        TensorSet::new(self.0.iter().map(|(name, tensor)| (name.clone(), tensor)))
    }

    pub fn save(&self, path: &Path) {
        let tensors = self.0.iter().map(|(name, tensor)| (name.clone(), tensor));
        safetensors::serialize_to_file(tensors, None, path).expect("the folder is writable");
    }
}

/// Two layers, grouped-query (4 query, 2 KV heads), a vocabulary of 64.
pub fn tiny_config_json(tied: bool) -> String {
    format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "vocab_size": 64, "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": {tied}}}"#
    )
}

pub fn tiny_config(tied: bool) -> ModelConfig {
    ModelConfig::from_json(&tiny_config_json(tied)).expect("a valid configuration")
}

/// Weights of `seed` for a tiny model: wide enough that greedy output wanders.
pub fn tiny_weights(tied: bool, dtype: DType, seed: u64) -> Weights {
    let asleep = tiny_builder(tied, dtype).build_asleep().expect("a tiny engine");
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let tensor = |spec: &dormouse::TensorSpec| {
        let norm = spec.name.ends_with("norm.weight");
        let values = (0..spec.shape.iter().product())
            .map(|_| if norm { 1.0 + 0.2 * uniform() } else { 0.9 * uniform() });
        (spec.name.clone(), encode(dtype, spec.shape.clone(), values.collect()))
    };
    Weights(asleep.expected_weights().tensors().iter().map(tensor).collect())
}

pub fn encode(dtype: DType, shape: Vec<usize>, values: Vec<f32>) -> Tensor {
    let (dtype, data) = match dtype {
        DType::F32 => (Dtype::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        DType::F16 => {
            (Dtype::F16, values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect())
        }
        DType::Bf16 => {
            (Dtype::BF16, values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect())
        }
    };
    Tensor { dtype, shape, data }
}

/// A small engine: 64 blocks of 4 tokens, one thread.
pub fn tiny_builder(tied: bool, dtype: DType) -> EngineBuilder {
    on_device(EngineBuilder::from_config(tiny_config(tied)))
        .dtype(dtype)
        .kv_cache(KvCapacity::Blocks(64))
        .block_size(4)
        .threads(1)
}

/// What an engine holds by its state: without the pinned memory that a GPU's engine keeps in every state.
pub fn parts(memory: MemoryReport) -> MemoryReport {
    MemoryReport { staging_bytes: 0, ..memory }
}

/// Whether the engines of this test program run on an emulated GPU: those of `cuda_suite.rs` do.
pub fn is_on_gpu() -> bool {
    env!("CARGO_CRATE_NAME") == "cuda_suite"
}

/// Of so many random cases: an emulated GPU takes long for each.
pub fn cases(count: u32) -> u32 {
    if is_on_gpu() { count.div_ceil(25) } else { count }
}

/// This test leaves something on the device on purpose.
pub fn leaks_on_purpose() {
    #[cfg(feature = "cuda")]
    gpu::leaks_on_purpose();
}

/// The builder, for the device that this test program is about.
pub fn on_device(builder: EngineBuilder) -> EngineBuilder {
    #[cfg(feature = "cuda")]
    if is_on_gpu() {
        return gpu::on_gpu(builder);
    }
    builder
}

pub fn awake(builder: EngineBuilder, weights: &Weights) -> Engine<Awake> {
    let asleep = builder.build_asleep().expect("a tiny engine");
    let loaded = asleep.load_weights(weights.source()).expect("complete weights");
    loaded.wake_up().expect("memory for a tiny cache")
}

/// What a fresh engine with these weights says to this request, alone, with no cache.
pub fn fresh(weights: &Weights, tied: bool, request: &Request) -> RequestOutput {
    let engine = awake(tiny_builder(tied, weights_dtype(weights)).prefix_cache(false), weights);
    engine.generate(std::slice::from_ref(request)).expect("a valid request").remove(0)
}

pub fn weights_dtype(weights: &Weights) -> DType {
    match weights.0[0].1.dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        _ => DType::Bf16,
    }
}

/// Tokens and logprob bits of each sample: what must be equal between any two runs.
pub fn bits(output: &RequestOutput) -> Vec<(Vec<u32>, Vec<u32>)> {
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect();
    output.completions.iter().map(|c| (c.tokens.clone(), bits(&c.logprobs))).collect()
}

/// `len` tokens that depend on `seed`, none of them the end of sequence.
pub fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| 1 + (i * 7 + seed * 13 + i * i * seed) % 63).collect()
}

/// Tensors that are the source's own, so that it can be sent to another thread.
pub struct Owned(pub Vec<(String, Tensor)>);

impl dormouse::WeightSource for Owned {
    fn index(&mut self) -> Result<Vec<dormouse::TensorSpec>, dormouse::SourceError> {
        let spec = |(name, tensor): &(String, Tensor)| {
            let dtype = match tensor.dtype {
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                _ => DType::Bf16,
            };
            dormouse::TensorSpec { name: name.clone(), dtype, shape: tensor.shape.clone() }
        };
        Ok(self.0.iter().map(spec).collect())
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), dormouse::SourceError> {
        sink(&self.0[tensor].1.data);
        Ok(())
    }
}

/// The first `len` tokens of a completion, as if it had been aborted there.
pub fn cut(completion: &Completion, len: usize) -> Completion {
    let mut cut = Completion { finish_reason: FinishReason::Abort, ..completion.clone() };
    cut.tokens.truncate(len);
    cut.logprobs.truncate(len);
    cut.processed_logprobs.iter_mut().for_each(|list| list.truncate(len));
    cut.top_logprobs.iter_mut().for_each(|list| list.truncate(len));
    cut.kept.iter_mut().for_each(|list| list.truncate(len));
    cut.versions.retain(|span| span.tokens.start < len);
    cut.versions.iter_mut().for_each(|span| span.tokens.end = span.tokens.end.min(len));
    cut
}
