//! Which version it is is not said while an update may be replacing it.
use dormouse::*;

fn look(engine: &mut Engine<WeightsLoaded>) {
    let update = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = engine.version();
    let _ = update.commit();
}

fn main() {}
