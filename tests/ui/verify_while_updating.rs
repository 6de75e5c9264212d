//! Weights that an update may be replacing are not verified.
use dormouse::*;

fn look(engine: &mut Engine<WeightsLoaded>) {
    let update = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = engine.verify();
    let _ = update.commit();
}

fn main() {}
