//! The passing twin of `submit_while_loaded.rs`.
use dormouse::*;

fn enqueue(engine: Engine<WeightsLoaded>) {
    let _ = engine.wake_up().unwrap().submit(Request::new(vec![1]));
}

fn main() {}
