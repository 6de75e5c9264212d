// Rotary embedding in the half-split form (Su et al. 2021, "RoFormer", section 3.4.2), and the per-head norms before it
// (Qwen3), equal bit for bit to the CPU device's.

#include "common.cuh"
#include "lanes.cuh"

__device__ __forceinline__ void rotate(float* low, float* high, float x_low, float x_high, float cos, float sin) {
    *low = x_low * cos - x_high * sin;
    *high = x_high * cos + x_low * sin;
}

/// In place on the query and key heads of fused rows. `cos`, `sin`: [rows][head_dim / 2]. Grid (rows, any).
extern "C" __global__ void rope(float* qkv, u32 q_heads, u32 kv_heads, u32 head_dim, const float* cos,
    const float* sin) {
    const u32 half = head_dim / 2;
    float* row = qkv + u64(blockIdx.x) * (q_heads + 2 * kv_heads) * head_dim;
    const float* row_cos = cos + u64(blockIdx.x) * half;
    const float* row_sin = sin + u64(blockIdx.x) * half;
    const u32 pairs = (q_heads + kv_heads) * half;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < pairs; i += gridDim.y * blockDim.x) {
        float* low = row + i / half * head_dim + i % half;
        rotate(low, low + half, low[0], low[half], row_cos[i % half], row_sin[i % half]);
    }
}
SHIM_EXPORT(rope)

/// The same after a norm of each head. A warp does a head; the squares are summed as the CPU device does, element `i`
/// by lane `i % 16`, then in a fixed tree. Grid (rows, any), whole warps.
extern "C" __global__ void qk_norm_rope(float* qkv, u32 q_heads, u32 kv_heads, u32 head_dim, const float* cos,
    const float* sin, const void* q_norm, u32 q_dtype, const void* k_norm, u32 k_dtype, float eps) {
    const u32 half = head_dim / 2, lane = threadIdx.x % WARP_LANES;
    float* row = qkv + u64(blockIdx.x) * (q_heads + 2 * kv_heads) * head_dim;
    const float* row_cos = cos + u64(blockIdx.x) * half;
    const float* row_sin = sin + u64(blockIdx.x) * half;
    const u32 warp = (blockIdx.y * blockDim.x + threadIdx.x) / WARP_LANES;
    for (u32 head = warp; head < q_heads + kv_heads; head += gridDim.y * (blockDim.x / WARP_LANES)) {
        float* x = row + head * head_dim;
        float sum = 0.0f;
        // Both halves of the warp do it, so that all lanes know the sum.
        for (u32 i = lane % 16; i < head_dim; i += 16) sum = fmaf(x[i], x[i], sum);
        const float factor = 1.0f / sqrtf(sum_of_16(sum) / float(head_dim) + eps);
        __syncwarp();
        const void* weight = head < q_heads ? q_norm : k_norm;
        const u32 dtype = head < q_heads ? q_dtype : k_dtype;
        for (u32 i = lane; i < half; i += WARP_LANES) {
            const float low = x[i] * factor * load_element(weight, i, dtype);
            const float high = x[i + half] * factor * load_element(weight, i + half, dtype);
            rotate(x + i, x + i + half, low, high, row_cos[i], row_sin[i]);
        }
    }
}
SHIM_EXPORT(qk_norm_rope)
