//! The passing twin of `submit_while_sleeping.rs`.
use dormouse::*;

fn enqueue(engine: Engine<Awake>) {
    let _ = engine.submit(Request::new(vec![1]));
}

fn main() {}
