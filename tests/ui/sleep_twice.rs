//! A sleeping engine does not sleep again.
use dormouse::*;

fn sleep(engine: Engine<Awake>) {
    let asleep = engine.sleep(SleepOptions::default()).unwrap();
    let _ = asleep.sleep(SleepOptions::default());
}

fn main() {}
