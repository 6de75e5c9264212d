//! What was loaded is not reported while an update may be replacing it.
use dormouse::*;

fn look(engine: &mut Engine<WeightsLoaded>) {
    let update = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = engine.report();
    let _ = update.commit();
}

fn main() {}
