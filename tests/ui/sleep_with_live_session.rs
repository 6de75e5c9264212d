//! A session pins KV: it must end before the engine sleeps.
use dormouse::*;

fn talk(engine: Engine<Awake>) {
    let mut session = engine.session();
    let _asleep = engine.sleep(SleepOptions::default());
    let _ = session.generate(&Request::new(vec![1]));
}

fn main() {}
