//! No other crate adds a state.
use dormouse::*;

#[derive(Debug)]
struct HalfAwake;

impl State for HalfAwake {
    const NAME: &'static str = "half awake";
}

fn main() {}
