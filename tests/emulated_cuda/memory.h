// Device memory: what is taken from a device's account, and which addresses are whose.
#pragma once
#include "driver.h"

// Takes `size` bytes of the device's memory, filled with the device's garbage. False: over the limit.
bool take_memory(Device& device, uint64_t size, uint64_t* offset);
void give_memory_back(Device& device, uint64_t offset, uint64_t size);

// The file that holds all memory of the device.
int memory_file(Device& device);

// Memory without access and without pages behind it, aligned; null if there is none.
uint64_t reserve_addresses(uint64_t size, uint64_t alignment);
// Turns a range into such memory again: a later touch faults.
void forget_addresses(uint64_t start, uint64_t size);

// Whether all of the range is memory of the device that kernels and copies may use.
bool is_device_memory(const Device& device, uint64_t start, uint64_t size);
// Whether any of it is an address of some device.
bool meets_device_addresses(uint64_t start, uint64_t size);

enum class HostMemory { PAGEABLE, PINNED, INVALID };
// What a copy may do with the range: a range that is pinned in part only is refused by real drivers.
HostMemory host_memory(const void* start, uint64_t size);

inline bool is_power_of_two(uint64_t value) { return value && !(value & (value - 1)); }
