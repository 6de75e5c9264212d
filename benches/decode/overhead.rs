//! What a step costs beside the model: plan, batch, bookkeeping.

use dormouse::{
    DType, Discarded, Engine, EngineBuilder, Failed, KvCapacity, ModelConfig, Request, SafetensorsBytes,
    Sleeping,
};
use safetensors::tensor::{Dtype, TensorView};

use super::Options;
use super::common::Outcome;
use super::common::report::{Cell, Report};
use super::generation::decode_step;

/// One layer of next to nothing.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 16,
    "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": true}"#;

/// Steps of a model so small that the rest is what takes the time.
pub(crate) fn step(options: &Options, report: &mut Report) -> Outcome {
    let asleep: Engine<Sleeping<Discarded>> = EngineBuilder::from_config(ModelConfig::from_json(CONFIG)?)
        .dtype(DType::F32)
        .threads(1)
        .kv_cache(KvCapacity::Tokens(64 << 10))
        .build_asleep()?;
    let zeros = vec![0; 4 * 16 * 8];
    let mut tensors = Vec::new();
    for tensor in asleep.expected_weights().tensors() {
        let bytes = 4 * tensor.shape.iter().product::<usize>();
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), &zeros[..bytes])?;
        tensors.push((tensor.name.clone(), view));
    }
    let file = safetensors::serialize(tensors, None)?;
    let loaded = asleep.load_weights(SafetensorsBytes::new(file)).map_err(|Failed { error, .. }| error)?;
    let engine = loaded.wake_up().map_err(|Failed { error, .. }| error)?;
    let mut rows = Vec::new();
    for batch in [1, 16, 64, 256] {
        let requests = (0..batch).map(|n| Request::new([1, 2, n as u32 % 16]).temperature(0.0)).collect();
        let time = decode_step(&engine, requests, batch, options.times(400, 100))?.as_secs_f64() * 1e6;
        rows.push(vec![
            Cell::Text(format!("batch {batch}")),
            Cell::Number(time, 1),
            Cell::Number(time / batch as f64, 2),
        ]);
    }
    let title = "Step overhead (a model of next to nothing: plan, batch, tiny kernels, bookkeeping)";
    report.table("overhead", title, &["step", "us/step", "us/sequence"], &rows);
    Ok(())
}
