//! PEFT's `adapter_config.json`: what the scale is, and whether the pairs are all there is to the adapter.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{LoraError, MAX_RANK};
use crate::weights::json::cut;
use crate::weights::{ReadError, UniqueKeys, read_bounded};

/// Longest configuration that is read, in bytes; `target_modules` may list every module.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// What makes an adapter more than its pairs, or its pairs mean something else, unless it is off.
const MUST_BE_OFF: [&str; 12] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "alpha_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
];

/// Initialisations that leave the base weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ) take the
/// pair's start out of them: the adapter then belongs to a base that isn't the checkpoint's.
const HARMLESS_INITS: [&str; 3] = ["gaussian", "orthogonal", "eva"];

/// The fields that count.
#[derive(Debug)]
pub(super) struct LoraConfig {
    /// `r`, then the ranks of `rank_pattern`.
    ranks: Vec<usize>,
    alpha: f64,
    use_rslora: bool,
}

impl LoraConfig {
    /// Reads the file.
    ///
    /// # Errors
    /// A [`LoraError`] if it can't be read, lacks what is needed, or asks for what isn't supported.
    pub(super) fn read(path: &Path) -> Result<Self, LoraError> {
        let text = read_bounded(path, MAX_CONFIG_BYTES).map_err(|fault| match fault {
            ReadError::Io(source) => LoraError::ConfigIo { path: path.to_owned(), source },
            ReadError::TooLarge { bytes } => {
                LoraError::ConfigTooLarge { path: path.to_owned(), bytes, limit_bytes: MAX_CONFIG_BYTES }
            }
        })?;
        let fields = serde_json::from_slice::<UniqueKeys>(&text)
            .map_err(|source| LoraError::ConfigJson { path: path.to_owned(), source })?;
        Fields { path, fields: fields.0 }.config()
    }

    /// The factor of a pair of this rank: worked out in f64 and rounded once, as PEFT's is.
    #[expect(clippy::cast_possible_truncation, reason = "rounded on purpose")]
    #[expect(clippy::cast_precision_loss, reason = "a rank is small")]
    pub(super) fn scale(&self, name: &str, rank: usize) -> Result<f32, LoraError> {
        if !self.ranks.contains(&rank) {
            let configured = self.ranks.clone();
            return Err(LoraError::RankNotConfigured { name: name.to_owned(), rank, configured });
        }
        let rank = rank as f64;
        Ok((self.alpha / if self.use_rslora { rank.sqrt() } else { rank }) as f32)
    }
}

struct Fields<'a> {
    path: &'a Path,
    fields: Map<String, Value>,
}

impl Fields<'_> {
    fn config(&self) -> Result<LoraConfig, LoraError> {
        if self.get("peft_type").as_str() != Some("LORA") {
            return Err(self.unsupported("peft_type"));
        }
        if let Some(field) = MUST_BE_OFF.into_iter().find(|field| !is_off(self.get(field))) {
            return Err(self.unsupported(field));
        }
        if !self.get("bias").is_null() && self.get("bias").as_str() != Some("none") {
            return Err(self.unsupported("bias"));
        }
        match self.get("init_lora_weights") {
            Value::Null | Value::Bool(_) => {}
            Value::String(init) if HARMLESS_INITS.contains(&init.as_str()) => {}
            _ => return Err(self.unsupported("init_lora_weights")),
        }
        let use_rslora = match self.get("use_rslora") {
            Value::Null => false,
            Value::Bool(on) => *on,
            _ => return Err(self.wrong("use_rslora", "true or false")),
        };
        let alpha = self.get("lora_alpha").as_f64().filter(|alpha| alpha.is_finite());
        let alpha = alpha.ok_or_else(|| self.wrong("lora_alpha", "a number"))?;
        let mut ranks = vec![rank(self.get("r")).ok_or_else(|| self.wrong("r", "a rank from 1 to 4096"))?];
        match self.get("rank_pattern") {
            Value::Null => {}
            Value::Object(pattern) => {
                for value in pattern.values() {
                    let expected = "an object of ranks from 1 to 4096";
                    ranks.push(rank(value).ok_or_else(|| self.wrong("rank_pattern", expected))?);
                }
                // Thousands of modules may be listed with a few ranks.
                ranks[1..].sort_unstable();
                ranks.dedup();
            }
            _ => return Err(self.wrong("rank_pattern", "an object of ranks from 1 to 4096")),
        }
        Ok(LoraConfig { ranks, alpha, use_rslora })
    }

    /// A field's value; one that isn't there is null, as one that PEFT leaves unset.
    fn get(&self, field: &str) -> &Value {
        self.fields.get(field).unwrap_or(&Value::Null)
    }

    fn wrong(&self, field: &'static str, expected: &'static str) -> LoraError {
        LoraError::ConfigField { path: self.path(), field, expected, received: self.shown(field) }
    }

    fn unsupported(&self, field: &'static str) -> LoraError {
        LoraError::Unsupported { path: self.path(), field, value: self.shown(field) }
    }

    fn path(&self) -> PathBuf {
        self.path.to_owned()
    }

    fn shown(&self, field: &str) -> String {
        cut(&self.get(field).to_string()).into()
    }
}

fn rank(value: &Value) -> Option<usize> {
    let rank = usize::try_from(value.as_u64()?).ok()?;
    (1..=MAX_RANK).contains(&rank).then_some(rank)
}

fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Number(_) | Value::String(_) => false,
    }
}
