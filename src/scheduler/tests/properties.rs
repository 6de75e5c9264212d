//! Random operations on tiny pools, everything verified after each.

use proptest::collection::vec;
use proptest::prelude::*;

use super::sim::{Sim, config};
use crate::kv::tests::two_bit_key;
use crate::kv::{PrefixCache, Salt, chained_blake3};
use crate::scheduler::{AddError, NewSequence, SchedulerConfig};

#[derive(Debug, Clone)]
enum Op {
    Add { prompt: Vec<u32>, more: usize, namespace: u8, recompute_from: usize, forks: u64 },
    Continue { pin: usize, prompt: Vec<u32>, more: usize, recompute_from: usize },
    Step,
    FailStep,
    AbortInStep(usize, bool),
    PreemptInStep(usize, bool),
    ClearInStep(bool),
    Abort(usize),
    Preempt(usize),
    Pin(usize),
    Unpin(usize),
    Clear,
}

fn recompute_from() -> impl Strategy<Value = usize> {
    prop_oneof![4 => Just(usize::MAX), 1 => 0usize..8]
}

fn op() -> impl Strategy<Value = Op> {
    let prompt = || vec(0u32..2, 1..12);
    prop_oneof![
        12 => (prompt(), 0usize..8, 0u8..2, recompute_from(), prop_oneof![3 => Just(0u64), 1 => 1u64..4]).prop_map(
            |(prompt, more, namespace, recompute_from, forks)| Op::Add {
                prompt, more, namespace, recompute_from, forks
            }
        ),
        4 => (any::<usize>(), vec(0u32..2, 0..5), 0usize..6, recompute_from())
            .prop_map(|(pin, prompt, more, recompute_from)| Op::Continue { pin, prompt, more, recompute_from }),
        30 => Just(Op::Step),
        1 => Just(Op::FailStep),
        2 => any::<(usize, bool)>().prop_map(|(which, fails)| Op::AbortInStep(which, fails)),
        2 => any::<(usize, bool)>().prop_map(|(which, fails)| Op::PreemptInStep(which, fails)),
        1 => any::<bool>().prop_map(Op::ClearInStep),
        3 => any::<usize>().prop_map(Op::Abort),
        3 => any::<usize>().prop_map(Op::Preempt),
        4 => any::<usize>().prop_map(Op::Pin),
        2 => any::<usize>().prop_map(Op::Unpin),
        1 => Just(Op::Clear),
    ]
}

fn any_config() -> impl Strategy<Value = SchedulerConfig> {
    let cache = prop_oneof![
        5 => Just(PrefixCache::Unlimited),
        2 => (0usize..4).prop_map(PrefixCache::AtMost),
        1 => Just(PrefixCache::Off),
    ];
    (1usize..=4, 1usize..=16, 1usize..=5, 1usize..=8, cache).prop_map(
        |(block_size, num_blocks, max_num_seqs, max_num_batched_tokens, prefix_cache)| SchedulerConfig {
            max_num_seqs,
            max_num_batched_tokens,
            prefix_cache,
            ..config(block_size, num_blocks)
        },
    )
}

fn pick<T: Copy>(from: &[T], which: usize) -> Option<T> {
    (!from.is_empty()).then(|| from[which % from.len()])
}

/// A step in which something happens while the device computes.
fn step_with(sim: &mut Sim, fails: bool, meanwhile: impl FnOnce(&mut Sim)) {
    let plan = sim.begin();
    meanwhile(sim);
    sim.check();
    if fails { sim.fail(&plan) } else { sim.complete(&plan) }
}

fn apply(sim: &mut Sim, op: Op) {
    let live = sim.live_ids();
    let pins: Vec<_> = sim.pins.keys().copied().collect();
    match op {
        Op::Add { prompt, more, namespace, recompute_from, forks } => {
            let salt = (namespace > 0).then(|| Salt([namespace].as_slice().into()));
            let new = NewSequence { salt, recompute_from, ..Sim::new_sequence(&prompt, more) };
            let needed = sim.scheduler.pool.blocks_for(prompt.len() + more);
            let refused = needed > sim.scheduler.pool.total();
            assert_eq!(matches!(sim.add(new, forks), Err(AddError::NeverFits { .. })), refused);
        }
        Op::Continue { pin, prompt, more, recompute_from } => {
            let Some(pin) = pick(&pins, pin) else { return };
            let (salt, mut tokens) = sim.pins[&pin].clone();
            tokens.extend(prompt);
            let new =
                NewSequence { salt, recompute_from, pinned: Some(pin), ..Sim::new_sequence(&tokens, more) };
            let added = sim.add(new, 0);
            assert!(matches!(added, Ok(_) | Err(AddError::NeverFits { .. })));
        }
        Op::Step => drop(sim.step()),
        Op::FailStep => step_with(sim, true, |_| ()),
        Op::AbortInStep(which, fails) => step_with(sim, fails, |sim| {
            if let Some(seq) = pick(&sim.live_ids(), which) {
                sim.abort(seq);
            }
        }),
        Op::PreemptInStep(which, fails) => step_with(sim, fails, |sim| {
            if let Some(seq) = pick(&sim.live_ids(), which) {
                sim.scheduler.preempt(seq);
            }
        }),
        Op::ClearInStep(fails) => step_with(sim, fails, |sim| sim.scheduler.clear_prefix_cache()),
        Op::Abort(which) => pick(&live, which).into_iter().for_each(|seq| sim.abort(seq)),
        Op::Preempt(which) => {
            pick(&live, which).map(|seq| sim.scheduler.preempt(seq));
        }
        Op::Pin(which) => {
            pick(&live, which).map(|seq| sim.finish_and_pin(seq));
        }
        Op::Unpin(which) => {
            if let Some(pin) = pick(&pins, which) {
                sim.pins.remove(&pin);
                assert!(sim.scheduler.unpin(pin));
            }
        }
        Op::Clear => {
            sim.scheduler.clear_prefix_cache();
            assert_eq!(sim.scheduler.stats().cached_blocks, 0);
        }
    }
    sim.check();
}

/// Unpins everything and runs to the end: nothing may be lost, starved or leaked.
fn wind_up(sim: &mut Sim) {
    for pin in std::mem::take(&mut sim.pins).into_keys() {
        assert!(sim.scheduler.unpin(pin));
    }
    let stuck = sim.stuck.len();
    sim.run_to_end();
    assert_eq!(sim.stuck.len(), stuck, "without pins nothing is stuck");
    sim.assert_all_free();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_operations_never_lose_starve_or_mix_up_anything(
        config in any_config(),
        weak_hash in any::<bool>(),
        ops in vec(op(), 1..160),
    ) {
        let mut sim = Sim::with_key_fn(config, if weak_hash { two_bit_key } else { chained_blake3 });
        for op in ops {
            apply(&mut sim, op);
        }
        wind_up(&mut sim);
    }
}

#[test]
fn the_same_calls_give_the_same_plans() {
    let run = || {
        let mut sim =
            Sim::new(SchedulerConfig { max_num_seqs: 5, max_num_batched_tokens: 9, ..config(2, 20) });
        let mut state = 77;
        let mut plans = Vec::new();
        for _ in 0..300 {
            let which = xorshift(&mut state);
            let prompt: Vec<u32> = (0..which % 9 + 1).map(|bit| (which >> bit & 1) as u32).collect();
            let new = Sim::new_sequence(&prompt, which / 64 % 12);
            sim.add(new, which as u64 / 1024 % 3).unwrap();
            plans.push(sim.step());
        }
        plans
    };
    assert_eq!(run(), run());
}

/// A small generator for long runs; proptest would spend its time on shrinking them.
fn xorshift(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state as usize
}

#[test]
fn b55_five_thousand_random_events_keep_the_books() {
    let mut sim = Sim::new(SchedulerConfig { max_num_seqs: 6, max_num_batched_tokens: 7, ..config(3, 14) });
    let mut state = 0x9e37_79b9_7f4a_7c15;
    for _ in 0..5_000 {
        let which = xorshift(&mut state);
        let op = match xorshift(&mut state) % 16 {
            0..=3 => Op::Add {
                prompt: (0..which % 14 + 1).map(|bit| (which >> bit & 1) as u32).collect(),
                more: which / 64 % 20,
                namespace: 0,
                recompute_from: usize::MAX,
                forks: 0,
            },
            4 => Op::Abort(which),
            5 => Op::Preempt(which),
            6 => Op::Pin(which),
            7 => Op::Unpin(which),
            8 if which.is_multiple_of(8) => Op::Clear,
            _ => Op::Step,
        };
        apply(&mut sim, op);
    }
    assert!(sim.scheduler.stats().preemptions > 0 && sim.finished.len() > 100 && sim.aborted.len() > 100);
    wind_up(&mut sim);
}
