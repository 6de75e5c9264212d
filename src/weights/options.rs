//! What a load or an update accepts.

use std::sync::Arc;

use super::{NameMap, WeightsDigest};

/// What a load or an update accepts, and what it checks. The default takes exactly the model's tensors, under
/// their Hugging Face names and in the engine's dtypes.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// How the source's names become the model's.
    pub names: NameMap,
    /// Whether f32, f16 and bf16 tensors are rounded (to nearest, ties to even) or widened to the engine's
    /// dtypes. Otherwise another dtype is an error.
    pub convert_dtypes: bool,
    /// Whether rows of the embedding and the output projection beyond the configured vocabulary are dropped.
    pub trim_vocab_padding: bool,
    /// Whether infinities and NaNs are refused; what counts is the value in the engine's dtype.
    pub require_finite: bool,
    /// The digest that the weights must have when all has arrived, see
    /// [`Engine::digest_of`](crate::Engine::digest_of).
    pub expected_digest: Option<WeightsDigest>,
    /// The caller's name for the new version, such as the training step; at most 256 bytes.
    pub label: Option<Arc<str>>,
}

impl LoadOptions {
    /// Maps names so.
    #[must_use]
    pub fn names(mut self, names: NameMap) -> Self {
        self.names = names;
        self
    }

    /// Converts dtypes.
    #[must_use]
    pub fn convert_dtypes(mut self) -> Self {
        self.convert_dtypes = true;
        self
    }

    /// Drops vocabulary padding.
    #[must_use]
    pub fn trim_vocab_padding(mut self) -> Self {
        self.trim_vocab_padding = true;
        self
    }

    /// Refuses infinities and NaNs.
    #[must_use]
    pub fn require_finite(mut self) -> Self {
        self.require_finite = true;
        self
    }

    /// Accepts weights with this digest only.
    #[must_use]
    pub fn expect_digest(mut self, digest: WeightsDigest) -> Self {
        self.expected_digest = Some(digest);
        self
    }

    /// Labels the new version.
    #[must_use]
    pub fn label(mut self, label: impl Into<Arc<str>>) -> Self {
        self.label = Some(label.into());
        self
    }
}

/// Where an update builds the new weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UpdateMode {
    /// Beside the current ones, whose place their pages take at the commit: until then the current weights
    /// stand, whatever happens. Takes the memory of the weights twice.
    #[default]
    Staged,
    /// Over the current ones, for when the memory does not reach. An update that does not commit leaves the
    /// weights *torn* from the first tensor on: the engine then refuses to wake until a complete update.
    InPlace,
}

/// Options of [`Engine::begin_update`](crate::Engine::begin_update).
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct UpdateOptions {
    /// What is accepted and checked.
    pub load: LoadOptions,
    /// Where the new weights are built.
    pub mode: UpdateMode,
    /// The tensors that the update brings, all of them and no other, by the model's names; `None`: all of the
    /// model's. The head of a model that ties it stands for the embedding.
    pub partial: Option<Vec<String>>,
}

impl UpdateOptions {
    /// Builds the new weights over the current ones.
    #[must_use]
    pub fn in_place(mut self) -> Self {
        self.mode = UpdateMode::InPlace;
        self
    }

    /// Brings these tensors only; the others stay.
    #[must_use]
    pub fn partial<N: Into<String>>(mut self, tensors: impl IntoIterator<Item = N>) -> Self {
        self.partial = Some(tensors.into_iter().map(Into::into).collect());
        self
    }
}

impl From<LoadOptions> for UpdateOptions {
    fn from(load: LoadOptions) -> Self {
        Self { load, ..Self::default() }
    }
}
