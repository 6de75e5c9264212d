//! The passing twin of `restore_after_discarding_parked.rs`.
use dormouse::*;

fn restore(engine: Engine<WeightsLoaded>) {
    let asleep = engine.park_weights().unwrap();
    let _ = asleep.restore_weights();
}

fn main() {}
