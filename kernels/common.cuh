// What the kernels share. They are compiled by nvcc for devices, and by g++ through tests/emulated_cuda/shim.h for
// tests, with the same results bit for bit but for tensor cores, which round in their own way, and the payloads of NaNs:
// no contraction of a * b + c unless `fmaf` says so, no approximate instructions, no atomics on floats, and every sum in
// one order that depends on its own row only.
#pragma once

#ifndef CUDA_CPU_SHIM
#include <cstdint>
#include <cuda_fp16.h>

/// Declares dynamic shared memory, 16-byte aligned.
#define DYN_SHARED(T, name)                                                                                            \
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];                                              \
    T* const name = reinterpret_cast<T*>(dynamic_shared_bytes)
/// Declares an array in shared memory, 16-byte aligned. Its content is anything at first.
#define STATIC_SHARED(T, name, count) __shared__ __align__(16) T name[count]
/// Makes a kernel callable where it is compiled for the CPU.
#define SHIM_EXPORT(name)
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

constexpr u32 DTYPE_F32 = 0, DTYPE_F16 = 1, DTYPE_BF16 = 2;
constexpr u32 WARP_LANES = 32, ALL_LANES = 0xffffffff;

__device__ __forceinline__ u32 ceil_div(u32 a, u32 b) { return a / b + (a % b != 0); }

// ---- Elements ----

__device__ __forceinline__ float f32_of_bf16(u16 bits) { return __uint_as_float(u32(bits) << 16); }
__device__ __forceinline__ float f32_of_f16(u16 bits) { return __half2float(__ushort_as_half(bits)); }

/// Rounds to nearest even; NaN stays NaN.
__device__ __forceinline__ u16 bf16_of_f32(float value) {
    const u32 bits = __float_as_uint(value);
    // Rounding may carry a NaN into infinity or cut its payload to nothing: make it quiet instead.
    if ((bits & 0x7fffffff) > 0x7f800000) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// Rounds to nearest even; beyond the largest f16 to infinity; NaN stays NaN.
__device__ __forceinline__ u16 f16_of_f32(float value) {
    const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffff;
    u32 narrowed;
    if (magnitude < 113u << 23) {
        // The addition rounds to a multiple of 2^-24, the smallest subnormal, which is the last place of 0.5.
        narrowed = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
    } else if (magnitude < 143u << 23) {
        narrowed = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    } else {
        narrowed = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    }
    return u16(narrowed | (bits >> 16 & 0x8000));
}

/// Element `i` of an array of the given dtype.
__device__ __forceinline__ float load_element(const void* from, u64 i, u32 dtype) {
    if (dtype == DTYPE_F32) return static_cast<const float*>(from)[i];
    const u16 bits = static_cast<const u16*>(from)[i];
    return dtype == DTYPE_F16 ? f32_of_f16(bits) : f32_of_bf16(bits);
}

// ---- Functions ----

/// `2^n` for an integer `n` from -126 to 127: the biased exponent, as the low bits of a float of 2^23 and more.
__device__ __forceinline__ float power_of_two(float n) {
    return __uint_as_float(__float_as_uint(n + (8388608.0f + 127.0f)) << 23);
}

/// `e^x`, operation by operation as the CPU device's (src/device/cpu/math.rs, which says why).
__device__ __forceinline__ float exp_f32(float x) {
    constexpr float ROUND = 12582912.0f, LOG2_E = 1.44269504f, LN2_HIGH = 355.0f / 512.0f, LN2_LOW = -2.1219444e-4f;
    // The order of the operands keeps a NaN.
    x = -105.0f > x ? -105.0f : x;
    x = 89.0f < x ? 89.0f : x;
    const float n = fmaf(x, LOG2_E, ROUND) - ROUND;
    float r = fmaf(n, -LN2_HIGH, x);
    r = fmaf(n, -LN2_LOW, r);
    float sum = 1.9875692e-4f;
    sum = fmaf(sum, r, 1.3981999e-3f);
    sum = fmaf(sum, r, 8.333452e-3f);
    sum = fmaf(sum, r, 4.1665796e-2f);
    sum = fmaf(sum, r, 1.6666665e-1f);
    sum = fmaf(sum, r, 0.5f);
    const float power = fmaf(sum, r * r, r) + 1.0f;
    const float half = fmaf(n, 0.5f, ROUND) - ROUND;
    return power * power_of_two(half) * power_of_two(n - half);
}

// ---- Reductions, each the same tree always ----

/// The sum over a warp, in all its lanes: lanes 16 apart first, then 8, 4, 2, 1.
__device__ __forceinline__ float warp_sum(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
    return value;
}

/// The greatest over a warp, in all its lanes. NaNs are passed over.
__device__ __forceinline__ float warp_max(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, apart));
    return value;
}

/// The sum over a one-dimensional block of whole warps, in all its threads; `scratch` holds a float for each warp.
/// The warps' sums are added in their order. Others may use `scratch` again after their next barrier.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    const u32 warp = threadIdx.x / WARP_LANES, warps = blockDim.x / WARP_LANES;
    value = warp_sum(value);
    if (threadIdx.x % WARP_LANES == 0) scratch[warp] = value;
    __syncthreads();
    float sum = scratch[0];
    for (u32 i = 1; i < warps; i++) sum += scratch[i];
    return sum;
}

// ---- Instructions without a C++ name ----

/// `d = a * b + c` for a warp: 16 x 16 by 16 x 8 bf16, distributed as PTX says for m16n8k16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float d[4], const u32 a[4], const u32 b[2], const float c[4]) {
#ifdef CUDA_CPU_SHIM
    shim::mma_m16n8k16_bf16(d, a, b, c, __LINE__);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}

/// Starts a copy of 16 aligned bytes into shared memory, past the first-level cache.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#ifdef CUDA_CPU_SHIM
    shim::copy_async_16(shared, global);
#else
    const u32 to = u32(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#endif
}

/// Makes a group of the copies that this thread has started since the last one.
__device__ __forceinline__ void copy_async_commit() {
#ifdef CUDA_CPU_SHIM
    shim::copy_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until at most the `IN_FLIGHT` newest groups of this thread are on their way. A barrier then shows their
/// bytes to other threads.
template <u32 IN_FLIGHT> __device__ __forceinline__ void copy_async_wait() {
#ifdef CUDA_CPU_SHIM
    shim::copy_async_wait(IN_FLIGHT);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(IN_FLIGHT) : "memory");
#endif
}
