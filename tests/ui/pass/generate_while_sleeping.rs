//! The passing twin of `generate_while_sleeping.rs`.
use dormouse::*;

fn rollout(engine: Engine<Awake>) {
    let _ = engine.generate(&[Request::new(vec![1])]);
}

fn main() {}
