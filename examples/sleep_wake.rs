//! Sleep and wake with the weights kept: the memory goes to the trainer and comes back, and a rollout after
//! it is the rollout before it, bit for bit.
//!
//! `cargo run --release --example sleep_wake`

use std::error::Error;

use dormouse::{Engine, InFlight, KvCapacity, Request, SleepOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model");
    let engine = Engine::builder(model).kv_cache(KvCapacity::Bytes(64 << 20)).build()?;
    let request = Request::new(vec![1, 2, 3, 4, 5, 6, 7, 8]).samples(4).max_new_tokens(16).seed(7);
    let before = engine.generate(std::slice::from_ref(&request))?;
    println!("awake:    {:?}", engine.memory());

    // A request that is still in flight: it keeps its tokens and goes on after the wake.
    let retracted = engine.submit(request.clone().seed(8))?;
    engine.step()?;
    let asleep = engine.sleep(SleepOptions::default().in_flight(InFlight::Retract))?;
    println!("sleeping: {:?}", asleep.memory());
    println!(
        "          freed {:?}, {} blocks dropped",
        asleep.report().freed,
        asleep.report().blocks_dropped
    );
    assert_eq!(asleep.report().settled.retracted, [retracted]);

    // `asleep.generate(..)` does not compile, nor does `asleep.wake_up()`: weights first.
    let engine = asleep.restore_weights()?.wake_up()?;
    println!("awake:    {:?}", engine.memory());
    let after = engine.generate(std::slice::from_ref(&request))?;
    assert_eq!(before[0].completions[0].tokens, after[0].completions[0].tokens);
    assert_eq!(before[0].completions[0].logprobs, after[0].completions[0].logprobs);

    let mut step = engine.step()?;
    while step.outputs.is_empty() {
        step = engine.step()?;
    }
    assert_eq!(step.outputs[0].request, retracted);
    println!("the retracted request ended: {} samples", step.outputs[0].completions.len());
    Ok(())
}
