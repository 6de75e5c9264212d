//! Nobody but a transition makes an engine of another state.
use dormouse::*;

fn forge(asleep: Engine<Sleeping>) -> Engine<Awake> {
    Engine { core: asleep.core, state: Awake {} }
}

fn main() {}
