// Writing and moving the paged cache. Of one layer, keys are [block][kv_head][head_dim][block_size], values
// [block][kv_head][block_size][head_dim].

#include "common.cuh"

/// Writes the key and value heads of row `i` of fused rows into slot `slots[i]` (`block * block_size + offset`).
/// Grid (rows).
extern "C" __global__ void store_kv(const float* qkv, u32 q_heads, u32 kv_heads, u32 head_dim, const u32* slots,
    float* keys, float* values, u32 block_size) {
    const u32 width = kv_heads * head_dim, slot = slots[blockIdx.x], offset = slot % block_size;
    const float* key = qkv + u64(blockIdx.x) * (q_heads + 2 * kv_heads) * head_dim + u64(q_heads) * head_dim;
    const float* value = key + width;
    const u64 block = u64(slot / block_size) * width * block_size;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        const u32 head = i / head_dim, d = i % head_dim;
        keys[block + u64(i) * block_size + offset] = key[i];
        values[block + (u64(head) * block_size + offset) * head_dim + d] = value[i];
    }
}
SHIM_EXPORT(store_kv)

/// Copies whole blocks, pair after pair of `copies` (from, to), of which a later one may read what an earlier one
/// wrote: a thread takes its element through all of them. Grid (any).
extern "C" __global__ void copy_blocks(float* keys, float* values, const u32* copies, u32 count, u32 block_elements) {
    const u64 threads = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < block_elements; i += threads) {
        for (u32 copy = 0; copy < count; copy++) {
            const u64 from = u64(copies[2 * copy]) * block_elements + i;
            const u64 to = u64(copies[2 * copy + 1]) * block_elements + i;
            keys[to] = keys[from];
            values[to] = values[from];
        }
    }
}
SHIM_EXPORT(copy_blocks)

/// Calls `move(in_cache, in_flat)` for the places of all elements of the keys, then of the values, of `blocks`.
template <class Keys, class Values>
__device__ __forceinline__ void for_each_element(const u32* blocks, u32 count, u32 block_elements, Keys keys,
    Values values) {
    const u64 threads = u64(gridDim.x) * blockDim.x;
    for (u32 block = blockIdx.y; block < count; block += gridDim.y) {
        const u64 cache = u64(blocks[block]) * block_elements, flat = u64(block) * block_elements * 2;
        for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < block_elements; i += threads) {
            keys(cache + i, flat + i);
            values(cache + i, flat + block_elements + i);
        }
    }
}

/// Copies blocks to one flat buffer: [count][keys, then values]. Grid (any, any).
extern "C" __global__ void gather_blocks(const float* keys, const float* values, const u32* blocks, u32 count,
    u32 block_elements, float* flat) {
    for_each_element(blocks, count, block_elements, [=](u64 from, u64 to) { flat[to] = keys[from]; },
        [=](u64 from, u64 to) { flat[to] = values[from]; });
}
SHIM_EXPORT(gather_blocks)

/// Copies blocks back from a flat buffer; no block is named twice. Grid (any, any).
extern "C" __global__ void scatter_blocks(float* keys, float* values, const u32* blocks, u32 count, u32 block_elements,
    const float* flat) {
    for_each_element(blocks, count, block_elements, [=](u64 to, u64 from) { keys[to] = flat[from]; },
        [=](u64 to, u64 from) { values[to] = flat[from]; });
}
SHIM_EXPORT(scatter_blocks)
