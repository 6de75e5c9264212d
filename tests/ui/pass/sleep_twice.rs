//! The passing twin of `sleep_twice.rs`.
use dormouse::*;

fn sleep(engine: Engine<Awake>) {
    let asleep = engine.sleep(SleepOptions::default()).unwrap();
    let engine = asleep.restore_weights().unwrap().wake_up().unwrap();
    let _ = engine.sleep(SleepOptions::default());
}

fn main() {}
