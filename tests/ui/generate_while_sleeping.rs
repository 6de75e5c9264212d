//! A sleeping engine has no KV cache to generate with.
use dormouse::*;

fn rollout(engine: Engine<Sleeping>) {
    let _ = engine.generate(&[Request::new(vec![1])]);
}

fn main() {}
