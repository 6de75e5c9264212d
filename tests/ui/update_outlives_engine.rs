//! An update does not outlive its engine.
use dormouse::*;

fn begin(mut engine: Engine<WeightsLoaded>) -> Update<'static> {
    engine.begin_update(UpdateOptions::default()).unwrap()
}

fn main() {}
