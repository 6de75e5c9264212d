//! The passing twin of `name_a_foreign_state.rs`.
use dormouse::*;

fn odd(_: Engine<WeightsLoaded>) {}

fn main() {}
