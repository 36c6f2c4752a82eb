#include "driver.h"

#include <dlfcn.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>

#include "error.h"
#include "fd.h"

namespace pymux {
namespace {

// Stringified after macro expansion, so that cuMemFree asks for cuMemFree_v2.
#define PYMUX_STR2(x) #x
#define PYMUX_STR(x) PYMUX_STR2(x)

std::mutex load_mutex;  // guards the three below
std::string loaded_choice;
unsigned loaded_after = 0;            // forks()
std::atomic<Driver*> table{nullptr};  // lives until the process ends

std::string embedded_library() {
  Dl_info self{};
  dladdr(reinterpret_cast<void*>(&Driver::load), &self);
  return (std::filesystem::path(self.dli_fname).parent_path() / "libcudasim.so").string();
}

std::unique_ptr<Driver> open_library(const std::string& path) {
  void* lib = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!lib) {
    const char* why = dlerror();
    throw Error("DriverError", "cannot load the driver library " + path + ": " + (why ? why : "unknown reason") +
                                   ". Set PYMUX_DRIVER to a libcuda.so.1, or to 'sim' for the simulated device.");
  }
  auto d = std::make_unique<Driver>();
  d->path = path;
#define X(name)                                                               \
  d->name = reinterpret_cast<decltype(d->name)>(dlsym(lib, PYMUX_STR(name))); \
  if (!d->name)                                                               \
    throw Error("DriverError", path + " has no function " PYMUX_STR(name) ", which pymux needs. Update the NVIDIA " \
                               "driver (CUDA 13 needs R580 or later), or set PYMUX_DRIVER=sim.");
  PYMUX_DRIVER_FUNCTIONS(X)
#undef X
#define X(name) d->name = reinterpret_cast<decltype(d->name)>(dlsym(lib, PYMUX_STR(name)));
  PYMUX_DRIVER_OPTIONAL(X)
#undef X
  return d;
}

CUresult usable(const Driver& d) {
  if (CUresult r = d.cuInit(0)) return r;
  int count = 0;
  if (CUresult r = d.cuDeviceGetCount(&count)) return r;
  return count > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

// A result by its number and by CUDA's own name.
std::string named(const Driver& d, CUresult r) {
  const char* name = nullptr;
  d.cuGetErrorName(r, &name);
  return "error " + std::to_string(r) + " (" + (name ? name : "unknown") + ")";
}

}  // namespace

const Driver* Driver::loaded() { return table.load(std::memory_order_acquire); }

bool Driver::lost() { return loaded() && forks() != loaded_after; }

const Driver& Driver::load(const std::string& choice) {
  if (lost()) throw forked_error();
  std::lock_guard lock(load_mutex);
  if (const Driver* d = loaded()) {
    if (choice != loaded_choice && choice != d->path)
      throw Error("DriverError", "this process already uses the driver " + d->path + "; '" + choice +
                                     "' cannot replace it. Set PYMUX_DRIVER before the first connect().");
    return *d;
  }
  std::unique_ptr<Driver> d;
  if (choice.empty()) {
    // No driver, or one without a device, means the simulated device; a driver that is there
    // but broken or too old is an error to be told.
    if (void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
      dlclose(lib);
      d = open_library("libcuda.so.1");
      CUresult r = usable(*d);
      if (r == CUDA_ERROR_NO_DEVICE) {
        d.reset();
      } else if (r != CUDA_SUCCESS) {
        throw Error("DriverError", "libcuda.so.1 is installed but cuInit failed with " + named(*d, r) +
                                       ". Run nvidia-smi to see why, or set PYMUX_DRIVER=sim.");
      }
    }
    if (!d) d = open_library(embedded_library());
  } else {
    d = open_library(choice == "sim" ? embedded_library() : choice);
  }
  if (CUresult r = usable(*d))
    throw Error("DriverError", d->path + ": cuInit failed with " + named(*d, r) +
                                   ". 'pymux doctor' looks at driver, devices and settings.");
  loaded_choice = choice;
  loaded_after = forks();
  table.store(d.release(), std::memory_order_release);
  return *loaded();
}

}  // namespace pymux
