#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

constexpr uint64_t PAGE = 4096;

int memory_file(Device& device) {
    if (device.memory < 0) {
        device.memory = memfd_create("emulated device memory", MFD_CLOEXEC);
        // A sparse file: only what was written takes memory.
        if (device.memory < 0 || ftruncate(device.memory, off_t(1) << 46)) {
            perror("emulated CUDA: no memory file");
            abort();
        }
    }
    return device.memory;
}

// Fresh memory of a real device holds whatever was there. Zeros would hide that something was never written. Writing
// garbage costs as much as the memory, so of more than 64 MiB only the first 64 KiB in each 2 MiB are written.
static void fill_with_garbage(Device& device, uint64_t offset, uint64_t size) {
    constexpr uint64_t WHOLE = uint64_t(64) << 20, STEP = uint64_t(2) << 20, PART = uint64_t(64) << 10;
    std::vector<char> garbage(size <= WHOLE ? std::min(size, STEP) : PART, char(device.fill));
    for (uint64_t at = 0; at < size; at += STEP) {
        uint64_t length = std::min<uint64_t>(garbage.size(), size - at);
        if (pwrite(memory_file(device), garbage.data(), length, off_t(offset + at)) != ssize_t(length)) {
            perror("emulated CUDA: device memory");
            abort();
        }
    }
}

bool take_memory(Device& device, uint64_t size, uint64_t* offset) {
    if (device.used + size > device.limit || device.used + size < size) return false;
    *offset = device.next_offset;
    device.next_offset += (size + PAGE - 1) / PAGE * PAGE;
    device.used += size;
    device.peak = std::max(device.peak, device.used);
    fill_with_garbage(device, *offset, size);
    return true;
}

void give_memory_back(Device& device, uint64_t offset, uint64_t size) {
    device.used -= size;
    uint64_t length = (size + PAGE - 1) / PAGE * PAGE;
    if (fallocate(device.memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(length))) {
        perror("emulated CUDA: device memory");
    }
    if (device.used) return;
    close(device.memory);  // a test's device is used no more, most likely
    device.memory = -1;
    device.next_offset = 0;
}

uint64_t reserve_addresses(uint64_t size, uint64_t alignment) {
    alignment = std::max(alignment, PAGE);
    uint64_t length = size + alignment;
    if (length < size) return 0;
    void* memory = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return 0;
    uint64_t start = reinterpret_cast<uint64_t>(memory), aligned = (start + alignment - 1) / alignment * alignment;
    uint64_t end = aligned + (size + PAGE - 1) / PAGE * PAGE;
    if (aligned > start) munmap(memory, aligned - start);
    if (start + length > end) munmap(reinterpret_cast<void*>(end), start + length - end);
    return aligned;
}

void forget_addresses(uint64_t start, uint64_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(reinterpret_cast<void*>(start), size, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
        perror("emulated CUDA: unmapping");
        abort();
    }
}

bool is_device_memory(const Device& device, uint64_t start, uint64_t size) {
    uint64_t end = start + size;
    if (end < start) return false;
    auto allocation = find_around(driver().allocations, start);
    if (allocation != driver().allocations.end()) {
        return allocation->second.device == &device && end <= allocation->first + allocation->second.size;
    }
    auto range = find_around(driver().ranges, start);
    if (range == driver().ranges.end()) return false;
    for (auto& mappings = range->second.mappings; start < end;) {
        auto mapping = find_around(mappings, start);
        if (mapping == mappings.end() || mapping->second.access == CU_MEM_ACCESS_FLAGS_PROT_NONE) return false;
        if (driver().physical.at(mapping->second.handle).device != &device) return false;
        start = mapping->first + mapping->second.size;
    }
    return true;
}

// Whether an entry of `map` (start -> something with a size) meets the range.
template <class Map>
static typename Map::const_iterator meets(const Map& map, uint64_t start, uint64_t size) {
    auto entry = map.lower_bound(start + size);
    if (entry == map.begin()) return map.end();
    --entry;
    return entry->first + entry->second.size > start ? entry : map.end();
}

bool meets_device_addresses(uint64_t start, uint64_t size) {
    auto& state = driver();
    return meets(state.allocations, start, size) != state.allocations.end() ||
           meets(state.ranges, start, size) != state.ranges.end();
}

HostMemory host_memory(const void* memory, uint64_t size) {
    uint64_t start = reinterpret_cast<uint64_t>(memory);
    if (!memory || start + size < start || meets_device_addresses(start, size)) return HostMemory::INVALID;
    auto& pinned = driver().pinned;
    auto entry = meets(pinned, start, size);
    if (entry == pinned.end()) return HostMemory::PAGEABLE;
    bool whole = entry->first <= start && start + size <= entry->first + entry->second.size;
    return whole ? HostMemory::PINNED : HostMemory::INVALID;
}
