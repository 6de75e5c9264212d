// XXH3-128 (seed 0, default secret) of each 64 KiB leaf of a byte string, the last one shorter.
//
// Source: the XXH3 specification of xxHash 0.8 (Collet). It sums the products of 16 stripes of 64 bytes, then scrambles
// eight accumulators. The sums don't depend on the accumulators, so they are computed side by side first; only the
// scrambles, one for each KiB, are a chain.
#include "common.cuh"

constexpr u32 LEAF_BYTES = 64 << 10, BLOCK_BYTES = 1024, STRIPE_BYTES = 64, LANES = 8, THREADS = 256;
constexpr u32 BLOCKS = LEAF_BYTES / BLOCK_BYTES, BLOCK_STRIPES = BLOCK_BYTES / STRIPE_BYTES;
/// Stripes that a warp takes at a time, eight bytes a lane, and how often it does that for a block.
constexpr u32 WARP_STRIPES = WARP_LANES / LANES, TURNS = BLOCK_STRIPES / WARP_STRIPES;

constexpr u64 PRIME32_1 = 0x9e3779b1, PRIME32_2 = 0x85ebca77, PRIME32_3 = 0xc2b2ae3d;
constexpr u64 PRIME64_1 = 0x9e3779b185ebca87, PRIME64_2 = 0xc2b2ae3d27d4eb4f, PRIME64_3 = 0x165667b19e3779f9;
constexpr u64 PRIME64_4 = 0x85ebca77c2b2ae63, PRIME64_5 = 0x27d4eb2f165667c5;
constexpr u64 PRIME_MX1 = 0x165667919e3779f9, PRIME_MX2 = 0x9fb21c651e98df25;

constexpr u32 SECRET_BYTES = 192;
__constant__ u8 SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct Hash { u64 low, high; };

/// Little-endian, at any address.
__device__ __forceinline__ u32 read_32(const u8* from) {
    return u32(from[0]) | u32(from[1]) << 8 | u32(from[2]) << 16 | u32(from[3]) << 24;
}
__device__ __forceinline__ u64 read_64(const u8* from) { return read_32(from) | u64(read_32(from + 4)) << 32; }

/// The same in as few loads as the address allows; `alignment` is that of all addresses in the call.
__device__ __forceinline__ u64 read_64_aligned(const u8* from, u32 alignment) {
    if (alignment % 8 == 0) return *reinterpret_cast<const u64*>(from);
    if (alignment % 4 == 0) {
        const u32* words = reinterpret_cast<const u32*>(from);
        return words[0] | u64(words[1]) << 32;
    }
    return read_64(from);
}

__device__ __forceinline__ u32 swap_32(u32 x) { return __byte_perm(x, 0, 0x0123); }
__device__ __forceinline__ u64 swap_64(u64 x) { return u64(swap_32(u32(x))) << 32 | swap_32(u32(x >> 32)); }
__device__ __forceinline__ u64 fold(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 avalanche(u64 hash) {
    hash = (hash ^ hash >> 37) * PRIME_MX1;
    return hash ^ hash >> 32;
}
__device__ __forceinline__ u64 avalanche_xxh64(u64 hash) {
    hash = (hash ^ hash >> 33) * PRIME64_2;
    hash = (hash ^ hash >> 29) * PRIME64_3;
    return hash ^ hash >> 32;
}

// ---- Up to 240 bytes, by one thread ----

__device__ Hash hash_1_to_3(const u8* bytes, u32 len) {
    const u32 combined = bytes[len - 1] | len << 8 | u32(bytes[0]) << 16 | u32(bytes[len / 2]) << 24;
    const u32 swapped = swap_32(combined);
    const u64 low = combined ^ read_32(SECRET) ^ read_32(SECRET + 4);
    const u64 high = (swapped << 13 | swapped >> 19) ^ read_32(SECRET + 8) ^ read_32(SECRET + 12);
    return {avalanche_xxh64(low), avalanche_xxh64(high)};
}

__device__ Hash hash_4_to_8(const u8* bytes, u32 len) {
    const u64 combined = read_32(bytes) | u64(read_32(bytes + len - 4)) << 32;
    const u64 keyed = combined ^ read_64(SECRET + 16) ^ read_64(SECRET + 24), factor = PRIME64_1 + (len << 2);
    u64 low = keyed * factor;
    const u64 high = __umul64hi(keyed, factor) + (low << 1);
    low ^= high >> 3;
    low = (low ^ low >> 35) * PRIME_MX2;
    return {low ^ low >> 28, avalanche(high)};
}

__device__ Hash hash_9_to_16(const u8* bytes, u32 len) {
    const u64 first = read_64(bytes), last = read_64(bytes + len - 8);
    const u64 a = first ^ last ^ read_64(SECRET + 32) ^ read_64(SECRET + 40);
    const u64 b = last ^ read_64(SECRET + 48) ^ read_64(SECRET + 56);
    u64 low = a * PRIME64_1 + (u64(len - 1) << 54);
    const u64 high = __umul64hi(a, PRIME64_1) + (b >> 32 << 32) + u64(u32(b)) * PRIME32_2;
    low ^= swap_64(high);
    return {avalanche(low * PRIME64_2), avalanche(__umul64hi(low, PRIME64_2) + high * PRIME64_2)};
}

/// Two accumulators for what has 17 to 240 bytes.
struct Mid {
    u64 a, b;

    __device__ static u64 mix(const u8* bytes, const u8* secret) {
        return fold(read_64(bytes) ^ read_64(secret), read_64(bytes + 8) ^ read_64(secret + 8));
    }
    __device__ void add(const u8* first, const u8* second, const u8* secret) {
        a = (a + mix(first, secret)) ^ (read_64(second) + read_64(second + 8));
        b = (b + mix(second, secret + 16)) ^ (read_64(first) + read_64(first + 8));
    }
    __device__ Hash hash(u32 len) const {
        return {avalanche(a + b), 0 - avalanche(a * PRIME64_1 + b * PRIME64_4 + len * PRIME64_2)};
    }
};

__device__ Hash hash_17_to_240(const u8* bytes, u32 len) {
    Mid mid = {len * PRIME64_1, 0};
    if (len <= 128) {
        for (int i = int(len - 1) / 32; i >= 0; i--)
            mid.add(bytes + 16 * i, bytes + len - 16 * (i + 1), SECRET + 32 * i);
        return mid.hash(len);
    }
    for (u32 i = 0; i < 4; i++) mid.add(bytes + 32 * i, bytes + 32 * i + 16, SECRET + 32 * i);
    mid = {avalanche(mid.a), avalanche(mid.b)};
    for (u32 i = 4; i < len / 32; i++) mid.add(bytes + 32 * i, bytes + 32 * i + 16, SECRET + 3 + 32 * (i - 4));
    mid.add(bytes + len - 16, bytes + len - 32, SECRET + 103);
    return mid.hash(len);
}

__device__ Hash hash_short(const u8* bytes, u32 len) {
    if (len <= 3) return hash_1_to_3(bytes, len);
    if (len <= 8) return hash_4_to_8(bytes, len);
    if (len <= 16) return hash_9_to_16(bytes, len);
    return hash_17_to_240(bytes, len);
}

// ---- More than 240 bytes, by a block ----

__device__ __forceinline__ u64 product(u64 key) { return u64(u32(key)) * (key >> 32); }

/// The sum of a block's stripes for each lane of eight bytes, by one warp; lanes 0 to 7 get them.
__device__ __forceinline__ u64 sum_stripes(const u8* block, u32 stripes, u32 alignment, const u64 keys[TURNS]) {
    const u32 lane = threadIdx.x % WARP_LANES;
    u64 sum = 0, plain = 0;
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        if (turn * WARP_STRIPES + lane / LANES >= stripes) continue;
        const u64 data = read_64_aligned(block + turn * WARP_STRIPES * STRIPE_BYTES + lane * 8, alignment);
        plain += data;
        sum += product(data ^ keys[turn]);
    }
    // An accumulator also takes its neighbour's data as it is.
    sum += __shfl_xor_sync(ALL_LANES, plain, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, LANES);
    return sum + __shfl_xor_sync(ALL_LANES, sum, 2 * LANES);
}

__constant__ u64 INITIAL[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                   PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

/// Lane `lane` of the eight accumulators, after all blocks and the last stripe.
__device__ u64 accumulate(const u64 (*sums)[LANES], const u8* bytes, u32 len, u32 lane) {
    const u32 scrambles = (len - 1) / BLOCK_BYTES;
    const u64 key = read_64(SECRET + SECRET_BYTES - STRIPE_BYTES + lane * 8);
    u64 sum = INITIAL[lane];
    for (u32 block = 0; block < scrambles; block++) {
        sum += sums[block][lane];
        sum = (sum ^ sum >> 47 ^ key) * PRIME32_1;
    }
    const u8* last = bytes + len - STRIPE_BYTES;
    const u64 data = read_64(last + lane * 8), neighbour = read_64(last + (lane ^ 1) * 8);
    return sum + sums[scrambles][lane] + neighbour + product(data ^ read_64(SECRET + 121 + lane * 8));
}

__device__ u64 merge(const u64 accumulators[LANES], const u8* secret, u64 start) {
    for (u32 i = 0; i < LANES; i += 2)
        start += fold(accumulators[i] ^ read_64(secret + 8 * i), accumulators[i + 1] ^ read_64(secret + 8 * i + 8));
    return avalanche(start);
}

/// Writes low and high half of each leaf's hash. Blocks of 256 threads, grid.x leaves; `bytes` at any address.
extern "C" __global__ void __launch_bounds__(THREADS) xxh3_leaves(const u8* bytes, u64 len, u64* out) {
    STATIC_SHARED(u64, sums_memory, BLOCKS * LANES);
    STATIC_SHARED(u64, accumulators, LANES);
    u64(*const sums)[LANES] = reinterpret_cast<u64(*)[LANES]>(sums_memory);
    const u64 start = u64(blockIdx.x) * LEAF_BYTES;
    const u8* leaf = bytes + start;
    const u32 leaf_len = u32(min(len - start, u64(LEAF_BYTES)));
    out += 2 * u64(blockIdx.x);
    if (leaf_len <= 240) {
        if (threadIdx.x == 0) {
            const Hash hash = hash_short(leaf, leaf_len);
            out[0] = hash.low;
            out[1] = hash.high;
        }
        return;
    }

    const u32 lane = threadIdx.x % WARP_LANES, alignment = u32(reinterpret_cast<uintptr_t>(leaf) % 8);
    u64 keys[TURNS];
    for (u32 turn = 0; turn < TURNS; turn++)
        keys[turn] = read_64(SECRET + 8 * (turn * WARP_STRIPES + lane / LANES + lane % LANES));
    // The last stripe, whole or not, is none of these: it has a key of its own.
    const u32 stripes = (leaf_len - 1) / STRIPE_BYTES;
    for (u32 block = threadIdx.x / WARP_LANES; block * BLOCK_STRIPES <= stripes; block += THREADS / WARP_LANES) {
        const u32 here = min(stripes - block * BLOCK_STRIPES, BLOCK_STRIPES);
        const u64 sum = sum_stripes(leaf + block * BLOCK_BYTES, here, alignment, keys);
        if (lane < LANES) sums[block][lane] = sum;
    }
    __syncthreads();
    if (threadIdx.x < LANES) accumulators[threadIdx.x] = accumulate(sums, leaf, leaf_len, threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = merge(accumulators, SECRET + 11, leaf_len * PRIME64_1);
    if (threadIdx.x == WARP_LANES) out[1] = merge(accumulators, SECRET + 117, ~(leaf_len * PRIME64_2));
}
SHIM_EXPORT(xxh3_leaves)
