//! The passing twin of `score_while_sleeping.rs`.
use dormouse::*;

fn score(engine: Engine<Awake>) {
    let _ = engine.score(&[vec![1, 2]]);
}

fn main() {}
