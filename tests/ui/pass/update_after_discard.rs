//! The passing twin of `update_after_discard.rs`.
use dormouse::*;

fn update(engine: Engine<Sleeping<Discarded>>, new: Checkpoint) {
    let _ = engine.load_weights(new);
}

fn main() {}
