// Memory of another process. A handle tells where the exporting process keeps the file of its device's memory, and
// which part of it the allocation is; whoever may trace that process (the same user) can open it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "memory.h"

constexpr uint32_t MAGIC = 0x31435049;

struct Exported {
    uint32_t magic;
    int32_t process, ordinal, descriptor;
    uint64_t file, address, offset, size;

    // What tells this allocation from all others.
    std::string name() const { return std::to_string(file) + ":" + std::to_string(offset); }
};
static_assert(sizeof(Exported) <= sizeof(CUipcMemHandle), "a handle holds it");

EMULATED_API cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr start) {
    Call call;
    auto* allocation = find(driver().allocations, start);
    Device* named = allocation ? allocation->device : nullptr;
    if (CUresult error = call.begin("cuIpcGetMemHandle", named, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    struct stat file;
    if (!handle || !allocation || !allocation->imported.empty()) return CUDA_ERROR_INVALID_VALUE;
    if (fstat(memory_file(*named), &file)) return CUDA_ERROR_OPERATING_SYSTEM;
    Exported exported{MAGIC,       getpid(), named->ordinal,     memory_file(*named),
                      file.st_ino, start,    allocation->offset, allocation->size};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &exported, sizeof exported);
    return CUDA_SUCCESS;
}

// The file of the exporting process, if the allocation is still in it; else negative.
static int open_file(const Exported& exported) {
    std::string path = "/proc/" + std::to_string(exported.process) + "/fd/" + std::to_string(exported.descriptor);
    int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return descriptor;
    struct stat file;
    bool same = !fstat(descriptor, &file) && file.st_ino == exported.file;
    // Freed memory is a hole in the file.
    if (same && lseek(descriptor, off_t(exported.offset), SEEK_DATA) == off_t(exported.offset)) return descriptor;
    close(descriptor);
    return -1;
}

EMULATED_API cuIpcOpenMemHandle_v2(CUdeviceptr* start, CUipcMemHandle handle, unsigned flags) {
    Call call;
    if (CUresult error = call.begin("cuIpcOpenMemHandle", nullptr, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    Exported exported;
    memcpy(&exported, &handle, sizeof exported);
    if (!start || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    if (exported.magic != MAGIC) return CUDA_ERROR_INVALID_HANDLE;
    if (exported.process == getpid() && !driver().ipc_to_self) return CUDA_ERROR_INVALID_CONTEXT;
    if (exported.process != getpid() && exported.ordinal != call.device->ordinal) return CUDA_ERROR_INVALID_DEVICE;
    for (auto& allocation : driver().allocations) {
        if (allocation.second.imported != exported.name() || allocation.second.device != call.device) continue;
        allocation.second.opened++;
        *start = allocation.first;
        return CUDA_SUCCESS;
    }
    int file = open_file(exported);
    if (file < 0) return CUDA_ERROR_INVALID_HANDLE;
    uint64_t address = reserve_addresses(exported.size, 512);
    void* at = reinterpret_cast<void*>(address);
    int access = PROT_READ | PROT_WRITE;
    bool mapped =
        address && mmap(at, exported.size, access, MAP_SHARED | MAP_FIXED, file, off_t(exported.offset)) == at;
    close(file);
    if (!mapped) return CUDA_ERROR_MAP_FAILED;
    driver().allocations[address] = {call.device, exported.size, 0, exported.name()};
    call.device->alive(Live::IPC_IMPORTS)++;
    *start = address;
    return CUDA_SUCCESS;
}

EMULATED_API cuIpcCloseMemHandle(CUdeviceptr start) {
    Call call;
    auto* allocation = find(driver().allocations, start);
    Device* named = allocation ? allocation->device : nullptr;
    if (CUresult error = call.begin("cuIpcCloseMemHandle", named, NEEDS_CONTEXT | NOT_IN_CAPTURE)) return error;
    if (!allocation || allocation->imported.empty()) return CUDA_ERROR_INVALID_VALUE;
    if (allocation->opened > 1) {
        allocation->opened--;
        return CUDA_SUCCESS;
    }
    expect_unused(call, *named, {start, allocation->size});
    allocation = find(driver().allocations, start);
    if (!allocation) return CUDA_ERROR_INVALID_VALUE;  // waiting for that work let other threads in
    forget_addresses(start, allocation->size);
    named->alive(Live::IPC_IMPORTS)--;
    driver().allocations.erase(start);
    return CUDA_SUCCESS;
}
