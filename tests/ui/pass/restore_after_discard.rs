//! The passing twin of `restore_after_discard.rs`.
use dormouse::*;

fn restore(engine: Engine<Awake>) {
    let asleep = engine.sleep(SleepOptions::default()).unwrap();
    let _ = asleep.restore_weights();
}

fn main() {}
