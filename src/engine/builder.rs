//! From a checkpoint to an engine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::core::{Core, Limits};
use super::state::{Carried, Discarded, Reservations, Sleeping};
use super::{Awake, BuildError, Engine, Failed, SleepReport};
use crate::device::cpu::{CpuDevice, CpuOptions};
#[cfg(feature = "cuda")]
use crate::device::cuda::{CudaDevice, CudaOptions};
use crate::device::{Device, KvShape};
use crate::kv::PrefixCache;
use crate::model::{KvMemory, ModelConfig, Workspace};
use crate::weights::{Checkpoint, DType, LoadOptions, Manifest, TensorSpec, WeightLayout, WeightSource};

pub use crate::device::cpu::SimdPath;

/// How much the KV cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvCapacity {
    /// As many blocks as fit into so many bytes.
    Bytes(u64),
    /// So many blocks.
    Blocks(usize),
    /// As many blocks as hold so many tokens.
    Tokens(usize),
}

/// Options of an engine; see [`Engine::builder`].
#[derive(Debug)]
#[must_use]
pub struct EngineBuilder {
    model: Model,
    dtype: Option<DType>,
    kv_cache: KvCapacity,
    block_size: usize,
    prefix_cache: bool,
    prefix_cache_blocks: Option<usize>,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    max_model_len: Option<usize>,
    threads: Option<usize>,
    simd: SimdPath,
    memory_limit_bytes: Option<u64>,
    seed: u64,
    #[cfg(feature = "cuda")]
    gpu: Option<u32>,
    #[cfg(feature = "cuda")]
    keep_parking_memory: bool,
}

#[derive(Debug)]
enum Model {
    Directory(PathBuf),
    Config(Box<ModelConfig>),
}

impl Engine<Awake> {
    /// Options for an engine on the checkpoint in `directory`: `config.json` and `model.safetensors`, or
    /// shards with `model.safetensors.index.json`.
    ///
    /// ```no_run
    /// use dormouse::{Engine, KvCapacity, Request};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let engine = Engine::builder("path/to/model").kv_cache(KvCapacity::Bytes(1 << 30)).build()?;
    /// let group = engine.generate(&[Request::new(vec![1, 2, 3]).samples(8).max_new_tokens(64)])?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(directory: impl AsRef<Path>) -> EngineBuilder {
        EngineBuilder::new(Model::Directory(directory.as_ref().to_owned()))
    }
}

impl EngineBuilder {
    /// Options for an engine of this configuration, which has no directory: it can only be built asleep.
    pub fn from_config(config: ModelConfig) -> Self {
        Self::new(Model::Config(Box::new(config)))
    }

    fn new(model: Model) -> Self {
        Self {
            model,
            dtype: None,
            kv_cache: KvCapacity::Bytes(1 << 30),
            block_size: 16,
            prefix_cache: true,
            prefix_cache_blocks: None,
            max_num_seqs: 256,
            max_num_batched_tokens: 512,
            max_model_len: None,
            threads: None,
            simd: SimdPath::Auto,
            memory_limit_bytes: None,
            seed: 0,
            #[cfg(feature = "cuda")]
            gpu: None,
            #[cfg(feature = "cuda")]
            keep_parking_memory: true,
        }
    }

    /// Runs on an NVIDIA GPU, by the number that the CUDA driver gives it, instead of the CPU. It needs a driver
    /// for CUDA 13.0 or later and compute capability 8.0 or more; no toolkit. The GPU is looked for when the
    /// engine is built.
    #[cfg(feature = "cuda")]
    pub fn cuda(mut self, ordinal: u32) -> Self {
        self.gpu = Some(ordinal);
        self
    }

    /// Whether a GPU's engine keeps the pinned host memory that parked weights took, for the next sleep; default on,
    /// as pinning takes longer than the copy. Without it the memory goes back to the system at each restore.
    #[cfg(feature = "cuda")]
    pub fn keep_parking_memory(mut self, keep: bool) -> Self {
        self.keep_parking_memory = keep;
        self
    }

    /// Weight dtype. Without it each tensor has the dtype it has in the checkpoint, or else the configuration
    /// says. [`build`](EngineBuilder::build) converts the checkpoint to it; later loads and updates do so with
    /// [`LoadOptions::convert_dtypes`](crate::LoadOptions::convert_dtypes) only.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Capacity of the KV cache; default 1 GiB. The system counts what was written only.
    pub fn kv_cache(mut self, capacity: KvCapacity) -> Self {
        self.kv_cache = capacity;
        self
    }

    /// Tokens of a KV block; default 16.
    pub fn block_size(mut self, tokens: usize) -> Self {
        self.block_size = tokens;
        self
    }

    /// Whether blocks are kept and found again by their contents; default on.
    pub fn prefix_cache(mut self, on: bool) -> Self {
        self.prefix_cache = on;
        self
    }

    /// Most blocks that the prefix cache keeps beyond those in use; default all that are free.
    pub fn prefix_cache_blocks(mut self, blocks: usize) -> Self {
        self.prefix_cache_blocks = Some(blocks);
        self
    }

    /// Most sequences in a step; default 256.
    pub fn max_num_seqs(mut self, sequences: usize) -> Self {
        self.max_num_seqs = sequences;
        self
    }

    /// Most tokens in a step, prompt chunks and decodes together; default 512.
    pub fn max_num_batched_tokens(mut self, tokens: usize) -> Self {
        self.max_num_batched_tokens = tokens;
        self
    }

    /// Most tokens of a sequence, prompt and output; default what the model was made for, or what the KV
    /// cache holds if that is less.
    pub fn max_model_len(mut self, tokens: usize) -> Self {
        self.max_model_len = Some(tokens);
        self
    }

    /// Threads that compute, the calling one among them; default all cores.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Instruction set of the kernels; default the best there is. The output is the same bits on all.
    pub fn simd(mut self, path: SimdPath) -> Self {
        self.simd = path;
        self
    }

    /// Most memory that weights, KV cache and activations may take together, bytes; default no limit beyond
    /// what the system has. A load over weights that are kept resident takes the weights twice for a moment:
    /// with a tight limit, discard or park them. So does an update, unless it is
    /// [in place](crate::UpdateOptions::in_place). (Parked weights are host memory and do not count.)
    pub fn memory_limit_bytes(mut self, bytes: u64) -> Self {
        self.memory_limit_bytes = Some(bytes);
        self
    }

    /// Seed from which requests without a seed get theirs, in order of submission; default 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Builds the engine with the checkpoint's weights, awake.
    ///
    /// # Errors
    /// [`BuildError`]; nothing is left behind.
    pub fn build(self) -> Result<Engine<Awake>, BuildError> {
        let directory = match &self.model {
            Model::Directory(directory) => directory.clone(),
            Model::Config(_) => {
                return Err(BuildError::NoCheckpoint);
            }
        };
        // A dtype that was asked for is what the checkpoint is converted to.
        let options = LoadOptions { convert_dtypes: self.dtype.is_some(), ..LoadOptions::default() };
        let asleep = self.build_asleep()?;
        let loaded = asleep.load_weights_with(Checkpoint::at(directory), options);
        let loaded = loaded.map_err(|Failed { error, .. }| error)?;
        loaded.wake_up().map_err(|Failed { error, .. }| error.into())
    }

    /// Builds the engine without weights, to be loaded by the trainer. No weight is read.
    ///
    /// # Errors
    /// [`BuildError`]; nothing is left behind.
    pub fn build_asleep(self) -> Result<Engine<Sleeping<Discarded>>, BuildError> {
        self.check_options()?;
        let config = match &self.model {
            Model::Directory(directory) => ModelConfig::from_dir(directory)?,
            Model::Config(config) => (**config).clone(),
        };
        let manifest = self.manifest(&config)?;
        let device = self.device()?;
        self.build_on(device, config, manifest)
    }

    fn device(&self) -> Result<Arc<dyn Device>, BuildError> {
        let threads =
            self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let memory_limit_bytes = self.memory_limit_bytes;
        #[cfg(feature = "cuda")]
        if let Some(ordinal) = self.gpu {
            let keep_parking_memory = self.keep_parking_memory;
            let options = CudaOptions { ordinal, memory_limit_bytes, keep_parking_memory };
            let host = CpuDevice::new(CpuOptions { threads, simd: self.simd, memory_limit_bytes: None })?;
            return Ok(Arc::new(CudaDevice::open(options, host)?));
        }
        Ok(Arc::new(CpuDevice::new(CpuOptions { threads, simd: self.simd, memory_limit_bytes })?))
    }

    /// Builds on a device that is there already.
    pub(crate) fn build_on(
        self,
        device: Arc<dyn Device>,
        config: ModelConfig,
        manifest: Manifest,
    ) -> Result<Engine<Sleeping<Discarded>>, BuildError> {
        device.check_heads(config.heads())?;
        let layout = WeightLayout::new(&config, &manifest, &*device)?;
        let limits = self.limits(&*device, &config)?;
        let kv_bytes = KvMemory::bytes(limits.kv, config.num_layers).ok_or(BuildError::InvalidOption {
            option: "kv_cache",
            value: limits.kv.num_blocks as u64,
            requirement: "its bytes must fit the address space",
        })?;
        let reserved = device.reserve("weights", layout.bytes)?;
        let reservations = Reservations {
            kv: device.reserve("KV cache", kv_bytes)?,
            workspace: Workspace::reserve(&*device, &limits.workspace(&*device, &config))?,
        };
        let core = Core::new(device, config, manifest, layout, limits);
        let state = Sleeping {
            weights: Discarded { reserved, last: None },
            reservations,
            carried: Carried::default(),
            report: SleepReport::default(),
        };
        Ok(Engine { core, state })
    }

    fn check_options(&self) -> Result<(), BuildError> {
        let options = [
            ("block_size", self.block_size, 1 << 16, "it must be 1 to 65536 tokens"),
            ("max_num_seqs", self.max_num_seqs, 1 << 16, "it must be 1 to 65536 sequences"),
            (
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                1 << 20,
                "it must be 1 to 1048576 tokens",
            ),
            ("max_model_len", self.max_model_len.unwrap_or(1), usize::MAX, "it must be at least 1 token"),
            ("threads", self.threads.unwrap_or(1), 1024, "it must be 1 to 1024 threads"),
        ];
        for (option, value, most, requirement) in options {
            if value == 0 || value > most {
                return Err(BuildError::InvalidOption { option, value: value as u64, requirement });
            }
        }
        Ok(())
    }

    /// The dtypes are the checkpoint's if there is one, tensor by tensor; then the builder's, then the
    /// configuration's.
    fn manifest(&self, config: &ModelConfig) -> Result<Manifest, BuildError> {
        if let (Model::Directory(directory), None) = (&self.model, self.dtype)
            && Checkpoint::exists(directory)
        {
            let offered = Checkpoint::at(directory).index()?;
            let dtypes: std::collections::HashMap<&str, DType> =
                offered.iter().map(|TensorSpec { name, dtype, .. }| (name.as_str(), *dtype)).collect();
            let fallback = config.dtype.unwrap_or(DType::Bf16);
            return Ok(Manifest::with_dtypes(config, |name| dtypes.get(name).copied().unwrap_or(fallback)));
        }
        let dtype = self.dtype.or(config.dtype).ok_or(BuildError::UnknownDType)?;
        Ok(Manifest::with_dtypes(config, |_| dtype))
    }

    fn limits(&self, device: &dyn Device, config: &ModelConfig) -> Result<Limits, BuildError> {
        let mut kv = KvShape {
            num_blocks: 1,
            block_size: self.block_size,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let block_bytes = KvMemory::bytes(kv, config.num_layers).unwrap_or(usize::MAX) as u64;
        let (num_blocks, capacity_bytes) = match self.kv_cache {
            KvCapacity::Bytes(bytes) => (bytes / block_bytes, bytes),
            KvCapacity::Blocks(blocks) => (blocks as u64, (blocks as u64).saturating_mul(block_bytes)),
            KvCapacity::Tokens(tokens) => {
                let blocks = tokens.div_ceil(self.block_size) as u64;
                (blocks, blocks.saturating_mul(block_bytes))
            }
        };
        if num_blocks == 0 {
            let block_size = self.block_size;
            return Err(BuildError::KvCacheTooSmall { capacity_bytes, block_bytes, block_size });
        }
        // Slots are 32-bit numbers.
        let most = u64::from(u32::MAX) / self.block_size as u64;
        if num_blocks > most {
            let requirement = "its slots (blocks times block size) must fit 32 bits";
            return Err(BuildError::InvalidOption { option: "kv_cache", value: num_blocks, requirement });
        }
        kv.num_blocks = num_blocks as usize;
        let kv_tokens = kv.num_blocks * kv.block_size;
        let max_model_len = self.max_model_len.unwrap_or(config.max_position_embeddings);
        if self.max_model_len.is_some_and(|tokens| tokens > kv_tokens) {
            let requirement = "the KV cache must hold a sequence of that length";
            let value = max_model_len as u64;
            return Err(BuildError::InvalidOption { option: "max_model_len", value, requirement });
        }
        if max_model_len > config.max_position_embeddings {
            let requirement = "it must not be above the configuration's max_position_embeddings";
            let value = max_model_len as u64;
            return Err(BuildError::InvalidOption { option: "max_model_len", value, requirement });
        }
        Ok(Limits {
            kv,
            max_model_len: max_model_len.min(kv_tokens),
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            logit_rows: device.logit_rows().min(self.max_num_batched_tokens),
            prefix_cache: match (self.prefix_cache, self.prefix_cache_blocks) {
                (false, _) => PrefixCache::Off,
                (true, None) => PrefixCache::Unlimited,
                (true, Some(blocks)) => PrefixCache::AtMost(blocks),
            },
            seed: self.seed,
        })
    }
}
