// Virtual memory management: address ranges, physical memory, and mapping the one at the other.
//
// A range is memory without access. Physical memory is a piece of the device's memory file; mapping maps it into the
// range, still without access. It goes back to the device when its handle is released and nothing maps it any more.
#include <sys/mman.h>

#include <algorithm>

#include "memory.h"

static bool is_multiple(const Device& device, uint64_t size) { return size % device.granularity == 0; }

static Device* device_of_handle(CUmemGenericAllocationHandle handle) {
    auto* physical = find(driver().physical, handle);
    return physical ? physical->device : nullptr;
}

static Device* device_around(uint64_t address) {
    auto range = find_around(driver().ranges, address);
    return range == driver().ranges.end() ? nullptr : range->second.device;
}

static void free_if_unused(CUmemGenericAllocationHandle handle) {
    Physical& physical = driver().physical.at(handle);
    if (!physical.released || physical.mappings) return;
    give_memory_back(*physical.device, physical.offset, physical.size);
    driver().physical.erase(handle);
}

static CUresult device_of_properties(const CUmemAllocationProp* properties, Device** device) {
    if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (properties->requested_handle_types) return CUDA_ERROR_NOT_SUPPORTED;
    if (properties->location.id < 0 || properties->location.id >= DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *device = &driver().device(properties->location.id);
    return CUDA_SUCCESS;
}

EMULATED_API cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties, unsigned) {
    Call call;
    Device* device = nullptr;
    CUresult invalid = device_of_properties(properties, &device);
    if (CUresult error = call.begin("cuMemGetAllocationGranularity", device, ANYWHERE)) return error;
    if (invalid) return invalid;
    if (!granularity) return CUDA_ERROR_INVALID_VALUE;
    *granularity = device->granularity;
    return CUDA_SUCCESS;
}

EMULATED_API cuMemAddressReserve(CUdeviceptr* start, size_t size, size_t alignment, CUdeviceptr,
                                 unsigned long long flags) {
    Call call;
    if (CUresult error = call.begin("cuMemAddressReserve", nullptr, ANYWHERE)) return error;
    Device& device = *call.device;
    if (!start || flags || !size || !is_multiple(device, size)) return CUDA_ERROR_INVALID_VALUE;
    if (alignment && !is_power_of_two(alignment)) return CUDA_ERROR_INVALID_VALUE;
    uint64_t address = reserve_addresses(size, std::max<uint64_t>(alignment, device.granularity));
    if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
    driver().ranges[address] = {&device, size, {}};
    device.alive(Live::ADDRESS_RANGES)++;
    *start = address;
    return CUDA_SUCCESS;
}

EMULATED_API cuMemAddressFree(CUdeviceptr start, size_t size) {
    Call call;
    if (CUresult error = call.begin("cuMemAddressFree", device_around(start), ANYWHERE)) return error;
    auto* range = find(driver().ranges, start);
    if (!range || range->size != size || !range->mappings.empty()) return CUDA_ERROR_INVALID_VALUE;
    range->device->alive(Live::ADDRESS_RANGES)--;
    munmap(reinterpret_cast<void*>(start), size);
    driver().ranges.erase(start);
    return CUDA_SUCCESS;
}

EMULATED_API cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                         unsigned long long flags) {
    Call call;
    Device* device = nullptr;
    CUresult invalid = device_of_properties(properties, &device);
    if (CUresult error = call.begin("cuMemCreate", device, NOT_IN_CAPTURE)) return error;
    if (invalid) return invalid;
    if (!handle || flags || !size || !is_multiple(*device, size)) return CUDA_ERROR_INVALID_VALUE;
    Physical physical{device, 0, size};
    if (!take_memory(*device, size, &physical.offset)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = driver().next_handle += 16;
    driver().physical[*handle] = physical;
    device->alive(Live::PHYSICAL_HANDLES)++;
    return CUDA_SUCCESS;
}

EMULATED_API cuMemRelease(CUmemGenericAllocationHandle handle) {
    Call call;
    if (CUresult error = call.begin("cuMemRelease", device_of_handle(handle), NOT_IN_CAPTURE)) return error;
    auto* physical = find(driver().physical, handle);
    if (!physical || physical->released) return CUDA_ERROR_INVALID_VALUE;
    physical->device->alive(Live::PHYSICAL_HANDLES)--;
    physical->released = true;
    free_if_unused(handle);
    return CUDA_SUCCESS;
}

EMULATED_API cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) {
    Call call;
    if (CUresult error = call.begin("cuMemMap", device_of_handle(handle), NOT_IN_CAPTURE)) return error;
    auto* physical = find(driver().physical, handle);
    if (!physical || physical->released || offset || flags || !size) return CUDA_ERROR_INVALID_VALUE;
    if (size > physical->size || !is_multiple(*physical->device, size)) return CUDA_ERROR_INVALID_VALUE;
    auto range = find_around(driver().ranges, start);
    if (range == driver().ranges.end() || size > range->first + range->second.size - start)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_multiple(*physical->device, start - range->first)) return CUDA_ERROR_INVALID_VALUE;
    auto& mappings = range->second.mappings;
    auto next = mappings.lower_bound(start);
    bool overlaps = next != mappings.end() && next->first < start + size;
    if (overlaps || find_around(mappings, start) != mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    void* mapped = mmap(reinterpret_cast<void*>(start), size, PROT_NONE, MAP_SHARED | MAP_FIXED,
                        memory_file(*physical->device), off_t(physical->offset));
    if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    mappings[start] = {size, handle};
    physical->mappings++;
    physical->device->alive(Live::MAPPINGS)++;
    return CUDA_SUCCESS;
}

// The mappings that make up exactly the range, without a hole; none if the range is not of that kind.
static std::vector<std::pair<const uint64_t, Mapping>*> whole_mappings(uint64_t start, uint64_t size) {
    std::vector<std::pair<const uint64_t, Mapping>*> whole;
    auto range = find_around(driver().ranges, start);
    if (range == driver().ranges.end() || !size) return whole;
    uint64_t at = start;
    while (at < start + size) {
        auto mapping = range->second.mappings.find(at);
        if (mapping == range->second.mappings.end()) return {};
        whole.push_back(&*mapping);
        at += mapping->second.size;
    }
    if (at != start + size) whole.clear();
    return whole;
}

EMULATED_API cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc* descriptions, size_t count) {
    Call call;
    if (CUresult error = call.begin("cuMemSetAccess", device_around(start), NOT_IN_CAPTURE)) return error;
    auto mappings = whole_mappings(start, size);
    if (mappings.empty() || !descriptions || count != 1) return CUDA_ERROR_INVALID_VALUE;
    int access = descriptions->flags, location = descriptions->location.id;
    if (descriptions->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    bool known = access == CU_MEM_ACCESS_FLAGS_PROT_NONE || access == CU_MEM_ACCESS_FLAGS_PROT_READ ||
                 access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!known) return CUDA_ERROR_INVALID_VALUE;
    for (auto* mapping : mappings)  // other devices have no access to this one's memory
        if (driver().physical.at(mapping->second.handle).device->ordinal != location) return CUDA_ERROR_INVALID_DEVICE;
    int protection = access == CU_MEM_ACCESS_FLAGS_PROT_NONE   ? PROT_NONE
                     : access == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ
                                                               : PROT_READ | PROT_WRITE;
    if (mprotect(reinterpret_cast<void*>(start), size, protection)) return CUDA_ERROR_OUT_OF_MEMORY;
    for (auto* mapping : mappings) mapping->second.access = access;
    return CUDA_SUCCESS;
}

EMULATED_API cuMemUnmap(CUdeviceptr start, size_t size) {
    Call call;
    if (CUresult error = call.begin("cuMemUnmap", device_around(start), NOT_IN_CAPTURE)) return error;
    if (whole_mappings(start, size).empty()) return CUDA_ERROR_INVALID_VALUE;
    expect_unused(call, *call.device, {start, size});
    // Waiting for that work let other threads in.
    auto mappings = whole_mappings(start, size);
    if (mappings.empty()) return CUDA_ERROR_INVALID_VALUE;
    forget_addresses(start, size);
    auto& range = find_around(driver().ranges, start)->second;
    for (auto* mapping : mappings) {
        uint64_t at = mapping->first;
        auto handle = mapping->second.handle;
        Physical& physical = driver().physical.at(handle);
        physical.mappings--;
        physical.device->alive(Live::MAPPINGS)--;
        range.mappings.erase(at);
        free_if_unused(handle);
    }
    return CUDA_SUCCESS;
}
