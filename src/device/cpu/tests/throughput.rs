//! How fast: `cargo test --release throughput -- --ignored --nocapture`. Prints, asserts nothing.
#![expect(clippy::print_stdout, reason = "the numbers are the point")]

use std::time::Instant;

use super::rig::*;
use crate::device::cpu::{CpuDevice, SimdPath};
use crate::device::{
    Arena, AttentionScores, AttentionSpan, Device, HeadShape, KvShape, MatrixShape, Output, StepInputs,
};
use crate::weights::DType;

/// SmolLM2-135M: rows, cols, times a forward pass.
const LAYERS: [(usize, usize, usize); 5] =
    [(960, 576, 30), (576, 576, 30), (3072, 576, 30), (576, 1536, 30), (49_152, 576, 1)];

fn seconds(mut f: impl FnMut()) -> f64 {
    f();
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        f();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// All matrices of the model, each in its own memory.
fn matrices(device: &CpuDevice) -> Vec<(MatrixShape, Arena)> {
    let mut all = Vec::new();
    for (rows, cols, count) in LAYERS {
        let shape = MatrixShape { rows, cols, dtype: DType::Bf16 };
        let plain = encode(DType::Bf16, &Noise::new(1).vec(rows * cols));
        for _ in 0..count {
            all.push((shape, packed_arena(device, shape, &plain)));
        }
    }
    all
}

#[test]
#[ignore = "measures"]
fn linear_layers() {
    for (threads, simd) in [(1, SimdPath::Auto), (2, SimdPath::Auto), (2, SimdPath::Avx2)] {
        let device = device(threads, simd);
        let matrices = matrices(&device);
        let bytes: usize = matrices.iter().map(|(_, arena)| arena.committed()).sum();
        for rows in [1, 2, 4, 6, 16, 64, 512] {
            let x = f32_arena(&device, &Noise::new(2).vec(rows * 1536));
            let mut out = f32_arena(&device, &vec![0.0; rows * 49_152]);
            let seconds = seconds(|| {
                for (shape, arena) in &matrices {
                    // A prompt needs logits of its last row only.
                    let rows = if rows == 512 && shape.rows == 49_152 { 1 } else { rows };
                    let x = x.view(0, rows * shape.cols);
                    let out = out.view_mut(0, rows * shape.rows);
                    with_step(&device, StepInputs::default(), |step| {
                        device.matmul(step, x, matrix(arena, *shape), None, Output::Store, out).unwrap();
                    });
                }
            });
            let head = if rows == 512 { 49_152_usize * 576 * 511 } else { 0 };
            let flops = 2.0 * (bytes as f64 / 2.0 * rows as f64 - head as f64);
            println!(
                "{} x{threads} m={rows:3}: {:7.1} tokens/s {:6.1} GB/s {:6.1} GFLOP/s",
                device.simd_name(),
                rows as f64 / seconds,
                bytes as f64 / seconds / 1e9,
                flops / seconds / 1e9
            );
        }
    }
}

#[test]
#[ignore = "measures"]
fn packing() {
    for (threads, dtype) in [(1, DType::Bf16), (2, DType::Bf16), (1, DType::F32), (1, DType::F16)] {
        let device = device(threads, SimdPath::Auto);
        let shape = MatrixShape { rows: 3072, cols: 4096, dtype };
        let mut plain = Noise::new(3).bytes(3072 * 4096 * dtype.size());
        let mut packed = packed_arena(&device, shape, &plain);
        let bytes = packed.committed();
        let write = seconds(|| device.write_rows(packed.view_mut(0, bytes), shape, 0, &plain).unwrap());
        let read = seconds(|| device.read_rows(packed.view(0, bytes), shape, 0, &mut plain).unwrap());
        let gb = bytes as f64 / 1e9;
        println!("{dtype} x{threads}: pack {:.2} GB/s, unpack {:.2} GB/s", gb / write, gb / read);
    }
}

#[test]
#[ignore = "measures"]
fn attention_speed() {
    let heads = HeadShape { q_heads: 9, kv_heads: 3, head_dim: 64 };
    for (threads, simd) in [(1, SimdPath::Auto), (2, SimdPath::Auto), (2, SimdPath::Avx2)] {
        let device = device(threads, simd);
        for (name, sequences, rows, context) in [
            ("prefill 512", 1, 512, 512),
            ("decode at 1000", 1, 1, 1000),
            ("16 decodes at 1000", 16, 1, 1000),
        ] {
            for block_size in [16, 8] {
                let blocks = context_blocks(context, block_size);
                let shape = KvShape { num_blocks: sequences * blocks, block_size, kv_heads: 3, head_dim: 64 };
                let mut cache = Cache::new(&device, shape);
                cache.keys = f32_arena(&device, &Noise::new(4).vec(shape.layer_elements()));
                cache.values = f32_arena(&device, &Noise::new(5).vec(shape.layer_elements()));
                let qkv = f32_arena(&device, &Noise::new(6).vec(sequences * rows * heads.width()));
                let mut out = f32_arena(&device, &vec![0.0; sequences * rows * heads.q_width()]);
                let tables: Vec<Vec<u32>> = (0..sequences)
                    .map(|s| ((s * blocks) as u32..((s + 1) * blocks) as u32).collect())
                    .collect();
                let spans: Vec<AttentionSpan<'_>> = tables
                    .iter()
                    .enumerate()
                    .map(|(s, table)| AttentionSpan {
                        first_row: s * rows,
                        rows,
                        first_position: context - rows,
                        block_table: table,
                    })
                    .collect();
                let scores = AttentionScores { scale: 0.125, window: None };
                let inputs = StepInputs { spans: &spans, heads, ..StepInputs::default() };
                let qkv = qkv.view(0, sequences * rows * heads.width());
                let seconds = seconds(|| {
                    let out = out.view_mut(0, sequences * rows * heads.q_width());
                    with_step(&device, inputs, |step| {
                        device.attention(step, qkv, heads, scores, cache.layer(), out).unwrap();
                    });
                });
                println!(
                    "{} x{threads} {name}, blocks of {block_size}: {:.1} us a layer, {:.2} ms for 30",
                    device.simd_name(),
                    seconds * 1e6,
                    seconds * 30e3
                );
            }
        }
    }
}

fn context_blocks(context: usize, block_size: usize) -> usize {
    context.div_ceil(block_size)
}

#[test]
#[ignore = "measures"]
fn dispatch() {
    let pool = crate::device::cpu::pool::Pool::new(2).unwrap();
    let seconds = seconds(|| {
        for _ in 0..10_000 {
            pool.for_each(2, &|task| {
                std::hint::black_box(task);
            });
        }
    });
    println!("dispatch: {:.2} us", seconds * 1e2);
}
