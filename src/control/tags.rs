//! The parts of an engine that sleep and wake by name.

use std::fmt;

/// A set of the parts that can sleep: the weights, the KV cache, or both. Never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tags {
    weights: bool,
    kv_cache: bool,
}

impl Tags {
    /// Both parts.
    pub const ALL: Self = Self { weights: true, kv_cache: true };
    /// The weights.
    pub const WEIGHTS: Self = Self { weights: true, kv_cache: false };
    /// The KV cache, with the prefix index, the scheduler and the activations.
    pub const KV_CACHE: Self = Self { weights: false, kv_cache: true };

    /// Reads names: `weights` (also `weight`) and `kv_cache`. A name may be there twice.
    ///
    /// # Errors
    /// [`TagError`] if there is none, or one is unknown: the list is refused whole.
    pub fn from_names<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> Result<Self, TagError> {
        let mut tags = Self { weights: false, kv_cache: false };
        for name in names {
            match name.as_ref() {
                "weights" | "weight" => tags.weights = true,
                "kv_cache" => tags.kv_cache = true,
                other => return Err(TagError::Unknown { tag: crate::weights::cut(other).into() }),
            }
        }
        if tags.weights || tags.kv_cache { Ok(tags) } else { Err(TagError::Empty) }
    }

    /// Whether the weights are among them.
    pub fn weights(self) -> bool {
        self.weights
    }

    /// Whether the KV cache is among them.
    pub fn kv_cache(self) -> bool {
        self.kv_cache
    }
}

impl fmt::Display for Tags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.weights, self.kv_cache) {
            (true, true) => "weights,kv_cache",
            (true, false) => "weights",
            _ => "kv_cache",
        })
    }
}

/// A list of tags that means nothing. Nothing was done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TagError {
    /// The list is there but has no entry.
    #[error("the list of tags is empty; leave it out for all")]
    Empty,
    /// One of them names no part.
    #[error("unknown tag {tag:?}; the tags are `weights` and `kv_cache`")]
    Unknown {
        /// The name, cut to a readable length.
        tag: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c12_b21_lists_are_refused_whole() {
        let tags = |names: &[&str]| Tags::from_names(names);
        assert_eq!(tags(&["weights"]), Ok(Tags::WEIGHTS));
        assert_eq!(tags(&["weight", "weights"]), Ok(Tags::WEIGHTS));
        assert_eq!(tags(&["kv_cache", "kv_cache"]), Ok(Tags::KV_CACHE));
        assert_eq!(tags(&["kv_cache", "weight"]), Ok(Tags::ALL));
        assert_eq!(tags(&[]), Err(TagError::Empty));
        for unknown in ["", "Weights", "kv", "cuda_graph", " weights", "draft", "weights,kv_cache"] {
            assert!(matches!(tags(&["weights", unknown]), Err(TagError::Unknown { .. })), "{unknown}");
        }
        let long = "x".repeat(1 << 20);
        assert!(tags(&[&long]).unwrap_err().to_string().len() < 300);
    }
}
