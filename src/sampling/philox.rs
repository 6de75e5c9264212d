//! Philox4x32-10: random numbers from a key and a counter, without state.
//!
//! # Source
//! Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Gives 128 random bits.
pub(super) fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [c0, c1, c2, c3] = counter;
        let product0 = u64::from(MULTIPLIERS[0]) * u64::from(c0);
        let product1 = u64::from(MULTIPLIERS[1]) * u64::from(c2);
        counter = [
            (product1 >> 32) as u32 ^ c1 ^ key[0],
            product1 as u32,
            (product0 >> 32) as u32 ^ c3 ^ key[1],
            product0 as u32,
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// Gives the 64 random bits that draw one token.
///
/// The key is the seed. The counter is the token's index in the completion (low, high), the sample's index,
/// and a last word, 0, left for other uses of the same seed.
pub(super) fn draw(seed: u64, sample: u32, token_index: u64) -> u64 {
    let counter = [token_index as u32, (token_index >> 32) as u32, sample, 0];
    let [high, low, ..] = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    u64::from(high) << 32 | u64::from(low)
}
