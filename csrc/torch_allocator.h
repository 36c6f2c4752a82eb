// What torch's CUDAPluggableAllocator calls: device memory from the region that the calling thread has
// entered, or from the one that replaces torch's allocator for the process.
// What it is not: torch itself caches what a memory pool gets here; what the replaced allocator hands out
// is used again by `stream_cache`.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "agent.h"
#include "stream_cache.h"

namespace pymux::torch_allocator {

// Allocations of this thread come from `region` until the matching leave().
void enter(std::shared_ptr<Agent> agent, std::shared_ptr<Region> region);
void leave();
// Allocations of all threads, on the agent's device and outside of enter(), come from `region`.
void install(const std::shared_ptr<Agent>& agent, const std::shared_ptr<Region>& region);
// The cache of a region, made when it is first asked for; it takes leases.
std::shared_ptr<StreamCache> cache_of(const std::shared_ptr<Agent>& agent, const std::shared_ptr<Region>& region);
// Waits for the device and gives up what is cached.
void empty_cache();
StreamCache::Stats stats(const std::shared_ptr<Region>& region);
void reset_peak(const std::shared_ptr<Region>& region);
// Why this thread's last allocation failed; torch itself only says "out of memory".
std::string last_error();
// Finds the region of an address, for frees from any thread.
void add(const std::shared_ptr<Region>& region);
std::shared_ptr<Region> find(CUdeviceptr at);

}  // namespace pymux::torch_allocator

#define PYMUX_EXPORT __attribute__((visibility("default")))
extern "C" {
// For a memory pool: nullptr says that there is no memory; torch empties its cache and tries again.
PYMUX_EXPORT void* pymux_torch_malloc(ssize_t size, int device, CUstream stream);
PYMUX_EXPORT void pymux_torch_free(void* ptr, ssize_t size, int device, CUstream stream);
// For the process: torch does not look at the result, so that these throw.
PYMUX_EXPORT void* pymux_torch_allocate(ssize_t size, int device, CUstream stream);
PYMUX_EXPORT void pymux_torch_record_stream(void* ptr, CUstream stream);
PYMUX_EXPORT void pymux_torch_begin_pool(int device, pymux::StreamCache::PoolId id, pymux::StreamCache::Filter filter);
PYMUX_EXPORT void pymux_torch_end_pool(int device, pymux::StreamCache::PoolId id);
PYMUX_EXPORT void pymux_torch_release_pool(int device, pymux::StreamCache::PoolId id);
PYMUX_EXPORT void* pymux_torch_base(void* ptr, std::size_t* size);
PYMUX_EXPORT void pymux_torch_empty_cache();
}
