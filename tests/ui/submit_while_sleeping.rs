//! Nothing can be queued in an engine that has no scheduler.
use dormouse::*;

fn enqueue(engine: Engine<Sleeping<Discarded>>) {
    let _ = engine.submit(Request::new(vec![1]));
}

fn main() {}
