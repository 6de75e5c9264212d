//! Scoring needs a KV cache too.
use dormouse::*;

fn score(engine: Engine<WeightsLoaded>) {
    let _ = engine.score(&[vec![1, 2]]);
}

fn main() {}
