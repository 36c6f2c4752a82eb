// libpymux_preload.so, which 'pymux run' puts before a program's libraries: cudaMalloc and cudaFree are
// answered from a region. What it is not: it allocates nothing itself; libpymux_core.so beside it does, and is
// loaded when the program first allocates, for most programs that inherit LD_PRELOAD never touch a GPU.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "preloaded.h"

namespace {

// Of the CUDA runtime API; the same in all of its versions.
constexpr int kInvalidValue = 1, kMemoryAllocation = 2, kInitializationError = 3;

int find_runtime(dl_phdr_info* info, std::size_t, void* out) {
  if (!info->dlpi_name || !std::strstr(info->dlpi_name, "libcudart.so")) return 0;
  *static_cast<void**>(out) = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  return *static_cast<void**>(out) != nullptr;
}

// The runtime's own function. A library that was loaded for its importer alone is not among the next ones.
template <class F>
F runtime(const char* name) {
  void* f = dlsym(RTLD_NEXT, name);
  if (!f) {
    void* library = nullptr;
    dl_iterate_phdr(find_runtime, &library);
    if (library) f = dlsym(library, name);
  }
  return reinterpret_cast<F>(f);
}

struct Core {
  decltype(&pymux_preload_malloc) malloc = nullptr;
  decltype(&pymux_preload_free) free = nullptr;
};
Core core;

void say(const char* what, const char* why) { std::fprintf(stderr, "pymux run: %s: %s\n", what, why); }

void load_core() {
  Dl_info self{};
  char path[4096];
  dladdr(reinterpret_cast<void*>(&load_core), &self);
  const char* slash = self.dli_fname ? std::strrchr(self.dli_fname, '/') : nullptr;
  const int dir = slash ? static_cast<int>(slash - self.dli_fname) : 0;
  std::snprintf(path, sizeof path, "%.*s/libpymux_core.so", dir, self.dli_fname);
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return say("its library cannot be loaded; install pymux again", dlerror());
  core.malloc = reinterpret_cast<decltype(core.malloc)>(dlsym(library, "pymux_preload_malloc"));
  core.free = reinterpret_cast<decltype(core.free)>(dlsym(library, "pymux_preload_free"));
  int version = 0;
  if (auto f = runtime<int (*)(int*)>("cudaRuntimeGetVersion")) f(&version);
  Dl_info file{};
  if (auto f = runtime<void*>("cudaMalloc")) dladdr(f, &file);
  auto start = reinterpret_cast<decltype(&pymux_preload_start)>(dlsym(library, "pymux_preload_start"));
  if (start && start(file.dli_fname ? file.dli_fname : "the CUDA runtime", version)) return;
  core = {};
}

bool serving() {
  static const bool asked = std::getenv("PYMUX_RUN") != nullptr;
  return asked;
}

const Core& get() {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, load_core);
  return core;
}

int missing(const char* name) {
  say(name, "the program calls it, and no libcudart.so is loaded that has it");
  return kInitializationError;
}

void once(std::atomic<bool>& said, const char* call) {
  if (!serving() || said.exchange(true)) return;
  std::fprintf(stderr,
               "pymux run: this program uses %s: that memory stays on the device while others have it. Only cudaMalloc "
               "is served from a region.\n",
               call);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int cudaMalloc(void** ptr, std::size_t bytes) {
  static const auto real = runtime<int (*)(void**, std::size_t)>("cudaMalloc");
  if (!serving() || !ptr || bytes == 0) return real ? real(ptr, bytes) : missing("cudaMalloc");
  int device = 0;
  static const auto current = runtime<int (*)(int*)>("cudaGetDevice");
  if (!current) return missing("cudaGetDevice");
  if (const int r = current(&device)) return r;
  // The runtime makes the device's context current at its own first call.
  static const auto real_free = runtime<int (*)(void*)>("cudaFree");
  if (real_free) real_free(nullptr);
  const Core& c = get();
  if (!c.malloc) return kInitializationError;
  switch (c.malloc(ptr, bytes, device)) {
    case PYMUX_PRELOAD_DONE:
      return 0;
    case PYMUX_PRELOAD_NO_MEMORY:
      return kMemoryAllocation;
    default:
      return kInitializationError;
  }
}

EXPORT int cudaFree(void* ptr) {
  static const auto real = runtime<int (*)(void*)>("cudaFree");
  if (ptr && serving() && core.free) {
    const int r = core.free(ptr);
    if (r != PYMUX_PRELOAD_NOT_OURS) return r == PYMUX_PRELOAD_DONE ? 0 : kInvalidValue;
  }
  return real ? real(ptr) : missing("cudaFree");
}

EXPORT int cudaMallocAsync(void** ptr, std::size_t bytes, void* stream) {
  static std::atomic<bool> said{false};
  static const auto real = runtime<int (*)(void**, std::size_t, void*)>("cudaMallocAsync");
  once(said, "cudaMallocAsync");
  return real ? real(ptr, bytes, stream) : missing("cudaMallocAsync");
}

EXPORT int cudaMallocFromPoolAsync(void** ptr, std::size_t bytes, void* pool, void* stream) {
  static std::atomic<bool> said{false};
  static const auto real = runtime<int (*)(void**, std::size_t, void*, void*)>("cudaMallocFromPoolAsync");
  once(said, "cudaMallocFromPoolAsync");
  return real ? real(ptr, bytes, pool, stream) : missing("cudaMallocFromPoolAsync");
}

EXPORT int cudaMallocManaged(void** ptr, std::size_t bytes, unsigned flags) {
  static std::atomic<bool> said{false};
  static const auto real = runtime<int (*)(void**, std::size_t, unsigned)>("cudaMallocManaged");
  once(said, "cudaMallocManaged");
  return real ? real(ptr, bytes, flags) : missing("cudaMallocManaged");
}
