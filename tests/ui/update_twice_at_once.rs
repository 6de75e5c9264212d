//! There is one update at a time.
use dormouse::*;

fn update(engine: &mut Engine<WeightsLoaded>) {
    let first = engine.begin_update(UpdateOptions::default()).unwrap();
    let second = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = (first.commit(), second.commit());
}

fn main() {}
