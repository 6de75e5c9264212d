//! The passing twin of `generate_while_loaded.rs`.
use dormouse::*;

fn rollout(engine: Engine<WeightsLoaded>) {
    let engine = engine.wake_up().unwrap();
    let _ = engine.generate(&[Request::new(vec![1])]);
}

fn main() {}
