// Weight matrices into and out of the layout in which the matrix products read them, elements from one dtype into
// another, and the search for values that are no numbers.
//
// Packed: `[row_tiles][col_tiles][32 lanes][8 elements]`, tiles of 16 x 16, padded with zeros. What a lane holds is its
// part of the first operand of `mma.m16n8k16`, so that a product loads it with one instruction.
#include "common.cuh"

constexpr u32 TILE = 16, TILE_ELEMENTS = TILE * TILE, LANE_ELEMENTS = 8;

/// The tiles that a range of rows touches, and the rows and columns of a lane's pairs in one of them.
struct Tiles {
    u32 cols, col_tiles, first_row, end_row, first_tile;
    u64 count;

    __device__ Tiles(u32 cols, u32 first_row, u32 rows)
        : cols(cols), col_tiles(ceil_div(cols, TILE)), first_row(first_row), end_row(first_row + rows),
          first_tile(first_row / TILE), count(u64(ceil_div(end_row, TILE) - first_tile) * col_tiles) {}

    /// Row of pair 0 to 3 of this lane in tile `i`.
    __device__ u32 row(u64 i, u32 pair) const {
        return (first_tile + u32(i / col_tiles)) * TILE + threadIdx.x % WARP_LANES / 4 + pair % 2 * 8;
    }
    /// First of its two columns.
    __device__ u32 col(u64 i, u32 pair) const {
        return u32(i % col_tiles) * TILE + threadIdx.x % 4 * 2 + pair / 2 * 8;
    }
    /// Where this lane's elements of tile `i` begin in the packed matrix.
    __device__ u64 packed(u64 i) const {
        return (u64(first_tile) * col_tiles + i) * TILE_ELEMENTS + threadIdx.x % WARP_LANES * LANE_ELEMENTS;
    }
    __device__ bool has_row(u32 row) const { return row >= first_row && row < end_row; }
};

/// This warp's number among all, and their count: warps take the tiles in turn, whatever the grid.
__device__ __forceinline__ u64 warp_index() { return (u64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP_LANES; }
__device__ __forceinline__ u64 warp_count() { return u64(gridDim.x) * blockDim.x / WARP_LANES; }

template <class T> struct alignas(sizeof(T) * 2) Pair { T first, second; };
template <class T> struct alignas(16) LaneTile { Pair<T> pairs[4]; };

/// Rows `first_row ..` of the packed matrix from `[rows][cols]`. Columns beyond `cols` become zeros.
template <class T> __device__ void pack_rows(T* dst, const T* src, u32 cols, u32 first_row, u32 rows) {
    const Tiles tiles(cols, first_row, rows);
    for (u64 i = warp_index(); i < tiles.count; i += warp_count()) {
        LaneTile<T> tile;
        for (u32 p = 0; p < 4; p++) {
            const u32 row = tiles.row(i, p), col = tiles.col(i, p);
            const T* from = src + u64(row - first_row) * cols + col;
            const bool inside = tiles.has_row(row);
            tile.pairs[p].first = inside && col < cols ? from[0] : T(0);
            tile.pairs[p].second = inside && col + 1 < cols ? from[1] : T(0);
        }
        LaneTile<T>* to = reinterpret_cast<LaneTile<T>*>(dst + tiles.packed(i));
        if (tiles.has_row(tiles.row(i, 0)) && tiles.has_row(tiles.row(i, 1))) {
            *to = tile;
        } else {
            // The tile's other rows belong to another matrix of a fused one.
            for (u32 p = 0; p < 4; p++)
                if (tiles.has_row(tiles.row(i, p))) to->pairs[p] = tile.pairs[p];
        }
    }
}

/// `[rows][cols]` from rows `first_row ..` of the packed matrix.
template <class T> __device__ void unpack_rows(T* out, const T* packed, u32 cols, u32 first_row, u32 rows) {
    const Tiles tiles(cols, first_row, rows);
    for (u64 i = warp_index(); i < tiles.count; i += warp_count()) {
        const LaneTile<T> tile = *reinterpret_cast<const LaneTile<T>*>(packed + tiles.packed(i));
        for (u32 p = 0; p < 4; p++) {
            const u32 row = tiles.row(i, p), col = tiles.col(i, p);
            if (!tiles.has_row(row)) continue;
            T* to = out + u64(row - first_row) * cols + col;
            if (col < cols) to[0] = tile.pairs[p].first;
            if (col + 1 < cols) to[1] = tile.pairs[p].second;
        }
    }
}

// Blocks of 256 threads; any grid.x, best `ceil(tiles / 8)`. `packed` is 16-byte aligned, the other side naturally.
extern "C" __global__ void __launch_bounds__(256)
    pack_rows_16(u16* packed, const u16* rows_in, u32 cols, u32 first_row, u32 rows) {
    pack_rows(packed, rows_in, cols, first_row, rows);
}
SHIM_EXPORT(pack_rows_16)

extern "C" __global__ void __launch_bounds__(256)
    pack_rows_32(u32* packed, const u32* rows_in, u32 cols, u32 first_row, u32 rows) {
    pack_rows(packed, rows_in, cols, first_row, rows);
}
SHIM_EXPORT(pack_rows_32)

extern "C" __global__ void __launch_bounds__(256)
    unpack_rows_16(u16* rows_out, const u16* packed, u32 cols, u32 first_row, u32 rows) {
    unpack_rows(rows_out, packed, cols, first_row, rows);
}
SHIM_EXPORT(unpack_rows_16)

extern "C" __global__ void __launch_bounds__(256)
    unpack_rows_32(u32* rows_out, const u32* packed, u32 cols, u32 first_row, u32 rows) {
    unpack_rows(rows_out, packed, cols, first_row, rows);
}
SHIM_EXPORT(unpack_rows_32)

/// The f32 that equals an f16, with a NaN's payload kept, as src/weights/convert.rs does it.
__device__ __forceinline__ u32 f32_bits_of_f16(u16 bits) {
    constexpr u32 BIAS = (127 - 15) << 23;
    const u32 magnitude = u32(bits & 0x7fff) << 13;
    u32 widened = magnitude + BIAS;
    if (magnitude < 0x0400u << 13) {
        // A subnormal is a multiple of 2^-24: put below the one of 2^-14, which is then taken away.
        widened = __float_as_uint(__uint_as_float(widened + (1u << 23)) - __uint_as_float(113u << 23));
    } else if (magnitude >= 0x7c00u << 13) {
        widened += BIAS;
    }
    return widened | u32(bits & 0x8000) << 16;
}

/// Elements of one dtype into another: a narrowing rounds once, to nearest even; NaN stays NaN. Any grid.x.
extern "C" __global__ void __launch_bounds__(256)
    convert(const void* src, u32 src_dtype, void* dst, u32 dst_dtype, u64 count) {
    const u64 step = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        u32 bits;
        if (src_dtype == DTYPE_F32) {
            bits = static_cast<const u32*>(src)[i];
        } else {
            bits = static_cast<const u16*>(src)[i];
            if (src_dtype != dst_dtype) bits = src_dtype == DTYPE_F16 ? f32_bits_of_f16(u16(bits)) : bits << 16;
        }
        if (dst_dtype == DTYPE_F32) {
            static_cast<u32*>(dst)[i] = bits;
        } else {
            u16* to = static_cast<u16*>(dst) + i;
            if (src_dtype == dst_dtype) *to = u16(bits);
            else *to = dst_dtype == DTYPE_F16 ? f16_of_f32(__uint_as_float(bits)) : bf16_of_f32(__uint_as_float(bits));
        }
    }
}
SHIM_EXPORT(convert)

/// Raises `*left` to `count - i` of the first element `i` that is infinite or no number: 0 stays 0 if there is none.
/// Any grid.x.
extern "C" __global__ void __launch_bounds__(256)
    first_non_finite(const void* src, u32 dtype, u64 count, unsigned long long* left) {
    const u64 step = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        // An exponent of ones only, whatever the sign and the rest.
        bool special;
        if (dtype == DTYPE_F32) {
            special = (static_cast<const u32*>(src)[i] & 0x7f800000) == 0x7f800000;
        } else {
            const u32 exponent = dtype == DTYPE_F16 ? 0x7c00 : 0x7f80;
            special = (static_cast<const u16*>(src)[i] & exponent) == exponent;
        }
        if (special) {
            atomicMax(left, static_cast<unsigned long long>(count - i));
            return;
        }
    }
}
SHIM_EXPORT(first_non_finite)
