// Device memory by cuMemAlloc, pinned host memory, and what an address is.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>

#include "memory.h"

static Device* device_of_allocation(uint64_t start) {
    auto* allocation = find(driver().allocations, start);
    return allocation ? allocation->device : nullptr;
}

static Device* device_of_pinned(const void* memory) {
    auto* pinned = find(driver().pinned, reinterpret_cast<uint64_t>(memory));
    return pinned ? pinned->device : nullptr;
}

EMULATED_API cuMemAlloc_v2(CUdeviceptr* start, size_t size) {
    Call call;
    if (CUresult error = call.begin("cuMemAlloc", nullptr, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    Device& device = *call.device;
    if (!start || !size || size > SIZE_MAX - 512) return CUDA_ERROR_INVALID_VALUE;
    size = (size + 511) / 512 * 512;
    Allocation allocation{&device, size, 0, {}};
    if (!take_memory(device, size, &allocation.offset)) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t address = reserve_addresses(size, 512);
    int access = PROT_READ | PROT_WRITE, file = memory_file(device);
    void* at = reinterpret_cast<void*>(address);
    if (!address || mmap(at, size, access, MAP_SHARED | MAP_FIXED, file, off_t(allocation.offset)) == MAP_FAILED) {
        give_memory_back(device, allocation.offset, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    driver().allocations[address] = allocation;
    device.alive(Live::ALLOCATIONS)++;
    *start = address;
    return CUDA_SUCCESS;
}

// The addresses are not given out again: a touch after this faults.
EMULATED_API cuMemFree_v2(CUdeviceptr start) {
    Call call;
    Device* named = device_of_allocation(start);
    if (CUresult error = call.begin("cuMemFree", named, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    if (!start) return CUDA_SUCCESS;
    if (!named || !driver().allocations.at(start).imported.empty()) return CUDA_ERROR_INVALID_VALUE;
    expect_unused(call, *named, {start, driver().allocations.at(start).size});
    auto* allocation = find(driver().allocations, start);
    if (!allocation) return CUDA_ERROR_INVALID_VALUE;  // waiting for that work let other threads in
    forget_addresses(start, allocation->size);
    give_memory_back(*named, allocation->offset, allocation->size);
    named->alive(Live::ALLOCATIONS)--;
    driver().allocations.erase(start);
    return CUDA_SUCCESS;
}

// What the process may do with its memory at [start, start + size): the least of all pages, -1 if some are missing.
static int host_access(uint64_t start, uint64_t size) {
    FILE* maps = fopen("/proc/self/maps", "r");
    if (!maps) return PROT_READ | PROT_WRITE;
    uint64_t at = start, low, high;
    int least = PROT_READ | PROT_WRITE;
    char read, write, line[512];
    while (at < start + size && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %c%c", &low, &high, &read, &write) != 4 || high <= at) continue;
        if (low > at) break;
        least &= (read == 'r' ? PROT_READ : 0) | (write == 'w' ? PROT_WRITE : 0);
        at = high;
    }
    fclose(maps);
    return at < start + size ? -1 : least;
}

EMULATED_API cuMemHostRegister_v2(void* memory, size_t size, unsigned flags) {
    Call call;
    if (CUresult error = call.begin("cuMemHostRegister", nullptr, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    constexpr unsigned PORTABLE = 1, DEVICE_MAP = 2, READ_ONLY = CU_MEMHOSTREGISTER_READ_ONLY;
    if (!memory || !size || flags & ~(PORTABLE | DEVICE_MAP | READ_ONLY)) return CUDA_ERROR_INVALID_VALUE;
    uint64_t start = reinterpret_cast<uint64_t>(memory);
    if (meets_device_addresses(start, size)) return CUDA_ERROR_INVALID_VALUE;
    if (host_memory(memory, size) != HostMemory::PAGEABLE) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    int needed = flags & READ_ONLY ? PROT_READ : PROT_READ | PROT_WRITE, access = host_access(start, size);
    if (access < 0 || (access & needed) != needed) return CUDA_ERROR_INVALID_VALUE;
    driver().pinned[start] = {call.device, size, true};
    call.device->alive(Live::HOST_REGISTRATIONS)++;
    return CUDA_SUCCESS;
}

EMULATED_API cuMemHostUnregister(void* memory) {
    Call call;
    Device* named = device_of_pinned(memory);
    if (CUresult error = call.begin("cuMemHostUnregister", named, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    uint64_t start = reinterpret_cast<uint64_t>(memory);
    auto* pinned = find(driver().pinned, start);
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    if (!pinned || !pinned->registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    expect_unused(call, *named, {start, pinned->size});
    named->alive(Live::HOST_REGISTRATIONS) -= int64_t(driver().pinned.erase(start));
    return CUDA_SUCCESS;
}

EMULATED_API cuMemHostAlloc(void** memory, size_t size, unsigned flags) {
    Call call;
    if (CUresult error = call.begin("cuMemHostAlloc", nullptr, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    if (!memory || !size || flags & ~7u) return CUDA_ERROR_INVALID_VALUE;
    void* fresh = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    driver().pinned[reinterpret_cast<uint64_t>(fresh)] = {call.device, size, false};
    call.device->alive(Live::HOST_ALLOCATIONS)++;
    *memory = fresh;
    return CUDA_SUCCESS;
}

EMULATED_API cuMemFreeHost(void* memory) {
    Call call;
    Device* named = device_of_pinned(memory);
    if (CUresult error = call.begin("cuMemFreeHost", named, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    if (!memory) return CUDA_SUCCESS;
    uint64_t start = reinterpret_cast<uint64_t>(memory);
    auto* pinned = find(driver().pinned, start);
    if (!pinned || pinned->registered) return CUDA_ERROR_INVALID_VALUE;
    uint64_t size = pinned->size;
    expect_unused(call, *named, {start, size});
    if (!driver().pinned.erase(start)) return CUDA_ERROR_INVALID_VALUE;
    named->alive(Live::HOST_ALLOCATIONS)--;
    munmap(memory, size);
    return CUDA_SUCCESS;
}

// An address and the allocation, mapping or pinned host memory that it is in.
struct Located {
    Device* device = nullptr;
    unsigned type = 0;
    Span span{0, 0};
    // What the driver calls the range: of mapped memory the whole reservation.
    Span range{0, 0};
};

static Located located(Device* device, unsigned type, Span span) { return {device, type, span, span}; }

static Located locate(uint64_t address) {
    auto& state = driver();
    auto allocation = find_around(state.allocations, address);
    if (allocation != state.allocations.end())
        return located(allocation->second.device, CU_MEMORYTYPE_DEVICE, {allocation->first, allocation->second.size});
    auto pinned = find_around(state.pinned, address);
    if (pinned != state.pinned.end())
        return located(pinned->second.device, CU_MEMORYTYPE_HOST, {pinned->first, pinned->second.size});
    auto range = find_around(state.ranges, address);
    if (range == state.ranges.end()) return {};
    auto mapping = find_around(range->second.mappings, address);
    if (mapping == range->second.mappings.end()) return {};
    Device* device = state.physical.at(mapping->second.handle).device;
    return {device, CU_MEMORYTYPE_DEVICE, {mapping->first, mapping->second.size}, {range->first, range->second.size}};
}

EMULATED_API cuPointerGetAttribute(void* data, int attribute, CUdeviceptr address) {
    Call call;
    Located located = locate(address);
    if (CUresult error = call.begin("cuPointerGetAttribute", located.device, ANYWHERE)) return error;
    if (!data || !located.device) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(data) = located.type;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *static_cast<int*>(data) = located.device->ordinal;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            *static_cast<uint64_t*>(data) = located.range.start;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            *static_cast<size_t*>(data) = located.range.size;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MAPPED:
            *static_cast<bool*>(data) = true;
            return CUDA_SUCCESS;
        default:
            return CUDA_ERROR_INVALID_VALUE;
    }
}

// The allocation or the one mapping that an address is in.
EMULATED_API cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* size, CUdeviceptr address) {
    Call call;
    Located located = locate(address);
    if (CUresult error = call.begin("cuMemGetAddressRange", located.device, NEEDS_CONTEXT)) return error;
    if (!located.device || located.type != CU_MEMORYTYPE_DEVICE) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = located.span.start;
    if (size) *size = located.span.size;
    return CUDA_SUCCESS;
}

EMULATED_API cuMemGetInfo_v2(size_t* free, size_t* total) {
    Call call;
    if (CUresult error = call.begin("cuMemGetInfo", nullptr, NEEDS_CONTEXT)) return error;
    if (!free || !total) return CUDA_ERROR_INVALID_VALUE;
    *total = call.device->limit;
    *free = call.device->limit - std::min(call.device->used, call.device->limit);
    return CUDA_SUCCESS;
}
