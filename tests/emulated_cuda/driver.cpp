#include "driver.h"

// Never destroyed: threads may still be in a call when the process ends.
Driver& driver() {
    static Driver* driver = [] {
        report_invalid_accesses();
        return new Driver;
    }();
    return *driver;
}

Device& Driver::device(int ordinal) {
    auto& device = devices[ordinal];
    if (!device) device = std::make_unique<Device>(ordinal);
    return *device;
}

void violation(Device& device, std::string text) { device.violations.push_back(std::move(text)); }

// The error injected into the call that was just counted.
static CUresult injected(Device& device) {
    uint64_t number = device.calls.size();
    Faults& faults = device.faults;
    if (faults.from && number >= faults.from) {
        if (!device.lost) discard(device);
        device.lost = true;
        return faults.from_error;
    }
    if (!faults.once || (!faults.only.empty() && faults.only != device.calls.back())) return CUDA_SUCCESS;
    if (faults.skipped-- > 0) return CUDA_SUCCESS;
    faults.once = false;
    return faults.once_error;
}

// Whether a capture forbids calls that might synchronise; if so it is invalid now. A real driver looks at the captures
// of the whole process; here each device belongs to another test, so only those of the same device count.
static bool invalidate_captures(Device& device) {
    bool forbidden = false;
    for (auto& capture : driver().captures) {
        auto* stream = find(driver().streams, capture->origin);
        if (!stream || (*stream)->device != &device) continue;
        bool own = capture->thread == std::this_thread::get_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        if (!own && capture->mode != CU_STREAM_CAPTURE_MODE_GLOBAL) continue;
        capture->invalidated = forbidden = true;
    }
    return forbidden;
}

CUresult Call::begin(const char* name, Device* named, unsigned rules) {
    Device* current = current_device();
    this->name = name;
    device = named ? named : current ? current : &driver().device(NO_DEVICE);
    device->calls.push_back(name);
    if (CUresult error = injected(*device)) return error;
    if (!driver().initialised && !(rules & BEFORE_INIT)) return CUDA_ERROR_NOT_INITIALIZED;
    if (rules & NEEDS_CONTEXT) {
        if (!current) return CUDA_ERROR_INVALID_CONTEXT;
        if (!current->retained) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    if (rules & NOT_IN_CAPTURE && invalidate_captures(*device)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return CUDA_SUCCESS;
}

CUresult invalid_handle(Call& call, const void* handle) {
    uint64_t value = reinterpret_cast<uint64_t>(handle);
    bool was_valid = value > FIRST_HANDLE && value <= driver().next_handle;
    if (was_valid) violation(*call.device, std::string(call.name) + " with a handle of something that was destroyed");
    return CUDA_ERROR_INVALID_HANDLE;
}
