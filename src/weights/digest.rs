//! What the weights are: a digest of their content, and the version the engine counts.

/// Digest of the content of a complete set of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightsDigest([u8; 32]);

impl WeightsDigest {
    /// Wraps the bytes of a digest.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Gives the bytes of the digest.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// One version of the weights: how many updates came before it, and what the weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightVersion {
    /// Counts committed loads and updates of this engine.
    pub counter: u64,
    /// Digest of the weights.
    pub digest: WeightsDigest,
}
