//! The passing twin of `restore_while_awake.rs`.
use dormouse::*;

fn restore(engine: Engine<Sleeping<Kept>>) {
    let _ = engine.restore_weights();
}

fn main() {}
