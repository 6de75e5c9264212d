//! Weights are loaded into a sleeping engine only: the KV of the old ones still exists here.
use dormouse::*;

fn update(engine: Engine<Awake>, new: Checkpoint) {
    let _ = engine.load_weights(new);
}

fn main() {}
