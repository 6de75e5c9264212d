//! A sleeping engine has no weights to score with, or no KV cache.
use dormouse::*;

fn score(engine: Engine<Sleeping>) {
    let _ = engine.score(&[vec![1, 2]]);
}

fn main() {}
