//! Candle as the trainer: its tensors implement `safetensors::View`, so they go in as they are.
//!
//! `cargo run --release --example candle`

use std::collections::HashMap;
use std::error::Error;

use candle_core::{Device, Tensor};
use dormouse::{Engine, LoadOptions, Request, SleepOptions, TensorSet};

/// One step of a trainer that has read no paper.
fn step(weights: &mut HashMap<String, Tensor>) -> candle_core::Result<()> {
    let name = "model.layers.1.mlp.down_proj.weight";
    let stepped = (&weights[name] * 1.25)?;
    weights.insert(name.to_owned(), stepped);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model");
    let mut weights = candle_core::safetensors::load(format!("{model}/model.safetensors"), &Device::Cpu)?;
    let engine = Engine::builder(model).build()?;
    let request = Request::new(vec![1, 2, 3]).max_new_tokens(8).temperature(0.0);
    let old = engine.generate(std::slice::from_ref(&request))?;
    println!("{}: {:?}", engine.version(), old[0].completions[0].tokens);

    // The memory of KV cache and activations is the trainer's while it works.
    let asleep = engine.sleep(SleepOptions::default().resident())?;
    step(&mut weights)?;
    let mut loaded = asleep.restore_weights()?;

    // What the engine must come to have. Whoever holds the tensors can say so; a worker elsewhere can expect it.
    let set = TensorSet::new(weights.iter().map(|(name, tensor)| (name.as_str(), tensor)));
    let digest = loaded.digest_of(set, LoadOptions::default())?;

    let mut update = loaded.begin_update(LoadOptions::default().expect_digest(digest).label("step 1"))?;
    for (name, tensor) in &weights {
        update.push(name, tensor)?; // candle copies one tensor's bytes out at a time; the engine keeps its own
    }
    let report = update.commit()?;
    println!("{} bytes in {:?}, current in {:?}", report.received_bytes, report.receiving, report.commit);
    assert_eq!(report.version.digest, digest);

    let engine = loaded.wake_up()?;
    let new = engine.generate(std::slice::from_ref(&request))?;
    println!("{}: {:?}", engine.version(), new[0].completions[0].tokens);
    assert_ne!(
        old[0].completions[0].logprobs, new[0].completions[0].logprobs,
        "other weights, other numbers"
    );
    Ok(())
}
