//! Random choices that a seed repeats.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::time::{SystemTime, UNIX_EPOCH};

/// A stream of random numbers (SplitMix64).
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// The seed that a variable gives, or one of now.
pub fn seed(variable: &str) -> u64 {
    number(variable).unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        now.as_nanos() as u64
    })
}

/// The number that a variable gives.
pub fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is a number, not {text:?}")))
}
