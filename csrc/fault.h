// Names the region when host code touches one of its pages that is not there, where a region's
// addresses are reachable from the host. What it is not: it recovers nothing; the process ends.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>

namespace pymux::fault {

// Adds a range; at the first one the SIGSEGV handler is put before those that are there (such as
// faulthandler's, which then prints Python's traceback).
void watch(CUdeviceptr base, std::size_t size, const std::string& job, const std::string& region, bool read_only);
void forget(CUdeviceptr base);

}  // namespace pymux::fault
