//! How a step's inputs lie in the step's memory, and what operations need in passing.

use super::ALIGNMENT;
use super::graphs::DecodeShape;
use super::sampling;
use crate::device::{AttentionSpan, HeadShape, StepBytes, StepInputs, StepLimits};

/// (row, query head) pairs of an attention tile, at most; as in `kernels/attention.cuh`.
const MAX_ENTRIES: usize = 16;
/// Positions of a chunk of attention; as in `kernels/attention.cuh`.
pub(super) const CHUNK: usize = 128;
/// Rows of the batch in a tile of packed activations, and the bytes of such a tile of 16 columns (three parts of
/// bf16 each); as in `kernels/matmul.cu`.
const TILE_ROWS: usize = 8;
const TILE_COLS: usize = 16;
const TILE_BYTES: usize = 3 * TILE_ROWS * TILE_COLS * 2;
/// Bytes for the results of single chunks of attention, at most. With more rows than they suffice for there is
/// enough to do without cutting sequences in chunks.
const PARTIALS_BYTES: usize = 32 << 20;

/// Offsets of the parts, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct StepLayout {
    pub(super) tokens: usize,
    pub(super) slots: usize,
    pub(super) cos: usize,
    pub(super) sin: usize,
    pub(super) logit_rows: usize,
    pub(super) copies: usize,
    pub(super) tiles: usize,
    /// Last, so that in decode steps the others depend on the number of rows alone.
    pub(super) tables: usize,
    pub(super) end: usize,
}

/// Numbers of things in a step.
struct Counts {
    rows: usize,
    angles: usize,
    logit_rows: usize,
    copies: usize,
    tiles: usize,
    table_blocks: usize,
}

impl StepLayout {
    fn new(counts: &Counts) -> Self {
        let mut end = 0_usize;
        let mut place = |words: usize| {
            let offset = end;
            end = (end + words * 4).next_multiple_of(ALIGNMENT);
            offset
        };
        Self {
            tokens: place(counts.rows),
            slots: place(counts.rows),
            cos: place(counts.angles),
            sin: place(counts.angles),
            logit_rows: place(counts.logit_rows),
            copies: place(2 * counts.copies),
            tiles: place(4 * counts.tiles),
            tables: place(counts.table_blocks),
            end: place(0),
        }
    }

    /// Of these inputs.
    pub(super) fn of(inputs: &StepInputs<'_>) -> Self {
        Self::new(&Counts {
            rows: inputs.tokens.len().max(inputs.slots.len()),
            angles: inputs.angles.cos.len(),
            logit_rows: inputs.logit_rows.len(),
            copies: inputs.copies.len(),
            tiles: tile_count(inputs),
            table_blocks: inputs.spans.iter().map(|span| span.block_table.len()).sum(),
        })
    }

    /// Bytes that the inputs of steps within the limits take at most.
    fn most_bytes(limits: &StepLimits) -> usize {
        let counts = Counts {
            rows: limits.rows,
            angles: limits.rows * limits.heads.head_dim / 2,
            logit_rows: limits.rows,
            copies: limits.spans,
            tiles: limits.rows,
            table_blocks: limits.spans * limits.table_blocks(),
        };
        Self::new(&counts).end
    }
}

/// Memory for steps within the limits.
pub(super) fn step_bytes(limits: &StepLimits) -> StepBytes {
    let entries = limits.spans * limits.heads.q_heads;
    let partials = partials_bytes(entries, rounded_chunks(limits.positions), limits.heads.head_dim);
    StepBytes {
        inputs: StepLayout::most_bytes(limits),
        scratch: packed_bytes(limits.rows, limits.widest)
            .max(partials.min(PARTIALS_BYTES))
            .max(sampling::LEAST_SCRATCH_BYTES),
    }
}

/// Chunks of a sequence of so many positions, rounded up, so that few different numbers come about.
pub(super) fn rounded_chunks(positions: usize) -> usize {
    positions.div_ceil(CHUNK).max(1).next_power_of_two()
}

/// Positions of the longest sequence.
pub(super) fn longest(inputs: &StepInputs<'_>) -> usize {
    inputs.spans.iter().map(|span| span.first_position + span.rows).max().unwrap_or(0)
}

/// What the launches of a decode step depend on, beside addresses: rows and chunks. Other steps have none.
pub(super) fn decode_shape(inputs: &StepInputs<'_>) -> Option<DecodeShape> {
    let rows = inputs.tokens.len();
    let all_single = inputs.spans.len() == rows && inputs.spans.iter().all(|span| span.rows == 1);
    let decode = all_single && inputs.logit_rows.len() == rows && inputs.copies.is_empty();
    decode.then(|| (rows, rounded_chunks(longest(inputs))))
}

/// Bytes of packed activations.
pub(super) fn packed_bytes(rows: usize, cols: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * cols.div_ceil(TILE_COLS) * TILE_BYTES
}

/// Bytes of the results of single chunks, for `entries` (row, query head) pairs.
pub(super) fn partials_bytes(entries: usize, chunks: usize, head_dim: usize) -> usize {
    entries.saturating_mul(chunks).saturating_mul((head_dim + 2) * 4)
}

/// Query heads of an attention tile: as many of those that share a key head as fit.
pub(super) fn heads_per_tile(heads: HeadShape) -> usize {
    (heads.q_heads / heads.kv_heads.max(1)).clamp(1, MAX_ENTRIES)
}

/// Rows of an attention tile.
pub(super) fn tile_rows(heads: HeadShape) -> usize {
    MAX_ENTRIES / heads_per_tile(heads)
}

pub(super) fn tile_count(inputs: &StepInputs<'_>) -> usize {
    let rows = tile_rows(inputs.heads);
    inputs.spans.iter().map(|span| span.rows.div_ceil(rows)).sum()
}

/// Writes the inputs as the kernels read them.
pub(super) fn write(inputs: &StepInputs<'_>, layout: &StepLayout, out: &mut [u8]) {
    let mut put = |offset: usize, words: &mut dyn Iterator<Item = u32>| {
        for (to, word) in out[offset..].as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
    };
    put(layout.tokens, &mut inputs.tokens.iter().copied());
    put(layout.slots, &mut inputs.slots.iter().copied());
    put(layout.cos, &mut inputs.angles.cos.iter().map(|cos| cos.to_bits()));
    put(layout.sin, &mut inputs.angles.sin.iter().map(|sin| sin.to_bits()));
    put(layout.logit_rows, &mut inputs.logit_rows.iter().copied());
    put(layout.copies, &mut inputs.copies.iter().flat_map(|&(from, to)| [from, to]));
    put(layout.tiles, &mut tiles(inputs));
    put(layout.tables, &mut inputs.spans.iter().flat_map(|span| span.block_table.iter().copied()));
}

/// `struct AttentionTile` of `kernels/attention.cuh`, one after another. The longest come first in a span, since they
/// begin first.
fn tiles<'a>(inputs: &'a StepInputs<'_>) -> impl Iterator<Item = u32> + 'a {
    let tile_rows = tile_rows(inputs.heads);
    let mut table = 0;
    inputs.spans.iter().flat_map(move |span: &AttentionSpan<'_>| {
        let first_block = table;
        table += span.block_table.len();
        let (first_row, rows, first_position) = (span.first_row, span.rows, span.first_position);
        (0..rows).step_by(tile_rows).rev().flat_map(move |row| {
            let rows = tile_rows.min(rows - row);
            [first_row + row, rows, first_position + row, first_block]
                .map(|number| u32::try_from(number).expect("rows and positions are counted in 32 bits"))
        })
    })
}
