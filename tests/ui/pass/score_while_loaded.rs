//! The passing twin of `score_while_loaded.rs`.
use dormouse::*;

fn score(engine: Engine<Awake>) {
    let _ = engine.score(&[vec![1, 2]]);
}

fn main() {}
