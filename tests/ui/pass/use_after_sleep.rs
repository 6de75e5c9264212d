//! The passing twin of `use_after_sleep.rs`.
use dormouse::*;

fn stale(engine: Engine<Awake>) {
    let _ = engine.generate(&[Request::new(vec![1])]);
    let _asleep = engine.sleep(SleepOptions::default());
}

fn main() {}
