// Initialisation, devices, contexts, error names, fault injection and cuGetProcAddress of the
// simulated driver.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sim.h"

namespace sim {
namespace {

std::atomic<bool> initialized{false};
std::atomic<bool> forked{false};
std::atomic<int> sticky{CUDA_SUCCESS};

// A context is an address that names a device; `live` counts primary retains.
struct Context {
  int ordinal = 0;
  int live = 0;
};
Context contexts[kMaxDevices];
std::mutex context_mutex;  // guards Context::live
thread_local std::vector<Context*>* context_stack = nullptr;

std::vector<Context*>& stack() {
  if (!context_stack) context_stack = new std::vector<Context*>();
  return *context_stack;
}

constexpr int kKill = -SIGKILL;  // as a code: the process is killed instead of the call

struct Fault {
  std::string call;
  long countdown;
  int code;
  bool forever;
};
std::mutex fault_mutex;  // guards faults
std::vector<Fault>* faults = nullptr;
std::atomic<bool> faults_armed{false};

CUresult injected(const char* call) {
  if (!faults_armed.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
  std::lock_guard lock(fault_mutex);
  if (!faults) return CUDA_SUCCESS;
  for (auto& f : *faults) {
    if (f.call != "*" && f.call != call) continue;
    if (f.countdown > 1) {
      --f.countdown;
    } else if (f.countdown == 1) {
      if (!f.forever) f.countdown = 0;
      if (f.code == kKill) raise(SIGKILL);
      return static_cast<CUresult>(f.code);
    }
  }
  return CUDA_SUCCESS;
}

long arm(const char* call, long n, int code, int forever) {
  long left = 0;
  std::lock_guard lock(fault_mutex);
  if (!faults) faults = new std::vector<Fault>();
  if (n <= 0) {
    for (const Fault& f : *faults)
      if (f.call == call) left = f.countdown;
    std::erase_if(*faults, [&](const Fault& f) { return f.call == call; });
  } else {
    faults->push_back({call, n, code, forever != 0});
  }
  faults_armed = !faults->empty();
  return left;
}

// PYMUX_SIM_FAIL="cuMemCreate:3:2", "...:forever" or "cuMemCreate:3:kill", comma separated.
void arm_from_environment() {
  const char* text = std::getenv("PYMUX_SIM_FAIL");
  if (!text) return;
  std::string all = text;
  for (std::size_t at = 0; at < all.size();) {
    std::size_t end = std::min(all.find(',', at), all.size());
    char call[64] = {}, code[16] = {}, mode[16] = {};
    long n = 0;
    if (std::sscanf(all.substr(at, end - at).c_str(), "%63[^:]:%ld:%15[^:]:%15s", call, &n, code, mode) >= 3)
      arm(call, n, std::strcmp(code, "kill") == 0 ? kKill : std::atoi(code), std::strcmp(mode, "forever") == 0);
    at = end + 1;
  }
}

bool valid(const Context* c) { return c >= contexts && c < contexts + device_count(); }

}  // namespace

bool is_fork() { return forked.load(std::memory_order_relaxed); }

CUresult enter(const char* call, unsigned needs) {
  if (forked.load(std::memory_order_relaxed)) return CUDA_ERROR_NOT_INITIALIZED;
  if (CUresult r = injected(call)) return r;
  if ((needs & kInit) && !initialized.load(std::memory_order_acquire)) return CUDA_ERROR_NOT_INITIALIZED;
  if (int s = sticky.load(std::memory_order_relaxed); s && needs == kContext) return static_cast<CUresult>(s);
  if (needs == kContext && !current_device()) return CUDA_ERROR_INVALID_CONTEXT;
  return CUDA_SUCCESS;
}

void set_sticky(CUresult code) { sticky = code; }

Device* current_device() {
  auto& s = stack();
  if (s.empty() || !s.back()) return nullptr;
  return s.back()->live > 0 ? &device(s.back()->ordinal) : nullptr;
}

}  // namespace sim

using namespace sim;

SIM_API CUresult CUDAAPI cuInit(unsigned int flags) {
  SIM_ENTER("cuInit", kNothing);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] {
      forked = true;
      close_files_of_parent();
    });
    arm_from_environment();
  });
  if (CUresult r = open_node()) return r;
  if (device_count() == 0) return CUDA_ERROR_NO_DEVICE;
  static std::once_flag answering;
  std::call_once(answering, answer_checkpoints);
  initialized.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuDriverGetVersion(int* version) {
  SIM_ENTER("cuDriverGetVersion", kNothing);
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = 13000;
  return CUDA_SUCCESS;
}

#define SIM_ERRORS(X)                                                                                         \
  X(CUDA_SUCCESS, "no error")                                                                                 \
  X(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                                             \
  X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                                \
  X(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                                       \
  X(CUDA_ERROR_DEINITIALIZED, "driver shutting down")                                                         \
  X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                                               \
  X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                                      \
  X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                                     \
  X(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS")                      \
  X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                                     \
  X(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state")                       \
  X(CUDA_ERROR_NOT_FOUND, "named symbol not found")                                                           \
  X(CUDA_ERROR_NOT_READY, "device not ready")                                                                 \
  X(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")                                   \
  X(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                                                   \
  X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped") \
  X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region")       \
  X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                                                      \
  X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                                      \
  X(CUDA_ERROR_UNKNOWN, "unknown error")

SIM_API CUresult CUDAAPI cuGetErrorName(CUresult error, const char** text) {
  if (!text) return CUDA_ERROR_INVALID_VALUE;
  switch (error) {
#define X(code, words) \
  case code:           \
    *text = #code;     \
    return CUDA_SUCCESS;
    SIM_ERRORS(X)
#undef X
    default:
      *text = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}

SIM_API CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  if (!text) return CUDA_ERROR_INVALID_VALUE;
  switch (error) {
#define X(code, words) \
  case code:           \
    *text = words;     \
    return CUDA_SUCCESS;
    SIM_ERRORS(X)
#undef X
    default:
      *text = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// ---- devices -------------------------------------------------------------------------------

namespace {
CUresult check_device(CUdevice dev) {
  return dev >= 0 && dev < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
}  // namespace

SIM_API CUresult CUDAAPI cuDeviceGetCount(int* count) {
  SIM_ENTER("cuDeviceGetCount", kInit);
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = device_count();
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuDeviceGet(CUdevice* dev, int ordinal) {
  SIM_ENTER("cuDeviceGet", kInit);
  if (!dev) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_device(ordinal)) return r;
  *dev = ordinal;
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuDeviceGetName(char* name, int len, CUdevice dev) {
  SIM_ENTER("cuDeviceGetName", kInit);
  if (!name || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_device(dev)) return r;
  std::snprintf(name, static_cast<std::size_t>(len), "pymux simulated device %d", dev);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice dev) {
  SIM_ENTER("cuDeviceGetUuid", kInit);
  if (!uuid) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_device(dev)) return r;
  std::memcpy(uuid->bytes, device(dev).control->uuid, 16);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuDeviceTotalMem(size_t* bytes, CUdevice dev) {
  SIM_ENTER("cuDeviceTotalMem", kInit);
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_device(dev)) return r;
  *bytes = device(dev).control->capacity;
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice dev) {
  SIM_ENTER("cuDeviceGetAttribute", kInit);
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_device(dev)) return r;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 1;
      break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      *value = 2;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
      *value = 0;
      break;
    default:
      if (attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
      *value = 0;
  }
  return CUDA_SUCCESS;
}

// ---- contexts ------------------------------------------------------------------------------

SIM_API CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* ctx, CUdevice dev) {
  SIM_ENTER("cuDevicePrimaryCtxRetain", kInit);
  if (!ctx) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_device(dev)) return r;
  std::lock_guard lock(context_mutex);
  contexts[dev].ordinal = dev;
  contexts[dev].live += 1;
  *ctx = reinterpret_cast<CUcontext>(&contexts[dev]);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev) {
  SIM_ENTER("cuDevicePrimaryCtxRelease", kInit);
  if (CUresult r = check_device(dev)) return r;
  std::lock_guard lock(context_mutex);
  if (contexts[dev].live == 0) return CUDA_ERROR_INVALID_CONTEXT;
  contexts[dev].live -= 1;
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) {
  SIM_ENTER("cuCtxSetCurrent", kInit);
  auto* c = reinterpret_cast<Context*>(ctx);
  if (c && !valid(c)) return CUDA_ERROR_INVALID_CONTEXT;
  auto& s = stack();
  if (s.empty()) {
    if (c) s.push_back(c);
  } else if (c) {
    s.back() = c;
  } else {
    s.pop_back();
  }
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuCtxGetCurrent(CUcontext* ctx) {
  SIM_ENTER("cuCtxGetCurrent", kInit);
  if (!ctx) return CUDA_ERROR_INVALID_VALUE;
  *ctx = reinterpret_cast<CUcontext>(stack().empty() ? nullptr : stack().back());
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx) {
  SIM_ENTER("cuCtxPushCurrent", kInit);
  auto* c = reinterpret_cast<Context*>(ctx);
  if (!valid(c)) return CUDA_ERROR_INVALID_CONTEXT;
  stack().push_back(c);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuCtxPopCurrent(CUcontext* ctx) {
  SIM_ENTER("cuCtxPopCurrent", kInit);
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (ctx) *ctx = reinterpret_cast<CUcontext>(stack().back());
  stack().pop_back();
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuCtxGetDevice(CUdevice* dev) {
  SIM_ENTER("cuCtxGetDevice", kContext);
  if (!dev) return CUDA_ERROR_INVALID_VALUE;
  *dev = current_device()->ordinal;
  return CUDA_SUCCESS;
}

// ---- symbol lookup -------------------------------------------------------------------------

SIM_API CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** pfn, int version, cuuint64_t flags,
                                          CUdriverProcAddressQueryResult* status) {
  (void)version;
  (void)flags;
  if (!symbol || !pfn) return CUDA_ERROR_INVALID_VALUE;
  Dl_info self{};
  dladdr(reinterpret_cast<void*>(&sim::set_sticky), &self);
  void* lib = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *pfn = nullptr;
  for (const char* suffix : {"_v4", "_v3", "_v2", ""}) {
    *pfn = dlsym(lib, (std::string(symbol) + suffix).c_str());
    Dl_info found{};
    // Only our own symbols: the lookup also walks what the library depends on.
    if (*pfn && dladdr(*pfn, &found) && found.dli_fbase == self.dli_fbase) break;
    *pfn = nullptr;
  }
  if (lib) dlclose(lib);
  if (status) *status = *pfn ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *pfn ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// ---- what tests set and read ---------------------------------------------------------------

// The n-th call of `call` ("*": any) from now fails with `code` (-9: SIGKILL instead), once or from then
// on; n <= 0 forgets the faults of that call. Gives how many calls were left when they were forgotten, so
// that a sweep knows where it ended.
SIM_API long cudasim_fail_nth(const char* call, long n, int code, int forever) { return arm(call, n, code, forever); }

SIM_API void cudasim_counts(sim::Counts* out) {
  *out = {};
  memory_counts(out);
  stream_counts(out);
}

SIM_API int cudasim_set_capacity(int dev, std::uint64_t bytes) {
  if (dev < 0 || dev >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  device(dev).control->capacity = bytes;
  return CUDA_SUCCESS;
}

SIM_API int cudasim_set_link(int dev, std::uint64_t to_device, std::uint64_t to_host) {
  if (dev < 0 || dev >= device_count() || !to_device || !to_host) return CUDA_ERROR_INVALID_VALUE;
  device(dev).control->link_rate[kHostToDevice] = to_device;
  device(dev).control->link_rate[kDeviceToHost] = to_host;
  return CUDA_SUCCESS;
}
