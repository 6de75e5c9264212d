//! Discarded weights must be loaded before waking: there is nothing to serve with.
use dormouse::*;

fn wake(engine: Engine<Awake>) {
    let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
    let _ = asleep.wake_up();
}

fn main() {}
