//! Which tensors a model needs, and whether an offered set is exactly those.

mod mismatch;
mod target;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

pub use self::mismatch::{Incomplete, WeightsMismatch, WrongDType, WrongShape};
pub(crate) use self::target::{Accept, Target};
use super::source::UnsupportedTensor;
use super::{DType, LoadOptions, TensorSpec};
use crate::model::ModelConfig;

/// Name of the token embedding.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the output projection; a tied model has none of its own.
pub(crate) const LM_HEAD: &str = "lm_head.weight";

/// The tensors of a model in Hugging Face naming, each once.
#[derive(Debug, Clone)]
pub struct Manifest {
    tensors: Vec<TensorSpec>,
    by_name: HashMap<String, usize>,
    /// Position of the embedding that an offered head must equal.
    tied_to: Option<usize>,
}

/// Where each tensor of a manifest is in an offered list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// For each tensor of the manifest its position in the offered list.
    pub offered: Vec<usize>,
    /// An offered output projection of a tied model: its bytes must equal the embedding's.
    pub tied_head: Option<TiedHead>,
    /// Positions of offered tensors that are no parameters, such as `rotary_emb.inv_freq`; not to be read.
    pub ignored: Vec<usize>,
}

/// An offered `lm_head.weight` of a model whose head is its embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedHead {
    /// Position of the head in the offered list.
    pub offered: usize,
    /// Position of the embedding in the manifest.
    pub embedding: usize,
}

impl Manifest {
    /// The tensors of a model, all of one element type.
    pub fn new(config: &ModelConfig, dtype: DType) -> Self {
        Self::with_dtypes(config, |_| dtype)
    }

    /// The tensors of a model, each of the element type that `dtype` gives for its name.
    pub fn with_dtypes(config: &ModelConfig, mut dtype: impl FnMut(&str) -> DType) -> Self {
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize]| {
            tensors.push(TensorSpec { dtype: dtype(&name), name, shape: shape.to_vec() });
        };
        add(EMBEDDING.into(), &[config.vocab_size, config.hidden_size]);
        for layer in 0..config.num_layers {
            add_layer(config, layer, &mut add);
        }
        add("model.norm.weight".into(), &[config.hidden_size]);
        if !config.tie_word_embeddings {
            add(LM_HEAD.into(), &[config.vocab_size, config.hidden_size]);
        }
        let by_name = tensors.iter().enumerate().map(|(i, spec)| (spec.name.clone(), i)).collect();
        Self { tensors, by_name, tied_to: config.tie_word_embeddings.then_some(0) }
    }

    /// The tensors: embedding, layers in order, final norm, head.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Position of a tensor, if the model has it.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Position of the tensor that a name reads: that of the embedding for the head of a model that ties it.
    pub(crate) fn position_read(&self, name: &str) -> Option<usize> {
        self.position(name).or(self.tied_to.filter(|_| name == LM_HEAD))
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        // Can't overflow: the configuration bounds the number of parameters.
        self.tensors.iter().map(|spec| spec.checked_bytes().map_or(u64::MAX, |bytes| bytes as u64)).sum()
    }

    /// Whether the offered tensors are exactly this manifest's, buffers aside.
    ///
    /// # Errors
    /// A [`WeightsMismatch`] with every fault.
    pub fn check(&self, offered: &[TensorSpec]) -> Result<Match, Box<WeightsMismatch>> {
        self.check_all(offered, &[])
    }

    /// As [`check`](Manifest::check), with the tensors that a source has in element types that no weight can
    /// have: a needed one is reported as such, not as missing; others don't matter.
    ///
    /// # Errors
    /// A [`WeightsMismatch`] with every fault.
    pub fn check_all(
        &self,
        offered: &[TensorSpec],
        unsupported: &[UnsupportedTensor],
    ) -> Result<Match, Box<WeightsMismatch>> {
        let (options, wanted) = (LoadOptions::default(), self.all());
        let accept = Accept { options: &options, wanted: &wanted, complete: true };
        let targets = self.assign(offered, unsupported, &accept, &|_| false)?;
        let mut places = vec![None; self.tensors.len()];
        let mut matched = Match { offered: Vec::new(), tied_head: None, ignored: Vec::new() };
        for (offered, target) in targets.into_iter().enumerate() {
            match target {
                Target::Tensor(position) => places[position] = Some(offered),
                Target::TiedHead { embedding } => matched.tied_head = Some(TiedHead { offered, embedding }),
                Target::Ignored => matched.ignored.push(offered),
            }
        }
        matched.offered = places.into_iter().flatten().collect();
        Ok(matched)
    }

    /// Whether the offered tensors are exactly this manifest's, as far as the options let them.
    ///
    /// # Errors
    /// A [`WeightsMismatch`] with every fault.
    pub fn check_with(
        &self,
        offered: &[TensorSpec],
        options: &LoadOptions,
    ) -> Result<(), Box<WeightsMismatch>> {
        let wanted = self.all();
        let accept = Accept { options, wanted: &wanted, complete: true };
        self.assign(offered, &[], &accept, &|_| false).map(|_| ())
    }

    /// Position of the embedding, if the head is tied to it.
    pub(crate) fn tied_to(&self) -> Option<usize> {
        self.tied_to
    }

    /// Every tensor is wanted.
    pub(crate) fn all(&self) -> Vec<bool> {
        vec![true; self.tensors.len()]
    }
}

/// The tensors of one layer, in the order of the computation.
fn add_layer(config: &ModelConfig, layer: usize, add: &mut impl FnMut(String, &[usize])) {
    let hidden = config.hidden_size;
    let inner = config.intermediate_size;
    let q_width = config.q_heads * config.head_dim;
    let kv_width = config.kv_heads * config.head_dim;
    let mut add = |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}"), shape);
    let mut linear = |name: &str, rows: usize, cols: usize, bias: bool| {
        add(&format!("{name}.weight"), &[rows, cols]);
        if bias {
            add(&format!("{name}.bias"), &[rows]);
        }
    };
    linear("self_attn.q_proj", q_width, hidden, config.qkv_bias);
    linear("self_attn.k_proj", kv_width, hidden, config.qkv_bias);
    linear("self_attn.v_proj", kv_width, hidden, config.qkv_bias);
    linear("self_attn.o_proj", hidden, q_width, config.o_bias);
    linear("mlp.gate_proj", inner, hidden, config.mlp_bias);
    linear("mlp.up_proj", inner, hidden, config.mlp_bias);
    linear("mlp.down_proj", hidden, inner, config.mlp_bias);
    add("input_layernorm.weight", &[hidden]);
    add("post_attention_layernorm.weight", &[hidden]);
    if config.qk_norm {
        add("self_attn.q_norm.weight", &[config.head_dim]);
        add("self_attn.k_norm.weight", &[config.head_dim]);
    }
}

/// Buffers that older checkpoints and some trainers save beside the parameters; all are derived from the
/// configuration.
fn is_buffer(name: &str) -> bool {
    const BUFFERS: [&str; 6] = [
        "rotary_emb.inv_freq",
        "rotary_emb.original_inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
        "self_attn.masked_bias",
        "self_attn.bias",
    ];
    BUFFERS.iter().any(|buffer| {
        // By path component: `my_rotary_emb.inv_freq` is something else.
        name.strip_suffix(buffer).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    })
}
