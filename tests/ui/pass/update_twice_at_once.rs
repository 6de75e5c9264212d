//! The passing twin of `update_twice_at_once.rs`.
use dormouse::*;

fn update(engine: &mut Engine<WeightsLoaded>) {
    let first = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = first.commit();
    let second = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = second.commit();
}

fn main() {}
