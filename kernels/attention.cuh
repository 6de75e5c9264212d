// Attention to one chunk of positions, and how chunks are merged; see attention.cu.
#pragma once

#include "common.cuh"
#include "lanes.cuh"

/// Threads of a block, and positions of a chunk.
constexpr u32 CHUNK = 128;
/// (row, head) pairs of a tile.
constexpr u32 MAX_ENTRIES = 16;
/// Loads that a thread has in flight.
constexpr u32 AHEAD = 8;

/// `rows` consecutive rows of the batch, from `row`, at positions from `position` on. Their blocks are
/// tables[table ..], one for each `block_size` positions from position 0.
struct AttentionTile {
    u32 row, rows, position, table;
};

/// The arguments that the kernels have in common.
struct Call {
    const float* qkv;
    u32 q_heads, kv_heads, head_dim;
    const float* keys;
    const float* values;
    u32 block_size;
    float scale;
};

struct Range {
    u32 start, end;

    __device__ __forceinline__ bool empty() const { return start >= end; }
    __device__ __forceinline__ bool contains(u32 position) const { return position >= start && position < end; }
    /// The part that lies in the chunk from position `first`, counted from there.
    __device__ __forceinline__ Range in_chunk(u32 first) const {
        return {min(max(start, first) - first, CHUNK), min(max(end, first) - first, CHUNK)};
    }
};

/// What a block works on: rows of a tile and some of the query heads of one key head. Entry `i` is row `i / heads` and
/// head `i % heads` of them.
struct Tile {
    u32 row, rows, position, window;
    u32 kv_head, head, heads;
    u32 entries;
    /// Entries, rounded up to a power of two.
    u32 padded;

    /// Number of the entry's query head among those of all rows.
    __device__ __forceinline__ u64 head_of(u32 entry, u32 q_heads) const {
        return u64(row + entry / heads) * q_heads + head + entry % heads;
    }
    /// The positions that a row sees.
    __device__ __forceinline__ Range seen_by(u32 row) const {
        const u32 end = position + row + 1;
        return {window != 0 && end > window ? end - window : 0, end};
    }
    /// The entries that see a position, a bit for each.
    __device__ __forceinline__ u32 entries_that_see(u32 position) const {
        u32 bits = 0;
#pragma unroll 1
        for (u32 row = 0; row < rows; row++) {
            if (seen_by(row).contains(position)) bits |= ((1u << heads) - 1) << row * heads;
        }
        return bits;
    }
    /// The positions that some row sees.
    __device__ __forceinline__ Range seen_by_any() const { return {seen_by(0).start, position + rows}; }
    /// The positions that all rows see, if any.
    __device__ __forceinline__ Range seen_by_all() const { return {seen_by(rows - 1).start, position + 1}; }
};

__device__ __forceinline__ u32 next_power_of_two(u32 x) { return x <= 1 ? 1 : 1u << (32 - __clz(x - 1)); }

/// Makes the tile of this block, in shared memory.
__device__ __forceinline__ const Tile& load_tile(Tile* tile, const AttentionTile* tiles, u32 q_heads, u32 kv_heads,
    u32 window, u32 heads_per_tile) {
    if (threadIdx.x == 0) {
        const AttentionTile rows = tiles[blockIdx.x];
        const u32 group = q_heads / kv_heads, parts = ceil_div(group, heads_per_tile);
        const u32 kv_head = blockIdx.y / parts, first = blockIdx.y % parts * heads_per_tile;
        const u32 heads = min(heads_per_tile, group - first);
        const u32 head = kv_head * group + first;
        const u32 entries = rows.rows * heads, padded = next_power_of_two(entries);
        *tile = {rows.row, rows.rows, rows.position, window, kv_head, head, heads, entries, padded};
    }
    __syncthreads();
    return *tile;
}

// ---- Merging ----

/// How much of the result of the chunks before, and of the next chunk, goes into the result of both.
struct Merge {
    float before, chunk;
};

/// The result of no chunk. Merging the first one with it gives the first one, bit for bit, even -0.
constexpr float NO_SUM = 0.0f, NO_VALUE = -0.0f;

/// What is subtracted from scores of which `greatest` is the greatest. Where all are -inf each weighs 0.
__device__ __forceinline__ float shift_of(float greatest) { return greatest == -INFINITY ? 0.0f : greatest; }

__device__ __forceinline__ Merge merge_factors(float greatest_before, float greatest_of_chunk) {
    const float shift = shift_of(larger(greatest_before, greatest_of_chunk));
    return {exp_f32(greatest_before - shift), exp_f32(greatest_of_chunk - shift)};
}

__device__ __forceinline__ float merged(Merge merge, float before, float chunk) {
    return fmaf(before, merge.before, chunk * merge.chunk);
}

// ---- One chunk ----

/// The same value, of which the compiler doesn't know that it is the same in the next round of a loop: what is made of
/// it is made anew, and takes no registers from round to round.
__device__ __forceinline__ u32 made_anew(u32 value) {
#ifndef CUDA_CPU_SHIM
    asm volatile("" : "+r"(value));
#endif
    return value;
}

/// What the threads of a block share, beside queries and weights.
struct Shared {
    Tile tile;
    /// Where the values of each of the chunk's positions begin. An address here would lose that it is a global one.
    u64 value_rows[CHUNK];
    /// The entries that see each of them, a bit for each.
    u32 seen_by[CHUNK];
    /// Whether an entry sees something of the chunk.
    bool sees[MAX_ENTRIES];
};

/// Floats from the weights of a position to those of the next; skewed where a softmax, which reads along positions,
/// would else meet few banks.
__device__ __forceinline__ constexpr u32 stride_of(u32 entries) { return entries >= 8 ? entries + 4 : entries; }

/// A tile on its way through the chunks. What can be had from shared memory takes no registers.
struct Block {
    const Call& call;
    const u32* table;
    float* memory;
    Shared& shared;

    __device__ __forceinline__ const Tile& tile() const { return shared.tile; }
    /// [head_dim][padded entries], zero for entries that the tile doesn't have.
    __device__ __forceinline__ float* queries() const { return memory; }
    /// [position][stride_of(padded entries)]: scores, then exponentials, of each entry.
    __device__ __forceinline__ float* weights() const { return memory + tile().padded * call.head_dim; }
    /// [entry][head_dim], for the caller's use.
    __device__ __forceinline__ float* sums() const { return weights() + CHUNK * stride_of(tile().padded); }
};

/// One of the chunks.
struct Chunk {
    /// Its first position.
    u32 first;
    /// What some row of the tile sees of it, counted from there.
    Range seen;
    /// The number of this thread.
    u32 thread;
};

__device__ __forceinline__ Chunk chunk_of(const Block& block, u32 number) {
    return {number * CHUNK, block.tile().seen_by_any().in_chunk(number * CHUNK), made_anew(threadIdx.x)};
}

/// `sums[i] += factors[i] * x`, each rounded once. Factors are loaded four at a time if there are that many.
template <u32 N> __device__ __forceinline__ void extend(float (&sums)[N], const float* factors, float x) {
    if constexpr (N >= 4) {
#pragma unroll
        for (u32 i = 0; i < N; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(factors + i);
            sums[i] = fmaf(four.x, x, sums[i]);
            sums[i + 1] = fmaf(four.y, x, sums[i + 1]);
            sums[i + 2] = fmaf(four.z, x, sums[i + 2]);
            sums[i + 3] = fmaf(four.w, x, sums[i + 3]);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < N; i++) sums[i] = fmaf(factors[i], x, sums[i]);
    }
}

/// The same for the sums of which `chosen` has the bit.
template <u32 N>
__device__ __forceinline__ void extend_chosen(float (&sums)[N], u32 chosen, const float* factors, float x) {
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        if (chosen >> i & 1) sums[i] = fmaf(factors[i], x, sums[i]);
    }
}

__device__ __forceinline__ void load_queries(const Block& block) {
    const Call& call = block.call;
    const Tile& tile = block.tile();
    const u64 width = u64(call.q_heads + 2 * call.kv_heads) * call.head_dim;
#pragma unroll 1
    for (u32 d = threadIdx.x; d < call.head_dim; d += CHUNK) {
#pragma unroll 4
        for (u32 entry = 0; entry < tile.padded; entry++) {
            const u32 row = tile.row + entry / tile.heads, head = tile.head + entry % tile.heads;
            const float* query = call.qkv + row * width + u64(head) * call.head_dim;
            block.queries()[d * tile.padded + entry] = entry < tile.entries ? query[d] : 0.0f;
        }
    }
}

/// Scores of the positions that some row sees, for all entries.
template <u32 N> __device__ __forceinline__ void score_chunk(const Block& block, u32 number) {
    const Chunk chunk = chunk_of(block, number);
    const Call& call = block.call;
    const u32 block_size = call.block_size, head_dim = call.head_dim;
    if (!chunk.seen.contains(chunk.thread)) return;
    const u32 position = chunk.first + chunk.thread, offset = position % block_size;
    const u64 rows = (u64(block.table[position / block_size]) * call.kv_heads + block.tile().kv_head) * block_size;
    block.shared.seen_by[chunk.thread] = block.tile().entries_that_see(position);
    block.shared.value_rows[chunk.thread] = (rows + offset) * head_dim;
    const float* key = call.keys + rows * head_dim + offset;

    float sums[N] = {};
    u32 d = 0;
#pragma unroll 1
    for (; d + AHEAD <= head_dim; d += AHEAD) {
        float elements[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++, key += block_size) elements[i] = *key;
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) extend(sums, block.queries() + (d + i) * N, elements[i]);
    }
#pragma unroll 1
    for (; d < head_dim; d++, key += block_size) extend(sums, block.queries() + d * N, *key);
#pragma unroll
    for (u32 i = 0; i < N; i++) block.weights()[chunk.thread * stride_of(N) + i] = sums[i] * call.scale;
}

/// Replaces an entry's scores by `e^(score - greatest)`, and by 0 where it doesn't see. Sixteen lanes do an entry; one
/// of them calls `result(entry, greatest, sum)` unless the entry sees nothing of the chunk.
template <class Result>
__device__ __forceinline__ void softmax_chunk(const Block& block, u32 number, Result result) {
    const Chunk chunk = chunk_of(block, number);
    constexpr u32 GROUPS = CHUNK / 16;
    const u32 lane = chunk.thread % 16, entries = block.tile().padded, stride = stride_of(entries);
    // All lanes take part in a warp's shuffles, so the last half warp may have an entry that doesn't exist.
#pragma unroll 1
    for (u32 entry = chunk.thread / 16; entry / 2 * 2 < entries; entry += CHUNK / 16) {
        float* weights = block.weights() + lane * stride + entry;
        Range seen = {0, 0};
        if (entry < block.tile().entries) seen = block.tile().seen_by(entry / block.tile().heads).in_chunk(chunk.first);
        float powers[GROUPS], greatest = -INFINITY, sum = NO_SUM;
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++) {
            powers[i] = seen.contains(i * 16 + lane) ? weights[i * 16 * stride] : -INFINITY;
            greatest = larger(greatest, powers[i]);
        }
        greatest = greatest_of_16(greatest);
        const float shift = shift_of(greatest);
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++) {
            powers[i] = exp_f32(powers[i] - shift);
            sum += powers[i];
        }
        sum = sum_of_16(sum);
        if (entry >= entries) continue;
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++) weights[i * 16 * stride] = powers[i];
        if (lane == 0) block.shared.sees[entry] = !seen.empty();
        if (lane == 0 && !seen.empty()) result(entry, greatest, sum);
    }
}

/// Weighted sums of the chunk's values. Calls `result(entry, column, sum)` for each element of each entry that sees
/// something of the chunk, from a thread that is the same for all chunks. Each of `N / E` groups of threads has `E`
/// entries.
template <u32 N, u32 E, class Result>
__device__ __forceinline__ void weigh_chunk(const Block& block, u32 number, Result result) {
    const Chunk chunk = chunk_of(block, number);
    constexpr u32 COLUMNS = CHUNK * E / N;
    const u32 entry = chunk.thread / COLUMNS * E;
    const float* values = block.call.values;
    const u64* rows = block.shared.value_rows;
    const Range seen = chunk.seen, all = block.tile().seen_by_all().in_chunk(chunk.first);
#pragma unroll 1
    for (u32 column = chunk.thread % COLUMNS; column < block.call.head_dim; column += COLUMNS) {
        float sums[E] = {}, elements[AHEAD];
        const float* weights = block.weights() + seen.start * stride_of(N) + entry;
#pragma unroll 1
        for (u32 at = seen.start; at < seen.end; at += AHEAD, weights += AHEAD * stride_of(N)) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) elements[i] = at + i < seen.end ? values[rows[at + i] + column] : 0.0f;
            if (at >= all.start && at + AHEAD <= all.end) {
#pragma unroll
                for (u32 i = 0; i < AHEAD; i++) extend(sums, weights + i * stride_of(N), elements[i]);
            } else {
#pragma unroll
                for (u32 i = 0; i < AHEAD; i++) {
                    const u32 chosen = at + i < seen.end ? block.shared.seen_by[at + i] >> entry : 0;
                    extend_chosen(sums, chosen, weights + i * stride_of(N), elements[i]);
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < E; i++) {
            if (block.shared.sees[entry + i]) result(entry + i, column, sums[i]);
        }
    }
}
