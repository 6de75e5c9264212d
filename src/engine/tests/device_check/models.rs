//! Models of real shapes with weights that are made up on the spot: there is nothing to carry to the machine.

use crate::engine::EngineBuilder;
use crate::model::ModelConfig;
use crate::weights::{DType, Manifest, SourceError, TensorSpec, WeightSource};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Two layers.
    Tiny,
    /// Qwen2.5-0.5B's.
    Small,
    /// Qwen2.5-7B's.
    Large,
}

impl Shape {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Small => "0.5b",
            Self::Large => "7b",
        }
    }

    pub(super) fn config(self) -> ModelConfig {
        let (hidden, intermediate, layers, heads, kv_heads, vocab, tied) = match self {
            Self::Tiny => (48, 80, 2, 6, 2, 200, true),
            Self::Small => (896, 4864, 24, 14, 2, 151_936, true),
            Self::Large => (3584, 18_944, 28, 28, 4, 152_064, false),
        };
        let json = format!(
            r#"{{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16",
            "hidden_size": {hidden}, "intermediate_size": {intermediate}, "num_hidden_layers": {layers},
            "num_attention_heads": {heads}, "num_key_value_heads": {kv_heads}, "vocab_size": {vocab},
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
            "eos_token_id": 0, "tie_word_embeddings": {tied}}}"#
        );
        ModelConfig::from_json(&json).unwrap()
    }

    pub(super) fn builder(self) -> EngineBuilder {
        EngineBuilder::from_config(self.config()).max_num_batched_tokens(512).max_num_seqs(256)
    }

    pub(super) fn weights(self, seed: u64) -> MadeUp {
        let manifest = Manifest::new(&self.config(), DType::Bf16);
        MadeUp { specs: manifest.tensors().to_vec(), seed }
    }
}

/// Weights that look random, of a size that keeps activations near 1.
#[derive(Debug)]
pub(super) struct MadeUp {
    specs: Vec<TensorSpec>,
    seed: u64,
}

impl MadeUp {
    /// The same weights made once, so that a transfer takes the time of a transfer.
    pub(super) fn made(mut self) -> Made {
        let mut tensors = Vec::new();
        for tensor in 0..self.specs.len() {
            let mut bytes = Vec::new();
            self.read(tensor, &mut |piece| bytes.extend_from_slice(piece)).unwrap();
            tensors.push(bytes);
        }
        Made { specs: self.specs, tensors }
    }
}

/// Weights in memory.
#[derive(Debug)]
pub(super) struct Made {
    specs: Vec<TensorSpec>,
    tensors: Vec<Vec<u8>>,
}

impl Made {
    pub(super) fn bytes(&self) -> u64 {
        self.tensors.iter().map(|bytes| bytes.len() as u64).sum()
    }
}

impl WeightSource for &Made {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        Ok(self.specs.clone())
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        sink(&self.tensors[tensor]);
        Ok(())
    }
}

/// Elements made at a time.
const PIECE: usize = 64 << 10;

impl WeightSource for MadeUp {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        Ok(self.specs.clone())
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let spec = &self.specs[tensor];
        let count: usize = spec.shape.iter().product();
        let (middle, size) = match &spec.shape[..] {
            [_, cols] => (0.0, (3.0 / *cols as f32).sqrt()),
            _ if spec.name.ends_with("norm.weight") => (1.0, 0.1),
            _ => (0.0, 0.1),
        };
        let mut state = (self.seed << 32 | tensor as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut piece = Vec::with_capacity(2 * PIECE);
        for first in (0..count).step_by(PIECE) {
            piece.clear();
            for _ in 0..PIECE.min(count - first) {
                // Xorshift, Marsaglia 2003.
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let uniform = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
                let value = (middle + size * uniform).to_bits();
                piece.extend_from_slice(&((value >> 16) as u16).to_le_bytes());
            }
            sink(&piece);
        }
        Ok(())
    }
}
