//! The passing twin of `verify_while_updating.rs`.
use dormouse::*;

fn look(engine: &mut Engine<WeightsLoaded>) {
    let update = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = update.commit();
    let _ = engine.verify();
}

fn main() {}
