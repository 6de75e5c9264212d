// Streams and events, and waiting for them.
#include <algorithm>

#include "driver.h"

static Device* device_of(CUstream handle) {
    auto* stream = find(driver().streams, handle);
    return stream ? (*stream)->device : nullptr;
}

static Device* device_of(CUevent handle) {
    auto* event = find(driver().events, handle);
    return event ? event->device : nullptr;
}

EMULATED_API cuStreamCreate(CUstream* handle, unsigned flags) {
    Call call;
    if (CUresult error = call.begin("cuStreamCreate", nullptr, NEEDS_CONTEXT)) return error;
    if (!handle || flags & ~CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    auto stream = std::make_shared<Stream>();
    stream->device = call.device;
    stream->handle = *handle = driver().new_handle<CUstream>();
    driver().streams[*handle] = stream;
    call.device->streams.push_back(stream);
    call.device->alive(Live::STREAMS)++;
    return CUDA_SUCCESS;
}

// What is queued still runs, sooner or later.
EMULATED_API cuStreamDestroy_v2(CUstream handle) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuStreamDestroy", named, ANYWHERE)) return error;
    if (!named) return invalid_handle(call, handle);
    auto stream = driver().streams.at(handle);
    if (stream->capture) stream->capture->invalidated = true;
    stream->destroyed = true;
    if (stream->queue.empty()) {
        auto& streams = named->streams;
        streams.erase(std::find(streams.begin(), streams.end(), stream));
    }
    driver().streams.erase(handle);
    named->alive(Live::STREAMS)--;
    return CUDA_SUCCESS;
}

EMULATED_API cuStreamSynchronize(CUstream handle) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuStreamSynchronize", named, NEEDS_CONTEXT)) return error;
    if (!named) return invalid_handle(call, handle);
    auto stream = driver().streams.at(handle);
    if (stream->capture) {
        stream->capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    finish(call, *named, {everything_of(stream)});
    return named->lost ? named->faults.from_error : CUDA_SUCCESS;
}

EMULATED_API cuEventCreate(CUevent* handle, unsigned flags) {
    Call call;
    if (CUresult error = call.begin("cuEventCreate", nullptr, NEEDS_CONTEXT)) return error;
    bool timed_interprocess = flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING);
    if (!handle || flags & ~7u || timed_interprocess) return CUDA_ERROR_INVALID_VALUE;
    *handle = driver().new_handle<CUevent>();
    driver().events[*handle] = {call.device, flags, nullptr, nullptr, {}};
    call.device->alive(Live::EVENTS)++;
    return CUDA_SUCCESS;
}

EMULATED_API cuEventDestroy_v2(CUevent handle) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuEventDestroy", named, ANYWHERE)) return error;
    if (!named) return invalid_handle(call, handle);
    driver().events.erase(handle);
    named->alive(Live::EVENTS)--;
    return CUDA_SUCCESS;
}

EMULATED_API cuEventRecord(CUevent handle, CUstream stream_handle) {
    Call call;
    Device* named = device_of(stream_handle);
    if (CUresult error = call.begin("cuEventRecord", named, NEEDS_CONTEXT)) return error;
    auto* event = find(driver().events, handle);
    if (!named) return invalid_handle(call, stream_handle);
    if (!event) return invalid_handle(call, handle);
    if (event->device != named) return CUDA_ERROR_INVALID_HANDLE;
    auto stream = driver().streams.at(stream_handle);
    if (stream->capture) {
        if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        event->capture = stream->capture;
        event->after = stream->capture_tail;
        return CUDA_SUCCESS;
    }
    event->capture = nullptr;
    event->mark = std::make_shared<Mark>();
    Work work;
    work.name = "cuEventRecord";
    work.mark = event->mark;
    return submit(call, stream, std::move(work));
}

// Joins `stream` to the capture that the event was recorded in.
static CUresult wait_in_capture(const std::shared_ptr<Stream>& stream, const Event& event) {
    auto& capture = event.capture;
    if (capture->ended) return CUDA_ERROR_INVALID_VALUE;
    if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture && stream->capture != capture) {
        stream->capture->invalidated = capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    stream->capture = capture;
    stream->capture_tail.insert(stream->capture_tail.end(), event.after.begin(), event.after.end());
    return CUDA_SUCCESS;
}

EMULATED_API cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
    Call call;
    Device* named = device_of(stream_handle);
    if (CUresult error = call.begin("cuStreamWaitEvent", named, NEEDS_CONTEXT)) return error;
    auto* event = find(driver().events, handle);
    if (!named) return invalid_handle(call, stream_handle);
    if (!event) return invalid_handle(call, handle);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (event->device != named) return CUDA_ERROR_NOT_SUPPORTED;  // waiting for another device
    auto stream = driver().streams.at(stream_handle);
    if (event->capture) return wait_in_capture(stream, *event);
    if (stream->capture) {
        if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (!event->mark) return CUDA_SUCCESS;
        stream->capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!event->mark || event->mark->done()) return CUDA_SUCCESS;
    Work work;
    work.name = "cuStreamWaitEvent";
    work.after = event->mark;
    return submit(call, stream, std::move(work));
}

EMULATED_API cuEventSynchronize(CUevent handle) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuEventSynchronize", named, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    if (!named) return invalid_handle(call, handle);
    Event& event = driver().events.at(handle);
    if (event.capture) return CUDA_ERROR_CAPTURED_EVENT;
    auto mark = event.mark;
    if (!mark) return CUDA_SUCCESS;
    finish(call, *named, {{mark->stream, mark->count}});
    return named->lost ? named->faults.from_error : CUDA_SUCCESS;
}

EMULATED_API cuEventQuery(CUevent handle) {
    Call call;
    Device* named = device_of(handle);
    if (CUresult error = call.begin("cuEventQuery", named, NOT_IN_CAPTURE)) return error;
    if (!named) return invalid_handle(call, handle);
    Event& event = driver().events.at(handle);
    if (event.capture) return CUDA_ERROR_CAPTURED_EVENT;
    auto mark = event.mark;
    if (!mark || mark->done()) return CUDA_SUCCESS;
    progress(call, *named, mark->stream);
    if (named->lost) return named->faults.from_error;
    return mark->done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EMULATED_API cuEventElapsedTime_v2(float* milliseconds, CUevent start_handle, CUevent end_handle) {
    Call call;
    Device* named = device_of(start_handle);
    if (CUresult error = call.begin("cuEventElapsedTime", named, ANYWHERE)) return error;
    auto *start = find(driver().events, start_handle), *end = find(driver().events, end_handle);
    if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
    if (!start) return invalid_handle(call, start_handle);
    if (!end) return invalid_handle(call, end_handle);
    if (start->device != end->device) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->mark || !end->mark || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (start->capture || end->capture) return CUDA_ERROR_CAPTURED_EVENT;
    if (!start->mark->done() || !end->mark->done()) return CUDA_ERROR_NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(end->mark->time - start->mark->time).count();
    return CUDA_SUCCESS;
}
