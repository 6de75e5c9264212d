//! The passing twin of `update_outlives_engine.rs`.
use dormouse::*;

fn begin(engine: &mut Engine<WeightsLoaded>) -> Update<'_> {
    engine.begin_update(UpdateOptions::default()).unwrap()
}

fn main() {}
