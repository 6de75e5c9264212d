// Root-mean-square norm (Zhang & Sennrich 2019, eq. 4), equal bit for bit to the CPU device's.

#include "common.cuh"
#include "lanes.cuh"

/// Elements that wait in shared memory for the sixteen lanes that sum them; a multiple of 16.
constexpr u32 STAGE = 4096;

/// Norm of rows of `dim`. Grid (rows), whole warps.
///
/// The squares are summed as the CPU device does, element `i` by lane `i % 16`, then in a fixed tree. More lanes would
/// save less than a microsecond of a launch.
extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const float* x, const void* weight, u32 dtype, float eps, u32 dim, float* out) {
    STATIC_SHARED(float, stage, STAGE);
    STATIC_SHARED(float, factor, 1);
    const float* from = x + u64(blockIdx.x) * dim;
    float* to = out + u64(blockIdx.x) * dim;
    float sum = 0.0f;
    for (u32 start = 0; start < dim; start += STAGE) {
        const u32 count = min(dim - start, STAGE);
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) stage[i] = from[start + i];
        __syncthreads();
        // Both halves of a warp do it, so that it stays together.
        if (threadIdx.x >= WARP_LANES) continue;
#pragma unroll 16
        for (u32 i = threadIdx.x % 16; i < count; i += 16) sum = fmaf(stage[i], stage[i], sum);
    }
    if (threadIdx.x < WARP_LANES) {
        sum = sum_of_16(sum);
        if (threadIdx.x == 0) *factor = 1.0f / sqrtf(sum / float(dim) + eps);
    }
    __syncthreads();
    const float* again = dim <= STAGE ? stage : from;
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) to[i] = again[i] * *factor * load_element(weight, i, dtype);
}
SHIM_EXPORT(rms_norm)
