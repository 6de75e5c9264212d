//! The model families and what transformers assumes of each where a configuration is silent.

use super::ConfigError;
use super::fields::Fields;

/// A family of decoder models that differ only in details of one transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModelFamily {
    /// Llama 2 and 3, SmolLM2.
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on query, key and value.
    Qwen2,
    /// Qwen3: a norm on each query and key head.
    Qwen3,
}

/// Values of absent keys.
///
/// Source: transformers 4.57 and 5.24, `configuration_{llama,mistral,qwen2,qwen3}.py`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Defaults {
    pub(super) vocab_size: usize,
    pub(super) intermediate_size: usize,
    /// `None`: as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// `None`: hidden size / query heads.
    pub(super) head_dim: Option<usize>,
    pub(super) max_positions: usize,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
}

impl ModelFamily {
    /// Reads `architectures` and `model_type`, which must agree.
    pub(super) fn parse(config: Fields<'_>) -> Result<Self, ConfigError> {
        let by_type = match config.text("model_type")? {
            None => None,
            Some("llama") => Some(ModelFamily::Llama),
            Some("mistral") => Some(ModelFamily::Mistral),
            Some("qwen2") => Some(ModelFamily::Qwen2),
            Some("qwen3") => Some(ModelFamily::Qwen3),
            Some(_) => return Err(config.unsupported("model_type")),
        };
        let by_class = match config.texts("architectures")?.as_deref() {
            None | Some([]) => None,
            Some(["LlamaForCausalLM"]) => Some(ModelFamily::Llama),
            Some(["MistralForCausalLM"]) => Some(ModelFamily::Mistral),
            Some(["Qwen2ForCausalLM"]) => Some(ModelFamily::Qwen2),
            Some(["Qwen3ForCausalLM"]) => Some(ModelFamily::Qwen3),
            Some(_) => return Err(config.unsupported("architectures")),
        };
        match (by_class, by_type) {
            (Some(class), Some(kind)) if class != kind => {
                Err(ConfigError::contradiction(("architectures", class), ("model_type", kind)))
            }
            (class, kind) => {
                class.or(kind).ok_or_else(|| ConfigError::Missing { field: "architectures".into() })
            }
        }
    }

    pub(super) fn defaults(self) -> Defaults {
        let qwen = Defaults {
            vocab_size: 151_936,
            intermediate_size: 22_016,
            kv_heads: Some(32),
            head_dim: None,
            max_positions: 32_768,
            bos: None,
            eos: None,
        };
        match self {
            ModelFamily::Llama => Defaults {
                vocab_size: 32_000,
                intermediate_size: 11_008,
                kv_heads: None,
                head_dim: None,
                max_positions: 2_048,
                bos: Some(1),
                eos: Some(2),
            },
            ModelFamily::Mistral => Defaults {
                vocab_size: 32_000,
                intermediate_size: 14_336,
                kv_heads: Some(8),
                head_dim: None,
                max_positions: 131_072,
                bos: Some(1),
                eos: Some(2),
            },
            ModelFamily::Qwen2 => qwen,
            ModelFamily::Qwen3 => Defaults { head_dim: Some(128), ..qwen },
        }
    }
}

impl std::fmt::Display for ModelFamily {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ModelFamily::Llama => "llama",
            ModelFamily::Mistral => "mistral",
            ModelFamily::Qwen2 => "qwen2",
            ModelFamily::Qwen3 => "qwen3",
        })
    }
}
