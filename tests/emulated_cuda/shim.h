// Runs CUDA C++ kernels on the CPU, for tests. Build: g++ -std=c++17 -O2 -ffp-contract=off -Wno-unknown-pragmas
// -include shim.h -x c++ NAME.cu.
//
// Each CUDA thread is a fiber; a block runs on one OS thread, blocks spread over several. What a device would leave
// undefined is made to show: shared memory starts as NaNs, asynchronous copies land only when they are waited for,
// threads that meet at different barriers or shuffles end the program, and the order in which warps and lanes run can
// be drawn from a seed. Not seen: races between blocks, the memory model, bank conflicts, anything about speed.
//
// Kernel files are linked into one library: types and functions of different files need different names.
//
// Architecture invariant: it defines only what gives the same bits on a device. There is no `rsqrtf` and no `__expf`.
#pragma once

#include "fibers.h"

#define CUDA_CPU_SHIM 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static const
#define __restrict__ __restrict
// Kept from block to block, as on a device it may be; `STATIC_SHARED` is the form that starts as NaNs.
#define __shared__ static thread_local
#define STATIC_SHARED(T, name, count)                                                                                  \
    static const char name##_key = 0;                                                                                  \
    T* const name = static_cast<T*>(shim::static_shared(&name##_key, sizeof(T) * (count)))
#define DYN_SHARED(T, name) T* const name = reinterpret_cast<T*>(shim::cur_block->dynamic_shared.data)

/// Exports a kernel under C names: `NAME__cpu` runs it, `NAME__info` describes its parameters.
#define SHIM_EXPORT(name)                                                                                              \
    extern "C" {                                                                                                       \
    __attribute__((visibility("default"))) extern const ShimKernel name##__info;                                       \
    const ShimKernel name##__info = shim::describe(name);                                                              \
    __attribute__((visibility("default"))) void name##__cpu(const unsigned* grid, const unsigned* block, size_t smem,  \
                                                            void** params, unsigned threads) {                         \
        shim::launch_packed(name, grid, block, smem, params, threads);                                                 \
    }                                                                                                                  \
    }

// ---- What device code sees ----

#define threadIdx (shim::cur->thread)
#define blockIdx (shim::cur_block->index)
#define blockDim (shim::cur_block->block)
#define gridDim (shim::cur_block->grid)
constexpr int warpSize = 32;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

inline void __syncthreads(int line = __builtin_LINE()) { shim::block_barrier(line); }
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    shim::check_mask(mask);
    shim::meet("", 0, line);
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() {}

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    shim::check_mask(mask);
    const int lane = shim::cur->lane;
    return shim::of_lane(value, (lane & ~(width - 1)) + (source & (width - 1)), line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, int line = __builtin_LINE()) {
    shim::check_mask(mask);
    const int lane = shim::cur->lane, source = lane ^ flip;
    return shim::of_lane(value, source / width <= lane / width ? source : lane, line);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, int by, int width = 32, int line = __builtin_LINE()) {
    shim::check_mask(mask);
    const int lane = shim::cur->lane, source = lane + by;
    return shim::of_lane(value, source / width == lane / width ? source : lane, line);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int by, int width = 32, int line = __builtin_LINE()) {
    shim::check_mask(mask);
    const int lane = shim::cur->lane, source = lane - by;
    return shim::of_lane(value, source >= 0 && source / width == lane / width ? source : lane, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    shim::check_mask(mask);
    const char vote = predicate != 0;
    const shim::Slots slots = shim::meet(&vote, 1, line);
    const uint32_t present = shim::present();
    unsigned votes = 0;
    for (unsigned i = 0; i < shim::WARP; i++) votes |= unsigned((present >> i & 1) && slots[i][0]) << i;
    return votes;
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return __ballot_sync(mask, !predicate, line) == 0;
}

template <class T> T atomicAdd(T* to, T value) {
    static_assert(std::is_integral_v<T>, "the order of float additions must not matter: there are none");
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
template <class T> T atomicExch(T* to, T value) { return __atomic_exchange_n(to, value, __ATOMIC_RELAXED); }
template <class T> T atomicCAS(T* to, T expected, T value) {
    __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T> T atomicMax(T* to, T value) {
    static_assert(std::is_integral_v<T>);
    T old = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(to, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}

template <class To, class From> To shim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return shim_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return shim_bits<float>(x); }
inline int __float_as_int(float x) { return shim_bits<int>(x); }
inline float __int_as_float(int x) { return shim_bits<float>(x); }
/// To the nearest integer, even ones at ties.
inline unsigned long long __float2ull_rn(float x) { return static_cast<unsigned long long>(std::nearbyint(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
/// Four bytes chosen from the eight of `low` and `high`, each by a nibble of `choice`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned choice) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (choice >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
template <class T> T __ldg(const T* from) { return *from; }

struct __half { uint16_t bits; };
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half half) { return half.bits; }
inline float __half2float(__half half) { return float(shim_bits<_Float16>(half.bits)); }

// ---- Twins of inline PTX ----

namespace shim {

/// Sixteen bytes that arrive when their group is waited for, not before.
inline void copy_async_16(void* shared, const void* global) {
    const auto address = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
    if (address % 16 != 0) die("a copy that isn't aligned");
    cur->copies.push_back({shared, global, cur->copy_group});
}
inline void copy_async_commit() { cur->copy_group++; }
inline void copy_async_wait(unsigned groups_in_flight) {
    Fiber& fiber = *cur;
    size_t done = 0;
    // Those after the last commit belong to no group yet.
    for (; done < fiber.copies.size() && fiber.copies[done].group + groups_in_flight < fiber.copy_group; done++)
        memcpy(fiber.copies[done].to, fiber.copies[done].from, 16);
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + done);
}

struct MmaLane {
    uint32_t a[4], b[2];
    float c[4];
};

/// All of `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`, with PTX's distribution over the lanes. Devices add
/// the exact products in a wider register and cut the sum (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor
/// cores"); so does this, in double.
inline void mma_combine(Slots slots) {
    static_assert(sizeof(MmaLane) <= SLOT_BYTES);
    MmaLane lanes[WARP];
    for (unsigned i = 0; i < WARP; i++) memcpy(&lanes[i], slots[i], sizeof(MmaLane));
    const auto element = [](uint32_t pair, int high) {
        return double(shim_bits<float>(high ? pair & 0xffff0000u : pair << 16));
    };
    double a[16][16], b[16][8], d[16][8];
    for (unsigned i = 0; i < WARP; i++) {
        const unsigned g = i / 4, t = i % 4;
        for (unsigned r = 0; r < 4; r++)
            for (unsigned h = 0; h < 2; h++) a[g + 8 * (r & 1)][2 * t + h + 8 * (r >> 1)] = element(lanes[i].a[r], h);
        for (unsigned r = 0; r < 2; r++)
            for (unsigned h = 0; h < 2; h++) b[2 * t + h + 8 * r][g] = element(lanes[i].b[r], h);
        for (unsigned e = 0; e < 4; e++) d[g + 8 * (e >> 1)][2 * t + (e & 1)] = lanes[i].c[e];
    }
    for (unsigned m = 0; m < 16; m++)
        for (unsigned k = 0; k < 16; k++)
            for (unsigned n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
    for (unsigned i = 0; i < WARP; i++)
        for (unsigned e = 0; e < 4; e++) {
            const double sum = d[i / 4 + 8 * (e >> 1)][2 * (i % 4) + (e & 1)];
            const float cut = float(shim_bits<double>(shim_bits<uint64_t>(sum) & ~uint64_t(0x1fffffff)));
            memcpy(slots[i] + 4 * e, &cut, 4);
        }
}

inline void mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], int line) {
    const MmaLane lane = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}};
    const Slots slots = meet(&lane, sizeof lane, line, mma_combine);
    if (present() != ~0u) die("a matrix product needs all 32 lanes");
    memcpy(d, slots[cur->lane], 16);
}

}  // namespace shim
