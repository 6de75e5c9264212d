//! Discarded weights cannot be restored, only loaded.
use dormouse::*;

fn restore(engine: Engine<Awake>) {
    let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
    let _ = asleep.restore_weights();
}

fn main() {}
