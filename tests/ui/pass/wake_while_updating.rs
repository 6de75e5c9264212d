//! The passing twin of `wake_while_updating.rs`.
use dormouse::*;

fn rollout(mut engine: Engine<WeightsLoaded>, new: Checkpoint) {
    let mut update = engine.begin_update(UpdateOptions::default()).unwrap();
    update.push_all(new).unwrap();
    update.commit().unwrap();
    let _ = engine.wake_up();
}

fn main() {}
