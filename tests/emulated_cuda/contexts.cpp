// Initialisation, errors, devices and their primary contexts.
#include <cstdio>
#include <map>

#include "driver.h"

static thread_local CUcontext current_context;

static CUcontext context_of(Device& device) { return reinterpret_cast<CUcontext>(&device); }

Device* current_device() { return reinterpret_cast<Device*>(current_context); }

static Device* device_named(int ordinal) {
    return ordinal >= 0 && ordinal < DEVICES ? &driver().device(ordinal) : nullptr;
}

EMULATED_API cuInit(unsigned flags) {
    Call call;
    if (CUresult error = call.begin("cuInit", &driver().device(NO_DEVICE), BEFORE_INIT)) return error;
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    driver().initialised = true;
    return CUDA_SUCCESS;
}

EMULATED_API cuDriverGetVersion(int* version) {
    Call call;
    if (CUresult error = call.begin("cuDriverGetVersion", &driver().device(NO_DEVICE), BEFORE_INIT)) return error;
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = 13000;
    return CUDA_SUCCESS;
}

#define ERROR_NAME(name) {name, #name}
static const std::map<int, const char*> ERROR_NAMES = {
    ERROR_NAME(CUDA_SUCCESS),
    ERROR_NAME(CUDA_ERROR_INVALID_VALUE),
    ERROR_NAME(CUDA_ERROR_OUT_OF_MEMORY),
    ERROR_NAME(CUDA_ERROR_NOT_INITIALIZED),
    ERROR_NAME(CUDA_ERROR_DEINITIALIZED),
    ERROR_NAME(CUDA_ERROR_NO_DEVICE),
    ERROR_NAME(CUDA_ERROR_INVALID_DEVICE),
    ERROR_NAME(CUDA_ERROR_INVALID_IMAGE),
    ERROR_NAME(CUDA_ERROR_INVALID_CONTEXT),
    ERROR_NAME(CUDA_ERROR_MAP_FAILED),
    ERROR_NAME(CUDA_ERROR_UNMAP_FAILED),
    ERROR_NAME(CUDA_ERROR_NO_BINARY_FOR_GPU),
    ERROR_NAME(CUDA_ERROR_ECC_UNCORRECTABLE),
    ERROR_NAME(CUDA_ERROR_OPERATING_SYSTEM),
    ERROR_NAME(CUDA_ERROR_INVALID_HANDLE),
    ERROR_NAME(CUDA_ERROR_ILLEGAL_STATE),
    ERROR_NAME(CUDA_ERROR_NOT_FOUND),
    ERROR_NAME(CUDA_ERROR_NOT_READY),
    ERROR_NAME(CUDA_ERROR_ILLEGAL_ADDRESS),
    ERROR_NAME(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES),
    ERROR_NAME(CUDA_ERROR_LAUNCH_TIMEOUT),
    ERROR_NAME(CUDA_ERROR_CONTEXT_IS_DESTROYED),
    ERROR_NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
    ERROR_NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
    ERROR_NAME(CUDA_ERROR_LAUNCH_FAILED),
    ERROR_NAME(CUDA_ERROR_NOT_PERMITTED),
    ERROR_NAME(CUDA_ERROR_NOT_SUPPORTED),
    ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
    ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
    ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_MERGE),
    ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED),
    ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_UNJOINED),
    ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
    ERROR_NAME(CUDA_ERROR_CAPTURED_EVENT),
    ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD),
    ERROR_NAME(CUDA_ERROR_UNKNOWN),
};

// These two describe errors, also those of calls before cuInit: they are not counted and never fail by injection.
static CUresult describe(CUresult error, const char* prefix, const char** text) {
    static std::map<int, std::string> texts;
    static std::mutex mutex;
    auto name = ERROR_NAMES.find(error);
    if (!text || name == ERROR_NAMES.end()) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard<std::mutex> lock(mutex);
    *text = *prefix ? (texts[error] = std::string(prefix) + name->second).c_str() : name->second;
    return CUDA_SUCCESS;
}

EMULATED_API cuGetErrorName(CUresult error, const char** text) { return describe(error, "", text); }

EMULATED_API cuGetErrorString(CUresult error, const char** text) { return describe(error, "emulated: ", text); }

EMULATED_API cuDeviceGetCount(int* count) {
    Call call;
    if (CUresult error = call.begin("cuDeviceGetCount", &driver().device(NO_DEVICE), ANYWHERE)) return error;
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    *count = DEVICES;
    return CUDA_SUCCESS;
}

EMULATED_API cuDeviceGet(CUdevice* device, int ordinal) {
    Call call;
    Device* named = device_named(ordinal);
    if (CUresult error = call.begin("cuDeviceGet", named, ANYWHERE)) return error;
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    if (!named) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EMULATED_API cuDeviceGetName(char* name, int size, CUdevice ordinal) {
    Call call;
    Device* named = device_named(ordinal);
    if (CUresult error = call.begin("cuDeviceGetName", named, ANYWHERE)) return error;
    if (!name || size <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!named) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, size_t(size), "Emulated CUDA device %d (CPU)", ordinal);
    return CUDA_SUCCESS;
}

// CU_DEVICE_ATTRIBUTE_*: what an H200 says, but for the PCI address and the number of its processors.
static const std::map<int, int> ATTRIBUTES = {
    {1, 1024},         // MAX_THREADS_PER_BLOCK
    {2, 1024},         // MAX_BLOCK_DIM_X
    {3, 1024},         // MAX_BLOCK_DIM_Y
    {4, 64},           // MAX_BLOCK_DIM_Z
    {5, 0x7fffffff},   // MAX_GRID_DIM_X
    {6, 65535},        // MAX_GRID_DIM_Y
    {7, 65535},        // MAX_GRID_DIM_Z
    {8, 48 << 10},     // MAX_SHARED_MEMORY_PER_BLOCK
    {9, 64 << 10},     // TOTAL_CONSTANT_MEMORY
    {10, 32},          // WARP_SIZE
    {12, 65536},       // MAX_REGISTERS_PER_BLOCK
    {13, 1980000},     // CLOCK_RATE
    {16, 4},           // MULTIPROCESSOR_COUNT
    {17, 0},           // KERNEL_EXEC_TIMEOUT
    {18, 0},           // INTEGRATED
    {19, 1},           // CAN_MAP_HOST_MEMORY
    {20, 0},           // COMPUTE_MODE
    {31, 1},           // CONCURRENT_KERNELS
    {32, 1},           // ECC_ENABLED
    {33, 0},           // PCI_BUS_ID
    {34, 0},           // PCI_DEVICE_ID
    {38, 60 << 20},    // L2_CACHE_SIZE
    {39, 2048},        // MAX_THREADS_PER_MULTIPROCESSOR
    {40, 3},           // ASYNC_ENGINE_COUNT
    {41, 1},           // UNIFIED_ADDRESSING
    {50, 0},           // PCI_DOMAIN_ID
    {75, 9},           // COMPUTE_CAPABILITY_MAJOR
    {76, 0},           // COMPUTE_CAPABILITY_MINOR
    {81, 228 << 10},   // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    {82, 65536},       // MAX_REGISTERS_PER_MULTIPROCESSOR
    {83, 0},           // MANAGED_MEMORY
    {88, 0},           // PAGEABLE_MEMORY_ACCESS
    {95, 1},           // COOPERATIVE_LAUNCH
    {97, 227 << 10},   // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    {99, 1},           // HOST_REGISTER_SUPPORTED
    {100, 0},          // PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
    {102, 1},          // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    {103, 0},          // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    {106, 32},         // MAX_BLOCKS_PER_MULTIPROCESSOR
    {111, 1 << 10},    // RESERVED_SHARED_MEMORY_PER_BLOCK
    {113, 1},          // READ_ONLY_HOST_REGISTER_SUPPORTED
    {115, 0},          // MEMORY_POOLS_SUPPORTED
};

EMULATED_API cuDeviceGetAttribute(int* value, int attribute, CUdevice ordinal) {
    Call call;
    Device* named = device_named(ordinal);
    if (CUresult error = call.begin("cuDeviceGetAttribute", named, ANYWHERE)) return error;
    if (!named) return CUDA_ERROR_INVALID_DEVICE;
    auto known = ATTRIBUTES.find(attribute);
    if (!value || known == ATTRIBUTES.end()) return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == 33 ? ordinal % 256 : attribute == 50 ? ordinal / 256 : known->second;
    return CUDA_SUCCESS;
}

EMULATED_API cuDeviceTotalMem_v2(size_t* bytes, CUdevice ordinal) {
    Call call;
    Device* named = device_named(ordinal);
    if (CUresult error = call.begin("cuDeviceTotalMem", named, ANYWHERE)) return error;
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    if (!named) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = named->limit;
    return CUDA_SUCCESS;
}

EMULATED_API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
    Call call;
    Device* named = device_named(ordinal);
    if (CUresult error = call.begin("cuDevicePrimaryCtxRetain", named, ANYWHERE)) return error;
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    if (!named) return CUDA_ERROR_INVALID_DEVICE;
    named->retained++;
    named->alive(Live::CONTEXTS)++;
    *context = context_of(*named);
    return CUDA_SUCCESS;
}

// A real driver ends all that the context holds. Here that stays, and stays counted: it was forgotten.
EMULATED_API cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    Call call;
    Device* named = device_named(ordinal);
    if (CUresult error = call.begin("cuDevicePrimaryCtxRelease", named, ANYWHERE)) return error;
    if (!named) return CUDA_ERROR_INVALID_DEVICE;
    if (!named->retained) return CUDA_ERROR_INVALID_CONTEXT;
    if (named->retained == 1) expect_unused(call, *named, [](const Work&) { return true; });
    named->retained--;
    named->alive(Live::CONTEXTS)--;
    return CUDA_SUCCESS;
}

EMULATED_API cuCtxSetCurrent(CUcontext context) {
    Call call;
    Device* named = nullptr;
    for (auto& device : driver().devices)
        if (context == context_of(*device.second)) named = device.second.get();
    if (CUresult error = call.begin("cuCtxSetCurrent", named, ANYWHERE)) return error;
    if (context && (!named || !named->retained)) return CUDA_ERROR_INVALID_CONTEXT;
    current_context = context;
    return CUDA_SUCCESS;
}

EMULATED_API cuCtxGetCurrent(CUcontext* context) {
    Call call;
    if (CUresult error = call.begin("cuCtxGetCurrent", nullptr, ANYWHERE)) return error;
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    *context = current_context;
    return CUDA_SUCCESS;
}

EMULATED_API cuCtxSynchronize() {
    Call call;
    if (CUresult error = call.begin("cuCtxSynchronize", nullptr, NEEDS_CONTEXT)) return error;
    // Forbidden during any capture, whatever its mode.
    bool capturing = false;
    for (auto& stream : call.device->streams)
        if (stream->capture) stream->capture->invalidated = capturing = true;
    if (capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    finish(call, *call.device, everything_on(*call.device));
    return CUDA_SUCCESS;
}
