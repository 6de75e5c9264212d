// Copies and fills: queued on a stream, after their ranges were checked.
//
// Host memory that is pinned is read and written when the copy runs. Pageable memory is read at the call, as a real
// driver stages it, and a copy to it is over when the call returns.
#include <cstring>

#include "memory.h"

// The stream of a handle if work of the current context may go there. The null stream is refused: its rules tie it to
// all other streams, and nothing here means to use it.
static CUresult stream_of(Call& call, CUstream handle, std::shared_ptr<Stream>* stream) {
    auto* found = find(driver().streams, handle);
    if (!found) return invalid_handle(call, handle);
    if ((*found)->device != current_device()) return CUDA_ERROR_INVALID_HANDLE;
    *stream = *found;
    return CUDA_SUCCESS;
}

static Device* device_of(CUstream handle) {
    auto* stream = find(driver().streams, handle);
    return stream ? (*stream)->device : nullptr;
}

static uint64_t address(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

static void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

static std::string name_of(const char* call, uint64_t size) {
    return std::string(call) + " of " + std::to_string(size) + " bytes";
}

EMULATED_API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t size, CUstream handle) {
    Call call;
    if (CUresult error = call.begin("cuMemcpyHtoDAsync", device_of(handle), NEEDS_CONTEXT)) return error;
    std::shared_ptr<Stream> stream;
    if (CUresult error = stream_of(call, handle, &stream)) return error;
    if (!size) return CUDA_SUCCESS;
    HostMemory kind = host_memory(from, size);
    if (kind == HostMemory::INVALID || !is_device_memory(*call.device, to, size)) return CUDA_ERROR_INVALID_VALUE;
    Work work;
    work.name = name_of("cuMemcpyHtoDAsync", size);
    work.touches = {{to, size}};
    if (kind == HostMemory::PAGEABLE) {
        if (stream->capture) {
            stream->capture->invalidated = true;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        auto* bytes = static_cast<const char*>(from);
        auto staged = std::make_shared<std::vector<char>>(bytes, bytes + size);
        work.run = [=] { memcpy(pointer(to), staged->data(), size); };
    } else {
        work.touches.push_back({address(from), size});
        work.run = [=] { memcpy(pointer(to), from, size); };
    }
    return submit(call, stream, std::move(work));
}

EMULATED_API cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t size, CUstream handle) {
    Call call;
    if (CUresult error = call.begin("cuMemcpyDtoHAsync", device_of(handle), NEEDS_CONTEXT)) return error;
    std::shared_ptr<Stream> stream;
    if (CUresult error = stream_of(call, handle, &stream)) return error;
    if (!size) return CUDA_SUCCESS;
    HostMemory kind = host_memory(to, size);
    if (kind == HostMemory::INVALID || !is_device_memory(*call.device, from, size)) return CUDA_ERROR_INVALID_VALUE;
    if (kind == HostMemory::PAGEABLE && stream->capture) {
        stream->capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    Work work;
    work.name = name_of("cuMemcpyDtoHAsync", size);
    work.touches = {{from, size}, {address(to), size}};
    work.run = [=] { memcpy(to, pointer(from), size); };
    if (CUresult error = submit(call, stream, std::move(work))) return error;
    if (kind == HostMemory::PAGEABLE) finish(call, *call.device, {everything_of(stream)});
    return call.device->lost ? call.device->faults.from_error : CUDA_SUCCESS;
}

EMULATED_API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream handle) {
    Call call;
    if (CUresult error = call.begin("cuMemcpyDtoDAsync", device_of(handle), NEEDS_CONTEXT)) return error;
    std::shared_ptr<Stream> stream;
    if (CUresult error = stream_of(call, handle, &stream)) return error;
    if (!size) return CUDA_SUCCESS;
    const Device& device = *call.device;
    if (!is_device_memory(device, to, size) || !is_device_memory(device, from, size)) return CUDA_ERROR_INVALID_VALUE;
    Span source{from, size}, target{to, size};
    if (source.overlaps(target)) violation(*call.device, "cuMemcpyDtoDAsync between ranges that overlap");
    Work work;
    work.name = name_of("cuMemcpyDtoDAsync", size);
    work.touches = {target, source};
    work.run = [=] { memmove(pointer(to), pointer(from), size); };
    return submit(call, stream, std::move(work));
}

EMULATED_API cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream handle) {
    Call call;
    if (CUresult error = call.begin("cuMemsetD8Async", device_of(handle), NEEDS_CONTEXT)) return error;
    std::shared_ptr<Stream> stream;
    if (CUresult error = stream_of(call, handle, &stream)) return error;
    if (!size) return CUDA_SUCCESS;
    if (!is_device_memory(*call.device, to, size)) return CUDA_ERROR_INVALID_VALUE;
    Work work;
    work.name = name_of("cuMemsetD8Async", size);
    work.touches = {{to, size}};
    work.run = [=] { memset(pointer(to), value, size); };
    return submit(call, stream, std::move(work));
}
