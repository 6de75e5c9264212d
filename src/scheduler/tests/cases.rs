//! Reported failures of other engines, each under its case's name.

use super::sim::{Sim, config};
use crate::kv::tests::two_bit_key;
use crate::kv::{PrefixCache, Salt};
use crate::scheduler::{AddError, NewSequence, PinId, SchedulerConfig, Stuck};

fn prompt(name: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|position| name * 1000 + position).collect()
}

#[test]
fn b09_tiny_cache_caps_finish_everything_and_zero_means_no_hits() {
    for (cap, cache) in [0, 1, 2].map(|cap| (cap, PrefixCache::AtMost(cap))) {
        for together in [1, 8] {
            let mut sim = Sim::new(SchedulerConfig { prefix_cache: cache, ..config(2, 24) });
            for request in 0..50u32 {
                let mut tokens = prompt(0, 5);
                tokens.extend(prompt(request % 7, request as usize % 4));
                sim.submit(&tokens, 3);
                if request % together == together - 1 {
                    sim.run_to_end();
                }
                assert!(sim.scheduler.stats().cached_blocks <= cap);
            }
            sim.run_to_end();
            assert_eq!(sim.finished.len(), 50);
            assert_eq!(sim.scheduler.stats().cached_tokens > 0, cap > 0);
            sim.assert_all_free();
        }
    }
}

#[test]
fn b43_positions_whose_logprobs_are_wanted_are_computed() {
    let mut sim = Sim::new(config(2, 32));
    sim.submit(&prompt(1, 9), 1);
    sim.run_to_end();
    for (recompute_from, cached) in [(0, 0), (1, 0), (2, 2), (5, 4), (usize::MAX, 8)] {
        let new = NewSequence { recompute_from, ..Sim::new_sequence(&prompt(1, 9), 1) };
        let seq = sim.add(new, 0).unwrap();
        sim.run_to_end();
        assert_eq!(sim.cached[&seq], cached, "from {recompute_from}");
    }
    // What was computed twice is kept once.
    assert_eq!(sim.scheduler.stats().cached_blocks, 4);
    sim.assert_all_free();
}

#[test]
fn b43_prompt_rows_are_wanted_once_not_after_each_preemption() {
    let mut sim = Sim::new(config(2, 32));
    let new = NewSequence { recompute_from: 0, ..Sim::new_sequence(&prompt(1, 8), 4) };
    let seq = sim.add(new, 0).unwrap();
    sim.step();
    sim.scheduler.preempt(seq);
    let plan = sim.step();
    assert_eq!(plan.admitted[0].cached_tokens, 8);
    sim.run_to_end();
}

#[test]
fn b44_cold_warm_and_chunked_prefill_compute_each_position_once() {
    for rows in [1, 7, 4, 64] {
        let mut sim = Sim::new(SchedulerConfig { max_num_batched_tokens: rows, ..config(4, 16) });
        sim.submit(&prompt(1, 21), 1);
        assert_eq!(sim.run_to_end(), 21usize.div_ceil(rows));
        let warm = sim.submit(&prompt(1, 21), 1);
        sim.run_to_end();
        assert_eq!(sim.cached[&warm], 20);
    }
}

#[test]
fn b50_with_two_bit_keys_nobody_gets_foreign_blocks() {
    let mut sim =
        Sim::with_key_fn(SchedulerConfig { max_num_batched_tokens: 16, ..config(2, 40) }, two_bit_key);
    for name in 0..100 {
        sim.submit(&prompt(name, 5 + name as usize % 4), 4);
    }
    sim.run_to_end();
    assert_eq!(sim.finished.len(), 100);
    assert_eq!(sim.scheduler.stats().cached_tokens, 0);
}

#[test]
fn b51_only_the_same_salt_hits() {
    let mut sim = Sim::new(config(2, 64));
    let salts = [Some("a"), Some("b"), None, Some("a"), Some(""), None];
    let cached = salts.map(|salt| {
        let salt = salt.map(|salt| Salt(salt.as_bytes().into()));
        let seq = sim.add(NewSequence { salt, ..Sim::new_sequence(&prompt(1, 8), 1) }, 0).unwrap();
        sim.run_to_end();
        sim.cached[&seq]
    });
    assert_eq!(cached, [0, 0, 0, 6, 0, 6]);
}

#[test]
fn b52_a_fully_cached_prompt_still_computes_its_last_token() {
    for len in [1, 3, 4, 5, 11, 12, 13] {
        for rows in [1, 3, 64] {
            let limit = (len - 1) / 4 * 4;
            let mut sim = Sim::new(SchedulerConfig { max_num_batched_tokens: rows, ..config(4, 32) });
            let (first, second) = (sim.submit(&prompt(1, len), 3), sim.submit(&prompt(1, len), 3));
            sim.run_to_end();
            // Together: the second finds the prefill of the first, which is in flight, in the same step if
            // there are rows left for it.
            assert_eq!((sim.cached[&first], sim.cached[&second]), (0, limit), "len {len}, rows {rows}");
            let third = sim.submit(&prompt(1, len), 3);
            sim.run_to_end();
            assert_eq!(sim.cached[&third], limit);
        }
    }
}

#[test]
fn b52_an_identical_prompt_joins_a_prefill_within_the_step() {
    let mut sim = Sim::new(config(4, 32));
    let (first, second) = (sim.submit(&prompt(1, 12), 3), sim.submit(&prompt(1, 12), 3));
    let plan = sim.step();
    let chunks: Vec<_> = plan.chunks.iter().map(|chunk| (chunk.seq, chunk.positions.clone())).collect();
    assert_eq!(chunks, [(first, 0..12), (second, 8..12)]);
    // The third block was computed by both and is held once now.
    assert_eq!(
        sim.scheduler.sequence(first).unwrap().blocks()[..3],
        sim.scheduler.sequence(second).unwrap().blocks()[..3]
    );
    assert_eq!(sim.scheduler.stats().owned_blocks, 3);
    sim.run_to_end();
}

#[test]
fn b56_twenty_thousand_short_requests_leave_nothing() {
    let mut sim = Sim::new(SchedulerConfig { max_num_seqs: 8, max_num_batched_tokens: 16, ..config(2, 48) });
    for request in 0..20_000u32 {
        let seq = sim.submit(&prompt(request % 11, 1 + request as usize % 6), 1 + request as usize % 3);
        if request % 2 == 0 {
            // At every stage: queued, within its prefill, decoding, at its last token.
            for _ in 0..request / 2 % 4 {
                sim.step();
            }
            sim.abort(seq);
        }
        if request % 8 == 7 {
            sim.run_to_end();
        }
    }
    sim.run_to_end();
    assert_eq!(sim.finished.len() + sim.aborted.len(), 20_000);
    assert_eq!(sim.scheduler.claims.len() + sim.scheduler.in_flight.len(), 0);
    sim.assert_all_free();
}

#[test]
fn b57_preempted_sequences_keep_every_token() {
    // Room for about one and a half sequences of 8 + 64 tokens.
    for cache in [PrefixCache::Unlimited, PrefixCache::Off] {
        let mut sim = Sim::new(SchedulerConfig { prefix_cache: cache, ..config(4, 27) });
        let seqs = [1, 2, 3, 4].map(|name| sim.submit(&prompt(name, 8), 64));
        sim.run_to_end();
        assert!(sim.scheduler.stats().preemptions > 0);
        // The driver compares every finished sequence with the tokens it sampled.
        assert!(seqs.iter().all(|seq| sim.finished[seq].len() == 72));
    }
}

#[test]
fn b58_a_sequence_that_never_fits_is_refused_at_once() {
    let mut sim = Sim::new(config(4, 5));
    let refused = sim.add(Sim::new_sequence(&prompt(1, 4), 17), 0);
    let fault = AddError::NeverFits { max_tokens: 21, needed_blocks: 6, total_blocks: 5 };
    assert_eq!(refused, Err(fault));
    sim.submit(&prompt(1, 4), 16);
    sim.run_to_end();
    sim.assert_all_free();
}

#[test]
fn b58_a_long_sequence_gets_through_a_stream_of_short_ones() {
    for cache in [PrefixCache::Unlimited, PrefixCache::Off] {
        let base = config(4, 16);
        let mut sim = Sim::new(SchedulerConfig { max_num_batched_tokens: 8, prefix_cache: cache, ..base });
        // Short ones before and after it.
        for name in 0..4 {
            sim.submit(&prompt(name, 6), 6);
        }
        let long = sim.submit(&prompt(100, 30), 34);
        let mut steps = 0;
        while sim.scheduler.is_live(long) {
            sim.submit(&prompt(200 + steps, 6), 6);
            sim.step();
            steps += 1;
            assert!(steps < 80, "the long one starves");
        }
        assert!(sim.preemptions.get(&long).copied().unwrap_or(0) <= 2);
        sim.run_to_end();
        sim.assert_all_free();
    }
}

#[test]
fn b60_after_turmoil_a_normal_request_is_admitted_at_once() {
    let mut sim = Sim::new(SchedulerConfig { max_num_seqs: 3, ..config(2, 8) });
    for round in 0..1_000u32 {
        let seq = sim.submit(&prompt(round % 5, 1 + round as usize % 9), round as usize % 7);
        if round % 3 == 0 {
            sim.abort(seq);
        }
        match round % 50 {
            17 => {
                let plan = sim.begin();
                sim.fail(&plan);
            }
            31 => sim.scheduler.clear_prefix_cache(),
            _ => drop(sim.step()),
        }
    }
    sim.run_to_end();
    sim.assert_all_free();
    let seq = sim.submit(&prompt(77, 15), 1);
    let plan = sim.step();
    assert_eq!(plan.admitted.first().map(|admitted| admitted.seq), Some(seq));
    sim.run_to_end();
}

#[test]
fn b60_pinned_blocks_that_hold_the_pool_are_reported_not_waited_for() {
    let mut sim = Sim::new(config(2, 4));
    let seq = sim.submit(&prompt(1, 5), 3);
    sim.step();
    let pin = sim.finish_and_pin(seq).unwrap();
    let blocked = sim.submit(&prompt(2, 4), 2);
    let stuck = Stuck { seq: blocked, needed_blocks: 3, available_blocks: 1 };
    assert_eq!(sim.step().stuck, Some(stuck));
    assert!(sim.scheduler.unpin(pin));
    sim.submit(&prompt(2, 4), 2);
    assert_eq!(sim.run_to_end(), 2);
    sim.assert_all_free();
}

#[test]
fn a_pinned_conversation_goes_on_from_its_partly_filled_block() {
    let mut sim = Sim::new(SchedulerConfig { prefix_cache: PrefixCache::Off, ..config(4, 16) });
    let seq = sim.submit(&prompt(1, 5), 9);
    sim.step();
    sim.step();
    let pin = sim.finish_and_pin(seq).unwrap();
    let (_, mut tokens) = sim.pins[&pin].clone();
    assert_eq!((tokens.len(), sim.scheduler.stats().pinned_blocks), (7, 2));
    let wrong = NewSequence { pinned: Some(pin), ..Sim::new_sequence(&prompt(2, 9), 1) };
    assert_eq!(sim.add(wrong, 0), Err(AddError::PinMismatch { common_tokens: 0, pinned_tokens: 6 }));
    tokens.extend([7, 7]);
    let salt = Some(Salt([1].as_slice().into()));
    let salted = NewSequence { pinned: Some(pin), salt, ..Sim::new_sequence(&tokens, 1) };
    assert_eq!(sim.add(salted, 0), Err(AddError::PinSaltDiffers));
    let next = NewSequence { pinned: Some(pin), ..Sim::new_sequence(&tokens, 3) };
    let next = sim.add(next, 0).unwrap();
    assert_eq!(sim.step().chunks[0].positions, 6..9);
    assert_eq!(sim.cached[&next], 6);
    let again = NewSequence { pinned: Some(pin), ..Sim::new_sequence(&tokens, 3) };
    assert_eq!(sim.add(again, 0), Err(AddError::UnknownPin { pin }));
    assert!(!sim.scheduler.unpin(pin) && !sim.scheduler.unpin(PinId(99)));
    sim.run_to_end();
    sim.assert_all_free();
}

#[test]
fn waiting_conversations_give_their_blocks_up_rather_than_block_each_other() {
    // Two conversations fill the pool, and both want to grow.
    let mut sim = Sim::new(config(2, 8));
    let pins = [1, 2].map(|name| {
        let seq = sim.submit(&prompt(name, 7), 2);
        sim.step();
        sim.finish_and_pin(seq).unwrap()
    });
    for pin in pins {
        let (_, mut tokens) = sim.pins[&pin].clone();
        tokens.extend([5, 6, 7, 8]);
        sim.add(NewSequence { pinned: Some(pin), ..Sim::new_sequence(&tokens, 3) }, 0).unwrap();
    }
    sim.run_to_end();
    assert_eq!((sim.stuck.len(), sim.finished.len()), (0, 4));
    sim.assert_all_free();
}

#[test]
fn thousands_of_waiting_requests_are_admitted_in_order_of_arrival() {
    let mut sim = Sim::new(SchedulerConfig { max_num_seqs: 4, ..config(4, 32) });
    let mut ids = Vec::new();
    for name in 0..3_000 {
        ids.push(sim.submit(&prompt(name, 3), 1));
    }
    let mut admitted = Vec::new();
    while !sim.scheduler.is_idle() {
        admitted.extend(sim.step().admitted.into_iter().map(|admitted| admitted.seq));
    }
    assert_eq!(admitted, ids);
}

#[test]
fn a_pin_keeps_the_computed_positions_only() {
    let mut sim = Sim::new(SchedulerConfig { max_num_batched_tokens: 5, ..config(2, 16) });
    let seq = sim.submit(&prompt(1, 12), 2);
    sim.step();
    assert_eq!(sim.scheduler.stats().owned_blocks, 6, "all the prompt's blocks are taken at admission");
    sim.finish_and_pin(seq).unwrap();
    assert_eq!(sim.scheduler.stats().pinned_blocks, 3);
    assert_eq!(sim.scheduler.stats().owned_blocks, 3);
}

#[test]
fn a_pin_never_stands_in_for_positions_that_must_be_computed() {
    // 7 pinned positions: all that a sequence of the same 7 tokens has, its last included; and more than one
    // has whose logprobs are wanted from position 3 on.
    let cases = [(0, usize::MAX, 6), (2, usize::MAX, 7), (2, 3, 2)];
    for (further, recompute_from, cached) in cases {
        let mut sim = Sim::new(config(2, 16));
        let seq = sim.submit(&prompt(1, 7), 2);
        sim.step();
        let pin = sim.finish_and_pin(seq).unwrap();
        let mut tokens = prompt(1, 7);
        tokens.extend(prompt(2, further));
        let next = NewSequence { recompute_from, pinned: Some(pin), ..Sim::new_sequence(&tokens, 2) };
        let next = sim.add(next, 0).unwrap();
        let plan = sim.step();
        assert_eq!(plan.chunks[0].positions, cached..tokens.len());
        assert_eq!(sim.cached[&next], cached);
        sim.run_to_end();
        sim.assert_all_free();
    }
}

#[test]
fn a_waiting_conversation_gives_its_blocks_up_before_a_running_sequence_is_preempted() {
    let mut sim = Sim::new(SchedulerConfig { max_num_seqs: 1, ..config(2, 8) });
    let first = sim.submit(&prompt(1, 5), 2);
    sim.step();
    let pin = sim.finish_and_pin(first).unwrap();
    sim.submit(&prompt(2, 6), 10);
    sim.step();
    let (_, mut tokens) = sim.pins[&pin].clone();
    tokens.push(9);
    sim.add(NewSequence { pinned: Some(pin), ..Sim::new_sequence(&tokens, 3) }, 0).unwrap();
    sim.run_to_end();
    assert_eq!((sim.scheduler.stats().preemptions, sim.finished.len()), (0, 3));
    sim.assert_all_free();
}

#[test]
fn b58_a_readmitted_sequence_is_not_preempted_again_at_once() {
    let mut readmissions = 0;
    for num_blocks in 31..48 {
        let base = config(1, num_blocks);
        let mut sim = Sim::new(SchedulerConfig { prefix_cache: PrefixCache::Off, ..base });
        for (name, more) in [(1, 4), (2, 9), (3, 16), (4, 25)] {
            sim.submit(&prompt(name, 2), more);
        }
        let young = sim.submit(&prompt(9, 12), 10);
        let mut just_back = false;
        while !sim.scheduler.is_idle() {
            let plan = sim.step();
            assert!(!(just_back && plan.preempted.contains(&young)), "its prefill was for nothing");
            let back = plan.admitted.iter().any(|admitted| admitted.seq == young);
            just_back = back && sim.preemptions.contains_key(&young);
            readmissions += usize::from(just_back && plan.chunks.len() > 1);
        }
    }
    assert!(readmissions > 0, "no scenario readmits it beside others");
}
