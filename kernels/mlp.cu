// The gate of a SwiGLU layer (Shazeer 2020, "GLU Variants Improve Transformer").

#include "common.cuh"

/// `out = silu(gate) * up` for rows of `gate | up`, each of `width`, equal bit for bit to the CPU device's. Grid (any,
/// rows).
extern "C" __global__ void silu_mul(const float* gate_up, u32 width, float* out) {
    const float* gate = gate_up + u64(blockIdx.y) * width * 2;
    const float* up = gate + width;
    float* to = out + u64(blockIdx.y) * width;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x) {
        to[i] = gate[i] / (1.0f + exp_f32(0.0f - gate[i])) * up[i];
    }
}
SHIM_EXPORT(silu_mul)
