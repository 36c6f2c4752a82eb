// What torch's CUDAPluggableAllocator calls: device memory from the region that the calling
// thread has entered. What it is not: it caches nothing; torch does.
#pragma once

#include <memory>
#include <string>

#include "agent.h"

namespace pymux::torch_allocator {

// Allocations of this thread come from `region` until the matching leave().
void enter(std::shared_ptr<Agent> agent, std::shared_ptr<Region> region);
void leave();
// Why this thread's last allocation failed; torch itself only says "out of memory".
std::string last_error();
// Finds the region of an address, for frees from any thread.
void add(const std::shared_ptr<Region>& region);
std::shared_ptr<Region> find(CUdeviceptr at);

}  // namespace pymux::torch_allocator

extern "C" {
__attribute__((visibility("default"))) void* pymux_torch_malloc(ssize_t size, int device, CUstream stream);
__attribute__((visibility("default"))) void pymux_torch_free(void* ptr, ssize_t size, int device, CUstream stream);
}
