//! New weights from memory: the trainer's tensors go in under their Hugging Face names, all or nothing.
//!
//! `cargo run --release --example update_weights`

use std::error::Error;

use dormouse::{Engine, LoadOptions, Request, SleepOptions, TensorSet};
use safetensors::SafeTensors;

fn main() -> Result<(), Box<dyn Error>> {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model");
    let engine = Engine::builder(model).build()?;
    let request = Request::new(vec![1, 2, 3]).max_new_tokens(8).temperature(0.0);
    let old = engine.generate(std::slice::from_ref(&request))?;
    println!("version {}: {:?}", engine.version(), old[0].completions[0].tokens);

    // What a trainer holds: named tensors in memory. Anything that implements `safetensors::View` will do.
    let file = std::fs::read(format!("{model}/model.safetensors"))?;
    let trained = SafeTensors::deserialize(&file)?.tensors();

    let asleep = engine.sleep_discarding(SleepOptions::default())?;
    println!("asleep, {} bytes held", asleep.memory().total_bytes());

    // An incomplete set is refused whole, with every fault listed, and the engine comes back.
    let half = trained[..2].iter().cloned();
    let Err(failed) = asleep.load_weights(TensorSet::new(half)) else { panic!("half a model is no model") };
    println!("refused: {}", failed.error);

    let mut loaded = failed.engine.load_weights(TensorSet::new(trained.iter().cloned()))?;
    println!("loaded {} bytes in {:?}", loaded.report().received_bytes, loaded.report().receiving);

    // Weights that are there can be replaced piece by piece. What is refused leaves them as they were.
    let before = loaded.version();
    let mut update = loaded.begin_update(LoadOptions::default())?;
    let (name, tensor) = &trained[0];
    update.push(name, tensor)?;
    let Err(error) = update.push("no.such.weight", tensor) else { panic!("the model has no such tensor") };
    println!("refused: {error}");
    drop(update);
    assert_eq!(loaded.version(), before);

    let mut update = loaded.begin_update(LoadOptions::default().label("step 2"))?;
    for (name, tensor) in &trained {
        update.push(name, tensor)?;
    }
    let report = update.commit()?;
    println!("version {}, current within {:?}", report.version, report.commit);

    // Memory holds what came in: digests compared, and a tensor read back.
    println!("verified {} tensors", loaded.verify()?.tensors);
    assert_eq!(loaded.tensor(name)?.data, tensor.data());

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
