// Causal attention over the paged cache.
//
// Positions are cut into chunks of 128, from position 0. A tile is a few consecutive rows of one sequence, with some of
// the query heads that share a key head; its (row, head) pairs, at most 16, are its entries: all of them use each key
// and value that a thread loads. An entry gets three things of a chunk, which depend on its own positions only:
//
// - scores, each one chain of fused multiply-adds over head_dim, times `scale`, a thread for each position;
// - the greatest of them, and the sum of the exponentials of their distances to it, by position mod 16, then in a
//   fixed tree;
// - sums of values weighted by the exponentials, each one chain over exactly the positions that the row sees, in
//   order, a thread for each element of head_dim. A row never meets a value that it doesn't see (0 * NaN is not 0).
//
// Chunks are merged in order, by the same functions whether one block walks them all (attention_whole) or each is
// another block's and they meet in memory (attention_split, attention_combine): the bits are the same. A chunk of which
// an entry sees nothing is no step of its merging. While all that a row sees lies in one chunk the bits are also those
// of the CPU device.
//
// Source: Vaswani et al. 2017, section 3.2; block tables: Kwon et al. 2023 (PagedAttention), section 4; chunks: Dao et
// al. 2023, "Flash-Decoding"; merging: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".

#include "attention.cuh"

// Dynamic shared memory, with `N` the greatest number of entries of a tile, rounded up to a power of two: as floats,
// N * head_dim queries, 128 * (N < 8 ? N : N + 4) weights, and for attention_whole N * head_dim sums.

/// A number that the compiler knows.
template <u32 N> struct Constant {
    static constexpr u32 value = N;
};

/// Calls `run` with the block's padded number of entries, a `Constant`.
template <class Run> __device__ __forceinline__ void for_entries(const Block& block, Run run) {
    switch (block.tile().padded) {
    case 1: return run(Constant<1>());
    case 2: return run(Constant<2>());
    case 4: return run(Constant<4>());
    case 8: return run(Constant<8>());
    default: return run(Constant<MAX_ENTRIES>());
    }
}

/// Attends to one chunk; `scalars` and `elements` take the results, as `softmax_chunk` and `weigh_chunk` say. The
/// block's queries are loaded, and nobody uses the rest of its memory any more.
template <class Scalars, class Elements>
__device__ __forceinline__ void attend(const Block& block, u32 chunk, Scalars scalars, Elements elements) {
    for_entries(block, [&](auto entries) { score_chunk<entries.value>(block, chunk); });
    __syncthreads();
    softmax_chunk(block, chunk, scalars);
    __syncthreads();
    for_entries(block, [&](auto entries) {
        constexpr u32 N = entries.value;
        // Small heads leave half of the threads without a column: let them have half of the entries.
        if (N > 1 && block.call.head_dim <= CHUNK / 2) {
            weigh_chunk<N, (N + 1) / 2>(block, chunk, elements);
        } else {
            weigh_chunk<N, N>(block, chunk, elements);
        }
    });
}

/// Results of single chunks: partials[row][q_head][max_chunks][head_dim sums, greatest, sum of exponentials], for the
/// chunks of which the row sees something.
///
/// Grid (tiles, kv_heads * ceil(group / heads_per_tile), chunks), 128 threads.
extern "C" __global__ void __launch_bounds__(CHUNK)
    attention_split(const float* qkv, u32 q_heads, u32 kv_heads, u32 head_dim, const float* keys, const float* values,
        u32 block_size, const AttentionTile* tiles, const u32* tables, float scale, u32 window, u32 heads_per_tile,
        u32 max_chunks, float* partials) {
    DYN_SHARED(float, memory);
    STATIC_SHARED(Shared, shared, 1);
    STATIC_SHARED(u64, targets, MAX_ENTRIES);
    const Tile& tile = load_tile(&shared->tile, tiles, q_heads, kv_heads, window, heads_per_tile);
    if (tile.seen_by_any().in_chunk(blockIdx.z * CHUNK).empty()) return;
    const Call call = {qkv, q_heads, kv_heads, head_dim, keys, values, block_size, scale};
    const Block block = {call, tables + tiles[blockIdx.x].table, memory, *shared};
    load_queries(block);
    if (threadIdx.x < tile.entries) {
        const u64 chunk = tile.head_of(threadIdx.x, q_heads) * max_chunks + blockIdx.z;
        targets[threadIdx.x] = chunk * (head_dim + 2);
    }
    __syncthreads();
    const auto scalars = [&](u32 entry, float greatest, float sum) {
        partials[targets[entry] + head_dim] = greatest;
        partials[targets[entry] + head_dim + 1] = sum;
    };
    const auto elements = [&](u32 entry, u32 column, float sum) { partials[targets[entry] + column] = sum; };
    attend(block, blockIdx.z, scalars, elements);
}
SHIM_EXPORT(attention_split)

/// Merges the chunks `chunks` of one entry, 128 at a time: first their factors, a thread for each chunk, then the
/// elements, a thread for each.
__device__ __forceinline__ void combine_entry(const float* partials, u32 head_dim, Range chunks, float4* steps,
    float* warps, float* out) {
    const u32 size = head_dim + 2, column = threadIdx.x;
    float greatest = -INFINITY, sum = NO_SUM, elements[2] = {NO_VALUE, NO_VALUE};
    for (u32 first = chunks.start; first < chunks.end; first += CHUNK) {
        const u32 count = min(chunks.end - first, CHUNK);
        const bool exists = threadIdx.x < count;
        const float* scalars = partials + u64(first + threadIdx.x) * size + head_dim;
        const float of_chunk = exists ? scalars[0] : -INFINITY;
        // A maximum is the same in any order, so those before each chunk are found side by side.
        const float before = greatest_before(of_chunk, greatest, warps);
        const Merge merge = merge_factors(before, of_chunk);
        steps[threadIdx.x] = {merge.before, merge.chunk, exists ? scalars[1] : NO_SUM, larger(before, of_chunk)};
        __syncthreads();
        greatest = steps[count - 1].w;
        const float* chunk = partials + u64(first) * size;
#pragma unroll 8
        for (u32 i = 0; i < count; i++, chunk += size) {
            const Merge merge = {steps[i].x, steps[i].y};
            sum = merged(merge, sum, steps[i].z);
            if (column < head_dim) elements[0] = merged(merge, elements[0], chunk[column]);
            if (column + CHUNK < head_dim) elements[1] = merged(merge, elements[1], chunk[column + CHUNK]);
        }
        // The barrier in `greatest_before` keeps the next steps from coming too early.
    }
    if (column < head_dim) out[column] = elements[0] / sum;
    if (column + CHUNK < head_dim) out[column + CHUNK] = elements[1] / sum;
}

/// Merges what attention_split left; `out`: [rows][q_heads][head_dim].
///
/// Grid (tiles, as attention_split's, any), 128 threads. The entries of a tile are shared out over z.
extern "C" __global__ void __launch_bounds__(CHUNK)
    attention_combine(const float* partials, u32 q_heads, u32 kv_heads, u32 head_dim, const AttentionTile* tiles,
        u32 window, u32 heads_per_tile, u32 max_chunks, float* out) {
    STATIC_SHARED(float4, steps, CHUNK);
    STATIC_SHARED(float, warps, CHUNK / WARP_LANES);
    STATIC_SHARED(Tile, shared_tile, 1);
    const Tile& tile = load_tile(shared_tile, tiles, q_heads, kv_heads, window, heads_per_tile);
    for (u32 entry = blockIdx.z; entry < tile.entries; entry += gridDim.z) {
        const Range seen = tile.seen_by(entry / tile.heads);
        const Range chunks = {seen.start / CHUNK, ceil_div(seen.end, CHUNK)};
        const u64 head = tile.head_of(entry, q_heads);
        combine_entry(partials + head * max_chunks * (head_dim + 2), head_dim, chunks, steps, warps,
            out + head * head_dim);
    }
}
SHIM_EXPORT(attention_combine)

/// What attention_whole knows of each entry, beside its sums of values.
struct State {
    float greatest[MAX_ENTRIES], sum[MAX_ENTRIES];
    /// How the chunk at hand goes into them.
    Merge merge[MAX_ENTRIES];
};

/// As attention_split and attention_combine, the same bits, without memory for partial results.
///
/// Grid (tiles, as attention_split's), 128 threads.
extern "C" __global__ void __launch_bounds__(CHUNK)
    attention_whole(const float* qkv, u32 q_heads, u32 kv_heads, u32 head_dim, const float* keys, const float* values,
        u32 block_size, const AttentionTile* tiles, const u32* tables, float scale, u32 window, u32 heads_per_tile,
        float* out) {
    DYN_SHARED(float, memory);
    STATIC_SHARED(Shared, shared, 1);
    STATIC_SHARED(State, state, 1);
    const Tile& tile = load_tile(&shared->tile, tiles, q_heads, kv_heads, window, heads_per_tile);
    const Call call = {qkv, q_heads, kv_heads, head_dim, keys, values, block_size, scale};
    const Block block = {call, tables + tiles[blockIdx.x].table, memory, *shared};
    load_queries(block);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < tile.entries * head_dim; i += CHUNK) block.sums()[i] = NO_VALUE;
    if (threadIdx.x < tile.entries) {
        state->greatest[threadIdx.x] = -INFINITY;
        state->sum[threadIdx.x] = NO_SUM;
    }
    const auto scalars = [&](u32 entry, float greatest, float sum) {
        const Merge merge = merge_factors(state->greatest[entry], greatest);
        state->greatest[entry] = larger(state->greatest[entry], greatest);
        state->sum[entry] = merged(merge, state->sum[entry], sum);
        state->merge[entry] = merge;
    };
    const auto elements = [&](u32 entry, u32 column, float sum) {
        float& element = block.sums()[entry * head_dim + column];
        element = merged(state->merge[entry], element, sum);
    };
#pragma unroll 1
    for (u32 chunk = tile.seen_by_any().start / CHUNK; chunk * CHUNK < tile.seen_by_any().end; chunk++) {
        __syncthreads();
        attend(block, chunk, scalars, elements);
    }
    __syncthreads();
#pragma unroll 1
    for (u32 entry = 0; entry < tile.entries; entry++) {
        float* to = out + tile.head_of(entry, q_heads) * head_dim;
#pragma unroll 1
        for (u32 column = threadIdx.x; column < head_dim; column += CHUNK) {
            to[column] = block.sums()[entry * head_dim + column] / state->sum[entry];
        }
    }
}
SHIM_EXPORT(attention_whole)
