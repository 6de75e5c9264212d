//! Discarded weights are loaded, not updated.
use dormouse::*;

fn update(mut engine: Engine<Sleeping<Discarded>>, new: Checkpoint) {
    let _ = engine.update(new);
}

fn main() {}
