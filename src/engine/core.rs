//! What an engine has in every state: the device, the model, its limits. No memory of the lifecycle.

use std::sync::Arc;

use crate::device::{Device, KvShape, StepLimits};
use crate::kv::PrefixCache;
use crate::model::{ModelConfig, Transformer, WorkspaceShape};
use crate::scheduler::SchedulerConfig;
use crate::weights::{IntakeShape, Manifest, WeightLayout, WeightVersion};

/// Sizes fixed when the engine was built.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) kv: KvShape,
    pub(crate) max_model_len: usize,
    pub(crate) max_num_seqs: usize,
    pub(crate) max_num_batched_tokens: usize,
    pub(crate) logit_rows: usize,
    pub(crate) prefix_cache: PrefixCache,
    pub(crate) seed: u64,
}

impl Limits {
    /// Sizes of the activations.
    pub(crate) fn workspace(&self, device: &dyn Device, config: &ModelConfig) -> WorkspaceShape {
        let heads = config.heads();
        let limits = StepLimits {
            rows: self.max_num_batched_tokens,
            spans: self.max_num_seqs.min(self.max_num_batched_tokens),
            positions: self.max_model_len,
            block_size: self.kv.block_size,
            heads,
            widest: config.hidden_size.max(config.intermediate_size).max(heads.q_width()),
        };
        WorkspaceShape::new(device, config, &limits, self.logit_rows)
    }
}

/// The parts of an engine that no transition touches. Shared, so that a step needs no engine.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) layout: Arc<WeightLayout>,
    pub(crate) transformer: Transformer,
    pub(crate) limits: Limits,
    pub(crate) workspace: WorkspaceShape,
}

/// [`Parts`], and the numbers that only go up over the engine's life.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) parts: Arc<Parts>,
    /// Counter of the last weight version; 0 before the first load.
    pub(crate) version_counter: u64,
    /// Number of the next request: request ids are unique over sleeps.
    pub(crate) next_request: u64,
}

impl Core {
    pub(crate) fn new(
        device: Arc<dyn Device>,
        config: ModelConfig,
        manifest: Manifest,
        layout: WeightLayout,
        limits: Limits,
    ) -> Self {
        let workspace = limits.workspace(&*device, &config);
        let config = Arc::new(config);
        let parts = Parts {
            transformer: Transformer::new(&*device, Arc::clone(&config)),
            device,
            config,
            manifest: Arc::new(manifest),
            layout: Arc::new(layout),
            limits,
            workspace,
        };
        Self { parts: Arc::new(parts), version_counter: 0, next_request: 0 }
    }
}

impl Parts {
    /// What weights come in for.
    pub(crate) fn intake_shape(&self) -> IntakeShape {
        let Self { device, manifest, layout, .. } = self;
        IntakeShape { device: device.clone(), manifest: manifest.clone(), layout: layout.clone() }
    }

    pub(crate) fn scheduler_config(&self, version: &WeightVersion) -> SchedulerConfig {
        SchedulerConfig {
            block_size: self.limits.kv.block_size,
            num_blocks: self.limits.kv.num_blocks,
            max_num_seqs: self.limits.max_num_seqs,
            max_num_batched_tokens: self.limits.max_num_batched_tokens,
            prefix_cache: self.limits.prefix_cache,
            weights_digest: *version.digest.as_bytes(),
        }
    }
}
