//! Weights are not updated under an awake engine: KV of the old ones exists here.
use dormouse::*;

fn update(mut engine: Engine<Awake>) {
    let _ = engine.begin_update(UpdateOptions::default());
}

fn main() {}
