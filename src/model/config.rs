//! What a model is made of: sizes, biases, rotary embedding, windows, read from a Hugging Face `config.json`.
//!
//! Everything that shapes the computation is either understood or refused by name; a configuration never
//! gives a model that differs silently from the one transformers would run. Every size has a bound, so that
//! later arithmetic on them can't overflow and a hostile file can't ask for absurd memory.

mod error;
mod family;
mod fields;
mod rope;
#[cfg(test)]
mod tests;
mod window;

use std::path::Path;

use serde_json::{Map, Value};

pub use self::error::ConfigError;
pub use self::family::ModelFamily;
use self::fields::Fields;
pub(crate) use self::rope::Rope;
pub use self::rope::RopeScaling;
use crate::weights::{DType, ReadError, UniqueKeys, read_bounded};

/// Longest configuration that is read, in bytes. Real ones have a few kilobytes.
pub(crate) const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Largest width of the residual stream.
pub(crate) const MAX_HIDDEN_SIZE: usize = 1 << 17;
/// Largest width of the feed-forward layer.
pub(crate) const MAX_INTERMEDIATE_SIZE: usize = 1 << 20;
/// Most layers.
pub(crate) const MAX_LAYERS: usize = 4096;
/// Most query heads.
pub(crate) const MAX_HEADS: usize = 4096;
/// Largest head.
pub(crate) const MAX_HEAD_DIM: usize = 1024;
/// Largest vocabulary.
pub(crate) const MAX_VOCAB_SIZE: usize = 1 << 22;
/// Longest context, in tokens.
pub(crate) const MAX_POSITIONS: usize = 1 << 30;
/// Most parameters of a whole model: 2^43 take 32 TiB in f32.
pub(crate) const MAX_PARAMETERS: u128 = 1 << 43;

/// Keys of features that none of our families has; absent, null, false or 0 means "without it".
const FOREIGN_KEYS: [&str; 12] = [
    "quantization_config",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "no_rope_layers",
    "attention_chunk_size",
    "vision_config",
    "text_config",
];

/// A decoder-only transformer of one of the supported families.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub(crate) family: ModelFamily,
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_layers: usize,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) rms_norm_eps: f32,
    pub(crate) max_position_embeddings: usize,
    pub(crate) tie_word_embeddings: bool,
    /// Biases on the query, key and value projections.
    pub(crate) qkv_bias: bool,
    /// A bias on the attention's output projection.
    pub(crate) o_bias: bool,
    /// Biases on gate, up and down.
    pub(crate) mlp_bias: bool,
    /// A norm on each query and key head before the rotary embedding.
    pub(crate) qk_norm: bool,
    /// Element type the checkpoint says it has.
    pub(crate) dtype: Option<DType>,
    pub(crate) bos_token_id: Option<u32>,
    /// Each id once, those of `config.json` first.
    pub(crate) eos_token_ids: Vec<u32>,
    /// For each layer how many of the last tokens it sees, the query's own included; `None`: all.
    pub(crate) sliding_windows: Vec<Option<usize>>,
    pub(crate) rope: Rope,
}

impl ModelConfig {
    /// Reads the text of a `config.json`.
    ///
    /// Absent keys get transformers' defaults. End-of-sequence and begin-of-sequence ids outside the
    /// vocabulary are errors when given, and dropped when they come from a default.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the field and its value.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let object = parse_object(text.as_bytes())?;
        let config = Fields::new(&object, "");
        let family = ModelFamily::parse(config)?;
        reject_foreign(config)?;
        let model = Self::parse(config, family)?;
        model.check_parameters()?;
        Ok(model)
    }

    /// Reads `config.json` of a model directory and adds the `eos_token_id`s of its `generation_config.json`,
    /// if that is there.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the file, the field and its value.
    pub fn from_dir(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let in_file = |path: &Path| {
            let path = path.to_owned();
            move |fault| ConfigError::InFile { path, fault: Box::new(fault) }
        };
        let path_config = path.as_ref().join("config.json");
        let text = read_text(&path_config)?;
        let text = String::from_utf8(text).map_err(|fault| {
            in_file(&path_config)(ConfigError::Json { source: serde::de::Error::custom(fault.utf8_error()) })
        })?;
        let mut model = Self::from_json(&text).map_err(in_file(&path_config))?;

        let path_generation = path.as_ref().join("generation_config.json");
        match read_text(&path_generation) {
            Ok(text) => model.add_generation_eos(&text).map_err(in_file(&path_generation))?,
            Err(ConfigError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            Err(fault) => return Err(fault),
        }
        Ok(model)
    }

    /// Angle in radians that each pair of a head's dimensions turns from one position to the next
    /// (`head_dim / 2` of them), and the factor that multiplies every cosine and sine.
    ///
    /// # Source
    /// Su et al. 2021, "RoFormer", §3.2.2; scalings as in transformers' `modeling_rope_utils.py`.
    pub fn rope_inv_freq(&self) -> (Vec<f32>, f32) {
        self.rope.inv_freq(self.head_dim)
    }

    /// The heads of a fused row of queries, keys and values.
    pub(crate) fn heads(&self) -> crate::device::HeadShape {
        crate::device::HeadShape { q_heads: self.q_heads, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }

    /// The family.
    pub fn family(&self) -> ModelFamily {
        self.family
    }

    /// Number of token ids.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.num_layers
    }

    /// Longest context of the model, in tokens.
    pub fn max_position_embeddings(&self) -> usize {
        self.max_position_embeddings
    }

    /// Ids that end a sequence, each once; may be empty.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// The id that begins a sequence, if the model has one.
    pub fn bos_token_id(&self) -> Option<u32> {
        self.bos_token_id
    }

    /// Element type that the configuration names, if it does.
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Stretching of the rotary embedding.
    pub fn rope_scaling(&self) -> RopeScaling {
        self.rope.scaling
    }

    fn parse(config: Fields<'_>, family: ModelFamily) -> Result<Self, ConfigError> {
        let defaults = family.defaults();
        let vocab_size = config.size("vocab_size", MAX_VOCAB_SIZE)?.unwrap_or(defaults.vocab_size);
        let num_layers = config.size("num_hidden_layers", MAX_LAYERS)?.unwrap_or(32);
        let max_position_embeddings =
            config.size("max_position_embeddings", MAX_POSITIONS)?.unwrap_or(defaults.max_positions);
        let hidden_size = config.size("hidden_size", MAX_HIDDEN_SIZE)?.unwrap_or(4096);
        let heads = Heads::parse(config, family, hidden_size)?;
        let attention_bias = config.flag("attention_bias")?.unwrap_or(false)
            && matches!(family, ModelFamily::Llama | ModelFamily::Qwen3);
        let in_vocabulary = |id: &u32| (*id as usize) < vocab_size;
        let token_ids = |key: &str, default: Option<u32>| -> Result<Vec<u32>, ConfigError> {
            let given = config.token_ids(key, vocab_size)?;
            let absent = || default.filter(|_| !config.has(key)).filter(in_vocabulary).into_iter().collect();
            Ok(given.unwrap_or_else(absent))
        };
        Ok(Self {
            family,
            vocab_size,
            hidden_size,
            intermediate_size: config
                .size("intermediate_size", MAX_INTERMEDIATE_SIZE)?
                .unwrap_or(defaults.intermediate_size),
            num_layers,
            q_heads: heads.query,
            kv_heads: heads.kv,
            head_dim: heads.dim,
            rms_norm_eps: parse_eps(config)?,
            max_position_embeddings,
            tie_word_embeddings: config.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: attention_bias || family == ModelFamily::Qwen2,
            o_bias: attention_bias,
            mlp_bias: config.flag("mlp_bias")?.unwrap_or(false) && family == ModelFamily::Llama,
            qk_norm: family == ModelFamily::Qwen3,
            dtype: parse_dtype(config)?,
            bos_token_id: token_ids("bos_token_id", defaults.bos)?.first().copied(),
            eos_token_ids: unique(token_ids("eos_token_id", defaults.eos)?),
            sliding_windows: window::parse_windows(config, family, num_layers)?,
            rope: Rope::parse(config, max_position_embeddings)?,
        })
    }

    fn add_generation_eos(&mut self, text: &[u8]) -> Result<(), ConfigError> {
        let object = parse_object(text)?;
        let ids = Fields::new(&object, "").token_ids("eos_token_id", self.vocab_size)?;
        self.eos_token_ids.extend(ids.unwrap_or_default());
        self.eos_token_ids = unique(std::mem::take(&mut self.eos_token_ids));
        Ok(())
    }

    /// Number of elements of all weight matrices (norms and biases are noise beside them).
    fn num_matrix_parameters(&self) -> u128 {
        let [vocab, hidden, inner, layers] =
            [self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers].map(|n| n as u128);
        let heads = (2 * self.q_heads + 2 * self.kv_heads) as u128 * self.head_dim as u128;
        let ends = if self.tie_word_embeddings { 1 } else { 2 };
        ends * vocab * hidden + layers * hidden * (heads + 3 * inner)
    }

    fn check_parameters(&self) -> Result<(), ConfigError> {
        let parameters = self.num_matrix_parameters();
        if parameters <= MAX_PARAMETERS {
            return Ok(());
        }
        Err(ConfigError::OutOfRange {
            field: "hidden_size * (vocab_size + num_hidden_layers * ..)".into(),
            expected: format!("at most {MAX_PARAMETERS} parameters"),
            received: parameters.to_string(),
        })
    }
}

struct Heads {
    query: usize,
    kv: usize,
    dim: usize,
}

impl Heads {
    fn parse(config: Fields<'_>, family: ModelFamily, hidden_size: usize) -> Result<Self, ConfigError> {
        let defaults = family.defaults();
        let query = config.size("num_attention_heads", MAX_HEADS)?.unwrap_or(32);
        let kv = match config.size("num_key_value_heads", MAX_HEADS)? {
            Some(kv) => kv,
            None if config.has("num_key_value_heads") => query,
            None => defaults.kv_heads.unwrap_or(query),
        };
        if query % kv != 0 {
            return Err(ConfigError::contradiction(
                ("num_attention_heads", query),
                ("num_key_value_heads", kv),
            ));
        }
        let dim = match config.size("head_dim", MAX_HEAD_DIM)? {
            Some(dim) => dim,
            None => match defaults.head_dim {
                Some(dim) if !config.has("head_dim") => dim,
                _ if hidden_size.is_multiple_of(query) => hidden_size / query,
                _ => {
                    return Err(ConfigError::contradiction(
                        ("hidden_size", hidden_size),
                        ("num_attention_heads", query),
                    ));
                }
            },
        };
        if dim % 2 != 0 || dim > MAX_HEAD_DIM {
            return Err(ConfigError::OutOfRange {
                field: "head_dim".into(),
                expected: format!("an even number up to {MAX_HEAD_DIM}"),
                received: dim.to_string(),
            });
        }
        Ok(Self { query, kv, dim })
    }
}

/// Refuses what would change the computation and isn't ours.
fn reject_foreign(config: Fields<'_>) -> Result<(), ConfigError> {
    for key in FOREIGN_KEYS {
        let without = |value: &Value| value.as_u64() == Some(0) || value.as_bool() == Some(false);
        if config.value(key).is_some_and(|value| !without(value)) {
            return Err(config.unsupported(key));
        }
    }
    match config.text("hidden_act")? {
        None | Some("silu") => Ok(()),
        Some(_) => Err(config.unsupported("hidden_act")),
    }
}

fn parse_eps(config: Fields<'_>) -> Result<f32, ConfigError> {
    let eps = config.positive("rms_norm_eps")?.unwrap_or(1e-6);
    match config.value("rms_norm_eps") {
        Some(value) if eps > 1.0 => {
            Err(config.out_of_range("rms_norm_eps", "above 0, at most 1".into(), value))
        }
        _ => Ok(eps as f32),
    }
}

/// `dtype` (transformers 5) or `torch_dtype`; where both occur they must agree.
fn parse_dtype(config: Fields<'_>) -> Result<Option<DType>, ConfigError> {
    let read = |key: &str| match config.text(key)?.map(|text| text.trim_start_matches("torch.")) {
        None | Some("auto") => Ok(None),
        Some("float32") => Ok(Some(DType::F32)),
        Some("float16") => Ok(Some(DType::F16)),
        Some("bfloat16") => Ok(Some(DType::Bf16)),
        Some(_) => Err(config.unsupported(key)),
    };
    match (read("dtype")?, read("torch_dtype")?) {
        (Some(new), Some(old)) if new != old => {
            Err(ConfigError::contradiction(("dtype", new), ("torch_dtype", old)))
        }
        (new, old) => Ok(new.or(old)),
    }
}

fn parse_object(text: &[u8]) -> Result<Map<String, Value>, ConfigError> {
    let bytes = text.len() as u64;
    if bytes > MAX_CONFIG_BYTES {
        return Err(ConfigError::TooLarge { bytes, limit_bytes: MAX_CONFIG_BYTES });
    }
    let UniqueKeys(object) = serde_json::from_slice(text).map_err(|source| ConfigError::Json { source })?;
    Ok(object)
}

fn read_text(path: &Path) -> Result<Vec<u8>, ConfigError> {
    read_bounded(path, MAX_CONFIG_BYTES).map_err(|fault| match fault {
        ReadError::Io(source) => ConfigError::Read { path: path.to_owned(), source },
        ReadError::TooLarge { bytes } => ConfigError::InFile {
            path: path.to_owned(),
            fault: Box::new(ConfigError::TooLarge { bytes, limit_bytes: MAX_CONFIG_BYTES }),
        },
    })
}

/// The ids in their order, repetitions dropped.
fn unique(ids: Vec<u32>) -> Vec<u32> {
    let mut seen = std::collections::HashSet::new();
    ids.into_iter().filter(|id| seen.insert(*id)).collect()
}
