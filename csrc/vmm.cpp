#include "vmm.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "error.h"

namespace pymux {
namespace {
const Driver& cu() { return *Driver::loaded(); }

int attribute(CUdevice_attribute a, CUdevice dev) {
  int v = 0;
  check(cu().cuDeviceGetAttribute(&v, a, dev), "cuDeviceGetAttribute");
  return v;
}

// What is left to give back. Never destroyed: owners may outlive static objects.
struct Leftovers {
  std::mutex mutex;  // guards calls
  std::vector<std::function<CUresult()>> calls;
  std::atomic<bool> any{false};  // also when only the wait is owed
  bool held = false;
};
Leftovers& leftovers() {
  static auto* l = new Leftovers();
  return *l;
}

// The driver is shutting down, or a fork of the process that had it: nothing is ours any more.
bool over(CUresult r) {
  return r == CUDA_SUCCESS || r == CUDA_ERROR_DEINITIALIZED || r == CUDA_ERROR_NOT_INITIALIZED ||
         r == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

template <class F>
void give_back(F call) {
  if (Driver::lost()) return;
  auto& l = leftovers();
  std::unique_lock lock(l.mutex);
  if (!l.held) {
    lock.unlock();
    if (over(call())) return;
    lock.lock();
  }
  l.calls.emplace_back(call);
  l.any = true;
}
}  // namespace

bool retry_releases() {
  auto& l = leftovers();
  if (!l.any.load(std::memory_order_relaxed)) return true;
  // What is left may be memory that a copy still uses.
  if (!over(cu().cuCtxSynchronize())) return false;
  std::lock_guard lock(l.mutex);
  l.held = false;
  std::erase_if(l.calls, [](auto& call) { return over(call()); });
  l.any = !l.calls.empty();
  return l.calls.empty();
}

void hold_releases() {
  auto& l = leftovers();
  std::lock_guard lock(l.mutex);
  l.held = l.any = true;
}

Device::Device(int ordinal) : ordinal_(ordinal) {
  CUdevice dev = 0;
  int count = 0;
  check(cu().cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count)
    throw Error("DriverError", "there is no device " + std::to_string(ordinal) + ": " + cu().path + " has " +
                                   std::to_string(count) + " (0 to " + std::to_string(count - 1) + ").");
  check(cu().cuDeviceGet(&dev, ordinal), "cuDeviceGet");
  char text[256] = {};
  check(cu().cuDeviceGetName(text, sizeof text - 1, dev), "cuDeviceGetName");
  name_ = text;
  CUuuid id{};
  check(cu().cuDeviceGetUuid(&id, dev), "cuDeviceGetUuid");
  std::memcpy(uuid_, id.bytes, sizeof uuid_);
  check(cu().cuDeviceTotalMem(&total_, dev), "cuDeviceTotalMem");
  if (!attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, dev))
    throw Error("DriverError", name_ + " has no virtual memory management, which pymux needs.");
  can_export_ = attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, dev) != 0;
  host_addressable_ = attribute(CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST, dev) != 0;
  host_numa_node_ = attribute(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, dev);
  CUmemAllocationProp p = prop();
  check(cu().cuMemGetAllocationGranularity(&granularity_, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  check(cu().cuDevicePrimaryCtxRetain(&context_, dev), "cuDevicePrimaryCtxRetain");
}

Device::~Device() {
  if (context_) cu().cuDevicePrimaryCtxRelease(ordinal_);
}

CUmemAllocationProp Device::prop() const {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = ordinal_;
  if (can_export_) p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}

void Device::probe_export() const {
  if (!can_export_) throw Error("DriverError", name_ + " cannot export memory as file descriptors");
  Page page = Page::create(*this, granularity_, true);
  Page::import(page.export_fd());
}

void Device::make_current() const {
  check(cu().cuCtxSetCurrent(context_), "cuCtxSetCurrent");
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  check(cu().cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
}

void Device::enter() const { check(cu().cuCtxPushCurrent(context_), "cuCtxPushCurrent"); }

void Device::exit() {
  CUcontext popped = nullptr;
  cu().cuCtxPopCurrent(&popped);
}

void Device::synchronize() const {
  in_context(
      [] { check(cu().cuCtxSynchronize(), "cuCtxSynchronize", "work submitted before the end of the phase failed"); });
}

Page Page::create(const Device& device, std::size_t size, bool exportable) {
  CUmemAllocationProp p = device.prop();
  if (!exportable) p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
  CUmemGenericAllocationHandle h = 0;
  check(cu().cuMemCreate(&h, size, &p, 0), "cuMemCreate", std::to_string(size) + " bytes");
  return Page(h);
}

Page Page::import(const Fd& fd) {
  CUmemGenericAllocationHandle h = 0;
  check(cu().cuMemImportFromShareableHandle(&h, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd.get())),
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  return Page(h);
}

Page::~Page() {
  if (handle_) give_back([h = handle_] { return cu().cuMemRelease(h); });
}

Fd Page::export_fd() const {
  int fd = -1;
  check(cu().cuMemExportToShareableHandle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle");
  return Fd(fd);
}

void Page::release() {
  check(cu().cuMemRelease(handle_), "cuMemRelease");
  handle_ = 0;
}

Reservation::Reservation(std::size_t size, std::size_t alignment) : size_(size) {
  check(cu().cuMemAddressReserve(&base_, size, alignment, 0, 0), "cuMemAddressReserve",
        std::to_string(size) + " bytes of addresses");
}

Reservation::~Reservation() {
  if (base_) give_back([b = base_, n = size_] { return cu().cuMemAddressFree(b, n); });
}

Mapping::Mapping(CUdeviceptr at, std::size_t size, const Page& page) : size_(size) {
  check(cu().cuMemMap(at, size, 0, page.get(), 0), "cuMemMap", std::to_string(size) + " bytes at " + hex(at));
  at_ = at;
}

Mapping::~Mapping() {
  if (at_) give_back([at = at_, n = size_] { return cu().cuMemUnmap(at, n); });
}

void Mapping::unmap() {
  check(cu().cuMemUnmap(at_, size_), "cuMemUnmap", std::to_string(size_) + " bytes at " + hex(at_));
  at_ = 0;
}

void set_access(const Device& device, CUdeviceptr at, std::size_t size, bool read_only) {
  CUmemAccessDesc d{};
  d.location = device.prop().location;
  if (read_only) {
    d.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
    const CUresult r = cu().cuMemSetAccess(at, size, &d, 1);
    if (r != CUDA_ERROR_NOT_SUPPORTED && r != CUDA_ERROR_INVALID_VALUE) return check(r, "cuMemSetAccess");
  }
  d.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check(cu().cuMemSetAccess(at, size, &d, 1), "cuMemSetAccess", std::to_string(size) + " bytes at " + hex(at));
}

Stream::Stream(Priority priority) {
  int least = 0, greatest = 0;
  check(cu().cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
  check(cu().cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING,
                                        priority == Priority::lowest ? least : greatest),
        "cuStreamCreateWithPriority");
}

Stream::~Stream() {
  if (stream_) give_back([x = stream_] { return cu().cuStreamDestroy(x); });
}

void Stream::quiesce() const {
  if (!over(cu().cuStreamSynchronize(stream_))) hold_releases();
}

void Stream::synchronize() const { check(cu().cuStreamSynchronize(stream_), "cuStreamSynchronize"); }

Event Event::create() {
  Event e;
  check(cu().cuEventCreate(&e.event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  return e;
}

Event Event::create_interprocess() {
  Event e;
  check(cu().cuEventCreate(&e.event_, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS), "cuEventCreate");
  return e;
}

Event Event::open(const CUipcEventHandle& handle) {
  Event e;
  check(cu().cuIpcOpenEventHandle(&e.event_, handle), "cuIpcOpenEventHandle");
  return e;
}

CUipcEventHandle Event::ipc_handle() const {
  CUipcEventHandle h{};
  check(cu().cuIpcGetEventHandle(&h, event_), "cuIpcGetEventHandle");
  return h;
}

void Event::make_wait(CUstream stream) const { check(cu().cuStreamWaitEvent(stream, event_, 0), "cuStreamWaitEvent"); }

Event::~Event() {
  if (event_) give_back([x = event_] { return cu().cuEventDestroy(x); });
}

void Event::record(CUstream stream) { check(cu().cuEventRecord(event_, stream), "cuEventRecord"); }

bool Event::done() const { return cu().cuEventQuery(event_) != CUDA_ERROR_NOT_READY; }

void Event::synchronize() const { check(cu().cuEventSynchronize(event_), "cuEventSynchronize"); }

}  // namespace pymux
