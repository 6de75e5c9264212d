//! New weights from memory: the trainer's tensors go in under their Hugging Face names, all or nothing.
//!
//! `cargo run --release --example update_weights`

use std::error::Error;

use dormouse::{Engine, Request, SleepOptions, TensorSet};
use safetensors::SafeTensors;

fn main() -> Result<(), Box<dyn Error>> {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model");
    let engine = Engine::builder(model).build()?;
    let request = Request::new(vec![1, 2, 3]).max_new_tokens(8).temperature(0.0);
    let old = engine.generate(std::slice::from_ref(&request))?;
    println!("version {}: {:?}", engine.version(), old[0].completions[0].tokens);

    // What a trainer holds: named tensors in memory. Anything that implements `safetensors::View` will do.
    let file = std::fs::read(format!("{model}/model.safetensors"))?;
    let trained = SafeTensors::deserialize(&file)?;

    let asleep = engine.sleep_discarding(SleepOptions::default())?;
    println!("asleep, {} bytes held", asleep.memory().total_bytes());

    // An incomplete set is refused whole, with every fault listed, and the engine comes back.
    let half = trained.tensors().into_iter().take(2);
    let Err(failed) = asleep.load_weights(TensorSet::new(half)) else { panic!("half a model is no model") };
    println!("refused: {}", failed.error);

    let loaded = failed.engine.load_weights(TensorSet::new(trained.tensors()))?;
    println!("loaded {} bytes in {:?}", loaded.report().received_bytes, loaded.report().receiving);
    let engine = loaded.wake_up()?;
    let new = engine.generate(std::slice::from_ref(&request))?;
    println!("version {}: {:?}", engine.version(), new[0].completions[0].tokens);
    assert_eq!(new[0].completions[0].cached_tokens, 0, "nothing of the old weights is left");
    assert_eq!(
        old[0].completions[0].logprobs, new[0].completions[0].logprobs,
        "the same weights, the same bits"
    );
    Ok(())
}
