//! The passing twin of `clone_an_engine.rs`.
use dormouse::*;

fn two(engine: std::sync::Arc<Engine<Awake>>) -> (std::sync::Arc<Engine<Awake>>, std::sync::Arc<Engine<Awake>>) {
    (engine.clone(), engine)
}

fn main() {}
