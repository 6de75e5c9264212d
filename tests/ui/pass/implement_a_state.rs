//! The passing twin of `implement_a_state.rs`.
use dormouse::*;

fn name<S: State>(_: &Engine<S>) -> &'static str {
    S::NAME
}

fn main() {}
