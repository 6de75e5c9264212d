// Rows looked up by number.

#include "common.cuh"

/// Place of an element in a packed matrix of `col_tiles` tiles of 16 columns: tiles of 16 x 16, in each the fragments
/// of 32 lanes.
__device__ __forceinline__ u64 packed_place(u32 row, u32 col, u32 col_tiles) {
    const u32 lane = row % 8 * 4 + col % 8 / 2;
    const u32 element = col % 16 / 8 * 4 + row % 16 / 8 * 2 + col % 2;
    return (u64(row / 16) * col_tiles + col / 16) * 256 + lane * 8 + element;
}

/// `out[i] = table[tokens[i]]`, as f32; `table` is packed. Grid (tokens).
extern "C" __global__ void embed(const void* table, u32 dtype, u32 cols, const u32* tokens, float* out) {
    const u32 token = tokens[blockIdx.x], col_tiles = ceil_div(cols, 16);
    float* to = out + u64(blockIdx.x) * cols;
    for (u32 col = threadIdx.x; col < cols; col += blockDim.x) {
        to[col] = load_element(table, packed_place(token, col, col_tiles), dtype);
    }
}
SHIM_EXPORT(embed)

/// `out[i] = x[rows[i]]`, rows of `dim` elements. Grid (rows).
extern "C" __global__ void gather_rows(const float* x, u32 dim, const u32* rows, float* out) {
    const float* from = x + u64(rows[blockIdx.x]) * dim;
    float* to = out + u64(blockIdx.x) * dim;
    for (u32 i = threadIdx.x; i < dim; i += blockDim.x) to[i] = from[i];
}
SHIM_EXPORT(gather_rows)
