//! The passing twin of `push_after_commit.rs`.
use dormouse::*;

fn update(engine: &mut Engine<WeightsLoaded>, new: Checkpoint) {
    let mut update = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = update.push_all(new);
    let _ = update.commit();
}

fn main() {}
