//! n samples of one prompt.

use super::sim::{Sim, config};
use crate::kv::PrefixCache;
use crate::scheduler::{NewSequence, Scheduler, SchedulerConfig, SeqId};

const PROMPT: [u32; 6] = [1, 2, 3, 4, 5, 6];

#[test]
fn a_group_computes_its_prompt_once_and_copies_its_last_block_on_write() {
    for cache in [PrefixCache::Unlimited, PrefixCache::Off] {
        let mut sim = Sim::new(SchedulerConfig { prefix_cache: cache, ..config(4, 32) });
        sim.add(Sim::new_sequence(&PROMPT, 7), 3).unwrap();
        assert_eq!(sim.step().chunks[0].positions, 0..6);
        assert_eq!(sim.scheduler.stats().running, 4);
        assert_eq!(sim.scheduler.stats().owned_blocks, 2);
        let plan = sim.step();
        assert!(plan.chunks.iter().all(|chunk| chunk.positions == (6..7) && chunk.samples));
        // The last of the four to write has the block to itself by then.
        assert_eq!(plan.copies.len(), 3);
        assert!(plan.copies.iter().all(|copy| copy.0 == plan.copies[0].0));
        assert_eq!(sim.scheduler.stats().owned_blocks, 5);
        sim.run_to_end();
        assert_eq!(sim.finished.len(), 4);
        sim.assert_all_free();
    }
}

#[test]
fn forks_beyond_max_num_seqs_wait_and_find_the_prompt() {
    let mut sim = Sim::new(SchedulerConfig { max_num_seqs: 2, ..config(2, 32) });
    let parent = sim.add(Sim::new_sequence(&PROMPT, 4), 4).unwrap();
    sim.step();
    let stats = sim.scheduler.stats();
    assert_eq!((stats.running, stats.waiting, stats.pending_forks), (2, 3, 0));
    sim.run_to_end();
    for fork in 2..=4 {
        assert_eq!(sim.cached[&SeqId(parent.0 + fork)], 6);
    }
    assert_eq!(sim.finished.len(), 5);
    sim.assert_all_free();
}

#[test]
fn a_fork_takes_the_place_of_an_aborted_parent() {
    for stage in 0..3 {
        let mut sim = Sim::new(SchedulerConfig { max_num_batched_tokens: 4, ..config(2, 32) });
        let parent = sim.add(Sim::new_sequence(&PROMPT, 4), 3).unwrap();
        match stage {
            0 => sim.abort(parent),
            1 => {
                sim.step();
                sim.abort(parent);
            }
            _ => {
                sim.step();
                let plan = sim.begin();
                sim.abort(parent);
                sim.complete(&plan);
            }
        }
        sim.abort(SeqId(parent.0 + 2));
        sim.run_to_end();
        let finished: Vec<_> = sim.finished.keys().map(|seq| seq.0 - parent.0).collect();
        assert_eq!(finished, [1, 3], "stage {stage}");
        sim.assert_all_free();
    }
}

#[test]
fn a_group_in_a_pool_for_one_sample_still_finishes() {
    for cache in [PrefixCache::Unlimited, PrefixCache::Off] {
        let mut sim = Sim::new(SchedulerConfig { prefix_cache: cache, ..config(4, 4) });
        sim.add(Sim::new_sequence(&PROMPT, 10), 3).unwrap();
        sim.run_to_end();
        assert!(sim.finished.values().all(|tokens| tokens.len() == 16));
        assert_eq!(sim.finished.len(), 4);
        assert!(sim.scheduler.stats().preemptions > 0);
        sim.assert_all_free();
    }
}

#[test]
fn a_failed_step_takes_back_what_it_promised() {
    let mut sim = Sim::new(config(2, 32));
    sim.add(Sim::new_sequence(&PROMPT, 4), 1).unwrap();
    sim.submit(&PROMPT, 4);
    let plan = sim.begin();
    assert_eq!(plan.admitted[1].cached_tokens, 4, "joined the prefill in flight");
    sim.fail(&plan);
    let again = sim.step();
    assert_eq!(again.admitted[0].cached_tokens, 0);
    sim.run_to_end();
    assert_eq!(sim.finished.len(), 3);
    sim.assert_all_free();
}

#[test]
fn a_late_fork_shares_nothing_that_its_parent_has_moved_past_or_lost() {
    for preempted in [false, true] {
        for (further, rows) in [(0, 3), (2, 64)] {
            let mut scheduler =
                Scheduler::new(SchedulerConfig { max_num_batched_tokens: rows, ..config(4, 32) });
            let (parent, child) = (SeqId(0), SeqId(1));
            let new = NewSequence { id: parent, forks: vec![child], ..Sim::new_sequence(&PROMPT, 8) };
            scheduler.add(new).unwrap();
            for token in 0..=further {
                assert!(!scheduler.plan().chunks.is_empty());
                scheduler.complete_step();
                if scheduler.sequence(parent).unwrap().computed() >= PROMPT.len() {
                    scheduler.append(parent, token);
                }
            }
            if preempted {
                scheduler.preempt(parent);
            }
            // In time, the child would run and share both blocks at once.
            assert!(scheduler.fork(parent, child, 9));
            assert!(!scheduler.is_running(child));
            let sequence = scheduler.sequence(child).unwrap();
            assert_eq!((sequence.tokens(), sequence.blocks()), (&[1, 2, 3, 4, 5, 6, 9][..], &[][..]));
            assert!(!scheduler.fork(parent, child, 9), "a fork comes once");
        }
    }
}
