//! A commit ends its update: nothing comes after it.
use dormouse::*;

fn update(engine: &mut Engine<WeightsLoaded>, new: Checkpoint) {
    let mut update = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = update.commit();
    let _ = update.push_all(new);
}

fn main() {}
