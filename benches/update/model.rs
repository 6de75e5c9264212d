//! The weights that come in again and again.

use std::path::{Path, PathBuf};

use dormouse::{DType, Engine, Failed, KvCapacity, Manifest, ModelConfig, TensorSet, WeightsLoaded};
use tempfile::TempDir;

use super::common::{Outcome, Tensor, tensors};

/// Of 65 MB in bf16.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 16384,
    "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": true}"#;

/// A checkpoint, and its tensors in memory.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) directory: PathBuf,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) bytes: u64,
    _made: Option<TempDir>,
}

impl Model {
    /// The checkpoint in a directory, or one that is made now.
    pub(crate) fn open(directory: Option<&Path>) -> Outcome<Self> {
        let (name, directory, made) = match directory {
            Some(directory) => (directory.display().to_string(), directory.to_owned(), None),
            None => {
                let made = tempfile::tempdir()?;
                make(made.path())?;
                ("made of random numbers".into(), made.path().to_owned(), Some(made))
            }
        };
        let tensors = tensors(&directory)?;
        let bytes = tensors.iter().map(|tensor| tensor.data.len() as u64).sum();
        Ok(Self { name, directory, tensors, bytes, _made: made })
    }

    pub(crate) fn set(&self) -> TensorSet<&Tensor> {
        set(&self.tensors)
    }

    pub(crate) fn files(&self) -> Outcome<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// The linear layers' weights.
    pub(crate) fn linear(&self) -> impl Iterator<Item = &Tensor> {
        let linear = |tensor: &&Tensor| tensor.spec.name.ends_with("_proj.weight");
        self.tensors.iter().filter(linear)
    }

    pub(crate) fn engine(&self, threads: usize) -> Outcome<Engine<WeightsLoaded>> {
        let builder = Engine::builder(&self.directory).threads(threads).kv_cache(KvCapacity::Tokens(1 << 10));
        let loaded = builder.build_asleep()?.load_weights(self.set());
        Ok(loaded.map_err(|Failed { error, .. }| error)?)
    }
}

pub(crate) fn set(tensors: &[Tensor]) -> TensorSet<&Tensor> {
    TensorSet::new(tensors.iter().map(|tensor| (tensor.spec.name.clone(), tensor)))
}

/// Writes a checkpoint of small random numbers.
fn make(directory: &Path) -> Outcome {
    let manifest = Manifest::new(&ModelConfig::from_json(CONFIG)?, DType::Bf16);
    let mut state = 1_u64;
    let mut number = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        half::bf16::from_f32((state >> 40) as f32 / (1 << 24) as f32 - 0.5)
    };
    let mut tensors = Vec::new();
    for spec in manifest.tensors() {
        let elements: usize = spec.shape.iter().product();
        let data = (0..elements).flat_map(|_| number().to_le_bytes()).collect();
        tensors.push(Tensor { spec: spec.clone(), data });
    }
    let named = tensors.iter().map(|tensor| (tensor.spec.name.as_str(), tensor));
    safetensors::serialize_to_file(named, None, &directory.join("model.safetensors"))?;
    Ok(std::fs::write(directory.join("config.json"), CONFIG)?)
}
