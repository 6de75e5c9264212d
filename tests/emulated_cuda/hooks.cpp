// What tests ask of the emulated driver and set in it: see mod.rs. None of this exists in CUDA.
#include <algorithm>
#include <cstring>

#include "driver.h"

#define HOOK(type) extern "C" __attribute__((visibility("default"))) type
using Lock = std::lock_guard<std::mutex>;

HOOK(void) emulated_set_memory_limit(int ordinal, uint64_t bytes) {
    Lock lock(driver().mutex);
    driver().device(ordinal).limit = bytes;
}

HOOK(void) emulated_set_granularity(int ordinal, uint64_t bytes) {
    Lock lock(driver().mutex);
    driver().device(ordinal).granularity = bytes;
}

HOOK(void) emulated_set_fill(int ordinal, unsigned char byte) {
    Lock lock(driver().mutex);
    driver().device(ordinal).fill = byte;
}

HOOK(void) emulated_set_seed(int ordinal, uint64_t seed) {
    Lock lock(driver().mutex);
    driver().device(ordinal).seed = seed;
    driver().device(ordinal).random.seed(seed);
}

HOOK(void) emulated_set_threads(unsigned threads) {
    Lock lock(driver().mutex);
    driver().threads = std::max(1u, threads);
}

HOOK(void) emulated_allow_ipc_to_self(bool allowed) {
    Lock lock(driver().mutex);
    driver().ipc_to_self = allowed;
}

HOOK(uint64_t) emulated_calls(int ordinal) {
    Lock lock(driver().mutex);
    return driver().device(ordinal).calls.size();
}

// The name of a call, from 0; null if there was none.
HOOK(const char*) emulated_call_name(int ordinal, uint64_t index) {
    Lock lock(driver().mutex);
    auto& calls = driver().device(ordinal).calls;
    return index < calls.size() ? calls[index] : nullptr;
}

// The `from_now`-th call (1: the next one) fails once; 0: none does. With a name, only calls of that name are counted.
HOOK(void) emulated_fail_call(int ordinal, const char* name, uint64_t from_now, int error) {
    Lock lock(driver().mutex);
    Faults& faults = driver().device(ordinal).faults;
    faults.once = from_now > 0;
    faults.skipped = from_now - 1;
    faults.only = name ? name : "";
    faults.once_error = CUresult(error);
}

// All calls from the `from_now`-th on fail, and nothing that is queued runs any more; 0: the device works again.
HOOK(void) emulated_fail_calls_from(int ordinal, uint64_t from_now, int error) {
    Lock lock(driver().mutex);
    Device& device = driver().device(ordinal);
    device.faults.from = from_now ? device.calls.size() + from_now : 0;
    device.faults.from_error = CUresult(error);
    device.lost = false;
}

// Whether the injected error of `emulated_fail_call` was not met yet.
HOOK(bool) emulated_fault_pending(int ordinal) {
    Lock lock(driver().mutex);
    return driver().device(ordinal).faults.once;
}

HOOK(uint64_t) emulated_violations(int ordinal) {
    Lock lock(driver().mutex);
    return driver().device(ordinal).violations.size();
}

// The text of a violation, from 0, valid until the process ends; null if there was none.
HOOK(const char*) emulated_violation(int ordinal, uint64_t index) {
    Lock lock(driver().mutex);
    auto& violations = driver().device(ordinal).violations;
    return index < violations.size() ? violations[index].c_str() : nullptr;
}

HOOK(int64_t) emulated_live(int ordinal, unsigned kind) {
    Lock lock(driver().mutex);
    return kind < unsigned(Live::COUNT) ? driver().device(ordinal).live[kind] : -1;
}

HOOK(uint64_t) emulated_used(int ordinal) {
    Lock lock(driver().mutex);
    return driver().device(ordinal).used;
}

// The most that was used since the last call of this.
HOOK(uint64_t) emulated_take_peak(int ordinal) {
    Lock lock(driver().mutex);
    Device& device = driver().device(ordinal);
    uint64_t peak = device.peak;
    device.peak = device.used;
    return peak;
}

// How much work is queued and not done.
HOOK(uint64_t) emulated_queued(int ordinal) {
    Lock lock(driver().mutex);
    uint64_t queued = 0;
    for (auto& stream : driver().device(ordinal).streams) queued += stream->queue.size();
    return queued;
}

// An ordinal that nobody else in this process was given.
HOOK(int) emulated_new_ordinal() {
    static int next = 0;
    Lock lock(driver().mutex);
    return next < DEVICES ? next++ : -1;
}
