// Modules, functions and launches. A kernel is one of the .cu files' that are linked into this library: the shim
// exports NAME__cpu, which runs it, and NAME__info, which tells the sizes of its parameters.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "memory.h"

constexpr unsigned FAT_BINARY_MAGIC = 0xBA55ED50;
constexpr unsigned STATIC_LIMIT = 48 << 10, DYNAMIC_LIMIT = 227 << 10;

// As the shim has it.
struct ShimKernel {
    uint32_t count;
    uint32_t bytes[24];
};
using ShimEntry = void (*)(const unsigned* grid, const unsigned* block, size_t shared, void** parameters,
                           unsigned threads);

struct Function {
    Device* device;
    CUmodule module;
    std::string name;
    ShimEntry entry;
    const ShimKernel* info;
    unsigned shared_limit = STATIC_LIMIT;
};

static Device* device_of(CUmodule handle) {
    auto* module = find(driver().modules, handle);
    return module ? module->device : nullptr;
}

static Device* device_of(CUfunction handle) {
    auto* function = find(driver().functions, handle);
    return function ? (*function)->device : nullptr;
}

// A symbol of this library, wherever it was loaded from.
static void* own_symbol(const std::string& name) {
    static void* library = [] {
        Dl_info info;
        return dladdr(reinterpret_cast<void*>(&driver), &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD)
                                                               : nullptr;
    }();
    return library ? dlsym(library, name.c_str()) : nullptr;
}

EMULATED_API cuModuleLoadData(CUmodule* handle, const void* image) {
    Call call;
    if (CUresult error = call.begin("cuModuleLoadData", nullptr, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    if (!handle || !image) return CUDA_ERROR_INVALID_VALUE;
    unsigned magic;
    memcpy(&magic, image, sizeof magic);
    if (magic != FAT_BINARY_MAGIC) return CUDA_ERROR_INVALID_IMAGE;
    *handle = driver().new_handle<CUmodule>();
    driver().modules[*handle] = {call.device, {}};
    call.device->alive(Live::MODULES)++;
    return CUDA_SUCCESS;
}

EMULATED_API cuModuleUnload(CUmodule handle) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuModuleUnload", named, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    if (!named) return invalid_handle(call, handle);
    expect_unused(call, *named, [=](const Work& work) { return work.module == handle; });
    auto* module = find(driver().modules, handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    for (auto& function : module->functions) driver().functions.erase(function.second);
    driver().modules.erase(handle);
    named->alive(Live::MODULES)--;
    return CUDA_SUCCESS;
}

EMULATED_API cuModuleGetFunction(CUfunction* handle, CUmodule module_handle, const char* name) {
    Call call;
    Device* named = device_of(module_handle);
    if (CUresult error = call.begin("cuModuleGetFunction", named, NEEDS_CONTEXT)) return error;
    if (!handle || !name) return CUDA_ERROR_INVALID_VALUE;
    if (!named) return invalid_handle(call, module_handle);
    Module& module = driver().modules.at(module_handle);
    if (auto* known = find(module.functions, std::string(name))) {
        *handle = *known;
        return CUDA_SUCCESS;
    }
    auto entry = reinterpret_cast<ShimEntry>(own_symbol(std::string(name) + "__cpu"));
    auto info = static_cast<const ShimKernel*>(own_symbol(std::string(name) + "__info"));
    if (!entry || !info) return CUDA_ERROR_NOT_FOUND;
    *handle = module.functions[name] = driver().new_handle<CUfunction>();
    driver().functions[*handle] = std::make_shared<Function>(Function{named, module_handle, name, entry, info});
    return CUDA_SUCCESS;
}

EMULATED_API cuFuncSetAttribute(CUfunction handle, int attribute, int value) {
    Call call;
    if (CUresult error = call.begin("cuFuncSetAttribute", device_of(handle), NEEDS_CONTEXT)) return error;
    auto* function = find(driver().functions, handle);
    if (!function) return invalid_handle(call, handle);
    if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)
        return value >= -1 && value <= 100 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    bool known = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    if (!known || value < 0 || unsigned(value) > DYNAMIC_LIMIT) return CUDA_ERROR_INVALID_VALUE;
    (*function)->shared_limit = std::max(STATIC_LIMIT, unsigned(value));
    return CUDA_SUCCESS;
}

struct Shape {
    unsigned grid[3], block[3], shared;
};

static bool fits(const Function& function, const Shape& shape) {
    const unsigned* grid = shape.grid;
    const unsigned* block = shape.block;
    for (int i = 0; i < 3; i++)
        if (!grid[i] || !block[i]) return false;
    if (grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535) return false;
    if (block[0] > 1024 || block[1] > 1024 || block[2] > 64 || block[0] * block[1] * block[2] > 1024) return false;
    return shape.shared <= function.shared_limit;
}

// The parameters as they were at the launch, each in words of its own.
struct Parameters {
    std::vector<std::vector<uint64_t>> values;

    Parameters(const ShimKernel& info, void** from) {
        for (uint32_t i = 0; i < info.count; i++) {
            values.emplace_back((info.bytes[i] + 7) / 8);
            memcpy(values.back().data(), from[i], info.bytes[i]);
        }
    }

    // What of them is an address of memory that kernels may use now: most likely they will.
    std::vector<uint64_t> pointers(const Device& device) const {
        std::vector<uint64_t> found;
        for (auto& value : values)
            for (uint64_t word : value)
                if (is_device_memory(device, word, 1) || find_around(driver().pinned, word) != driver().pinned.end())
                    found.push_back(word);
        return found;
    }
};

static Work launch(const Function& function, const Shape& shape, void** from) {
    auto parameters = std::make_shared<Parameters>(*function.info, from);
    Work work;
    work.name = "kernel " + function.name + " on device " + std::to_string(function.device->ordinal);
    work.pointers = parameters->pointers(*function.device);
    work.module = function.module;
    work.run = [entry = function.entry, shape, parameters, threads = driver().threads] {
        std::vector<void*> pointers;
        for (auto& value : parameters->values) pointers.push_back(value.data());
        entry(shape.grid, shape.block, shape.shared, pointers.data(), threads);
    };
    return work;
}

EMULATED_API cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream_handle,
                            void** parameters, void** extra) {
    Call call;
    auto* function = find(driver().functions, handle);
    auto* stream = find(driver().streams, stream_handle);
    Device* named = function ? (*function)->device : stream ? (*stream)->device : nullptr;
    if (CUresult error = call.begin("cuLaunchKernel", named, NEEDS_CONTEXT)) return error;
    if (!function) return invalid_handle(call, handle);
    if (!stream) return invalid_handle(call, stream_handle);
    if ((*stream)->device != named || current_device() != named) return CUDA_ERROR_INVALID_HANDLE;
    Shape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared};
    if (extra || !fits(**function, shape)) return CUDA_ERROR_INVALID_VALUE;
    const ShimKernel& info = *(*function)->info;
    for (uint32_t i = 0; i < info.count; i++)
        if (!parameters || !parameters[i]) return CUDA_ERROR_INVALID_VALUE;
    return submit(call, std::shared_ptr<Stream>(*stream), launch(**function, shape, parameters));
}

EMULATED_API cuGraphCreate(CUgraph* graph, unsigned flags) {
    Call call;
    Device* named = current_device();
    if (CUresult error = call.begin("cuGraphCreate", named, NEEDS_CONTEXT)) return error;
    if (!graph || flags) return CUDA_ERROR_INVALID_VALUE;
    *graph = driver().new_handle<CUgraph>();
    driver().graphs[*graph] = {named, {}};
    named->alive(Live::GRAPHS)++;
    return CUDA_SUCCESS;
}

// As in cuda.h.
struct KernelNodeParameters {
    CUfunction function;
    unsigned grid[3], block[3], shared;
    void** parameters;
    void** extra;
    void* kernel;
    void* context;
};

// A node is known by its number in its graph, from 1 on.
EMULATED_API cuGraphAddKernelNode_v2(CUgraphNode* node, CUgraph handle, const CUgraphNode* after, size_t count,
                                     const KernelNodeParameters* launched) {
    Call call;
    auto* graph = find(driver().graphs, handle);
    Device* named = graph ? graph->device : nullptr;
    if (CUresult error = call.begin("cuGraphAddKernelNode", named, NEEDS_CONTEXT)) return error;
    if (!graph) return invalid_handle(call, handle);
    if (!node || !launched || launched->extra || launched->kernel) return CUDA_ERROR_INVALID_VALUE;
    auto* function = find(driver().functions, launched->function);
    if (!function) return invalid_handle(call, launched->function);
    if ((*function)->device != named) return CUDA_ERROR_INVALID_HANDLE;
    const unsigned *grid = launched->grid, *block = launched->block;
    Shape shape{{grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, launched->shared};
    if (!fits(**function, shape)) return CUDA_ERROR_INVALID_VALUE;
    const ShimKernel& info = *(*function)->info;
    for (uint32_t i = 0; i < info.count; i++)
        if (!launched->parameters || !launched->parameters[i]) return CUDA_ERROR_INVALID_VALUE;
    Node added{launch(**function, shape, launched->parameters), {}};
    for (size_t i = 0; i < count; i++) {
        size_t number = reinterpret_cast<size_t>(after[i]);
        if (!number || number > graph->nodes.size()) return CUDA_ERROR_INVALID_VALUE;
        added.after.push_back(number - 1);
    }
    graph->nodes.push_back(std::move(added));
    *node = reinterpret_cast<CUgraphNode>(graph->nodes.size());
    return CUDA_SUCCESS;
}
