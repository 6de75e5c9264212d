//! The passing twin of `forge_an_engine.rs`.
use dormouse::*;

fn awake(asleep: Engine<Sleeping>) -> Engine<Awake> {
    asleep.restore_weights().unwrap().wake_up().unwrap()
}

fn main() {}
