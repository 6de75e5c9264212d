//! No tensor can be read while an update is open: it may be of the old weights or of the new ones.
use dormouse::*;

fn look(engine: &mut Engine<WeightsLoaded>) {
    let update = engine.begin_update(UpdateOptions::default()).unwrap();
    let _ = engine.tensor("lm_head.weight");
    let _ = update.commit();
}

fn main() {}
