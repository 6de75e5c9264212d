//! Two engines on one KV cache do not exist.
use dormouse::*;

fn two(engine: Engine<Awake>) -> (Engine<Awake>, Engine<Awake>) {
    (engine.clone(), engine)
}

fn main() {}
