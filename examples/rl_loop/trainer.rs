//! The trainer: an evolution strategy on f32 master weights.
//!
//! Sources: Salimans et al. 2017, "Evolution strategies as a scalable alternative to reinforcement learning"
//! (antithetic pairs, standardised rewards); Qiu et al. 2025, "Evolution strategies at scale" (the same for
//! the weights of a language model).

use std::borrow::Cow;
use std::error::Error;

use dormouse::{Checkpoint, TensorSet, TensorSpec, WeightSource};
use half::{bf16, f16};
use safetensors::{Dtype, View};

/// The policy's master weights.
pub struct EvolutionStrategy {
    tensors: Vec<MasterTensor>,
    sigma: f32,
    rate: f32,
}

struct MasterTensor {
    spec: TensorSpec,
    values: Vec<f32>,
    /// Root mean square of the values as they were: perturbations are relative to it.
    scale: f32,
}

/// A full set of weights in the checkpoint's dtypes, as the engine takes it.
pub struct Policy(Vec<(String, Tensor)>);

/// A tensor in memory.
pub struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl View for &Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}

impl Policy {
    pub fn source(&self) -> TensorSet<&Tensor> {
        TensorSet::new(self.0.iter().map(|(name, tensor)| (name.clone(), tensor)))
    }
}

impl EvolutionStrategy {
    /// Takes the checkpoint's weights as the master weights.
    pub fn open(model: &str, sigma: f32, rate: f32) -> Result<Self, Box<dyn Error>> {
        let mut checkpoint = Checkpoint::at(model);
        let mut tensors = Vec::new();
        for (index, spec) in checkpoint.index()?.into_iter().enumerate() {
            let mut bytes = Vec::new();
            checkpoint.read(index, &mut |chunk| bytes.extend_from_slice(chunk))?;
            let values = decode(spec.dtype, &bytes);
            let squares: f64 = values.iter().map(|&value| f64::from(value).powi(2)).sum();
            let scale = (squares / values.len() as f64).sqrt() as f32;
            tensors.push(MasterTensor { spec, values, scale });
        }
        Ok(Self { tensors, sigma, rate })
    }

    pub fn parameters(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.values.len()).sum()
    }

    /// The policy as it is.
    pub fn policy(&self) -> Policy {
        self.perturbed(0, 0.0)
    }

    /// A member of a population: members 2i and 2i + 1 go the same way in opposite directions.
    pub fn member(&self, seed: u64, member: usize) -> Policy {
        let sign = if member.is_multiple_of(2) { 1.0 } else { -1.0 };
        self.perturbed(pair_seed(seed, member / 2), sign * self.sigma)
    }

    fn perturbed(&self, seed: u64, scale: f32) -> Policy {
        let mut random = Random::new(seed);
        let tensors = self.tensors.iter().map(|tensor| {
            let scale = scale * tensor.scale;
            let values = tensor.values.iter().map(|value| value + scale * random.normal());
            (tensor.spec.name.clone(), encode(&tensor.spec, values))
        });
        Policy(tensors.collect())
    }

    /// Moves the master weights along the perturbations, each weighed by its standardised reward.
    pub fn update(&mut self, seed: u64, rewards: &[f32]) {
        let members = rewards.len() as f32;
        let mean = rewards.iter().sum::<f32>() / members;
        let deviation = (rewards.iter().map(|r| (r - mean).powi(2)).sum::<f32>() / members).sqrt() + 1e-6;
        for (pair, rewards) in rewards.chunks_exact(2).enumerate() {
            let step = self.rate * self.sigma * (rewards[0] - rewards[1]) / deviation / members;
            let mut random = Random::new(pair_seed(seed, pair));
            for tensor in &mut self.tensors {
                let step = step * tensor.scale;
                tensor.values.iter_mut().for_each(|value| *value += step * random.normal());
            }
        }
    }
}

fn pair_seed(seed: u64, pair: usize) -> u64 {
    seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ (pair as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn decode(dtype: dormouse::DType, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        dormouse::DType::F32 => {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        }
        dormouse::DType::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        dormouse::DType::Bf16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
    }
}

fn encode(spec: &TensorSpec, values: impl Iterator<Item = f32>) -> Tensor {
    let (dtype, data) = match spec.dtype {
        dormouse::DType::F32 => (Dtype::F32, values.flat_map(f32::to_le_bytes).collect()),
        dormouse::DType::F16 => (Dtype::F16, values.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect()),
        dormouse::DType::Bf16 => {
            (Dtype::BF16, values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect())
        }
    };
    Tensor { dtype, shape: spec.shape.clone(), data }
}

/// SplitMix64 (Steele et al. 2014): small, and the same on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Nearly normal, mean 0 and variance 1: the sum of four uniform numbers (Irwin-Hall). Cheap, and an
    /// evolution strategy asks only that no direction is preferred.
    pub fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }
}
