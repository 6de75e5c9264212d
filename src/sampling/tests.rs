//! Sampling against naive implementations, and the promises about reproducibility.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::completion::StopCause;

const EOS: TokenId = 2;

fn sampler(
    params: &SamplingParams,
    seed: u64,
    sample: usize,
    prompt: &[TokenId],
    gen_: &[TokenId],
) -> Sampler {
    Sampler::new(Arc::new(params.clone()), &[EOS], seed, sample, prompt, gen_)
}

fn draw(params: &SamplingParams, seed: u64, logits: &[f32]) -> Result<Sampled, SampleError> {
    sampler(params, seed, 0, &[], &[]).sample(logits, 0, &mut SamplerScratch::default())
}

fn reporting() -> SamplingParams {
    SamplingParams {
        processed_logprobs: true,
        return_kept_set: true,
        top_logprobs: 3,
        ..SamplingParams::default()
    }
}

/// Processes logits as the documentation says, in f64 and token by token.
fn naive_processed(
    params: &SamplingParams,
    prompt: &[TokenId],
    generated: &[TokenId],
    logits: &[f32],
) -> Vec<f64> {
    let count = |tokens: &[TokenId], token| tokens.iter().filter(|&&t| t == token).count() as f64;
    let one = |(index, &logit): (usize, &f32)| {
        let token = index as TokenId;
        let mut logit = f64::from(logit);
        if params.allowed_tokens.as_ref().is_some_and(|allowed| !allowed.contains(&token)) {
            logit = f64::NEG_INFINITY;
        }
        let stops = (token == EOS && !params.ignore_eos) || params.stop_token_ids.contains(&token);
        if generated.len() < params.min_new_tokens && stops {
            logit = f64::NEG_INFINITY;
        }
        logit += params.logit_bias.iter().filter(|b| b.0 == token).map(|b| f64::from(b.1)).sum::<f64>();
        let (prompted, generated) = (count(prompt, token), count(generated, token));
        if prompted + generated > 0.0 {
            let penalty = f64::from(params.repetition_penalty);
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        logit -= f64::from(params.frequency_penalty) * generated;
        logit -= if generated > 0.0 { f64::from(params.presence_penalty) } else { 0.0 };
        logit
    };
    logits.iter().enumerate().map(one).collect()
}

/// Filters by sorting everything, one filter after the other.
fn brute_force_kept(params: &SamplingParams, processed: &[f32]) -> Vec<TokenId> {
    let max = processed.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scaled = |logit: f32| (logit - max) / params.temperature;
    let mut weights = Vec::new();
    softmax::fill_weights(processed, scaled, &mut weights);
    let mut order: Vec<usize> = (0..processed.len()).filter(|&t| processed[t] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| processed[b].partial_cmp(&processed[a]).unwrap().then(a.cmp(&b)));
    if params.min_p > 0.0 {
        order.retain(|&t| f64::from(scaled(processed[t])) >= f64::from(params.min_p).ln());
    }
    if params.top_k > 0 {
        order.truncate(params.top_k);
    }
    if params.top_p < 1.0 {
        let total: u64 = order.iter().map(|&t| weights[t]).sum();
        let mut before = 0;
        let mut kept = Vec::new();
        for &token in &order {
            if before as f64 >= f64::from(params.top_p) * total as f64 {
                break;
            }
            kept.push(token);
            before += weights[token];
        }
        order = kept;
    }
    order.sort_unstable();
    order.into_iter().map(|t| t as TokenId).collect()
}

/// Logits of which many are equal, some nearly so, and some impossible.
fn logits(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![
        4 => -12.0..12.0f32,
        4 => (-6..6i32).prop_map(|step| step as f32 * 0.5),
        1 => Just(-0.0f32),
        1 => Just(f32::NEG_INFINITY),
        1 => -100.0..-30.0f32,
    ];
    (proptest::collection::vec(logit, len), -3.0..3.0f32).prop_map(|(mut logits, first)| {
        logits[0] = first;
        logits
    })
}

prop_compose! {
    fn filters()(
        temperature in prop_oneof![Just(1.0f32), 0.05..3.0f32, Just(1e-6f32), Just(1e30f32)],
        top_k in prop_oneof![Just(0usize), 1..40usize, 250..600usize],
        top_p in prop_oneof![Just(1.0f32), 0.01..1.0f32, Just(f32::MIN_POSITIVE), Just(0.999_999_9f32)],
        min_p in prop_oneof![Just(0.0f32), 0.0..1.0f32, Just(1.0f32)],
    ) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, min_p, ..reporting() }
    }
}

prop_compose! {
    fn processors()(
        min_new_tokens in 0..6usize,
        ignore_eos: bool,
        stop_token_ids in proptest::collection::vec(0..30u32, 0..3),
        repetition_penalty in prop_oneof![Just(1.0f32), 0.5..2.0f32],
        presence_penalty in prop_oneof![Just(0.0f32), -2.0..2.0f32],
        frequency_penalty in prop_oneof![Just(0.0f32), -2.0..2.0f32],
        logit_bias in proptest::collection::vec(
            (0..30u32, prop_oneof![9 => -5.0..5.0f32, 1 => Just(f32::NEG_INFINITY)]), 0..4),
        allowed_tokens in proptest::option::of(proptest::collection::vec(0..30u32, 1..20)),
    ) -> SamplingParams {
        SamplingParams {
            min_new_tokens, ignore_eos, stop_token_ids, repetition_penalty, presence_penalty,
            frequency_penalty, logit_bias, allowed_tokens, ..reporting()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kept_sets_equal_brute_force(params in filters(), logits in logits(1..700), seed: u64) {
        let sampled = draw(&params, seed, &logits).unwrap();
        let kept = sampled.kept.unwrap();
        prop_assert_eq!(&kept, &brute_force_kept(&params, &logits));
        prop_assert!(kept.contains(&sampled.token));
        // The drawn distribution, in f64 over the kept set.
        let scale = |t: TokenId| f64::from(logits[t as usize]) / f64::from(params.temperature);
        let max = kept.iter().map(|&t| scale(t)).fold(f64::NEG_INFINITY, f64::max);
        let log_total = kept.iter().map(|&t| (scale(t) - max).exp()).sum::<f64>().ln() + max;
        let exact = scale(sampled.token) - log_total;
        let got = f64::from(sampled.processed_logprob.unwrap());
        prop_assert!((got - exact).abs() < 1e-5 * (1.0 + exact.abs()) || params.temperature < 0.01);
        prop_assert!(got <= 0.0);
    }

    #[test]
    fn processors_equal_a_naive_implementation(
        params in processors(),
        logits in logits(30..31),
        prompt in proptest::collection::vec(0..30u32, 0..10),
        generated in proptest::collection::vec(0..30u32, 0..10),
    ) {
        let expected = naive_processed(&params, &prompt, &generated, &logits);
        let mut observed = sampler(&params, 1, 0, &prompt, &[]);
        generated.iter().for_each(|&token| observed.observe(token));
        let rebuilt = sampler(&params, 1, 0, &prompt, &generated);
        let mut got = Vec::new();
        rebuilt.processors.apply(&params, generated.len(), &logits, &mut got);
        for (got, expected) in got.iter().zip(&expected) {
            prop_assert!(
                f64::from(*got) == *expected || (f64::from(*got) - expected).abs() < 1e-4,
                "{got} is not {expected}"
            );
        }
        let scratch = &mut SamplerScratch::default();
        let drawn = rebuilt.sample(&logits, generated.len(), scratch);
        prop_assert_eq!(&drawn, &observed.sample(&logits, generated.len(), scratch));
        let possible = expected.iter().any(|logit| *logit > f64::NEG_INFINITY);
        match drawn {
            Ok(sampled) => prop_assert!(expected[sampled.token as usize] > f64::NEG_INFINITY),
            Err(error) => prop_assert!(!possible && error == SampleError::NothingAllowed),
        }
    }

    #[test]
    fn hostile_parameters_never_panic(
        numbers in proptest::array::uniform6(any::<f32>()),
        bias in any::<f32>(),
        top_k: usize,
        logits in proptest::collection::vec(any::<f32>(), 0..40),
        seed: u64,
    ) {
        let [temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty] = numbers;
        // Extreme, but mostly within what validation lets through.
        let (temperature, repetition_penalty) = (temperature.abs(), repetition_penalty.abs());
        let (top_p, min_p) = (top_p.abs().min(1.0), min_p.abs().min(1.0));
        let params = SamplingParams {
            temperature, top_p, min_p, top_k, repetition_penalty, presence_penalty, frequency_penalty,
            logit_bias: vec![(0, bias), (3, f32::MAX)],
            ..reporting()
        };
        let limits = crate::RequestLimits { vocab_size: 40, max_model_len: 100 };
        let request = crate::Request::new([1]).params(params.clone());
        let sampler = sampler(&params, seed, 0, &[1, 2], &[3, 3]);
        if request.validate(&limits).is_ok()
            && let Ok(sampled) = sampler.sample(&logits, 2, &mut SamplerScratch::default())
        {
            prop_assert!(sampled.logprob.is_finite());
            prop_assert!(sampled.processed_logprob.unwrap().is_finite());
        }
    }
}

#[test]
fn philox_gives_the_published_vectors() {
    // Random123 1.14, `kat_vectors`.
    let max = u32::MAX;
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    let vectors = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([max; 4], [max; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (pi, [0xa409_3822, 0x299f_31d0], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
    ];
    for (counter, key, expected) in vectors {
        assert_eq!(philox::philox4x32(counter, key), expected);
    }
}

/// Pearson's statistic of `counts` against `expected` probabilities.
fn chi_square(counts: &[u64], expected: &[f64]) -> f64 {
    let draws = counts.iter().sum::<u64>() as f64;
    counts.iter().zip(expected).map(|(&n, p)| (n as f64 - p * draws).powi(2) / (p * draws)).sum()
}

#[test]
fn draws_follow_the_distribution() {
    let logits: Vec<f32> = (0..20).map(|i| (i as f32 * 1.7).sin() * 2.0).collect();
    for params in [
        SamplingParams { temperature: 0.7, ..reporting() },
        SamplingParams { temperature: 1.3, top_k: 8, ..reporting() },
        SamplingParams { top_p: 0.8, min_p: 0.05, ..reporting() },
    ] {
        let kept = brute_force_kept(&params, &logits);
        let weight = |t: &TokenId| (f64::from(logits[*t as usize]) / f64::from(params.temperature)).exp();
        let total: f64 = kept.iter().map(weight).sum();
        let expected: Vec<f64> = kept.iter().map(|t| weight(t) / total).collect();
        // Three ways to get 20 000 independent draws: over seeds, samples and positions.
        for way in 0..3 {
            let mut counts = vec![0_u64; kept.len()];
            let scratch = &mut SamplerScratch::default();
            for i in 0..20_000 {
                let (seed, sample, index) = [(i, 0, 0), (7, i, 0), (7, 0, i)][way];
                let sampled = sampler(&params, seed as u64, sample, &[], &[]).sample(&logits, index, scratch);
                counts[kept.binary_search(&sampled.unwrap().token).unwrap()] += 1;
            }
            // At most 19 degrees of freedom: exceeded with probability 1e-4 if the draws are right.
            assert!(chi_square(&counts, &expected) < 51.0, "way {way}: {counts:?}");
        }
    }
}

#[test]
fn a_draw_depends_on_nothing_else() {
    let params = SamplingParams { temperature: 0.9, top_p: 0.9, presence_penalty: 0.1, ..reporting() };
    let rows: Vec<Vec<f32>> =
        (0..8).map(|r| (0..500).map(|i| ((i * 37 + r * 101) % 97) as f32 / 10.0).collect()).collect();
    let alone: Vec<Sampled> = rows
        .iter()
        .enumerate()
        .map(|(r, row)| {
            sampler(&params, 42, r, &[1], &[5]).sample(row, 3, &mut SamplerScratch::default()).unwrap()
        })
        .collect();
    let scratch = &mut SamplerScratch::default();
    for r in (0..rows.len()).rev().chain(0..rows.len()) {
        let other = SamplingParams { top_k: 3, ..SamplingParams::default() };
        let neighbour = vec![0.5; 900];
        sampler(&other, 9, r, &[], &[]).sample(&neighbour, r, scratch).unwrap();
        assert_eq!(sampler(&params, 42, r, &[1], &[5]).sample(&rows[r], 3, scratch).unwrap(), alone[r]);
    }
}

#[test]
fn seeds_samples_and_positions_have_their_own_streams() {
    let draws: BTreeSet<u64> = (0..10)
        .flat_map(|seed| (0..10).flat_map(move |s| (0..10).map(move |t| philox::draw(seed, s, t))))
        .chain([philox::draw(1 << 32, 0, 0), philox::draw(0, 0, 1 << 32)])
        .collect();
    assert_eq!(draws.len(), 1002);
}

#[test]
fn greedy_takes_the_lowest_id_of_the_best() {
    let params = SamplingParams { temperature: 0.0, ..reporting() };
    let sampled = draw(&params, 1, &[0.0, 3.0, -1.0, 3.0]).unwrap();
    assert_eq!((sampled.token, sampled.processed_logprob, sampled.kept), (1, Some(0.0), Some(vec![1])));
    let top: Vec<TokenId> = sampled.top.unwrap().iter().map(|t| t.token).collect();
    assert_eq!(top, [1, 3, 0]);
    assert_eq!(draw(&params, 1, &[-0.0, 0.0]).unwrap().token, 0);
    let biased = SamplingParams { logit_bias: vec![(2, 4.0)], ..params };
    let sampled = draw(&biased, 1, &[0.0, 3.0, -1.0, 3.0]).unwrap();
    assert_eq!(sampled.token, 1);
    let exact = 3.0 - (1.0 + (-1.0_f64).exp() + 2.0 * 3.0_f64.exp()).ln();
    assert!((f64::from(sampled.logprob) - exact).abs() < 1e-6, "the model's logprob, without the bias");
}

#[test]
fn ties_are_kept_by_id() {
    let logits = vec![1.0; 1000];
    let params = SamplingParams { top_k: 300, ..reporting() };
    assert_eq!(draw(&params, 5, &logits).unwrap().kept.unwrap(), (0..300).collect::<Vec<_>>());
    let params = SamplingParams { top_p: 0.25, ..reporting() };
    assert_eq!(draw(&params, 5, &logits).unwrap().kept.unwrap(), (0..250).collect::<Vec<_>>());
}

#[test]
fn an_unchanged_distribution_has_one_logprob() {
    let logits: Vec<f32> = (0..333).map(|i| ((i * 7) % 50) as f32 * 0.13).collect();
    for seed in 0..50 {
        let sampled = draw(&reporting(), seed, &logits).unwrap();
        assert_eq!(sampled.processed_logprob.map(f32::to_bits), Some(sampled.logprob.to_bits()));
        assert_eq!(
            sampled.logprob.to_bits(),
            logprob(&logits, log_sum_exp(&logits), sampled.token).to_bits()
        );
    }
}

#[test]
fn tiny_temperatures_are_greedy() {
    for temperature in [1e-6, 1e-30, f32::MIN_POSITIVE, f32::from_bits(1)] {
        let params = SamplingParams { temperature, top_p: 0.9, min_p: 0.1, ..reporting() };
        let sampled = draw(&params, 3, &[1.0, -5.0, 1.5, f32::NEG_INFINITY, f32::MIN]).unwrap();
        assert_eq!((sampled.token, sampled.processed_logprob), (2, Some(0.0)));
        assert_eq!(sampled.kept, Some(vec![2]));
    }
}

#[test]
fn logits_that_are_no_distribution_are_errors() {
    for temperature in [0.0, 1.0] {
        let params = SamplingParams { temperature, ..reporting() };
        for bad in [&[][..], &[f32::NAN, 1.0], &[1.0, f32::INFINITY], &[f32::NEG_INFINITY; 3]] {
            assert_eq!(draw(&params, 1, bad), Err(SampleError::NonFiniteLogits), "{bad:?}");
        }
        let nothing = SamplingParams { allowed_tokens: Some(vec![EOS]), min_new_tokens: 1, ..params };
        assert_eq!(draw(&nothing, 1, &[1.0; 5]), Err(SampleError::NothingAllowed));
    }
    assert_eq!(SampleError::NothingAllowed.at(7), CompletionError::NothingAllowed { position: 7 });
}

#[test]
fn stops_are_found_in_order_and_not_too_early() {
    let mut params = SamplingParams {
        stop_token_ids: vec![7],
        stop_sequences: vec![vec![1, 2, 3], vec![3]],
        ..SamplingParams::default()
    };
    assert_eq!(stop_cause(&params, &[EOS], &[]), None);
    assert_eq!(stop_cause(&params, &[EOS], &[5, EOS]), Some(StopCause::Eos(EOS)));
    assert_eq!(stop_cause(&params, &[7], &[7]), Some(StopCause::Eos(7)));
    assert_eq!(stop_cause(&params, &[EOS], &[7]), Some(StopCause::TokenId(7)));
    assert_eq!(stop_cause(&params, &[EOS], &[7, 4]), None);
    assert_eq!(stop_cause(&params, &[EOS], &[9, 1, 2, 3]), Some(StopCause::Sequence(0)));
    assert_eq!(stop_cause(&params, &[EOS], &[2, 3]), Some(StopCause::Sequence(1)));
    params.ignore_eos = true;
    assert_eq!(stop_cause(&params, &[EOS], &[5, EOS]), None);
    params.min_new_tokens = 3;
    assert_eq!(stop_cause(&params, &[EOS], &[4, 7]), None);
    assert_eq!(stop_cause(&params, &[EOS], &[4, 4, 7]), Some(StopCause::TokenId(7)));
}
