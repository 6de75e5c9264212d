//! Attention: near f64 and the CPU, and bit for bit the same over blocks, chunks, batches and forms of the kernel.

use super::rig::*;
use super::{cpu, gpu};
use crate::device::cpu::tests::attention::{Sequence, fill, naive, run};
use crate::device::{AttentionSpan, Device, HeadShape, KvShape, StepInputs};

const SMALL: HeadShape = HeadShape { q_heads: 6, kv_heads: 2, head_dim: 20 };
const WIDE: HeadShape = HeadShape { q_heads: 9, kv_heads: 3, head_dim: 64 };
/// Shapes around what kernels do by halves: more heads than a tile, odd and largest heads, one head.
const SHAPES: [HeadShape; 8] = [
    SMALL,
    WIDE,
    HeadShape { q_heads: 16, kv_heads: 1, head_dim: 2 },
    HeadShape { q_heads: 20, kv_heads: 1, head_dim: 8 },
    HeadShape { q_heads: 3, kv_heads: 3, head_dim: 128 },
    HeadShape { q_heads: 8, kv_heads: 2, head_dim: 256 },
    HeadShape { q_heads: 5, kv_heads: 1, head_dim: 33 },
    HeadShape { q_heads: 1, kv_heads: 1, head_dim: 1 },
];

/// Blocks are enough without cutting sequences in chunks from about this many rows on.
const MANY: usize = 40;

#[test]
fn attention_is_close_to_f64() {
    let mut noise = Noise::new(1);
    let (emulated, gpu) = gpu();
    for heads in SHAPES {
        for window in [None, Some(1), Some(2), Some(21), Some(1000)] {
            let qkv: Vec<f32> = noise.vec(75 * heads.width()).iter().map(|x| x * 2.0).collect();
            let (cache, sequences) = fill(&gpu, heads, 16, std::slice::from_ref(&qkv));
            let got = run(&gpu, heads, window, &cache, &sequences[0], 75);
            // Scores are sums of as many rounded products as a head has elements.
            let tolerance = if heads.head_dim > 128 { 4e-6 } else { 2e-6 };
            assert_close("attention", &got, &naive(heads, window, &qkv), tolerance);
        }
    }
    // Several chunks of 128 positions.
    for window in [None, Some(130), Some(7)] {
        let qkv: Vec<f32> = noise.vec(300 * SMALL.width()).iter().map(|x| x * 2.0).collect();
        let (cache, sequences) = fill(&gpu, SMALL, 16, std::slice::from_ref(&qkv));
        let got = run(&gpu, SMALL, window, &cache, &sequences[0], 100);
        assert_close("attention over chunks", &got, &naive(SMALL, window, &qkv), 2e-6);
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn within_a_chunk_attention_is_the_cpus_bits() {
    let mut noise = Noise::new(2);
    let (emulated, gpu) = gpu();
    for heads in SHAPES {
        for window in [None, Some(3), Some(19)] {
            let qkv: Vec<f32> = noise.vec(128 * heads.width()).iter().map(|x| x * 3.0).collect();
            let on = |device: &dyn Device| {
                let (cache, sequences) = fill(device, heads, 16, std::slice::from_ref(&qkv));
                bits(&run(device, heads, window, &cache, &sequences[0], 128))
            };
            assert!(on(&gpu) == on(&cpu()), "{heads:?}, window {window:?}");
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn bits_depend_neither_on_blocks_nor_on_chunks() {
    let mut noise = Noise::new(3);
    let (emulated, gpu) = gpu();
    for (heads, len) in [(SMALL, 67), (WIDE, 67), (SMALL, 259)] {
        let qkv: Vec<f32> = noise.vec(len * heads.width()).iter().map(|x| x * 3.0).collect();
        for window in [None, Some(3), Some(140)] {
            let (cache, sequences) = fill(&gpu, heads, 16, std::slice::from_ref(&qkv));
            let expected = bits(&run(&gpu, heads, window, &cache, &sequences[0], 1));
            for block_size in [1, 2, 3, 16, 48, 80, 128, 300] {
                let (cache, sequences) = fill(&gpu, heads, block_size, std::slice::from_ref(&qkv));
                for chunk in [5, 17, MANY, 67, len] {
                    let got = run(&gpu, heads, window, &cache, &sequences[0], chunk);
                    assert!(bits(&got) == expected, "blocks of {block_size}, {chunk} rows at a time");
                }
            }
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

/// The last `rows` of each sequence in one batch, and what the rows are alone.
fn batch(heads: HeadShape, sequences: &[Sequence], alone: &[Vec<f32>], rows: &[usize]) -> Batch {
    let mut batch = Batch::default();
    for ((sequence, alone), &rows) in sequences.iter().zip(alone).zip(rows) {
        let first_position = sequence.len - rows;
        let first_row = batch.qkv.len() / heads.width();
        batch.spans.push((first_row, rows, first_position, sequence.table.clone()));
        batch.qkv.extend_from_slice(&sequence.qkv[first_position * heads.width()..]);
        batch.expected.extend_from_slice(&alone[first_position * heads.q_width()..]);
    }
    batch
}

#[derive(Default)]
struct Batch {
    qkv: Vec<f32>,
    spans: Vec<(usize, usize, usize, Vec<u32>)>,
    expected: Vec<f32>,
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    let mut noise = Noise::new(4);
    let (emulated, gpu) = gpu();
    for (heads, lens) in [(WIDE, [40, 1, 90, 17]), (SMALL, [128, 129, 300, 1])] {
        let inputs: Vec<Vec<f32>> = lens.iter().map(|len| noise.vec(len * heads.width())).collect();
        let (cache, sequences) = fill(&gpu, heads, 16, &inputs);
        let alone: Vec<Vec<f32>> =
            sequences.iter().map(|sequence| run(&gpu, heads, None, &cache, sequence, 1)).collect();
        // A prefill, single decodes, a chunk; decodes only; everything at once.
        for rows in [[lens[0], 1, 1, 1], [1, 1, 1, 1], lens] {
            let batch = batch(heads, &sequences, &alone, &rows);
            let mut spans: Vec<AttentionSpan<'_>> = batch
                .spans
                .iter()
                .map(|(first_row, rows, first_position, table)| AttentionSpan {
                    first_row: *first_row,
                    rows: *rows,
                    first_position: *first_position,
                    block_table: table,
                })
                .collect();
            for _ in 0..2 {
                let got = attention(&gpu, heads, &batch.qkv, &spans, None, &cache);
                assert!(bits(&got) == bits(&batch.expected), "{heads:?}, {rows:?}");
                spans.reverse();
            }
        }
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn later_positions_are_never_touched() {
    // The cache is full of NaNs beyond each stored position; and a NaN stored later reaches no earlier row.
    let mut noise = Noise::new(5);
    let (emulated, gpu) = gpu();
    for (heads, len, seen) in [(WIDE, 30, 20), (SMALL, 200, 131)] {
        let clean = noise.vec(len * heads.width());
        let mut dirty = clean.clone();
        dirty[seen * heads.width()..].fill(f32::NAN);
        for block_size in [1, 16, 256] {
            let (cache, sequences) = fill(&gpu, heads, block_size, std::slice::from_ref(&clean));
            let expected = run(&gpu, heads, None, &cache, &sequences[0], len);
            let (cache, sequences) = fill(&gpu, heads, block_size, std::slice::from_ref(&dirty));
            for chunk in [1, 7, len] {
                let got = run(&gpu, heads, None, &cache, &sequences[0], chunk);
                let seen = seen * heads.q_width();
                assert!(bits(&got[..seen]) == bits(&expected[..seen]), "{heads:?}, blocks of {block_size}");
                assert!(got[seen..].iter().all(|x| x.is_nan()));
            }
        }
        // Nor are earlier ones that have left the window.
        let mut dirty = clean.clone();
        dirty[..9 * heads.width()].fill(f32::NAN);
        let [clean, dirty] = [clean, dirty].map(|qkv| {
            let (cache, sequences) = fill(&gpu, heads, 16, &[qkv]);
            run(&gpu, heads, Some(5), &cache, &sequences[0], len)
        });
        let unseen = 13 * heads.q_width();
        assert!(bits(&clean[unseen..]) == bits(&dirty[unseen..]), "{heads:?}");
        assert!(dirty[..9 * heads.q_width()].iter().all(|x| x.is_nan()));
    }
    drop(gpu);
    emulated.assert_clean();
}

#[test]
fn keys_and_values_lie_where_the_cpu_puts_them() {
    let mut noise = Noise::new(6);
    let (emulated, gpu) = gpu();
    for heads in SHAPES {
        for block_size in [1, 3, 16] {
            let shape =
                KvShape { num_blocks: 5, block_size, kv_heads: heads.kv_heads, head_dim: heads.head_dim };
            let qkv = noise.vec(7 * heads.width());
            let slots: Vec<u32> = (0..7).map(|i| (i * 2 + 1) % (5 * block_size as u32)).collect();
            let slots = &slots[..slots.len().min(2 * block_size)];
            let on = |device: &dyn Device| {
                let mut cache = Cache::new(device, shape);
                cache.store(device, heads, &qkv[..slots.len() * heads.width()], slots);
                let inputs = StepInputs { copies: &[(0, 2), (2, 3), (1, 0)], ..StepInputs::default() };
                with_step(device, inputs, |step| device.copy_blocks(step, cache.layer_mut()).unwrap());
                let len = shape.layer_elements();
                [&cache.keys, &cache.values].map(|arena| bits(&read_f32(device, arena, len)))
            };
            assert!(on(&gpu) == on(&cpu()), "{heads:?}, blocks of {block_size}");
        }
    }
    drop(gpu);
    emulated.assert_clean();
}
