//! Waking goes through loaded weights.
use dormouse::*;

fn wake(engine: Engine<Sleeping>) {
    let _ = engine.wake_up();
}

fn main() {}
