// The state of the emulated driver. One mutex guards all of it; work (kernels, copies) runs with the mutex released.
#pragma once
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda_api.h"
#include "queue.h"

constexpr int DEVICES = 1024;
// Calls that belong to no device (cuInit, or an address range reserved without a context) are kept under this ordinal.
constexpr int NO_DEVICE = -1;
constexpr uint64_t FIRST_HANDLE = 0x1000;

// Kinds of things that must all be gone at the end; the order is known to mod.rs.
enum class Live : unsigned {
    ADDRESS_RANGES,
    PHYSICAL_HANDLES,
    MAPPINGS,
    ALLOCATIONS,
    IPC_IMPORTS,
    HOST_REGISTRATIONS,
    HOST_ALLOCATIONS,
    STREAMS,
    EVENTS,
    MODULES,
    GRAPHS,
    GRAPH_EXECS,
    CONTEXTS,
    COUNT,
};

// Which calls fail by injection: once the call after `skipped` others (of those named `only`, if that is set), and all
// calls from number `from` on.
struct Faults {
    bool once = false;
    uint64_t skipped = 0, from = 0;
    std::string only;
    CUresult once_error = CUDA_SUCCESS, from_error = CUDA_SUCCESS;
};

struct Device {
    explicit Device(int ordinal) : ordinal(ordinal), random(1) {}

    const int ordinal;
    unsigned retained = 0;  // of the primary context

  // Memory: all of the device's is one file, so that other processes can map it. Offsets are never used twice.
    uint64_t limit = uint64_t(1) << 30, granularity = uint64_t(2) << 20;
    uint64_t used = 0, peak = 0, next_offset = 0;
    int memory = -1, fill = 0xA5;

    // Work: streams that exist, or are destroyed and still have work. Seed 0 is the laziest order.
    std::vector<std::shared_ptr<Stream>> streams;
    uint64_t seed = 1;
    std::mt19937_64 random;

    Faults faults;
    bool lost = false;
    std::vector<const char*> calls;
    std::deque<std::string> violations;  // their texts stay where they are
    std::array<int64_t, size_t(Live::COUNT)> live{};

    int64_t& alive(Live kind) { return live[size_t(kind)]; }
};

struct Physical {
    Device* device;
    uint64_t offset, size;
    bool released = false;
    unsigned mappings = 0;
};

struct Mapping {
    uint64_t size;
    CUmemGenericAllocationHandle handle;
    int access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
};

struct AddressRange {
    Device* device;
    uint64_t size;
    std::map<uint64_t, Mapping> mappings;  // by start
};

// Of cuMemAlloc, or opened from another process (`imported` then names the allocation there).
struct Allocation {
    Device* device;
    uint64_t size, offset;
    std::string imported;
    unsigned opened = 1;
};

// Host memory that copies may use directly, and so late.
struct PinnedHost {
    Device* device;
    uint64_t size;
    bool registered;  // else of cuMemHostAlloc
};

struct Event {
    Device* device;
    unsigned flags;
    std::shared_ptr<Mark> mark;        // of the last record; none: never recorded
    std::shared_ptr<Capture> capture;  // the last record was in a capture, after the nodes `after`
    std::vector<size_t> after;
};

struct Module {
    Device* device;
    std::map<std::string, CUfunction> functions;
};

struct Graph {
    Device* device;
    std::vector<Node> nodes;
};

struct GraphExec {
    Device* device;
    std::vector<Node> nodes;
    std::shared_ptr<Mark> last_launch;  // launches of one executable graph never overlap
};

struct Function;  // in kernels.cpp

struct Driver {
    std::mutex mutex;
    std::condition_variable changed;  // work has ended
    bool initialised = false;
    bool ipc_to_self = false;
    unsigned threads = 1;  // that run the blocks of a kernel
    uint64_t next_handle = FIRST_HANDLE;

    std::map<int, std::unique_ptr<Device>> devices;
    std::map<uint64_t, AddressRange> ranges;
    std::map<CUmemGenericAllocationHandle, Physical> physical;
    std::map<uint64_t, Allocation> allocations;
    std::map<uint64_t, PinnedHost> pinned;
    std::map<CUstream, std::shared_ptr<Stream>> streams;
    std::map<CUevent, Event> events;
    std::map<CUmodule, Module> modules;
    std::map<CUfunction, std::shared_ptr<Function>> functions;
    std::map<CUgraph, Graph> graphs;
    std::map<CUgraphExec, GraphExec> graph_execs;
    std::vector<std::shared_ptr<Capture>> captures;

    Device& device(int ordinal);
    // A handle no earlier object had, so that one used after its end is noticed.
    template <class Handle>
    Handle new_handle() {
        return reinterpret_cast<Handle>(next_handle += 16);
    }
};

Driver& driver();

// The object of a handle, or null.
template <class Map, class Key>
typename Map::mapped_type* find(Map& map, Key key) {
    auto found = map.find(key);
    return found == map.end() ? nullptr : &found->second;
}

// The entry of `map` (start -> something with a size) that holds `address`, or end.
template <class Map>
typename Map::iterator find_around(Map& map, uint64_t address) {
    auto after = map.upper_bound(address);
    if (after == map.begin()) return map.end();
    auto entry = std::prev(after);
    return address - entry->first < entry->second.size ? entry : map.end();
}

// Remembers that something was done that is undefined on a real machine.
void violation(Device& device, std::string text);

// One call of the API: holds the mutex, is counted, fails by injection, and checks what is the same for many calls.
enum Rule : unsigned { ANYWHERE = 0, BEFORE_INIT = 1, NEEDS_CONTEXT = 2, NOT_IN_CAPTURE = 4 };

struct Call {
    Call() : lock(driver().mutex) {}
    // `named` is the device of what the arguments name, if they name something; else the current context's is taken.
    CUresult begin(const char* name, Device* named, unsigned rules);

    std::unique_lock<std::mutex> lock;
    Device* device = nullptr;
    const char* name = "";
};

// The error of a call with a handle of nothing. If something had it once, that is a violation: real drivers may crash.
CUresult invalid_handle(Call& call, const void* handle);

// The device of this thread's current context, or null.
Device* current_device();
