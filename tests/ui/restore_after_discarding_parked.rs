//! Parked weights that were discarded are gone for good.
use dormouse::*;

fn restore(engine: Engine<WeightsLoaded>) {
    let asleep = engine.park_weights().unwrap();
    let _ = asleep.discard_weights().restore_weights();
}

fn main() {}
