//! A transition takes the engine: the old name is gone.
use dormouse::*;

fn stale(engine: Engine<Awake>) {
    let _asleep = engine.sleep(SleepOptions::default());
    let _ = engine.generate(&[Request::new(vec![1])]);
}

fn main() {}
