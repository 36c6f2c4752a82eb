#include "torch_allocator.h"

#include <map>
#include <mutex>

#include "error.h"

namespace pymux::torch_allocator {
namespace {

struct Entered {
  std::shared_ptr<Agent> agent;
  std::shared_ptr<Region> region;
};
thread_local std::vector<Entered> entered;
thread_local std::string why;

std::mutex regions_mutex;  // guards regions
std::map<CUdeviceptr, std::weak_ptr<Region>>& regions() {
  static auto* m = new std::map<CUdeviceptr, std::weak_ptr<Region>>();  // outlives every tensor
  return *m;
}

}  // namespace

void enter(std::shared_ptr<Agent> agent, std::shared_ptr<Region> region) {
  entered.push_back({std::move(agent), std::move(region)});
}

void leave() {
  if (entered.empty()) throw Error("RegionError", "no region was entered on this thread.");
  entered.pop_back();
}

std::string last_error() { return why; }

void add(const std::shared_ptr<Region>& region) {
  std::lock_guard lock(regions_mutex);
  std::erase_if(regions(), [](const auto& entry) { return entry.second.expired(); });
  regions()[region->addresses.base()] = region;
}

std::shared_ptr<Region> find(CUdeviceptr at) {
  std::lock_guard lock(regions_mutex);
  auto it = regions().upper_bound(at);
  if (it == regions().begin()) return nullptr;
  auto r = std::prev(it)->second.lock();
  return r && r->contains(at) ? r : nullptr;
}

}  // namespace pymux::torch_allocator

using namespace pymux;

void* pymux_torch_malloc(ssize_t size, int device, CUstream) {
  using namespace torch_allocator;
  try {
    if (entered.empty() || size < 0 || entered.back().agent->device().ordinal() != device) {
      why = "no region of this device was entered on this thread";
      return nullptr;
    }
    auto& e = entered.back();
    return reinterpret_cast<void*>(e.agent->allocate(e.region, static_cast<std::size_t>(size)));
  } catch (const std::exception& e) {
    why = e.what();
    return nullptr;  // torch empties its cache, retries, and raises OutOfMemoryError
  }
}

void pymux_torch_free(void* ptr, ssize_t, int, CUstream) {
  const auto at = reinterpret_cast<CUdeviceptr>(ptr);
  if (auto r = torch_allocator::find(at)) r->free(at - r->addresses.base());
}
