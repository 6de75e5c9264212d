//! Attention over the paged cache.
//!
//! A task is a few consecutive rows of one sequence and the query heads that share a key head: all of them
//! use each key and value while it is in a register. A row's result depends on its own positions only:
//!
//! - a score is one chain over `head_dim`, sixteen positions side by side;
//! - the softmax sums by absolute position mod 16, then in a fixed tree;
//! - an output element is one chain over exactly the positions that the row sees, in order.
#![allow(unsafe_code, reason = "threads write disjoint output; tiles read through pointers")]

use parking_lot::Mutex;

use super::chain::{Rows, StoredF32, extend, for_tile, next_tile};
use super::host::SharedMut;
use super::math::{exp, greatest};
use super::pool::Pool;
use super::simd::{Kernel, LANES, Lanes, Simd};
use crate::device::{AttentionScores, AttentionSpan, HeadShape, KvShape};

/// Calls with fewer multiplications run on the caller's thread.
const PARALLEL_FROM: usize = 128 << 10;

/// Buffers of one thread, kept by the device from call to call.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Query heads of the tile, `[tile, head_dim]`.
    queries: Vec<f32>,
    /// `[tile, positions]`, first scores, then their exponentials.
    scores: Vec<f32>,
    /// Sum of the exponentials of each of the tile's rows.
    sums: Vec<f32>,
    /// `[tile, head_dim]`.
    out: Vec<f32>,
    /// Keys of 16 positions, `[head_dim, 16]`, where blocks don't hold them in that form.
    keys: Vec<f32>,
}

/// The buffers that no thread uses at the moment.
#[derive(Debug, Default)]
pub(super) struct Scratches(Mutex<Vec<Scratch>>);

/// The sequences of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Batch<'a> {
    pub(super) spans: &'a [AttentionSpan<'a>],
    pub(super) scores: AttentionScores,
}

/// One call, its shapes checked.
pub(super) struct Attention<'a> {
    qkv: &'a [f32],
    shape: HeadShape,
    batch: Batch<'a>,
    keys: &'a [f32],
    values: &'a [f32],
    cache: KvShape,
    out: SharedMut<'a, f32>,
}

/// Rows of a span and query heads of one key head.
#[derive(Debug, Clone, Copy)]
struct Task<'a> {
    span: &'a AttentionSpan<'a>,
    /// Within the span.
    row: usize,
    rows: usize,
    kv_head: usize,
    /// First of the query heads.
    head: usize,
    heads: usize,
}

impl<'a> Attention<'a> {
    /// Checks the shapes of a call; see [`crate::device::Device::attention`].
    pub(super) fn new(
        qkv: &'a [f32],
        shape: HeadShape,
        batch: Batch<'a>,
        (keys, values, cache): (&'a [f32], &'a [f32], KvShape),
        out: &'a mut [f32],
    ) -> Self {
        let rows = qkv.len() / shape.width();
        assert_eq!(qkv.len(), rows * shape.width(), "the input has whole rows");
        assert_eq!(out.len(), rows * shape.q_width(), "the output has a row for each row of input");
        assert!(shape.q_heads.is_multiple_of(shape.kv_heads), "query heads share key heads evenly");
        assert_eq!((cache.kv_heads, cache.head_dim), (shape.kv_heads, shape.head_dim), "the cache's heads");
        assert_eq!(keys.len(), cache.layer_elements(), "the keys of a layer");
        assert_eq!(values.len(), cache.layer_elements(), "the values of a layer");
        let mut row_ranges: Vec<_> = batch.spans.iter().map(|span| (span.first_row, span.rows)).collect();
        row_ranges.sort_unstable();
        for pair in row_ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "spans don't overlap");
        }
        let this = Self { qkv, shape, batch, keys, values, cache, out: SharedMut::new(out) };
        for span in batch.spans.iter().filter(|span| span.rows > 0) {
            assert!(span.first_row + span.rows <= rows, "a span's rows exist");
            let last = (span.first_position + span.rows - 1) / cache.block_size;
            assert!(last < span.block_table.len(), "a span's table covers its positions");
            let first = this.first_visible(span.first_position) / cache.block_size;
            let blocks = &span.block_table[first..=last];
            assert!(blocks.iter().all(|&block| (block as usize) < cache.num_blocks), "blocks exist");
        }
        this
    }

    /// Computes it, on several threads if that pays.
    pub(super) fn compute(&self, simd: Simd, pool: &Pool, scratches: &Scratches) {
        let work: usize =
            self.batch.spans.iter().map(|span| span.rows * (span.first_position + span.rows)).sum();
        let parallel = work * self.shape.q_width() >= PARALLEL_FROM;
        let threads = if parallel { pool.threads() } else { 1 };
        let tasks = self.tasks(simd.tile_rows(), threads);
        let take_all = |next: &dyn Fn() -> Option<usize>| {
            let mut scratch = scratches.0.lock().pop().unwrap_or_default();
            while let Some(task) = next() {
                simd.run(TaskOf(self, tasks[task], &mut scratch));
            }
            scratches.0.lock().push(scratch);
        };
        if threads == 1 {
            let left = std::cell::RefCell::new(0..tasks.len());
            return take_all(&|| left.borrow_mut().next());
        }
        pool.run(tasks.len(), &|tasks| take_all(&|| tasks.next()));
    }

    /// All tasks, the longest of each span first.
    fn tasks(&self, tile_rows: usize, threads: usize) -> Vec<Task<'a>> {
        let group = self.shape.q_heads / self.shape.kv_heads;
        let mut heads = group.min(tile_rows);
        let rows = (tile_rows / heads).max(1);
        let row_tiles: usize = self.batch.spans.iter().map(|span| span.rows.div_ceil(rows)).sum();
        // With few tasks an even load is worth more than sharing keys among heads.
        while heads > 1
            && row_tiles * self.shape.kv_heads * group.div_ceil(heads) < 2 * threads
            && threads > 1
        {
            heads = heads.div_ceil(2);
        }
        let mut tasks = Vec::new();
        for span in self.batch.spans {
            for row in (0..span.rows).step_by(rows).rev() {
                let rows = rows.min(span.rows - row);
                for kv_head in 0..self.shape.kv_heads {
                    for first in (0..group).step_by(heads) {
                        let (head, heads) = (kv_head * group + first, heads.min(group - first));
                        tasks.push(Task { span, row, rows, kv_head, head, heads });
                    }
                }
            }
        }
        tasks
    }

    /// The first position that a query at `position` sees.
    fn first_visible(&self, position: usize) -> usize {
        self.batch.scores.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Start of the keys or values of one head in one block.
    fn head_start(&self, block: u32, kv_head: usize) -> usize {
        let elements = self.cache.block_size * self.cache.head_dim;
        (block as usize * self.cache.kv_heads + kv_head) * elements
    }
}

struct TaskOf<'a>(&'a Attention<'a>, Task<'a>, &'a mut Scratch);

impl Kernel for TaskOf<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let tile = Tile::new(self.0, self.1);
        tile.prepare(self.2);
        let mut entry = 0;
        while entry < tile.count {
            let count = next_tile::<L>(tile.count - entry);
            for_tile!(L, count, compute_scores::<L>(&tile, self.2, entry));
            entry += count;
        }
        for entry in 0..tile.count {
            softmax::<L>(&tile, self.2, entry);
        }
        weigh_values::<L>(&tile, self.2);
        tile.finish::<L>(self.2);
    }
}

/// A task and what follows from it. Its entries are its rows times its heads.
struct Tile<'a> {
    call: &'a Attention<'a>,
    task: Task<'a>,
    count: usize,
    head_dim: usize,
    /// The first position of the score buffer, a multiple of 16.
    origin: usize,
    /// Positions of the score buffer, a multiple of 16.
    stride: usize,
}

impl<'a> Tile<'a> {
    fn new(call: &'a Attention<'a>, task: Task<'a>) -> Self {
        let first = task.span.first_position + task.row;
        let origin = call.first_visible(first) / LANES * LANES;
        let stride = (first + task.rows).next_multiple_of(LANES) - origin;
        let head_dim = call.shape.head_dim;
        Self { call, task, count: task.rows * task.heads, head_dim, origin, stride }
    }

    /// Positions that row `row` of the tile sees.
    fn visible(&self, row: usize) -> std::ops::Range<usize> {
        let position = self.task.span.first_position + self.task.row + row;
        self.call.first_visible(position)..position + 1
    }

    /// Sizes the buffers and gathers the queries.
    fn prepare(&self, scratch: &mut Scratch) {
        let Scratch { queries, scores, sums, out, keys } = scratch;
        scores.resize(scores.len().max(self.count * self.stride), 0.0);
        keys.resize(self.head_dim * LANES, 0.0);
        sums.clear();
        out.clear();
        out.resize(self.count * self.head_dim, 0.0);
        queries.clear();
        for row in 0..self.task.rows {
            let row = self.task.span.first_row + self.task.row + row;
            let start = row * self.call.shape.width() + self.task.head * self.head_dim;
            queries.extend_from_slice(&self.call.qkv[start..][..self.task.heads * self.head_dim]);
        }
    }

    /// Where the keys of the 16 positions from `position` (a multiple of 16) lie, and the bytes from one
    /// element of `head_dim` to the next. They are copied to `copy` if no block holds them side by side.
    fn keys(&self, position: usize, copy: &mut [f32]) -> (*const u8, usize) {
        let block_size = self.call.cache.block_size;
        let table = self.task.span.block_table;
        let start = |position: usize| {
            let block = self.call.head_start(table[position / block_size], self.task.kv_head);
            block + position % block_size
        };
        if block_size.is_multiple_of(LANES) {
            let keys = &self.call.keys[start(position)..][..(self.head_dim - 1) * block_size + LANES];
            return (keys.as_ptr().cast(), block_size * size_of::<f32>());
        }
        let end = (position + LANES).min(self.visible(self.task.rows - 1).end);
        let mut position = position.max(self.visible(0).start);
        while position < end {
            let count = (block_size - position % block_size).min(end - position);
            let keys = self.call.keys[start(position)..].chunks(block_size);
            for (group, keys) in copy.chunks_exact_mut(LANES).zip(keys) {
                // A loop, as runs are too short for a call of `memcpy`.
                for (to, &from) in group[position % LANES..][..count].iter_mut().zip(keys) {
                    *to = from;
                }
            }
            position += count;
        }
        (copy.as_ptr().cast(), LANES * size_of::<f32>())
    }

    /// Divides by the sums and writes the tile's output.
    #[inline(always)]
    fn finish<L: Lanes>(&self, scratch: &Scratch) {
        for row in 0..self.task.rows {
            for head in 0..self.task.heads {
                let entry = row * self.task.heads + head;
                let sum = L::splat(scratch.sums[entry]);
                let row = self.task.span.first_row + self.task.row + row;
                let start = row * self.call.shape.q_width() + (self.task.head + head) * self.head_dim;
                // SAFETY: tasks differ in span, row or head, and spans don't overlap (checked by `new`).
                let target = unsafe { self.call.out.part(start, self.head_dim) };
                let source = &scratch.out[entry * self.head_dim..][..self.head_dim];
                for (target, source) in target.chunks_mut(LANES).zip(source.chunks(LANES)) {
                    L::load_first(source, 0.0).div(sum).store_first(target);
                }
            }
        }
    }
}

/// Fills the score buffer of entries `entry..entry + R`. Positions that a row doesn't see get scores too,
/// which nobody reads.
#[inline(always)]
fn compute_scores<L: Lanes, const R: usize, const P: usize>(
    tile: &Tile<'_>,
    scratch: &mut Scratch,
    entry: usize,
) {
    let Scratch { queries, scores, keys, .. } = scratch;
    let queries = &queries[entry * tile.head_dim..][..R * tile.head_dim];
    let scores = &mut scores[entry * tile.stride..][..R * tile.stride];
    // Copied keys are of 16 positions at a time.
    let wide = tile.call.cache.block_size.is_multiple_of(LANES);
    let mut done = 0;
    while wide && done + P * LANES <= tile.stride {
        score_tile::<L, R, P>(tile, queries, scores, keys, done);
        done += P * LANES;
    }
    while done < tile.stride {
        score_tile::<L, R, 1>(tile, queries, scores, keys, done);
        done += LANES;
    }
}

#[inline(always)]
fn score_tile<L: Lanes, const R: usize, const P: usize>(
    tile: &Tile<'_>,
    queries: &[f32],
    scores: &mut [f32],
    copy: &mut [f32],
    offset: usize,
) {
    assert!(queries.len() == R * tile.head_dim, "a query for each row");
    let mut w = [std::ptr::null(); P];
    let mut step = 0;
    for (p, w) in w.iter_mut().enumerate() {
        (*w, step) = tile.keys(tile.origin + offset + p * LANES, copy);
    }
    let x = Rows { start: queries.as_ptr(), stride: tile.head_dim };
    let mut sums = [[L::splat(0.0); P]; R];
    // SAFETY: the queries are `R` rows of `head_dim`, and `keys` checked that sixteen positions can be read at
    // each of `head_dim` steps; with copied keys `P` is 1, so none is overwritten.
    unsafe { extend::<L, StoredF32, R, P>(&mut sums, x, w, step, tile.head_dim) };
    let scale = L::splat(tile.call.batch.scores.scale);
    for (r, sums) in sums.iter().enumerate() {
        for (p, &sum) in sums.iter().enumerate() {
            sum.mul(scale).store_first(&mut scores[r * tile.stride + offset + p * LANES..][..LANES]);
        }
    }
}

/// Replaces the scores of one entry by `e^(score - greatest)` and notes their sum.
#[inline(always)]
fn softmax<L: Lanes>(tile: &Tile<'_>, scratch: &mut Scratch, entry: usize) {
    let visible = tile.visible(entry / tile.task.heads);
    let first = visible.start / LANES * LANES;
    let end = visible.end.next_multiple_of(LANES);
    let start = entry * tile.stride + first - tile.origin;
    let scores = &mut scratch.scores[start..start + end - first];
    scores[..visible.start - first].fill(f32::NEG_INFINITY);
    scores[visible.end - first..].fill(f32::NEG_INFINITY);
    let shift = L::splat(greatest::<L>(scores));
    let mut sum = L::splat(0.0);
    for group in scores.as_chunks_mut::<LANES>().0 {
        let power = exp(L::load(group).sub(shift));
        power.store(group);
        sum = sum.add(power);
    }
    scratch.sums.push(sum.sum());
}

/// Fills the output buffer with the sums of values weighted by the exponentials.
///
/// The positions that all rows see are shared; before and after, each row goes its own way, so that it
/// never meets a value that it doesn't see (`0 * NaN` is not 0).
#[inline(always)]
fn weigh_values<L: Lanes>(tile: &Tile<'_>, scratch: &mut Scratch) {
    let Task { rows, heads, .. } = tile.task;
    // With a narrow window there may be none; then all positions of a row come "before".
    let (start, end) = (tile.visible(rows - 1).start, tile.visible(0).end);
    let start = if start < end { start } else { usize::MAX };
    for step in 0..=2 * rows {
        let (mut entry, entries, positions) = if step == rows {
            (0, rows * heads, start..end)
        } else {
            let row = step % (rows + 1);
            let seen = tile.visible(row);
            let before = seen.start..seen.end.min(start);
            let after = start.max(end)..seen.end;
            (row * heads, heads, if step < rows { before } else { after })
        };
        let last = entry + entries;
        while entry < last && !positions.is_empty() {
            let count = next_tile::<L>(last - entry);
            for_tile!(L, count, weigh::<L>(tile, scratch, entry, positions.clone()));
            entry += count;
        }
    }
}

/// Continues the chains of entries `entry..entry + R` over some positions.
#[inline(always)]
fn weigh<L: Lanes, const R: usize, const P: usize>(
    tile: &Tile<'_>,
    scratch: &mut Scratch,
    entry: usize,
    positions: std::ops::Range<usize>,
) {
    let mut column = 0;
    while column + P * LANES <= tile.head_dim {
        weigh_columns::<L, R, P>(tile, scratch, entry, positions.clone(), column);
        column += P * LANES;
    }
    while column + LANES <= tile.head_dim {
        weigh_columns::<L, R, 1>(tile, scratch, entry, positions.clone(), column);
        column += LANES;
    }
    if column < tile.head_dim {
        weigh_rest(tile, scratch, entry..entry + R, positions, column);
    }
}

#[inline(always)]
fn weigh_columns<L: Lanes, const R: usize, const P: usize>(
    tile: &Tile<'_>,
    scratch: &mut Scratch,
    entry: usize,
    positions: std::ops::Range<usize>,
    column: usize,
) {
    let (head_dim, block_size) = (tile.head_dim, tile.call.cache.block_size);
    let weights = &scratch.scores[entry * tile.stride..][..R * tile.stride];
    let out = &mut scratch.out[entry * head_dim..][..R * head_dim];
    let mut sums = [[L::splat(0.0); P]; R];
    for (r, sums) in sums.iter_mut().enumerate() {
        for (p, sum) in sums.iter_mut().enumerate() {
            *sum = L::load_first(&out[r * head_dim + column + p * LANES..][..LANES], 0.0);
        }
    }
    let mut position = positions.start;
    while position < positions.end {
        let (block, offset) = (position / block_size, position % block_size);
        let count = (block_size - offset).min(positions.end - position);
        let start = tile.call.head_start(tile.task.span.block_table[block], tile.task.kv_head);
        let values = &tile.call.values[start + offset * head_dim..][..count * head_dim];
        let w = std::array::from_fn(|p| values[column + p * LANES..].as_ptr().cast());
        let weights = &weights[position - tile.origin..];
        assert!(weights.len() >= (R - 1) * tile.stride + count, "a weight for each position");
        let x = Rows { start: weights.as_ptr(), stride: tile.stride };
        // SAFETY: `count` weights lie in each of `R` rows, and `count` rows of `head_dim` values were sliced,
        // of which columns up to `column + P * 16 <= head_dim` are read.
        unsafe { extend::<L, StoredF32, R, P>(&mut sums, x, w, head_dim * size_of::<f32>(), count) };
        position += count;
    }
    for (r, sums) in sums.iter().enumerate() {
        for (p, &sum) in sums.iter().enumerate() {
            sum.store_first(&mut out[r * head_dim + column + p * LANES..][..LANES]);
        }
    }
}

/// The columns after the last sixteen of a `head_dim` that is no multiple of them.
#[inline(always)]
fn weigh_rest(
    tile: &Tile<'_>,
    scratch: &mut Scratch,
    entries: std::ops::Range<usize>,
    positions: std::ops::Range<usize>,
    column: usize,
) {
    let (head_dim, block_size) = (tile.head_dim, tile.call.cache.block_size);
    for position in positions {
        let start =
            tile.call.head_start(tile.task.span.block_table[position / block_size], tile.task.kv_head);
        let values = &tile.call.values[start + position % block_size * head_dim..][column..head_dim];
        for entry in entries.clone() {
            let weight = scratch.scores[entry * tile.stride + position - tile.origin];
            let out = &mut scratch.out[entry * head_dim + column..(entry + 1) * head_dim];
            for (out, &value) in out.iter_mut().zip(values) {
                *out = weight.mul_add(value, *out);
            }
        }
    }
}
