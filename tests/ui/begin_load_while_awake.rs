//! A load in pieces begins asleep too.
use dormouse::*;

fn load(engine: Engine<Awake>) {
    let _ = engine.begin_load(LoadOptions::default());
}

fn main() {}
