//! Loaded weights alone cannot generate: the KV cache comes with waking.
use dormouse::*;

fn rollout(engine: Engine<WeightsLoaded>) {
    let _ = engine.generate(&[Request::new(vec![1])]);
}

fn main() {}
