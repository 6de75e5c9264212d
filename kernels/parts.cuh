// Numbers as sums of bf16, which is what tensor cores multiply, and the products of such sums. Used by matmul.cu.
//
// Activations are f32, cut into three bf16 parts that add up to them exactly; f16 weights are cut into two parts, f32
// weights into three, in registers. Of the products of parts only those are left out whose factors are about 2^-24 of
// the whole.
//
// Source: Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
// Computations".
#pragma once

#include "common.cuh"

constexpr u32 TILE = 16, BATCH_TILE = 8, X_PARTS = 3;
/// u32 of a tile of packed activations: for each part and lane two.
constexpr u32 X_TILE = X_PARTS * WARP_LANES * 2;

// ---- Activations ----

/// Parts of an f32 as bf16: it is their sum.
struct Parts { u32 lo, mid, hi; };

__device__ __forceinline__ Parts split(float x) {
    // What isn't finite goes into the part that meets only the largest part of a weight: infinity times a part that is
    // 0 would be NaN where the product isn't. (Weights are finite; an infinite one gives infinities or NaNs.)
    if (!(fabsf(x) <= 3.40282347e38f)) return {bf16_of_f32(x), 0, 0};
    u32 hi = bf16_of_f32(x);
    if ((hi & 0x7fff) == 0x7f80) hi = __float_as_uint(x) >> 16;
    const float rest = x - f32_of_bf16(u16(hi));
    const u32 mid = bf16_of_f32(rest);
    return {bf16_of_f32(rest - f32_of_bf16(u16(mid))), mid, hi};
}

/// A lane's part of a tile of activations.
struct X { u32 lo[2], mid[2], hi[2]; };

/// From the address of the lane's own two words of the first part.
__device__ __forceinline__ X load_x(const u32* own) {
    const uint2* from = reinterpret_cast<const uint2*>(own);
    const uint2 lo = from[0], mid = from[WARP_LANES], hi = from[2 * WARP_LANES];
    return {{lo.x, lo.y}, {mid.x, mid.y}, {hi.x, hi.y}};
}

// ---- Weights ----

/// The halves of two f32 that make a pair of bf16, cut and not rounded: an exact rest stays.
__device__ __forceinline__ u32 upper_halves(float first, float second) {
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}
__device__ __forceinline__ float without_upper_half(float x) {
    return x - __uint_as_float(__float_as_uint(x) & 0xffff0000);
}
__device__ __forceinline__ u32 round_to_bf16(float first, float second) {
#ifdef CUDA_CPU_SHIM
    return bf16_of_f32(first) | u32(bf16_of_f32(second)) << 16;
#else
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#endif
}

// How a lane's part of a tile of weights is cut into parts and multiplied. `VECTORS`: its loads of 16 bytes. `STAGES`:
// tiles that the wide product has on their way; they fit 48 KiB.

struct Bf16 {
    static constexpr u32 VECTORS = 1, STAGES = 4;
    u32 w[4];

    __device__ __forceinline__ void cut(const uint4* raw) {
        w[0] = raw[0].x, w[1] = raw[0].y, w[2] = raw[0].z, w[3] = raw[0].w;
    }
    __device__ __forceinline__ void multiply(float sum[4], const X& x) const {
        mma_m16n8k16_bf16(sum, w, x.lo, sum);
        mma_m16n8k16_bf16(sum, w, x.mid, sum);
        mma_m16n8k16_bf16(sum, w, x.hi, sum);
    }
};

struct F16 {
    static constexpr u32 VECTORS = 1, STAGES = 4;
    u32 hi[4], mid[4];

    __device__ __forceinline__ void cut(const uint4* raw) {
        const u32 pairs[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float first = f32_of_f16(u16(pairs[i])), second = f32_of_f16(u16(pairs[i] >> 16));
            hi[i] = upper_halves(first, second);
            mid[i] = upper_halves(without_upper_half(first), without_upper_half(second));
        }
    }
    __device__ __forceinline__ void multiply(float sum[4], const X& x) const {
        mma_m16n8k16_bf16(sum, hi, x.lo, sum);
        mma_m16n8k16_bf16(sum, mid, x.mid, sum);
        mma_m16n8k16_bf16(sum, hi, x.mid, sum);
        mma_m16n8k16_bf16(sum, mid, x.hi, sum);
        mma_m16n8k16_bf16(sum, hi, x.hi, sum);
    }
};

struct F32 {
    static constexpr u32 VECTORS = 2, STAGES = 3;
    u32 hi[4], mid[4], lo[4];

    __device__ __forceinline__ void cut(const uint4* raw) {
        const u32 values[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float first = __uint_as_float(values[2 * i]), second = __uint_as_float(values[2 * i + 1]);
            hi[i] = upper_halves(first, second);
            const float rest = without_upper_half(first), rest_2 = without_upper_half(second);
            mid[i] = round_to_bf16(rest, rest_2);
            lo[i] = upper_halves(rest - __uint_as_float(mid[i] << 16), rest_2 - __uint_as_float(mid[i] & 0xffff0000));
        }
    }
    __device__ __forceinline__ void multiply(float sum[4], const X& x) const {
        mma_m16n8k16_bf16(sum, hi, x.lo, sum);
        mma_m16n8k16_bf16(sum, lo, x.hi, sum);
        mma_m16n8k16_bf16(sum, mid, x.mid, sum);
        mma_m16n8k16_bf16(sum, hi, x.mid, sum);
        mma_m16n8k16_bf16(sum, mid, x.hi, sum);
        mma_m16n8k16_bf16(sum, hi, x.hi, sum);
    }
};

/// Tiles of weights below each other.
template <class W, u32 TILES> struct Rows {
    W tiles[TILES];

    __device__ __forceinline__ Rows(const uint4* raw, u32 stride) {
#pragma unroll
        for (u32 m = 0; m < TILES; m++) tiles[m].cut(raw + m * stride);
    }
};

/// Adds a tile's product to the accumulator of its chunk.
template <class W> __device__ __forceinline__ void add_tile(float acc[4], const W& w, const X& x) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    w.multiply(sum, x);
#pragma unroll
    for (u32 e = 0; e < 4; e++) acc[e] += sum[e];
}
