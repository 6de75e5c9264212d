// Reductions over half warps, and the running maximum of a block, each in a fixed order.
#pragma once

#include "common.cuh"

/// The sum over sixteen lanes, in all of them: lanes 8 apart first, then 4, 2, 1, as the CPU device sums its vectors.
__device__ __forceinline__ float sum_of_16(float value) {
    for (int apart = 8; apart > 0; apart /= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
    return value;
}

/// The larger one, and `a` if `b` is NaN.
__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }

/// The greatest over sixteen lanes, in all of them. No lane is NaN.
__device__ __forceinline__ float greatest_of_16(float value) {
    for (int apart = 8; apart > 0; apart /= 2) value = larger(value, __shfl_xor_sync(ALL_LANES, value, apart));
    return value;
}

/// The greatest of `first` and the values of the threads before this one in a block of whole warps; `scratch` holds a
/// float for each warp. No value is NaN. Others may use `scratch` again after their next barrier.
__device__ __forceinline__ float greatest_before(float value, float first, float* scratch) {
    const u32 lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    for (u32 apart = 1; apart < WARP_LANES; apart *= 2) {
        const float other = __shfl_up_sync(ALL_LANES, value, apart);
        if (lane >= apart) value = larger(value, other);
    }
    if (lane == WARP_LANES - 1) scratch[warp] = value;
    const float before = __shfl_up_sync(ALL_LANES, value, 1);
    __syncthreads();
    if (lane > 0) first = larger(first, before);
    for (u32 i = 0; i < warp; i++) first = larger(first, scratch[i]);
    return first;
}
