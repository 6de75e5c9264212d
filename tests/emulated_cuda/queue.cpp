#include "queue.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "driver.h"

bool Mark::done() const { return stream->completed >= count; }

// What runs now, for the message of the signal handler: kernels may use several threads, so it is one for all.
static std::atomic<const char*> now_running{nullptr};

// Runs the front of a stream with the mutex released.
static void run_front(Call& call, const std::shared_ptr<Stream>& stream) {
    stream->running = true;
    Work& work = stream->queue.front();  // stays where it is: nobody else removes a running front
    if (work.run) {
        now_running = work.name.c_str();
        call.lock.unlock();
        work.run();
        call.lock.lock();
        now_running = nullptr;
    }
    if (work.mark) work.mark->time = std::chrono::steady_clock::now();
    stream->queue.pop_front();
    stream->completed++;
    stream->running = false;
    if (stream->destroyed && stream->queue.empty()) {
        auto& streams = stream->device->streams;
        streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
    }
    driver().changed.notify_all();
}

// The stream to run next if only what `stream` needs is run: itself or one that it waits for.
static std::shared_ptr<Stream> needed_by(std::shared_ptr<Stream> stream) {
    while (!stream->running && !stream->runnable()) stream = stream->queue.front().after->stream;
    return stream->running ? nullptr : stream;
}

static std::shared_ptr<Stream> any_runnable(Device& device, const Stream* except) {
    std::vector<std::shared_ptr<Stream>> runnable;
    for (auto& stream : device.streams)
        if (stream.get() != except && stream->runnable()) runnable.push_back(stream);
    return runnable.empty() ? nullptr : runnable[device.random() % runnable.size()];
}

// How the work of different streams is mixed while somebody waits for one.
enum class Order { NEEDED_ONLY, ANY, OTHERS_FIRST };

static std::shared_ptr<Stream> choose(Device& device, const std::shared_ptr<Stream>& waited_for, Order order) {
    std::shared_ptr<Stream> stream;
    if (order == Order::ANY) stream = any_runnable(device, nullptr);
    if (order == Order::OTHERS_FIRST) stream = any_runnable(device, waited_for.get());
    return stream ? stream : needed_by(waited_for);
}

void finish(Call& call, Device& device, const std::vector<Target>& targets) {
    Order order = device.seed ? Order(device.random() % 3) : Order::NEEDED_ONLY;
    for (const Target& target : targets) {
        while (target.stream->completed < target.count) {
            if (auto stream = choose(device, target.stream, order)) {
                run_front(call, stream);
            } else {
                driver().changed.wait(call.lock);  // another thread runs what is needed
            }
        }
    }
}

Target everything_of(const std::shared_ptr<Stream>& stream) { return {stream, stream->submitted}; }

std::vector<Target> everything_on(Device& device) {
    std::vector<Target> targets;
    for (auto& stream : device.streams) targets.push_back(everything_of(stream));
    return targets;
}

void progress(Call& call, Device& device, const std::shared_ptr<Stream>& stream) {
    size_t steps = device.seed ? device.random() % 4 : 1;
    for (size_t i = 0; i < steps; i++) {
        auto next = device.seed ? any_runnable(device, nullptr) : stream->queue.empty() ? nullptr : needed_by(stream);
        if (!next) return;
        run_front(call, next);
    }
}

void enqueue(const std::shared_ptr<Stream>& stream, Work work) {
    stream->submitted++;
    if (work.mark) *work.mark = {stream, stream->submitted, {}};
    stream->queue.push_back(std::move(work));
}

CUresult submit(Call& call, const std::shared_ptr<Stream>& stream, Work work) {
    if (auto& capture = stream->capture) {
        if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        capture->nodes.push_back({std::move(work), stream->capture_tail});
        stream->capture_tail = {capture->nodes.size() - 1};
        return CUDA_SUCCESS;
    }
    enqueue(stream, std::move(work));
    // Now and then the device is quick: a source that is changed too soon after the call must not always be read late.
    Device& device = *stream->device;
    if (device.seed && device.random() % 8 == 0) progress(call, device, stream);
    return CUDA_SUCCESS;
}

void discard(Device& device) {
    for (auto& stream : device.streams) {
        size_t kept = stream->running ? 1 : 0;
        stream->queue.resize(kept);
        stream->completed = stream->submitted - kept;
    }
    driver().changed.notify_all();
}

void expect_unused(Call& call, Device& device, const std::function<bool(const Work&)>& uses) {
    for (auto& stream : device.streams) {
        for (auto& work : stream->queue) {
            if (!uses(work)) continue;
            violation(device, std::string(call.name) + " while " + work.name + " is queued that may use it");
            return finish(call, device, everything_on(device));
        }
    }
}

// The start of the mapped memory that ends in `span` without a hole: a kernel that was given an address in it may go on
// into the span.
static uint64_t reach(const Span& span) {
    auto range = find_around(driver().ranges, span.start);
    if (range == driver().ranges.end()) return span.start;
    uint64_t start = span.start;
    auto& mappings = range->second.mappings;
    for (auto next = mappings.lower_bound(start); next != mappings.begin();) {
        --next;
        if (next->first + next->second.size != start) break;
        start = next->first;
    }
    return start;
}

void expect_unused(Call& call, Device& device, Span span) {
    uint64_t start = reach(span), end = span.start + span.size;
    expect_unused(call, device, [&](const Work& work) {
        for (uint64_t pointer : work.pointers)
            if (start <= pointer && pointer < end) return true;
        for (const Span& touched : work.touches)
            if (touched.overlaps(span)) return true;
        return false;
    });
}

// A real device ends such a kernel with CUDA_ERROR_ILLEGAL_ADDRESS; here the process ends, but says why.
static struct sigaction previous_handler;

static void on_invalid_access(int, siginfo_t* info, void*) {
    if (const char* name = now_running) {
        char text[256];
        int size =
            snprintf(text, sizeof text, "emulated CUDA: %s touches %p, which is not there\n", name, info->si_addr);
        if (write(STDERR_FILENO, text, size_t(size)) < 0) abort();
    }
    sigaction(SIGSEGV, &previous_handler, nullptr);  // the access is tried again and meets the handler before ours
}

void report_invalid_accesses() {
    struct sigaction handler{};
    handler.sa_sigaction = on_invalid_access;
    handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &handler, &previous_handler);
}
