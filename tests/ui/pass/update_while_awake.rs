//! The passing twin of `update_while_awake.rs`.
use dormouse::*;

fn update(engine: Engine<Awake>) {
    let asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
    let mut engine = asleep.restore_weights().unwrap();
    let _ = engine.begin_update(UpdateOptions::default());
}

fn main() {}
