// The backing store: pinned host memory in slots of one page. Pinned once, reused, never per swap.
// What it is not: it copies nothing.
//
// Invariant: a slot is free or belongs to one page. Used by the agent thread alone, but for the
// counters. Memory is a memfd per chunk, registered with the driver whole.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "vmm.h"

namespace pymux {

class Backing {
 public:
  explicit Backing(std::size_t page_size) : page_size_(page_size) {}
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // Takes a free slot, growing by a chunk when there is none. Throws HostOutOfMemory, with
  // figures, when the host has no room; nothing is changed then.
  std::int64_t take();
  void give(std::int64_t slot);
  char* address(std::int64_t slot) const;
  // Unpins and returns every chunk without a used slot; gives the bytes released.
  std::size_t trim();

  std::size_t pinned_bytes() const { return pinned_.load(); }
  std::size_t used_bytes() const { return used_.load() * page_size_; }

 private:
  struct Chunk {
    char* base = nullptr;
    std::size_t used = 0;
  };
  void grow();
  std::size_t page_size_;
  std::vector<Chunk> chunks_;  // a trimmed chunk keeps its place, with base null
  std::vector<std::int64_t> free_;
  std::atomic<std::size_t> pinned_{0}, used_{0};
};

}  // namespace pymux
