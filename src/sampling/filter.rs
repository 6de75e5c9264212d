//! `min_p`, `top_k` and `top_p`: each keeps a beginning of the tokens' order, so together they are one cut.

use super::SamplerScratch;
use super::softmax::LEAST_SCALED;
use crate::request::{SamplingParams, TokenId};

/// Intervals of scaled logits per unit.
const INTERVALS_PER_UNIT: f32 = 64.0;
/// Intervals of scaled logits from 0 down to [`LEAST_SCALED`], and one for all below.
const INTERVALS: usize = (-LEAST_SCALED * INTERVALS_PER_UNIT) as usize + 1;

/// The last token that is kept, in the order of higher logits, then lower ids.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cut {
    logit: f32,
    token: TokenId,
}

impl Cut {
    /// Keeps every token that is not ruled out by a logit of negative infinity.
    pub(super) const NONE: Cut = Cut { logit: f32::MIN, token: TokenId::MAX };

    fn keeps(self, token: usize, logit: f32) -> bool {
        logit > self.logit || (logit == self.logit && token as TokenId <= self.token)
    }

    /// Lists the kept tokens by ascending id.
    pub(super) fn kept(self, logits: &[f32]) -> Vec<TokenId> {
        let kept = logits.iter().enumerate().filter(|&(token, &logit)| self.keeps(token, logit));
        kept.map(|(token, _)| token as TokenId).collect()
    }

    /// Makes the cut after the token with this key.
    fn after(key: u64, logits: &[f32]) -> Self {
        let token = key_token(key);
        Cut { logit: logits[token as usize], token }
    }
}

/// Tells whether the parameters keep less than everything.
pub(super) fn filters(params: &SamplingParams) -> bool {
    params.top_k > 0 || params.top_p < 1.0 || params.min_p > 0.0
}

/// Gives a number that sorts tokens by descending logit, then ascending id. No logit may be NaN.
pub(super) fn key(token: usize, logit: f32) -> u64 {
    // The two zeros are equal, so they need equal keys.
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ascending) << 32 | token as u64
}

/// Gives the token back.
pub(super) fn key_token(key: u64) -> TokenId {
    key as TokenId
}

/// Collects the keys of the first `count` tokens in no particular order, or of all that have finite logits.
pub(super) fn select(logits: &[f32], count: usize, keys: &mut Vec<u64>) {
    select_kept(logits, Cut::NONE, count, keys);
}

fn select_kept(logits: &[f32], cut: Cut, count: usize, keys: &mut Vec<u64>) {
    keys.clear();
    if count == 0 {
        return;
    }
    // Candidates gather until there are twice as many as needed; the lower half then sets the bar.
    let full = count.saturating_mul(2).max(256);
    let mut bar = u64::MAX;
    for (token, &logit) in logits.iter().enumerate() {
        let key = key(token, logit);
        if key < bar && cut.keeps(token, logit) {
            keys.push(key);
            if keys.len() == full {
                keys.select_nth_unstable(count - 1);
                keys.truncate(count);
                bar = keys[count - 1];
            }
        }
    }
    if keys.len() > count {
        keys.select_nth_unstable(count - 1);
        keys.truncate(count);
    }
}

/// Finds which tokens may be drawn.
///
/// `scaled` maps the largest logit to 0; `scratch.weights` holds the weights. `min_p` and `top_p` see the
/// distribution that remains after the filters before them.
pub(super) fn cut(
    params: &SamplingParams,
    logits: &[f32],
    scaled: impl Fn(f32) -> f32,
    scratch: &mut SamplerScratch,
) -> Cut {
    let mut cut = Cut::NONE;
    if params.min_p > 0.0 {
        let least = f64::from(params.min_p).ln();
        let kept = logits.iter().copied().filter(|&logit| f64::from(scaled(logit)) >= least);
        cut = Cut { logit: kept.fold(f32::INFINITY, f32::min), token: TokenId::MAX };
    }
    if params.top_k > 0 && params.top_k < logits.len() {
        select_kept(logits, cut, params.top_k, &mut scratch.keys);
        if let Some(&last) = scratch.keys.iter().max().filter(|_| scratch.keys.len() == params.top_k) {
            cut = Cut::after(last, logits);
        }
    }
    if params.top_p < 1.0 {
        cut = cut_at_mass(params.top_p, cut, logits, scaled, scratch);
    }
    cut
}

/// Finds the shortest beginning of the kept tokens whose weight reaches `top_p` of theirs.
///
/// A histogram finds the interval of logits in which that happens; only that one is sorted.
fn cut_at_mass(
    top_p: f32,
    cut: Cut,
    logits: &[f32],
    scaled: impl Fn(f32) -> f32,
    scratch: &mut SamplerScratch,
) -> Cut {
    let SamplerScratch { weights, histogram, keys, .. } = scratch;
    histogram.clear();
    histogram.resize(INTERVALS, 0);
    for_each_interval(logits, &scaled, |token, interval| {
        histogram[interval] += if cut.keeps(token, logits[token]) { weights[token] } else { 0 };
    });
    let total: u64 = histogram.iter().sum();
    let wanted = (f64::from(top_p) * total as f64).ceil() as u64;
    let mut mass = 0;
    for (at, weight) in histogram.iter().enumerate() {
        if mass + weight >= wanted {
            keys.clear();
            for_each_interval(logits, &scaled, |token, interval| {
                if interval == at && weights[token] > 0 && cut.keeps(token, logits[token]) {
                    keys.push(key(token, logits[token]));
                }
            });
            keys.sort_unstable();
            for &key in keys.iter() {
                mass += weights[key_token(key) as usize];
                if mass >= wanted {
                    return Cut::after(key, logits);
                }
            }
        }
        mass += weight;
    }
    // Not reached: `wanted` is at most the total.
    cut
}

/// Calls `f` with each token and the interval of its logit, which are computed 64 at a time so that they
/// vectorise.
fn for_each_interval(logits: &[f32], scaled: impl Fn(f32) -> f32, mut f: impl FnMut(usize, usize)) {
    const BLOCK: usize = 64;
    const LAST: f32 = (INTERVALS - 1) as f32;
    let mut intervals = [0_i32; BLOCK];
    for (block, logits) in logits.chunks(BLOCK).enumerate() {
        for (interval, &logit) in intervals.iter_mut().zip(logits) {
            let at = -scaled(logit) * INTERVALS_PER_UNIT;
            *interval = if at < LAST { at } else { LAST } as i32;
        }
        for (at, &interval) in intervals[..logits.len()].iter().enumerate() {
            f(block * BLOCK + at, interval as usize);
        }
    }
}

/// Sets the weights of tokens after the cut to 0 and gives the sum of the others.
pub(super) fn drop_weights(logits: &[f32], cut: Cut, weights: &mut [u64]) -> u64 {
    for (token, (&logit, weight)) in logits.iter().zip(weights.iter_mut()).enumerate() {
        *weight = if cut.keeps(token, logit) { *weight } else { 0 };
    }
    weights.iter().sum()
}
