//! The passing twin of `wake_from_sleeping.rs`.
use dormouse::*;

fn wake(engine: Engine<Sleeping>) {
    let _ = engine.restore_weights().unwrap().wake_up();
}

fn main() {}
