// Kernels for the tests of the emulated driver itself.
#ifndef CUDA_CPU_SHIM
#error "only for the emulated driver"
#endif

// y = a * x + y.
extern "C" __global__ void probe_saxpy(float a, const float* x, float* y, unsigned count) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = fmaf(a, x[i], y[i]);
}
SHIM_EXPORT(probe_saxpy)

// The sum of a block's values, through dynamic shared memory.
extern "C" __global__ void probe_block_sum(const float* x, float* sums) {
    DYN_SHARED(float, shared);
    shared[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    if (threadIdx.x != 0) return;
    float sum = 0;
    for (unsigned i = 0; i < blockDim.x; i++) sum += shared[i];
    sums[blockIdx.x] = sum;
}
SHIM_EXPORT(probe_block_sum)
