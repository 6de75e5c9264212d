// Order, weights and selection of tokens by their logits, as src/sampling does it on the host. Used by sampling.cu.
//
// Weights are integers, so that the order of their sums, and of atomic additions of them, is of no account.
#pragma once

#include "common.cuh"
#include "lanes.cuh"

/// Logits of one row; a block works on it.
struct LogitRow { float* logits; u32 vocab; };

// ---- The order of tokens: higher logit first, then lower id ----

/// A number that is smaller for higher logits, and the same for both zeros. NaN has none.
__device__ __forceinline__ u32 order_of(float logit) {
    const u32 bits = __float_as_uint(logit + 0.0f);
    return bits >> 31 ? bits : ~(bits | 0x80000000);
}
/// Sorts tokens.
__device__ __forceinline__ u64 key_of(u32 token, float logit) { return u64(order_of(logit)) << 32 | token; }

/// The key after which there are only tokens with logits of negative infinity: the last of the least finite logit.
constexpr u64 ALL_FINITE = u64(0xff7fffff) << 32 | 0xffffffff;

// ---- Weights ----

/// `exp(x)` for `x <= 0`, operation by operation as src/sampling/softmax.rs, which fuses none.
__device__ __forceinline__ float exp_below_0(float x) {
    constexpr float ROUND = 12582912.0f;
    const float clamped = x > -87.0f ? x : -87.0f;
    const float shifted = clamped * 1.44269504f + ROUND;
    const float n = shifted - ROUND;
    const float r = clamped - n * 0.693359375f - n * -2.1219444e-4f;
    float p = 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.66666655e-1f;
    p = p * r + 5.00000010e-1f;
    const float mantissa = p * (r * r) + r + 1.0f;
    const float scale = __uint_as_float((__float_as_uint(shifted) - __float_as_uint(ROUND) + 127) << 23);
    return x > -87.0f ? mantissa * scale : 0.0f;
}

/// Weighs each token by its probability, as a fixed-point number.
struct ByMass {
    float greatest, temperature;

    __device__ __forceinline__ float scaled(float logit) const {
        const float below = logit - greatest;
        return temperature == 1.0f ? below : below / temperature;
    }
    /// The product is exact, and rounded to the nearest integer.
    __device__ __forceinline__ u64 operator()(float logit) const {
        return __float2ull_rn(exp_below_0(scaled(logit)) * 1099511627776.0f);
    }
};

/// Weighs all tokens the same.
struct ByCount {
    __device__ __forceinline__ u64 operator()(float) const { return 1; }
};

// ---- Reductions ----

/// What is combined over a block of whole warps, in all its threads. `scratch` holds a value for each warp. `combine`
/// is associative and commutative.
template <class F> __device__ __forceinline__ u64 block_combine(u64 value, u64* scratch, F combine) {
    for (int apart = 16; apart > 0; apart /= 2) value = combine(value, __shfl_xor_sync(ALL_LANES, value, apart));
    __syncthreads();
    if (threadIdx.x % WARP_LANES == 0) scratch[threadIdx.x / WARP_LANES] = value;
    __syncthreads();
    value = scratch[0];
    for (u32 i = 1; i < blockDim.x / WARP_LANES; i++) value = combine(value, scratch[i]);
    return value;
}
struct Add { __device__ u64 operator()(u64 a, u64 b) const { return a + b; } };
struct Least { __device__ u64 operator()(u64 a, u64 b) const { return b < a ? b : a; } };
struct Most { __device__ u64 operator()(u64 a, u64 b) const { return b > a ? b : a; } };

/// The sum of this lane's value and those of the lanes before it.
__device__ __forceinline__ u64 sum_up_to(u64 value) {
    for (u32 apart = 1; apart < WARP_LANES; apart *= 2) {
        const u64 before = __shfl_up_sync(ALL_LANES, value, apart);
        if (threadIdx.x % WARP_LANES >= apart) value += before;
    }
    return value;
}

/// The first key, how many logits are above negative infinity, and how many are NaN or positive infinity.
struct Extremes { u64 best, finite, unsound; };

__device__ __forceinline__ Extremes extremes(const LogitRow& row, u64* scratch) {
    u64 best = ~u64(0), finite = 0, unsound = 0;
    for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) {
        const float logit = row.logits[i];
        best = Least()(best, key_of(i, logit));
        finite += logit > -INFINITY;
        // NaN, too.
        unsound += !(logit < INFINITY);
    }
    const u64 counts = block_combine(finite << 32 | unsound, scratch, Add());
    return {block_combine(best, scratch, Least()), counts >> 32, counts & 0xffffffff};
}

/// Weight of the tokens up to a key.
template <class W> __device__ u64 weight_up_to(const LogitRow& row, u64 last, const W& weigh, u64* scratch) {
    u64 sum = 0;
    for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) {
        const float logit = row.logits[i];
        if (key_of(i, logit) <= last) sum += weigh(logit);
    }
    return block_combine(sum, scratch, Add());
}

// ---- Selection ----

/// Intervals of logits below the greatest, and how many are one unit. The last one holds all that is further below.
constexpr u32 BINS = 2048;
constexpr float BINS_PER_UNIT = 32.0f;
/// Tokens of an interval that are compared with each other.
constexpr u32 MOST_LISTED = 512;

/// Shared memory of a selection.
struct Selection {
    u64 *bins, *listed, *weights, *scratch;
    /// One each.
    u64 *before, *result;
    u32 *bin, *count;
};

__device__ __forceinline__ u32 bin_of(float logit, float greatest) {
    const float bin = (greatest - logit) * BINS_PER_UNIT;
    return bin < float(BINS - 1) ? u32(bin) : BINS - 1;
}

/// Adds to the interval of each lane of a warp: at once if it is the same for all, which is slow otherwise.
__device__ __forceinline__ void add_to_bin(u64* bins, u32 bin, u64 weight) {
    const u32 adding = __ballot_sync(ALL_LANES, weight > 0);
    if (adding == 0) return;
    const u32 first = u32(__ffs(int(adding))) - 1;
    const u32 of_first = __shfl_sync(ALL_LANES, bin, int(first));
    if (__all_sync(ALL_LANES, weight == 0 || bin == of_first)) {
        for (int apart = 16; apart > 0; apart /= 2) weight += __shfl_xor_sync(ALL_LANES, weight, apart);
        if (threadIdx.x % WARP_LANES != first) return;
    }
    if (weight > 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(bins + bin), static_cast<unsigned long long>(weight));
    }
}

/// The interval in which the weight from the greatest logit down reaches `wanted`, and the weight before it.
__device__ __forceinline__ void find_bin(const Selection& shared, u64 wanted) {
    if (threadIdx.x >= WARP_LANES) return;
    u64 before = 0;
    u32 bin = BINS - 1;
    for (u32 base = 0; base < BINS; base += WARP_LANES) {
        const u64 own = shared.bins[base + threadIdx.x], up_to = before + sum_up_to(own);
        const u32 reached = __ballot_sync(ALL_LANES, up_to >= wanted);
        if (reached) {
            const int lane = __ffs(int(reached)) - 1;
            bin = base + u32(lane);
            before = __shfl_sync(ALL_LANES, up_to - own, lane);
            break;
        }
        before = __shfl_sync(ALL_LANES, up_to, WARP_LANES - 1);
    }
    if (threadIdx.x == 0) *shared.bin = bin, *shared.before = before;
}

/// The key of the first token, of those up to `last`, at which their weight reaches `wanted`: at least 1, and at most
/// the weight of all of them.
template <class W>
__device__ u64 select_key(const LogitRow& row, float greatest, u64 last, u64 wanted, const W& weigh,
                          const Selection& shared) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < BINS; i += blockDim.x) shared.bins[i] = 0;
    if (threadIdx.x == 0) *shared.count = 0;
    __syncthreads();
    const u32 lane = threadIdx.x % WARP_LANES;
    for (u32 base = threadIdx.x - lane; base < row.vocab; base += blockDim.x) {
        const u32 i = base + lane;
        u32 bin = BINS - 1;
        u64 weight = 0;
        if (i < row.vocab) {
            const float logit = row.logits[i];
            bin = bin_of(logit, greatest);
            // The weight of the last interval is not needed: what isn't reached before is reached there. Nor is it
            // asked whether tokens are up to `last`: those that aren't come after the one that is looked for.
            if (bin < BINS - 1) weight = weigh(logit);
        }
        add_to_bin(shared.bins, bin, weight);
    }
    __syncthreads();
    find_bin(shared, wanted);
    __syncthreads();

    const u32 bin = *shared.bin;
    const u64 before = *shared.before;
    u64 low = ~u64(0), high = 0;
    for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) {
        const float logit = row.logits[i];
        const u64 key = key_of(i, logit);
        if (key > last || bin_of(logit, greatest) != bin) continue;
        const u32 place = atomicAdd(shared.count, 1u);
        if (place < MOST_LISTED) shared.listed[place] = key, shared.weights[place] = weigh(logit);
        low = Least()(low, key), high = Most()(high, key);
    }
    __syncthreads();
    const u32 count = *shared.count;
    if (count <= MOST_LISTED) {
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
            const u64 key = shared.listed[i];
            u64 sum = before;
            for (u32 j = 0; j < count; j++) sum += shared.listed[j] < key ? shared.weights[j] : 0;
            if (sum < wanted && sum + shared.weights[i] >= wanted) *shared.result = key;
        }
        __syncthreads();
        return *shared.result;
    }
    // Many equal or nearly equal logits: bisection, for which nothing needs to be kept.
    low = block_combine(low, shared.scratch, Least()), high = block_combine(high, shared.scratch, Most());
    while (low < high) {
        const u64 middle = low + (high - low) / 2;
        u64 sum = 0;
        for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) {
            const float logit = row.logits[i];
            if (key_of(i, logit) <= middle && bin_of(logit, greatest) == bin) sum += weigh(logit);
        }
        if (before + block_combine(sum, shared.scratch, Add()) >= wanted) high = middle;
        else low = middle + 1;
    }
    return low;
}
