//! Draws by a device that has the logits: what it is asked, and what is made of its answer.

use super::{Drawn, SampleError, Sampled, Sampler, filter, logprob_drawn};
use crate::completion::TokenLogprob;
use crate::device::{DrawQuery, RowAnswer, RowQuery};

impl Sampler {
    /// What a device is asked about the logits of the token with this index. Samplers of one request ask the same if
    /// their sequences have the same tokens, apart from the random bits.
    pub(crate) fn query(&self, token_index: usize) -> RowQuery {
        let params = &*self.params;
        let draw = DrawQuery {
            changes: self.processors.changes(params, token_index),
            temperature: params.temperature,
            least_scaled: least_scaled(params.min_p),
            top_k: params.top_k,
            top_p: params.top_p,
            random: vec![self.random(token_index)],
            kept: params.return_kept_set && params.temperature > 0.0,
        };
        RowQuery { token: None, top: params.top_logprobs, draw: Some(draw) }
    }

    /// Makes of the answer what [`Sampler::sample`] makes of the logits; `draw` counts the query's random bits.
    ///
    /// # Errors
    /// [`SampleError`]; nothing has changed.
    pub(crate) fn take(
        &self,
        answer: &RowAnswer,
        draw: usize,
        token_index: usize,
    ) -> Result<Sampled, SampleError> {
        if !answer.sound {
            return Err(SampleError::NonFiniteLogits);
        }
        if !answer.possible {
            return Err(SampleError::NothingAllowed);
        }
        let params = &*self.params;
        let at = answer.drawn[draw];
        let drawn = if params.temperature == 0.0 {
            Drawn::greedy(params, at.token)
        } else {
            let scaled = (at.changed - answer.greatest_changed) / params.temperature;
            let kept = params.return_kept_set.then(|| answer.kept.clone());
            Drawn { token: at.token, logprob_drawn: logprob_drawn(scaled, answer.weight), kept }
        };
        let lse = answer.log_sum_exp();
        let active = self.processors.active(params, token_index);
        self.conclude(active, drawn, at.logit - lse, || {
            let mut keys: Vec<_> =
                answer.top.iter().map(|at| (filter::key(at.token as usize, at.logit), at)).collect();
            keys.sort_unstable_by_key(|&(key, _)| key);
            let of = keys.iter().map(|(_, at)| TokenLogprob { token: at.token, logprob: at.logit - lse });
            of.collect()
        })
    }
}

/// The least scaled logit that `min_p` keeps: comparing with it is comparing with the exact logarithm.
fn least_scaled(min_p: f32) -> f32 {
    let least = f64::from(min_p).ln();
    let nearest = least as f32;
    if f64::from(nearest) < least { nearest.next_up() } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_scaled_logit_is_where_min_p_ends() {
        assert_eq!(least_scaled(0.0), f32::NEG_INFINITY);
        assert_eq!(least_scaled(1.0), 0.0);
        for min_p in [f32::from_bits(1), 1e-3, 0.05, 0.3, 0.999_999_94] {
            let (least, exact) = (least_scaled(min_p), f64::from(min_p).ln());
            assert!(f64::from(least) >= exact && f64::from(least.next_down()) < exact);
        }
    }
}
