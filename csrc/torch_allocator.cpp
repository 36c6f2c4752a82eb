#include "torch_allocator.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "error.h"

namespace pymux::torch_allocator {
namespace {

struct Entered {
  std::shared_ptr<Agent> agent;
  std::shared_ptr<Region> region;
};
thread_local std::vector<Entered> entered;
thread_local std::string why;

// A region, and its cache once torch's allocator has been replaced: then both live as long as the process,
// for tensors may outlive a Mux.
struct Known {
  std::weak_ptr<Region> region;
  std::shared_ptr<StreamCache> cache;
};
std::mutex regions_mutex;  // guards the two below
std::map<CUdeviceptr, Known>& regions() {
  static auto* m = new std::map<CUdeviceptr, Known>();  // outlives every tensor
  return *m;
}
std::map<int, std::shared_ptr<StreamCache>>& installed() {  // by device
  static auto* m = new std::map<int, std::shared_ptr<StreamCache>>();
  return *m;
}

// The region of an address and its cache, if it has one.
std::pair<std::shared_ptr<Region>, std::shared_ptr<StreamCache>> look_up(CUdeviceptr at) {
  std::lock_guard lock(regions_mutex);
  auto it = regions().upper_bound(at);
  if (it == regions().begin()) return {};
  const Known& known = std::prev(it)->second;
  auto r = known.region.lock();
  if (!r || !r->contains(at)) return {};
  return {r, known.cache};
}

std::vector<std::shared_ptr<StreamCache>> caches() {
  std::lock_guard lock(regions_mutex);
  std::vector<std::shared_ptr<StreamCache>> out;
  for (auto& [at, known] : regions())
    if (known.cache) out.push_back(known.cache);
  return out;
}

// The cache that serves this thread's allocations on a device.
std::shared_ptr<StreamCache> serving(int device) {
  if (!entered.empty() && entered.back().agent->device().ordinal() == device)
    return cache_of(entered.back().agent, entered.back().region);
  std::lock_guard lock(regions_mutex);
  auto it = installed().find(device);
  if (it == installed().end())
    throw std::runtime_error("pymux: no region of device " + std::to_string(device) +
                             " was installed as torch's allocator; connect() to that device and install() there too.");
  return it->second;
}

}  // namespace

std::shared_ptr<StreamCache> cache_of(const std::shared_ptr<Agent>& agent, const std::shared_ptr<Region>& region) {
  std::lock_guard lock(regions_mutex);
  Known& known = regions()[region->addresses.base()];
  known.region = region;
  if (!known.cache) known.cache = std::make_shared<StreamCache>(agent, region);
  return known.cache;
}

void enter(std::shared_ptr<Agent> agent, std::shared_ptr<Region> region) {
  entered.push_back({std::move(agent), std::move(region)});
}

void leave() {
  if (entered.empty()) throw Error("RegionError", "no region was entered on this thread.");
  entered.pop_back();
}

std::string last_error() { return why; }

void install(const std::shared_ptr<Agent>& agent, const std::shared_ptr<Region>& region) {
  auto cache = cache_of(agent, region);
  std::lock_guard lock(regions_mutex);
  installed()[agent->device().ordinal()] = cache;
}

void empty_cache() {
  for (auto& c : caches()) c->empty();
}

StreamCache::Stats stats(const std::shared_ptr<Region>& region) {
  const auto cache = look_up(region->addresses.base()).second;
  return cache ? cache->stats() : StreamCache::Stats{};
}

void reset_peak(const std::shared_ptr<Region>& region) {
  if (const auto cache = look_up(region->addresses.base()).second) cache->reset_peak();
}

void add(const std::shared_ptr<Region>& region) {
  std::lock_guard lock(regions_mutex);
  std::erase_if(regions(), [](const auto& entry) { return entry.second.region.expired(); });
  regions()[region->addresses.base()] = {region, nullptr};
}

std::shared_ptr<Region> find(CUdeviceptr at) { return look_up(at).first; }

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
  if (Driver::lost()) return;  // in a forked child, which has no such memory
  const auto at = reinterpret_cast<CUdeviceptr>(ptr);
  const auto [region, cache] = torch_allocator::look_up(at);
  if (region && !(cache && cache->free(at))) region->free(at - region->addresses.base());
}

void* pymux_torch_allocate(ssize_t size, int device, CUstream stream) {
  using namespace torch_allocator;
  if (size <= 0) return nullptr;
  try {
    return reinterpret_cast<void*>(serving(device)->allocate(static_cast<std::size_t>(size), stream));
  } catch (const Error& e) {
    why = e.what();
    throw std::runtime_error((e.no_memory() ? "CUDA out of memory. pymux: " : "pymux: ") + why);
  }
}

void pymux_torch_record_stream(void* ptr, CUstream stream) {
  if (Driver::lost()) return;
  const auto at = reinterpret_cast<CUdeviceptr>(ptr);
  if (auto cache = torch_allocator::look_up(at).second) cache->record_stream(at, stream);
}

void pymux_torch_begin_pool(int, StreamCache::PoolId id, StreamCache::Filter filter) {
  for (auto& c : torch_allocator::caches()) c->begin_pool(id, filter);
}

void pymux_torch_end_pool(int, StreamCache::PoolId id) {
  for (auto& c : torch_allocator::caches()) c->end_pool(id);
}

void pymux_torch_release_pool(int, StreamCache::PoolId id) {
  for (auto& c : torch_allocator::caches()) c->release_pool(id);
}

void* pymux_torch_base(void* ptr, std::size_t* size) {
  const auto at = reinterpret_cast<CUdeviceptr>(ptr);
  const auto region = torch_allocator::find(at);
  if (size) *size = region ? region->addresses.base() + region->addresses.size() - at : 0;
  return region ? reinterpret_cast<void*>(region->addresses.base()) : ptr;
}

void pymux_torch_empty_cache() {
  if (!Driver::lost()) torch_allocator::empty_cache();
}
