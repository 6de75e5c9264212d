//! There is nothing to update before weights are loaded or restored.
use dormouse::*;

fn update(mut engine: Engine<Sleeping<Kept>>) {
    let _ = engine.begin_update(UpdateOptions::default());
}

fn main() {}
