// Fingerprints of pages on the device, to find those that a phase left as they were.
// What it is not: it compares nothing and knows no regions.
//
// Invariant: without a kernel for this device it is not available, and nothing else changes.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pymux {

struct Digest {
  std::uint64_t a = 0, b = 0;
  bool operator==(const Digest&) const = default;
};

class Fingerprinter {
 public:
  Fingerprinter();  // needs a current context; loads the kernel, or is not available
  ~Fingerprinter();
  Fingerprinter(const Fingerprinter&) = delete;
  Fingerprinter& operator=(const Fingerprinter&) = delete;

  bool available() const { return function_ != nullptr; }
  // Of the contents of pages of this size (a multiple of 16 bytes); waits. Throws CudaError.
  std::vector<Digest> digest(const std::vector<CUdeviceptr>& pages, std::size_t page_size);

 private:
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
  CUstream stream_ = nullptr;
  void* out_ = nullptr;  // pinned host memory that the kernel writes
};

}  // namespace pymux
