// Stream capture and graphs. A capture records what would have been queued, with the parameters of that moment; a
// launch queues it, in an order that the capture allows, with the same parameters again.
#include <algorithm>

#include "driver.h"
#include "memory.h"

static Device* device_of(CUstream handle) {
    auto* stream = find(driver().streams, handle);
    return stream ? (*stream)->device : nullptr;
}

static Device* device_of(CUgraph handle) {
    auto* graph = find(driver().graphs, handle);
    return graph ? graph->device : nullptr;
}

static Device* device_of(CUgraphExec handle) {
    auto* exec = find(driver().graph_execs, handle);
    return exec ? exec->device : nullptr;
}

EMULATED_API cuStreamBeginCapture_v2(CUstream handle, int mode) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuStreamBeginCapture", named, NEEDS_CONTEXT)) return error;
    if (!named) return invalid_handle(call, handle);
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    auto stream = driver().streams.at(handle);
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = handle;
    stream->capture->mode = mode;
    stream->capture->thread = std::this_thread::get_id();
    stream->capture_tail.clear();
    driver().captures.push_back(stream->capture);
    return CUDA_SUCCESS;
}

// Whether everything in the capture comes before the end of its first stream.
static bool is_joined(const Capture& capture, const std::vector<size_t>& tail) {
    std::vector<bool> before(capture.nodes.size());
    for (size_t node : tail) before[node] = true;
    for (size_t node = capture.nodes.size(); node-- > 0;)
        if (before[node])
            for (size_t earlier : capture.nodes[node].after) before[earlier] = true;
    return std::all_of(before.begin(), before.end(), [](bool joined) { return joined; });
}

static void end_capture(const std::shared_ptr<Capture>& capture) {
    capture->ended = true;
    for (auto& stream : driver().streams) {
        if (stream.second->capture != capture) continue;
        stream.second->capture = nullptr;
        stream.second->capture_tail.clear();
    }
    auto& captures = driver().captures;
    captures.erase(std::remove(captures.begin(), captures.end(), capture), captures.end());
}

EMULATED_API cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuStreamEndCapture", named, NEEDS_CONTEXT)) return error;
    if (!named) return invalid_handle(call, handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    *graph = nullptr;
    auto stream = driver().streams.at(handle);
    auto capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != handle) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    bool other_thread = capture->thread != std::this_thread::get_id();
    if (other_thread && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    bool joined = is_joined(*capture, stream->capture_tail);
    end_capture(capture);
    if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *graph = driver().new_handle<CUgraph>();
    driver().graphs[*graph] = {named, std::move(capture->nodes)};
    named->alive(Live::GRAPHS)++;
    return CUDA_SUCCESS;
}

EMULATED_API cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph handle, unsigned long long flags) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuGraphInstantiate", named, NEEDS_CONTEXT)) return error;
    if (!exec || flags) return CUDA_ERROR_INVALID_VALUE;
    if (!named) return invalid_handle(call, handle);
    *exec = driver().new_handle<CUgraphExec>();
    driver().graph_execs[*exec] = {named, driver().graphs.at(handle).nodes, nullptr};
    named->alive(Live::GRAPH_EXECS)++;
    return CUDA_SUCCESS;
}

EMULATED_API cuGraphDestroy(CUgraph handle) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuGraphDestroy", named, ANYWHERE)) return error;
    if (!named) return invalid_handle(call, handle);
    driver().graphs.erase(handle);
    named->alive(Live::GRAPHS)--;
    return CUDA_SUCCESS;
}

// A launch that is queued still runs.
EMULATED_API cuGraphExecDestroy(CUgraphExec handle) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuGraphExecDestroy", named, ANYWHERE)) return error;
    if (!named) return invalid_handle(call, handle);
    driver().graph_execs.erase(handle);
    named->alive(Live::GRAPH_EXECS)--;
    return CUDA_SUCCESS;
}

// What a recorded work needs and is no longer there, in words; empty if all is.
static std::string missing(const Device& device, const Work& work) {
    if (work.module && !find(driver().modules, work.module)) return "whose module was unloaded";
    auto is_there = [&](uint64_t start, uint64_t size) {
        return is_device_memory(device, start, size) ||
               host_memory(reinterpret_cast<void*>(start), size) == HostMemory::PINNED;
    };
    for (uint64_t pointer : work.pointers)
        if (!is_there(pointer, 1)) return "that was given memory which is gone";
    for (const Span& span : work.touches)
        if (!is_there(span.start, span.size)) return "whose memory is gone";
    return "";
}

// An order of the nodes that their edges allow.
static std::vector<size_t> order_of(Device& device, const std::vector<Node>& nodes) {
    std::vector<size_t> order, ready, open(nodes.size());
    std::vector<std::vector<size_t>> next(nodes.size());
    for (size_t node = 0; node < nodes.size(); node++) {
        open[node] = nodes[node].after.size();
        if (!open[node]) ready.push_back(node);
        for (size_t earlier : nodes[node].after) next[earlier].push_back(node);
    }
    while (!ready.empty()) {
        auto chosen = ready.begin() + long(device.seed ? device.random() % ready.size() : 0);
        size_t node = *chosen;
        ready.erase(chosen);
        order.push_back(node);
        for (size_t later : next[node])
            if (!--open[later]) ready.push_back(later);
    }
    return order;
}

EMULATED_API cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuGraphLaunch", named, NEEDS_CONTEXT)) return error;
    auto* found = find(driver().streams, stream_handle);
    if (!named) return invalid_handle(call, handle);
    if (!found) return invalid_handle(call, stream_handle);
    if ((*found)->device != named) return CUDA_ERROR_INVALID_HANDLE;
    auto stream = *found;
    if (stream->capture) {  // a graph in a graph
        stream->capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    GraphExec& exec = driver().graph_execs.at(handle);
    for (const Node& node : exec.nodes) {
        std::string fault = missing(*named, node.work);
        if (fault.empty()) continue;
        violation(*named, "cuGraphLaunch of a graph with " + node.work.name + " " + fault);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    Work wait, end;
    wait.name = end.name = "cuGraphLaunch";
    wait.after = exec.last_launch;
    enqueue(stream, std::move(wait));
    for (size_t node : order_of(*named, exec.nodes)) enqueue(stream, exec.nodes[node].work);
    end.mark = exec.last_launch = std::make_shared<Mark>();
    return submit(call, stream, std::move(end));
}
