//! An engine is in one of the four states.
use dormouse::*;

fn odd(_: Engine<String>) {}

fn main() {}
