//! Which weights an engine has.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::WeightsDigest;
use super::json::cut;

/// Bytes of the longest label.
pub(crate) const MAX_LABEL_BYTES: usize = 256;

/// Which weights an engine has: how many commits it has seen, what the last one brought, and what the caller
/// calls it.
///
/// In JSON: `{"counter": 3, "digest": "<64 hex digits>", "label": "step 120"}`, the label only if there is one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightVersion {
    /// Counts commits of this engine, loads and updates alike, from 1. It only goes up.
    pub counter: u64,
    /// The weights themselves; the same after an update with equal tensors.
    pub digest: WeightsDigest,
    /// The caller's name for them, such as the training step.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "label")]
    pub label: Option<Arc<str>>,
}

impl fmt::Display for WeightVersion {
    /// Such as `3@a1b2c3d4e5f6` or `3@a1b2c3d4e5f6 (step 120)`; the label cut to a readable length.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.counter, self.digest.short())?;
        self.label.as_ref().map_or(Ok(()), |label| write!(f, " ({})", cut(label)))
    }
}

/// A shared string in JSON.
mod label {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(label: &Option<Arc<str>>, out: S) -> Result<S::Ok, S::Error> {
        label.as_deref().serialize(out)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Arc<str>>, D::Error> {
        Ok(Option::<String>::deserialize(input)?.map(Arc::from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c22_text_and_json_name_counter_digest_and_label() {
        let digest = WeightsDigest::from_bytes([0xab; 32]);
        let plain = WeightVersion { counter: 3, digest, label: None };
        assert_eq!(plain.to_string(), "3@abababababab");
        let labelled = WeightVersion { label: Some("step 120".into()), ..plain.clone() };
        assert_eq!(labelled.to_string(), "3@abababababab (step 120)");
        assert_ne!(plain, labelled);
        // The engine's label comes to the trainer's terminal, and the other way round.
        let odd = WeightVersion { label: Some("a\nb\u{1b}[2J".into()), ..plain.clone() };
        assert_eq!(odd.to_string(), "3@abababababab (a\\nb\\u{1b}[2J)");
        for version in [plain, labelled] {
            let json = serde_json::to_string(&version).unwrap();
            assert_eq!(json.contains("label"), version.label.is_some());
            assert_eq!(serde_json::from_str::<WeightVersion>(&json).unwrap(), version);
        }
        assert!(serde_json::from_str::<WeightVersion>(r#"{"counter": 1, "digest": "00"}"#).is_err());
    }
}
