//! Weights that come in from the GPU itself, on an emulated one: what arrives is what arrives over the host.

mod faults;
mod hostile;
mod process;
mod ways;

use std::sync::Arc;

use super::{bits, cpu, requests};
use crate::device::Transfer;
use crate::device::cuda::emulated::{Emulated, EmulatedDevice};
use crate::device::cuda::trainer::TrainerMemory;
use crate::device::cuda::{CudaDevice, CudaOptions};
use crate::engine::{Discarded, Engine, EngineBuilder, KvCapacity, Sleeping, WeightsLoaded};
use crate::model::ModelConfig;
use crate::weights::{
    BucketEntry, DType, GpuBucket, GpuTensors, LoadOptions, Manifest, TensorSet, TensorSpec, WeightTensor,
    read_rows,
};

/// Widths that are no multiples of anything, a head that may be tied, and an embedding of several leaves.
fn config(tied: bool) -> ModelConfig {
    config_of(tied, 1203)
}

fn config_of(tied: bool, vocab_size: usize) -> ModelConfig {
    ModelConfig::from_json(&format!(
        r#"{{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 44,
        "intermediate_size": 51, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": {vocab_size},
        "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": {tied}}}"#
    ))
    .unwrap()
}

/// An emulated GPU of this test's own, with small pages.
fn gpu() -> (EmulatedDevice, Arc<CudaDevice>) {
    let emulated = Emulated::load().adverse_device();
    (emulated, open(emulated))
}

fn open(emulated: EmulatedDevice) -> Arc<CudaDevice> {
    let ordinal = emulated.ordinal.unsigned_abs();
    let options = CudaOptions { ordinal, memory_limit_bytes: None, keep_parking_memory: true };
    Arc::new(CudaDevice::open(options, cpu()).unwrap())
}

fn build(device: &Arc<CudaDevice>, config: &ModelConfig, dtype: DType) -> Engine<Sleeping<Discarded>> {
    let manifest = Manifest::new(config, dtype);
    EngineBuilder::from_config(config.clone())
        .dtype(dtype)
        .kv_cache(KvCapacity::Blocks(32))
        .block_size(4)
        .max_num_batched_tokens(24)
        .build_on(Arc::<CudaDevice>::clone(device), config.clone(), manifest)
        .unwrap()
}

/// Complete weights of a model that depend on a seed.
fn tensors(config: &ModelConfig, dtype: DType, seed: u64) -> Vec<WeightTensor> {
    let manifest = Manifest::new(config, dtype);
    let specs = manifest.tensors().iter().enumerate();
    specs.map(|(position, spec)| tensor(spec, seed * 1000 + position as u64)).collect()
}

fn tensor(spec: &TensorSpec, seed: u64) -> WeightTensor {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut data = Vec::new();
    for _ in 0..spec.shape.iter().product() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let value = (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        match spec.dtype {
            DType::F32 => data.extend(value.to_le_bytes()),
            DType::F16 => data.extend(half::f16::from_f32(value).to_le_bytes()),
            DType::Bf16 => data.extend(half::bf16::from_f32(value).to_le_bytes()),
        }
    }
    WeightTensor { spec: spec.clone(), data }
}

fn set(tensors: &[WeightTensor]) -> TensorSet<&WeightTensor> {
    tensors.iter().map(|tensor| (tensor.spec.name.clone(), tensor)).collect()
}

/// Tensors one behind the other, with 0, 1, 2, .. bytes between them.
fn flatten(tensors: &[WeightTensor]) -> (Vec<BucketEntry>, Vec<u8>) {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (number, tensor) in tensors.iter().enumerate() {
        data.resize(data.len() + number % 6, 0xee);
        let begin = data.len();
        data.extend(&tensor.data);
        entries.push(BucketEntry { tensor: tensor.spec.clone(), offset: 0, range: begin..data.len() });
    }
    (entries, data)
}

/// The tensors on a GPU, at all alignments.
struct OnGpu {
    entries: Vec<BucketEntry>,
    memory: TrainerMemory,
}

impl OnGpu {
    fn new(emulated: EmulatedDevice, tensors: &[WeightTensor]) -> Self {
        let (entries, data) = flatten(tensors);
        Self { entries, memory: TrainerMemory::new(emulated.ordinal, &data) }
    }

    fn source(&self) -> GpuTensors {
        let slice = |entry: &BucketEntry| {
            let memory = self.memory.memory().slice(entry.range.start, entry.range.len()).unwrap();
            (entry.tensor.clone(), memory)
        };
        self.entries.iter().map(slice).collect()
    }

    fn bucket(&self) -> GpuBucket {
        GpuBucket::new(self.entries.clone(), self.memory.memory()).unwrap()
    }
}

/// All that can be seen of loaded weights, and that they are what they say.
fn contents(engine: &Engine<WeightsLoaded>) -> Vec<WeightTensor> {
    engine.verify().unwrap();
    let parts = &engine.core.parts;
    let arena = engine.state.weights.arena();
    // What the rows pass through stays for all of them.
    let _transfer = Transfer(Arc::clone(&parts.device));
    let read = |(tensor, place): (&TensorSpec, &_)| {
        let mut data = vec![0; tensor.checked_bytes().unwrap()];
        read_rows(&*parts.device, &parts.layout, arena, *place, 0, &mut data).unwrap();
        WeightTensor { spec: tensor.clone(), data }
    };
    parts.manifest.tensors().iter().zip(&parts.layout.places).map(read).collect()
}

fn converting() -> LoadOptions {
    LoadOptions::default().convert_dtypes().require_finite()
}

/// Asserts that two engines hold the same weights and say the same.
#[track_caller]
fn assert_same(one: Engine<WeightsLoaded>, other: Engine<WeightsLoaded>) {
    assert_eq!(contents(&one), contents(&other));
    assert_eq!(one.version().unwrap().digest, other.version().unwrap().digest);
    let outputs = [one, other].map(|engine| bits(&engine.wake_up().unwrap().generate(&requests()).unwrap()));
    assert_eq!(outputs[0], outputs[1]);
}
