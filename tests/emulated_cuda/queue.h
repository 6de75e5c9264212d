// Streams: what is queued on them, and the order in which it runs.
//
// Little runs when it is queued. Whoever waits (for a stream, an event, a context) runs the queued work of the device,
// in an order that the rules of streams and events allow, until what is waited for is done. A host that does not wait
// for a result finds it missing, and a stream that does not wait for another one sooner or later runs before it.
#pragma once
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_api.h"

struct Call;
struct Device;
struct Stream;

struct Span {
    uint64_t start, size;
    bool overlaps(const Span& other) const { return start < other.start + other.size && other.start < start + size; }
};

// A place in a stream: done when the first `count` works of the stream are.
struct Mark {
    std::shared_ptr<Stream> stream;
    uint64_t count;
    std::chrono::steady_clock::time_point time;
    bool done() const;
};

struct Work {
    std::string name;
    std::function<void()> run;  // none: only a mark or a wait
    std::vector<Span> touches;  // of copies: device and host memory
    std::vector<uint64_t> pointers;  // of kernels: parameters that may be addresses
    CUmodule module = nullptr;  // of kernels
    std::shared_ptr<Mark> after;  // waits for this
    std::shared_ptr<Mark> mark;  // is told when this has run
};

// A work of a graph and the works (by index) that it comes after.
struct Node {
    Work work;
    std::vector<size_t> after;
};

struct Capture {
    CUstream origin;
    int mode;
    std::thread::id thread;
    bool invalidated = false, ended = false;
    std::vector<Node> nodes;
};

struct Stream {
    Device* device;
    CUstream handle;
    std::deque<Work> queue;  // the front stays while it runs
    bool running = false, destroyed = false;
    uint64_t submitted = 0, completed = 0;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> capture_tail;  // the nodes that the next work comes after
    bool runnable() const {
        return !queue.empty() && !running && (!queue.front().after || queue.front().after->done());
    }
};

// The work of a stream up to a count.
struct Target {
    std::shared_ptr<Stream> stream;
    uint64_t count;
};

// Queues `work`, or records it if the stream is in a capture. Some of the device's work may then run.
CUresult submit(Call& call, const std::shared_ptr<Stream>& stream, Work work);

// Queues `work` whatever the stream captures.
void enqueue(const std::shared_ptr<Stream>& stream, Work work);

// Runs work until all targets are done.
void finish(Call& call, Device& device, const std::vector<Target>& targets);
Target everything_of(const std::shared_ptr<Stream>& stream);
std::vector<Target> everything_on(Device& device);

// Runs a little, as time passes on a real device between two looks at it.
void progress(Call& call, Device& device, const std::shared_ptr<Stream>& stream);

// Forgets what is queued: a lost device runs nothing more.
void discard(Device& device);

// For calls that take memory away: if queued work may still touch `span` that is a violation; the work then runs first,
// so that the test goes on and can tell.
void expect_unused(Call& call, Device& device, Span span);
// The same for the end of something else that `uses` recognises.
void expect_unused(Call& call, Device& device, const std::function<bool(const Work&)>& uses);

// From now on, work that touches memory which is not there says so before the process ends.
void report_invalid_accesses();
