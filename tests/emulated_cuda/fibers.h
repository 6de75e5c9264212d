// How the shim runs the threads of a kernel: fibers, what they meet at, blocks, launches. See shim.h.
#pragma once


#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <sys/mman.h>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

/// The parameters of a kernel, beside each as `NAME__info`, for whoever copies them at launch.
struct ShimKernel {
    uint32_t count;
    uint32_t bytes[24];
};

namespace shim {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 64 << 10, GUARD_BYTES = 4 << 10, SLOT_BYTES = 64, MOST_SHARED = 227 << 10;
constexpr int POISON = 0xff;

enum class State : uint8_t { Ready, WaitsForWarp, WaitsForBlock, Done };

struct Copy {
    void* to;
    const void* from;
    unsigned group;
};

struct Fiber {
    void* stack_pointer;
    State state;
    unsigned lane, warp, parity;
    dim3 thread;
    unsigned copy_group;
    std::vector<Copy> copies;
};

using Slots = char (*)[SLOT_BYTES];

/// A meeting of a warp's lanes: each leaves its bytes, the last one combines them, then all read. Two sets of slots
/// in turn, so that a lane which is ahead doesn't overwrite what another has yet to read.
struct Warp {
    unsigned alive, arrived;
    int line;
    uint32_t present[2];
    void (*combine)(Slots);
    alignas(16) char slots[2][WARP][SLOT_BYTES];
};

/// Memory at a multiple of 128 bytes.
struct Buffer {
    char* data = nullptr;
    size_t bytes = 0;
    explicit Buffer(size_t size) : bytes((size + 127) / 128 * 128) {
        data = static_cast<char*>(aligned_alloc(128, std::max(bytes, size_t(128))));
    }
    Buffer(Buffer&& from) noexcept : data(std::exchange(from.data, nullptr)), bytes(from.bytes) {}
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer() { free(data); }
    void poison() { memset(data, POISON, bytes); }
};

struct StaticShared {
    const void* key;
    Buffer memory;
};

/// What one OS thread needs to run one block after the other.
struct Block {
    dim3 grid, block, index;
    Buffer dynamic_shared;
    std::vector<StaticShared> static_shared;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    unsigned alive = 0, arrived = 0;
    int line = 0;
    void* scheduler = nullptr;
    const void* kernel = nullptr;
    void (*entry)(const void*) = nullptr;
    std::mt19937_64 random;
    bool in_order = true;
    Block(dim3 grid, dim3 block, size_t shared) : grid(grid), block(block), dynamic_shared(shared) {}
};

// Constant initialisation and this model keep an access to one instruction in a shared library too.
#define SHIM_TLS __attribute__((tls_model("initial-exec")))
inline thread_local Block* cur_block SHIM_TLS = nullptr;
inline thread_local Fiber* cur SHIM_TLS = nullptr;
#undef SHIM_TLS

inline std::atomic<uint64_t> order_seed{0};

/// With a seed other than 0 warps and lanes run in an order drawn from it, anew for each launch.
inline void set_order_seed(uint64_t seed) { order_seed = seed; }

[[noreturn]] inline void die(const char* what) {
    const dim3 b = cur_block->index, t = cur ? cur->thread : dim3(0, 0, 0);
    fprintf(stderr, "cuda shim: %s (block %u,%u,%u thread %u,%u,%u)\n", what, b.x, b.y, b.z, t.x, t.y, t.z);
    abort();
}

/// Saves the callee-saved registers and the stack pointer, and continues on another stack.
extern "C" void dormouse_shim_switch(void** save, void* load);
asm(R"(
.text
.weak dormouse_shim_switch
.hidden dormouse_shim_switch
.type dormouse_shim_switch,@function
dormouse_shim_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
.size dormouse_shim_switch,.-dormouse_shim_switch
)");

inline void to_scheduler() { dormouse_shim_switch(&cur->stack_pointer, cur_block->scheduler); }

inline void to_fiber(Fiber& fiber) {
    cur = &fiber;
    dormouse_shim_switch(&cur_block->scheduler, fiber.stack_pointer);
    cur = nullptr;
}

// ---- Meetings ----

inline void release_block(Block& block) {
    block.arrived = 0;
    for (Fiber& fiber : block.fibers)
        if (fiber.state == State::WaitsForBlock) fiber.state = State::Ready;
}

inline void release_warp(Block& block, unsigned index, unsigned parity) {
    Warp& warp = block.warps[index];
    if (warp.combine) warp.combine(warp.slots[parity]);
    warp.arrived = 0;
    const size_t end = std::min<size_t>(block.fibers.size(), (index + 1) * WARP);
    for (size_t i = index * WARP; i < end; i++)
        if (block.fibers[i].state == State::WaitsForWarp) block.fibers[i].state = State::Ready;
}

inline void block_barrier(int line) {
    Block& block = *cur_block;
    if (block.arrived == 0) block.line = line;
    if (block.line != line) die("threads of a block meet at different barriers");
    if (++block.arrived == block.alive) return release_block(block);
    cur->state = State::WaitsForBlock;
    to_scheduler();
}

/// The lanes that were at this lane's last meeting.
inline uint32_t present() { return cur_block->warps[cur->warp].present[cur->parity]; }

/// Leaves `bytes` bytes, waits for the warp, and returns what each lane left, or what `combine` made of it.
inline Slots meet(const void* value, size_t bytes, int line, void (*combine)(Slots) = nullptr) {
    Warp& warp = cur_block->warps[cur->warp];
    const unsigned parity = cur->parity ^= 1;
    if (warp.arrived == 0) {
        warp.present[parity] = 0;
        warp.line = line;
        warp.combine = combine;
    }
    if (warp.line != line) die("lanes of a warp meet at different places");
    warp.present[parity] |= 1u << cur->lane;
    memcpy(warp.slots[parity][cur->lane], value, bytes);
    if (++warp.arrived == warp.alive) {
        release_warp(*cur_block, cur->warp, parity);
    } else {
        cur->state = State::WaitsForWarp;
        to_scheduler();
    }
    return warp.slots[parity];
}

/// Masks other than that of all lanes are not modelled.
inline void check_mask(unsigned mask) {
    if (mask != ~0u) die("a mask that leaves lanes out");
}

/// The value that lane `source` has left.
template <class T> T of_lane(T value, unsigned source, int line) {
    static_assert(sizeof(T) <= SLOT_BYTES && std::is_trivially_copyable_v<T>);
    const Slots slots = meet(&value, sizeof value, line);
    if (!(present() >> source & 1)) die("a shuffle from a lane that isn't there");
    memcpy(&value, slots[source], sizeof value);
    return value;
}

// ---- Running ----

inline void fiber_main() {
    cur_block->entry(cur_block->kernel);
    Block& block = *cur_block;
    Fiber& fiber = *cur;
    Warp& warp = block.warps[fiber.warp];
    if (!fiber.copies.empty()) die("asynchronous copies that nobody waited for");
    fiber.state = State::Done;
    // A thread that has ended counts as arrived, as on devices since Volta.
    block.alive--;
    warp.alive--;
    if (block.alive && block.arrived == block.alive) release_block(block);
    if (warp.alive && warp.arrived == warp.alive) release_warp(block, fiber.warp, fiber.parity ^ 1);
    to_scheduler();
    abort();
}

/// Stacks with a page below each that nobody may touch. They are kept for the next launch.
class Stacks {
  public:
    explicit Stacks(size_t count) : count_(count) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* memory = mmap(nullptr, count * STRIDE, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (memory == MAP_FAILED) die("no memory for stacks");
        memory_ = static_cast<char*>(memory);
        for (size_t i = 0; i < count; i++) mprotect(memory_ + i * STRIDE, GUARD_BYTES, PROT_NONE);
    }
    ~Stacks() { munmap(memory_, count_ * STRIDE); }
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;

    size_t count() const { return count_; }

    /// The initial stack pointer of stack `i`, set up so that the first switch to it enters `fiber_main`.
    void* fresh(size_t i) const {
        char* top = memory_ + (i + 1) * STRIDE;
#ifdef __SANITIZE_ADDRESS__
        __asan_unpoison_memory_region(top - STACK_BYTES, STACK_BYTES);  // Frames left there were never unwound.
#endif
        void** pointer = reinterpret_cast<void**>(top);
        *--pointer = nullptr;
        *--pointer = reinterpret_cast<void*>(&fiber_main);
        for (int saved = 0; saved < 6; saved++) *--pointer = nullptr;
        return pointer;
    }

    static std::unique_ptr<Stacks> take(size_t count) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            for (auto& kept : free_list) {
                if (kept->count() < count) continue;
                std::swap(kept, free_list.back());
                std::unique_ptr<Stacks> found = std::move(free_list.back());
                free_list.pop_back();
                return found;
            }
        }
        return std::make_unique<Stacks>(count);
    }
    static void put_back(std::unique_ptr<Stacks> stacks) {
        std::lock_guard<std::mutex> lock(mutex);
        free_list.push_back(std::move(stacks));
    }

  private:
    static constexpr size_t STRIDE = GUARD_BYTES + STACK_BYTES;
    static inline std::mutex mutex;
    static inline std::vector<std::unique_ptr<Stacks>> free_list;
    size_t count_;
    char* memory_ = nullptr;
};

/// Runs the ready lanes of a warp once; whether there were any.
inline bool run_warp(Block& block, unsigned warp) {
    const unsigned first = warp * WARP, lanes = std::min<unsigned>(WARP, block.fibers.size() - first);
    const uint64_t random = block.in_order ? 0 : block.random();
    const bool backwards = random & 1;
    unsigned at = (random >> 1) % lanes;
    bool ran = false;
    for (unsigned i = 0; i < lanes; i++, at = at + 1 == lanes ? 0 : at + 1) {
        Fiber& fiber = block.fibers[first + (backwards ? lanes - 1 - at : at)];
        if (fiber.state != State::Ready) continue;
        to_fiber(fiber);
        ran = true;
    }
    return ran;
}

/// Runs all threads of one block to their end.
inline void run_block(Block& block, const Stacks& stacks) {
    const unsigned threads = block.fibers.size(), warps = block.warps.size();
    block.alive = threads;
    block.arrived = 0;
    block.dynamic_shared.poison();
    for (StaticShared& shared : block.static_shared) shared.memory.poison();
    for (unsigned w = 0; w < warps; w++) {
        block.warps[w].alive = std::min(WARP, threads - w * WARP);
        block.warps[w].arrived = 0;
    }
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = block.fibers[i];
        fiber.stack_pointer = stacks.fresh(i);
        fiber.state = State::Ready;
        fiber.lane = i % WARP;
        fiber.warp = i / WARP;
        fiber.parity = fiber.copy_group = 0;
        fiber.thread = dim3(i % block.block.x, i / block.block.x % block.block.y, i / (block.block.x * block.block.y));
    }
    std::vector<unsigned> order(warps);
    for (unsigned w = 0; w < warps; w++) order[w] = w;
    while (block.alive) {
        if (!block.in_order) std::shuffle(order.begin(), order.end(), block.random);
        bool ran = false;
        // A warp runs until it waits for the block; out of order it may be left at any of its meetings.
        for (unsigned w : order)
            while (run_warp(block, w)) {
                ran = true;
                if (!block.in_order && block.random() % 4 == 0) break;
            }
        if (!ran) die("deadlock: a barrier or shuffle that not all threads reach");
    }
}

/// Memory that is the block's own, found again by each of its threads through `key`.
inline void* static_shared(const void* key, size_t bytes) {
    for (StaticShared& shared : cur_block->static_shared)
        if (shared.key == key) return shared.memory.data;
    cur_block->static_shared.push_back({key, Buffer(bytes)});
    Buffer& memory = cur_block->static_shared.back().memory;
    memory.poison();
    return memory.data;
}

inline std::atomic<uint64_t> launches{0};

/// Runs `kernel` for every thread of every block of the grid, on up to `workers` OS threads.
template <class F> void launch(dim3 grid, dim3 block, size_t shared, const F& kernel, unsigned workers) {
    const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (blocks == 0 || threads == 0 || threads > 1024 || shared > MOST_SHARED) {
        fprintf(stderr, "cuda shim: a launch that a device refuses\n");
        abort();
    }
    const uint64_t seed = order_seed, launch_number = launches++;
    std::atomic<uint64_t> next{0};
    auto work = [&] {
        Block state(grid, block, shared);
        state.fibers.resize(threads);
        state.warps.resize((threads + WARP - 1) / WARP);
        state.kernel = &kernel;
        state.entry = [](const void* f) { (*static_cast<const F*>(f))(); };
        state.in_order = seed == 0;
        cur_block = &state;
        std::unique_ptr<Stacks> stacks = Stacks::take(threads);
        for (uint64_t i; (i = next++) < blocks;) {
            state.index = dim3(i % grid.x, i / grid.x % grid.y, i / (uint64_t(grid.x) * grid.y));
            state.random.seed(seed * 0x9e3779b97f4a7c15 + launch_number * 0x100000001b3 + i);
            run_block(state, *stacks);
        }
        Stacks::put_back(std::move(stacks));
        cur_block = nullptr;
    };
    // Starting a thread costs as much as running a few warps.
    const uint64_t useful = std::min<uint64_t>({workers, blocks, 1 + blocks * threads / 2048});
    std::vector<std::thread> others;
    for (uint64_t i = 1; i < useful; i++) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
}

template <class... A, size_t... I> void call(void (*kernel)(A...), void** parameters, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(parameters[I])...);
}

/// As `cuLaunchKernel`: an array of pointers to the arguments.
template <class... A>
void launch_packed(void (*kernel)(A...), const unsigned* grid, const unsigned* block, size_t shared, void** parameters,
                   unsigned workers) {
    const auto thread = [&] { call(kernel, parameters, std::index_sequence_for<A...>{}); };
    launch(dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), shared, thread, workers);
}

template <class... A> constexpr ShimKernel describe(void (*)(A...)) {
    static_assert(sizeof...(A) <= 24, "ShimKernel has room for them");
    return ShimKernel{uint32_t(sizeof...(A)), {uint32_t(sizeof(A))...}};
}

}  // namespace shim
