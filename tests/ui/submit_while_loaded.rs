//! The scheduler comes with waking.
use dormouse::*;

fn enqueue(engine: Engine<WeightsLoaded>) {
    let _ = engine.submit(Request::new(vec![1]));
}

fn main() {}
