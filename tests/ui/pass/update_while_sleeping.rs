//! The passing twin of `update_while_sleeping.rs`.
use dormouse::*;

fn update(engine: Engine<Sleeping<Kept>>) {
    let mut engine = engine.restore_weights().unwrap();
    let _ = engine.begin_update(UpdateOptions::default());
}

fn main() {}
