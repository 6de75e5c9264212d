//! The passing twin of `wake_after_discard.rs`.
use dormouse::*;

fn wake(engine: Engine<Awake>, new: Checkpoint) {
    let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
    let _ = asleep.load_weights(new).unwrap().wake_up();
}

fn main() {}
