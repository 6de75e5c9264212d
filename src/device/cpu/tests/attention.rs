//! Attention against f64, and bit for bit against itself over blocks, chunks, batches, threads and
//! instruction sets.

use super::rig::*;
use crate::device::cpu::SimdPath;
use crate::device::{AttentionSpan, Device, HeadShape, KvShape, StepInputs};

const SMALL: HeadShape = HeadShape { q_heads: 6, kv_heads: 2, head_dim: 20 };
const WIDE: HeadShape = HeadShape { q_heads: 9, kv_heads: 3, head_dim: 64 };

/// One sequence: its rows of qkv, and where its blocks are.
pub(in crate::device) struct Sequence {
    pub(in crate::device) qkv: Vec<f32>,
    pub(in crate::device) len: usize,
    pub(in crate::device) table: Vec<u32>,
}

/// Sequences with interleaved blocks, in a cache that holds them.
pub(in crate::device) fn fill(
    device: &dyn Device,
    heads: HeadShape,
    block_size: usize,
    inputs: &[Vec<f32>],
) -> (Cache, Vec<Sequence>) {
    let lens: Vec<usize> = inputs.iter().map(|qkv| qkv.len() / heads.width()).collect();
    let num_blocks = lens.iter().map(|len| len.div_ceil(block_size)).sum::<usize>() + 1;
    let shape = KvShape { num_blocks, block_size, kv_heads: heads.kv_heads, head_dim: heads.head_dim };
    let mut cache = Cache::new(device, shape);
    // From the last block down, taking turns.
    let mut free: Vec<u32> = (0..num_blocks as u32).collect();
    let mut tables = vec![Vec::new(); inputs.len()];
    for block in 0..lens.iter().map(|len| len.div_ceil(block_size)).max().unwrap() {
        for (table, len) in tables.iter_mut().zip(&lens) {
            if block * block_size < *len {
                table.push(free.pop().unwrap());
            }
        }
    }
    let mut sequences = Vec::new();
    for ((qkv, len), table) in inputs.iter().zip(lens).zip(tables) {
        let slot =
            |position: usize| table[position / block_size] as usize * block_size + position % block_size;
        let slots: Vec<u32> = (0..len).map(|position| slot(position) as u32).collect();
        cache.store(device, heads, qkv, &slots);
        sequences.push(Sequence { qkv: qkv.clone(), len, table });
    }
    (cache, sequences)
}

/// All rows of one sequence, `chunk` at a time.
pub(in crate::device) fn run(
    device: &dyn Device,
    heads: HeadShape,
    window: Option<usize>,
    cache: &Cache,
    sequence: &Sequence,
    chunk: usize,
) -> Vec<f32> {
    let mut out = Vec::new();
    for first in (0..sequence.len).step_by(chunk) {
        let rows = chunk.min(sequence.len - first);
        let qkv = &sequence.qkv[first * heads.width()..][..rows * heads.width()];
        let span = AttentionSpan { first_row: 0, rows, first_position: first, block_table: &sequence.table };
        out.extend(attention(device, heads, qkv, &[span], window, cache));
    }
    out
}

pub(in crate::device) fn naive(heads: HeadShape, window: Option<usize>, qkv: &[f32]) -> Vec<f64> {
    let HeadShape { q_heads, kv_heads, head_dim } = heads;
    let at = |row: usize, head: usize, d: usize| f64::from(qkv[row * heads.width() + head * head_dim + d]);
    let mut out = Vec::new();
    for row in 0..qkv.len() / heads.width() {
        let visible = window.map_or(0, |window| (row + 1).saturating_sub(window))..row + 1;
        for head in 0..q_heads {
            let kv_head = head / (q_heads / kv_heads);
            let score = |position: usize| {
                let dot: f64 =
                    (0..head_dim).map(|d| at(row, head, d) * at(position, q_heads + kv_head, d)).sum();
                (dot / (head_dim as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = visible.clone().map(score).collect();
            let sum: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let value = |position: usize| at(position, q_heads + kv_heads + kv_head, d);
                let weighted = visible.clone().zip(&weights).map(|(position, w)| w * value(position));
                out.push(weighted.sum::<f64>() / sum);
            }
        }
    }
    out
}

#[test]
fn attention_is_close_to_f64() {
    let mut noise = Noise::new(11);
    let device = device(2, SimdPath::Auto);
    for heads in [SMALL, WIDE, HeadShape { q_heads: 16, kv_heads: 1, head_dim: 2 }] {
        for window in [None, Some(1), Some(2), Some(21), Some(1000)] {
            let qkv: Vec<f32> = noise.vec(75 * heads.width()).iter().map(|x| x * 2.0).collect();
            let (cache, sequences) = fill(&device, heads, 16, std::slice::from_ref(&qkv));
            let got = run(&device, heads, window, &cache, &sequences[0], 75);
            assert_close("attention", &got, &naive(heads, window, &qkv), 2e-6);
        }
    }
}

#[test]
fn bits_depend_neither_on_blocks_nor_on_chunks() {
    let mut noise = Noise::new(12);
    for heads in [SMALL, WIDE] {
        let qkv: Vec<f32> = noise.vec(67 * heads.width()).iter().map(|x| x * 3.0).collect();
        for window in [None, Some(3), Some(19)] {
            let reference = device(1, SimdPath::Portable);
            let (cache, sequences) = fill(&reference, heads, 1, std::slice::from_ref(&qkv));
            let expected = bits(&run(&reference, heads, window, &cache, &sequences[0], 1));
            for device in devices() {
                let portable = device.simd_name() == "portable";
                for block_size in [1, 2, 3, 16, 32, 48, 80] {
                    let (cache, sequences) = fill(&device, heads, block_size, std::slice::from_ref(&qkv));
                    let chunks: &[usize] = if portable { &[67] } else { &[1, 2, 5, 17, 67] };
                    for &chunk in chunks {
                        let got = run(&device, heads, window, &cache, &sequences[0], chunk);
                        let name = device.simd_name();
                        assert_eq!(bits(&got), expected, "blocks of {block_size}, chunks of {chunk}, {name}");
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    let mut noise = Noise::new(13);
    let heads = WIDE;
    let inputs: Vec<Vec<f32>> = [40, 1, 90, 17].iter().map(|len| noise.vec(len * heads.width())).collect();
    for device in devices() {
        let (cache, sequences) = fill(&device, heads, 16, &inputs);
        let alone: Vec<Vec<f32>> =
            sequences.iter().map(|sequence| run(&device, heads, None, &cache, sequence, 1)).collect();
        // The last rows of each: a prefill, single decodes, a chunk.
        let (mut qkv, mut spans, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for (sequence, (alone, rows)) in sequences.iter().zip(alone.iter().zip([40, 1, 1, 9])) {
            let first_position = sequence.len - rows;
            let first_row = qkv.len() / heads.width();
            spans.push(AttentionSpan { first_row, rows, first_position, block_table: &sequence.table });
            qkv.extend_from_slice(&sequence.qkv[first_position * heads.width()..]);
            expected.extend_from_slice(&alone[first_position * heads.q_width()..]);
        }
        spans.reverse();
        let got = attention(&device, heads, &qkv, &spans, None, &cache);
        assert_eq!(bits(&got), bits(&expected), "{}", device.simd_name());
    }
}

#[test]
fn later_positions_are_never_touched() {
    // The cache is full of NaNs beyond each stored position; and a NaN stored later reaches no earlier row.
    let mut noise = Noise::new(14);
    let heads = WIDE;
    let device = device(2, SimdPath::Auto);
    let clean = noise.vec(30 * heads.width());
    let mut dirty = clean.clone();
    dirty[20 * heads.width()..].fill(f32::NAN);
    for block_size in [1, 16] {
        let (cache, sequences) = fill(&device, heads, block_size, std::slice::from_ref(&clean));
        let expected = run(&device, heads, None, &cache, &sequences[0], 30);
        let (cache, sequences) = fill(&device, heads, block_size, std::slice::from_ref(&dirty));
        let got = run(&device, heads, None, &cache, &sequences[0], 30);
        let seen = 20 * heads.q_width();
        assert_eq!(bits(&got[..seen]), bits(&expected[..seen]));
        assert!(got[seen..].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn blocks_are_copied_in_order() {
    let device = device(1, SimdPath::Auto);
    let shape = KvShape { num_blocks: 4, block_size: 2, kv_heads: 1, head_dim: 2 };
    let mut cache = Cache::new(&device, shape);
    let elements: Vec<f32> = (0..16).map(|i| i as f32).collect();
    cache.keys = f32_arena(&device, &elements);
    cache.values = f32_arena(&device, &elements);
    let inputs = StepInputs { copies: &[(0, 2), (2, 3), (1, 0)], ..StepInputs::default() };
    with_step(&device, inputs, |step| device.copy_blocks(step, cache.layer_mut()).unwrap());
    let expected = [4, 5, 6, 7, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3].map(|i| i as f32);
    assert_eq!(read_f32(&device, &cache.keys, 16), expected);
    assert_eq!(read_f32(&device, &cache.values, 16), expected);
}

#[test]
#[should_panic(expected = "spans don't overlap")]
fn overlapping_spans_are_refused() {
    let device = device(1, SimdPath::Auto);
    let (cache, sequences) = fill(&device, SMALL, 4, &[vec![0.5; 3 * SMALL.width()]]);
    let span = AttentionSpan { first_row: 0, rows: 2, first_position: 0, block_table: &sequences[0].table };
    let other = AttentionSpan { first_row: 1, ..span };
    attention(&device, SMALL, &sequences[0].qkv, &[span, other], None, &cache);
}
