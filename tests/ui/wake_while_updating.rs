//! An engine does not wake while an update is open: its weights would be those of neither before nor after.
use dormouse::*;

fn rollout(mut engine: Engine<WeightsLoaded>, new: Checkpoint) {
    let mut update = engine.begin_update(UpdateOptions::default()).unwrap();
    update.push_all(new).unwrap();
    let _ = engine.wake_up();
    update.commit().unwrap();
}

fn main() {}
