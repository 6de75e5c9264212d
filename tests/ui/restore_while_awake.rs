//! There is nothing to restore while the weights are resident and serve.
use dormouse::*;

fn restore(engine: Engine<Awake>) {
    let _ = engine.restore_weights();
}

fn main() {}
