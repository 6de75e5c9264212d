//! The passing twin of `sleep_with_live_session.rs`.
use dormouse::*;

fn talk(engine: Engine<Awake>) {
    let mut session = engine.session();
    let _ = session.generate(&Request::new(vec![1]));
    drop(session);
    let _asleep = engine.sleep(SleepOptions::default());
}

fn main() {}
