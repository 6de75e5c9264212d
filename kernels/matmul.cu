// Products of packed weights with the rows of a batch, on tensor cores, with results of f32's grade (parts.cuh).
//
// Architecture invariant: an output is the same bits whatever the batch and whichever kernel. Its column tiles are cut
// into 8 chunks of `ceil(col_tiles / 8)`. A chunk's sum starts from 0 and takes tile after tile; a tile is one chain of
// mma, smallest products first; chunks are added in their order; then comes the bias, then, if asked, what `out` held.
// A tile starts from 0, for a tensor core cuts what it adds to, where an addition rounds (Fasi et al. 2021, "Numerical
// behavior of NVIDIA tensor cores").
#include "parts.cuh"

constexpr u32 CHUNKS = 8, THREADS = 256;

/// `[ceil(batch / 8)][col_tiles][lo, mid, hi][32 lanes][2]` from `[batch][cols]`: the second operand of m16n8k16, with
/// zeros beyond the batch and the columns. Blocks of 256 threads, any grid.x, best `ceil(tiles / 8)`.
extern "C" __global__ void __launch_bounds__(THREADS) pack_activations(const float* x, u32 batch, u32 cols, u32* out) {
    const u32 col_tiles = ceil_div(cols, TILE), lane = threadIdx.x % WARP_LANES;
    const u64 tiles = u64(ceil_div(batch, BATCH_TILE)) * col_tiles, warps = u64(gridDim.x) * blockDim.x / WARP_LANES;
    for (u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP_LANES; i < tiles; i += warps) {
        const u32 row = u32(i / col_tiles) * BATCH_TILE + lane / 4, col = u32(i % col_tiles) * TILE + lane % 4 * 2;
        const float* from = x + u64(row) * cols + col;
        u32 parts[X_PARTS][2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 at = half * 8;
            const Parts first = split(row < batch && col + at < cols ? from[at] : 0.0f);
            const Parts second = split(row < batch && col + at + 1 < cols ? from[at + 1] : 0.0f);
            parts[0][half] = first.lo | second.lo << 16;
            parts[1][half] = first.mid | second.mid << 16;
            parts[2][half] = first.hi | second.hi << 16;
        }
        uint2* to = reinterpret_cast<uint2*>(out + i * X_TILE) + lane;
#pragma unroll
        for (u32 part = 0; part < X_PARTS; part++) to[part * WARP_LANES] = make_uint2(parts[part][0], parts[part][1]);
    }
}
SHIM_EXPORT(pack_activations)

// ---- The product, its shapes ----

struct Product {
    const uint4* w;
    const u32* x;
    u32 rows, cols, batch;
    const void* bias;
    u32 bias_dtype, add;
    float* out;

    __device__ u32 row_tiles() const { return ceil_div(rows, TILE); }
    __device__ u32 col_tiles() const { return ceil_div(cols, TILE); }
    __device__ u32 batch_tiles() const { return ceil_div(batch, BATCH_TILE); }
    /// Column tiles of a chunk, but for the last ones.
    __device__ u32 chunk_tiles() const { return ceil_div(col_tiles(), CHUNKS); }
    /// The first tile of row tile `tile`, or of the last one: what is computed from that is not stored.
    __device__ const uint4* w_tiles(u32 tile, u32 vectors) const {
        return w + u64(min(tile, row_tiles() - 1)) * col_tiles() * (WARP_LANES * vectors);
    }
    __device__ const u32* x_tiles(u32 tile) const {
        return x + u64(min(tile, batch_tiles() - 1)) * col_tiles() * X_TILE;
    }
    __device__ void store(u32 row, u32 batch_row, float sum) const {
        if (row >= rows || batch_row >= batch) return;
        if (bias) sum += load_element(bias, row, bias_dtype);
        float* to = out + u64(batch_row) * rows + row;
        *to = add ? *to + sum : sum;
    }
};

// ---- Narrow: few rows of batch. The weights are read once; a warp takes a chunk ----

constexpr u32 NARROW_BATCH = 32;
/// Shared memory of a warp, in 16 bytes: a ring of stages of weights on their way. Later the partial sums lie there.
constexpr u32 RING_VECTORS = 384;

/// `ROW_TILES` x `BATCH_TILES` tiles of output: each warp one chunk of them, then all warps the sums of the chunks.
template <class W, u32 ROW_TILES, u32 BATCH_TILES> struct Narrow {
    static constexpr u32 TILES = ROW_TILES * BATCH_TILES, TILE_VECTORS = WARP_LANES * W::VECTORS;
    /// Column tiles of a stage: enough for their activations to come together, few enough to keep those in registers.
    static constexpr u32 DEPTH = BATCH_TILES * W::VECTORS < 4 ? 4 / (BATCH_TILES * W::VECTORS) : 1;
    static constexpr u32 STAGE_VECTORS = DEPTH * ROW_TILES * TILE_VECTORS, STAGES = RING_VECTORS / STAGE_VECTORS;
    static_assert(STAGES >= 3 && TILES * WARP_LANES <= RING_VECTORS);

    const Product& p;
    uint4* shared;
    u32 lane, warp, row_tile, first_batch, end;
    const uint4* w[ROW_TILES];
    const u32* x[BATCH_TILES];

    __device__ __forceinline__ Narrow(const Product& p, uint4* shared, u32 row_tile, u32 first_batch)
        : p(p), shared(shared), lane(threadIdx.x % WARP_LANES), warp(threadIdx.x / WARP_LANES), row_tile(row_tile),
          first_batch(first_batch), end(min((warp + 1) * p.chunk_tiles(), p.col_tiles())) {
#pragma unroll
        for (u32 m = 0; m < ROW_TILES; m++) w[m] = p.w_tiles(row_tile + m, W::VECTORS) + lane;
#pragma unroll
        for (u32 n = 0; n < BATCH_TILES; n++) {
            // Lanes whose row of the batch isn't there read the first row's bytes, which come anyway: their results
            // aren't stored.
            const bool there = first_batch + n * BATCH_TILE + lane / 4 < p.batch;
            x[n] = p.x_tiles(first_batch / BATCH_TILE + n) + (there ? lane : lane % 4) * 2;
        }
    }

    /// Starts the copies of weights of column tiles `tile ..`, those of the chunk, and makes a group of them.
    __device__ __forceinline__ void fetch(u32 tile, u32 stage) const {
        uint4* to = shared + warp * RING_VECTORS + stage * STAGE_VECTORS + lane;
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++)
            if (tile + d < end)
#pragma unroll
                for (u32 m = 0; m < ROW_TILES; m++)
#pragma unroll
                    for (u32 v = 0; v < W::VECTORS; v++)
                        copy_async_16(to + (d * ROW_TILES + m) * TILE_VECTORS + v * WARP_LANES,
                                      w[m] + u64(tile + d) * TILE_VECTORS + v * WARP_LANES);
        copy_async_commit();
    }

    __device__ __forceinline__ void compute() const {
        float acc[ROW_TILES][BATCH_TILES][4] = {};
        u32 tile = warp * p.chunk_tiles(), stage = 0, free_stage = STAGES - 1;
#pragma unroll
        for (u32 s = 0; s < STAGES - 1; s++) fetch(tile + s * DEPTH, s);
#pragma unroll 1
        for (; tile < end; tile += DEPTH) {
            X columns[DEPTH][BATCH_TILES];
#pragma unroll
            for (u32 d = 0; d < DEPTH; d++)
#pragma unroll
                for (u32 n = 0; n < BATCH_TILES; n++)
                    columns[d][n] = load_x(x[n] + u64(min(tile + d, end - 1)) * X_TILE);
            copy_async_wait<STAGES - 2>();
            // Also: all lanes are done with the stage that the next fetch writes.
            __syncwarp();
            fetch(tile + (STAGES - 1) * DEPTH, free_stage);
            const uint4* from = shared + warp * RING_VECTORS + stage * STAGE_VECTORS + lane * W::VECTORS;
#pragma unroll
            for (u32 d = 0; d < DEPTH; d++) {
                if (tile + d >= end) break;
                const Rows<W, ROW_TILES> weights(from + d * ROW_TILES * TILE_VECTORS, TILE_VECTORS);
#pragma unroll
                for (u32 n = 0; n < BATCH_TILES; n++)
#pragma unroll
                    for (u32 m = 0; m < ROW_TILES; m++) add_tile(acc[m][n], weights.tiles[m], columns[d][n]);
            }
            free_stage = stage;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        __syncthreads();
        reduce(acc);
    }

    __device__ __forceinline__ void reduce(const float (*acc)[BATCH_TILES][4]) const {
        float4* partials = reinterpret_cast<float4*>(shared);
#pragma unroll
        for (u32 m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (u32 n = 0; n < BATCH_TILES; n++) {
                const float* sum = acc[m][n];
                const u32 at = (warp * TILES + m * BATCH_TILES + n) * WARP_LANES + lane;
                partials[at] = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
        __syncthreads();
        const float* sums = reinterpret_cast<const float*>(shared);
        const u32 chunks = ceil_div(p.col_tiles(), p.chunk_tiles());
        for (u32 i = threadIdx.x; i < TILES * TILE * BATCH_TILE; i += THREADS) {
            const u32 row = i % (ROW_TILES * TILE), batch_row = i / (ROW_TILES * TILE);
            const u32 element = row % TILE / 8 * 2 + batch_row % 2, owner = row % 8 * 4 + batch_row % BATCH_TILE / 2;
            const u32 at = ((row / TILE * BATCH_TILES + batch_row / BATCH_TILE) * WARP_LANES + owner) * 4 + element;
            float sum = 0.0f;
            for (u32 chunk = 0; chunk < chunks; chunk++) sum += sums[chunk * TILES * WARP_LANES * 4 + at];
            p.store(row_tile * TILE + row, first_batch + batch_row, sum);
        }
    }
};

/// With more rows of batch a block takes two row tiles, so that activations are read half as often; half of the blocks
/// then have nothing to do.
template <class W> __device__ __forceinline__ void narrow(const Product& p) {
    STATIC_SHARED(uint4, shared, CHUNKS * RING_VECTORS);
    const u32 first_batch = blockIdx.y * NARROW_BATCH, here = min(p.batch - first_batch, NARROW_BATCH);
    if (here <= 8) return Narrow<W, 1, 1>(p, shared, blockIdx.x, first_batch).compute();
    if (blockIdx.x * 2 >= p.row_tiles()) return;
    if (here <= 16) return Narrow<W, 2, 2>(p, shared, blockIdx.x * 2, first_batch).compute();
    Narrow<W, 2, 4>(p, shared, blockIdx.x * 2, first_batch).compute();
}

// ---- Wide: many rows of batch. A block takes 128 x 64 outputs, a warp 32 x 32 of them, through all chunks ----

constexpr u32 WIDE_ROW_TILES = 8, WIDE_BATCH_TILES = 8, WARP_ROW_TILES = 2, WARP_BATCH_TILES = 4;
/// Blocks that run at the same time share rows of weights and of the batch in the second-level cache: they are numbered
/// so that they make about a square.
constexpr u32 WIDE_GROUP = 16;

template <class W> struct Wide {
    static constexpr u32 W_VECTORS = WIDE_ROW_TILES * WARP_LANES * W::VECTORS;
    static constexpr u32 X_TILE_VECTORS = X_TILE / 4, X_VECTORS = WIDE_BATCH_TILES * X_TILE_VECTORS;
    static constexpr u32 STAGE_VECTORS = W_VECTORS + X_VECTORS;

    const Product& p;
    uint4* stages;
    u32 row_tile, batch_tile;
    const uint4 *w_from, *x_from;

    __device__ Wide(const Product& p, uint4* stages) : p(p), stages(stages) {
        const u32 row_blocks = ceil_div(p.row_tiles(), WIDE_ROW_TILES);
        const u32 batch_blocks = ceil_div(p.batch_tiles(), WIDE_BATCH_TILES);
        const u32 group_blocks = WIDE_GROUP * batch_blocks;
        const u32 group = blockIdx.x / group_blocks, in_group = blockIdx.x % group_blocks;
        const u32 height = min(row_blocks - group * WIDE_GROUP, WIDE_GROUP);
        row_tile = (group * WIDE_GROUP + in_group % height) * WIDE_ROW_TILES;
        batch_tile = in_group / height * WIDE_BATCH_TILES;
        const u32 lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
        w_from = p.w_tiles(row_tile + warp, W::VECTORS) + lane;
        x_from = reinterpret_cast<const uint4*>(p.x_tiles(batch_tile + warp)) + lane;
    }

    /// Starts the copies of column tile `tile`, if there is one, and makes a group of them. Each warp copies one tile
    /// of weights and one of activations.
    __device__ __forceinline__ void fetch(u32 tile) const {
        static_assert(WIDE_ROW_TILES == THREADS / WARP_LANES && WIDE_BATCH_TILES == THREADS / WARP_LANES);
        const u32 lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
        if (tile < p.col_tiles()) {
            uint4* to = stages + tile % W::STAGES * STAGE_VECTORS + lane;
            uint4* w_to = to + warp * (WARP_LANES * W::VECTORS);
            const uint4* w = w_from + u64(tile) * (WARP_LANES * W::VECTORS);
#pragma unroll
            for (u32 v = 0; v < W::VECTORS; v++) copy_async_16(w_to + v * WARP_LANES, w + v * WARP_LANES);
            uint4* x_to = to + W_VECTORS + warp * X_TILE_VECTORS;
            const uint4* x = x_from + u64(tile) * X_TILE_VECTORS;
            copy_async_16(x_to, x);
            if (lane < X_TILE_VECTORS - WARP_LANES) copy_async_16(x_to + WARP_LANES, x + WARP_LANES);
        }
        copy_async_commit();
    }

    __device__ __forceinline__ void compute() const {
        const u32 lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
        const u32 warp_row = warp / 2 * WARP_ROW_TILES, warp_batch = warp % 2 * WARP_BATCH_TILES;
        const bool inside = row_tile + warp_row < p.row_tiles() && batch_tile + warp_batch < p.batch_tiles();
        float total[WARP_ROW_TILES][WARP_BATCH_TILES][4] = {};
        for (u32 tile = 0; tile < W::STAGES - 1; tile++) fetch(tile);
        for (u32 tile = 0; tile < p.col_tiles();) {
            float acc[WARP_ROW_TILES][WARP_BATCH_TILES][4] = {};
            const u32 end = min(tile + p.chunk_tiles(), p.col_tiles());
#pragma unroll 1
            for (; tile < end; tile++) {
                copy_async_wait<W::STAGES - 2>();
                // Also: all warps are done with the stage that the next fetch writes.
                __syncthreads();
                fetch(tile + W::STAGES - 1);
                if (!inside) continue;
                const uint4* stage = stages + tile % W::STAGES * STAGE_VECTORS;
                const u32* x = reinterpret_cast<const u32*>(stage + W_VECTORS);
                multiply(acc, stage + (warp_row * WARP_LANES + lane) * W::VECTORS, x + warp_batch * X_TILE + lane * 2);
            }
            add_chunk(total, acc);
        }
        store(total, (row_tile + warp_row) * TILE, (batch_tile + warp_batch) * BATCH_TILE);
    }

    static __device__ __forceinline__ void multiply(float (*acc)[WARP_BATCH_TILES][4], const uint4* w, const u32* x) {
        const Rows<W, WARP_ROW_TILES> weights(w, WARP_LANES * W::VECTORS);
#pragma unroll
        for (u32 n = 0; n < WARP_BATCH_TILES; n++) {
            const X columns = load_x(x + n * X_TILE);
#pragma unroll
            for (u32 m = 0; m < WARP_ROW_TILES; m++) add_tile(acc[m][n], weights.tiles[m], columns);
        }
    }

    static __device__ __forceinline__ void add_chunk(float (*total)[WARP_BATCH_TILES][4],
                                                     const float (*acc)[WARP_BATCH_TILES][4]) {
#pragma unroll
        for (u32 m = 0; m < WARP_ROW_TILES; m++)
#pragma unroll
            for (u32 n = 0; n < WARP_BATCH_TILES; n++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) total[m][n][e] += acc[m][n][e];
    }

    __device__ __forceinline__ void store(const float (*total)[WARP_BATCH_TILES][4], u32 row, u32 batch_row) const {
        const u32 lane = threadIdx.x % WARP_LANES;
#pragma unroll
        for (u32 m = 0; m < WARP_ROW_TILES; m++)
#pragma unroll
            for (u32 n = 0; n < WARP_BATCH_TILES; n++)
#pragma unroll
                for (u32 e = 0; e < 4; e++)
                    p.store(row + m * TILE + lane / 4 + e / 2 * 8, batch_row + n * BATCH_TILE + lane % 4 * 2 + e % 2,
                            total[m][n][e]);
    }
};

template <class W> __device__ __forceinline__ void wide(const Product& p) {
    STATIC_SHARED(uint4, stages, W::STAGES * Wide<W>::STAGE_VECTORS);
    Wide<W>(p, stages).compute();
}

// Blocks of 256 threads. Narrow: grid (ceil(rows / 16), ceil(batch / 32)). Wide: grid.x = ceil(rows / 128) *
// ceil(batch / 64). `w` and `x` are 16-byte aligned.
#define MATMUL(name, BLOCKS, function)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        name(const void* w, const u32* x, u32 rows, u32 cols, u32 batch, const void* bias, u32 bias_dtype, u32 add,    \
             float* out) {                                                                                             \
        function({static_cast<const uint4*>(w), x, rows, cols, batch, bias, bias_dtype, add, out});                    \
    }                                                                                                                  \
    SHIM_EXPORT(name)

MATMUL(matmul_bf16_narrow, 2, narrow<Bf16>)
MATMUL(matmul_f16_narrow, 2, narrow<F16>)
MATMUL(matmul_f32_narrow, 2, narrow<F32>)
MATMUL(matmul_bf16_wide, 2, wide<Bf16>)
MATMUL(matmul_f16_wide, 1, wide<F16>)
MATMUL(matmul_f32_wide, 1, wide<F32>)
