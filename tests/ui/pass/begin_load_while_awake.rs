//! The passing twin of `begin_load_while_awake.rs`.
use dormouse::*;

fn load(engine: Engine<Awake>) {
    let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
    let _ = asleep.begin_load(LoadOptions::default());
}

fn main() {}
