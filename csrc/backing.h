// The backing store: one arena of pinned host memory in slots of one page. Pinned once, reused,
// never per swap; grown by a thread of its own, before it is needed where that can be foreseen.
// What it is not: it copies nothing, and does not know how much it may have (the agent says).
//
// Invariants: a slot is free or belongs to one page; addresses of slots never change. Memory is one
// memfd; a chunk of it is registered with the driver once, and punched out when it is trimmed.
// All but the growing happens on the agent thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "vmm.h"

namespace pymux {

class Backing {
 public:
  static constexpr std::size_t kSlotsPerChunk = 16;

  // grown: called from the growing thread when a chunk is there, or could not be had.
  // shared: a file of `slots` pages that other processes map too; slots are then told by number, never taken.
  Backing(const Device& device, std::size_t page_size, std::function<void()> grown, Fd shared = {},
          std::size_t slots = 0);
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // Lets the thread grow the store to `slots` in all (rounded up to chunks), as far as allow() goes.
  void expect(std::size_t slots);
  void allow(std::size_t bytes);
  std::size_t allowed() const { return allowed_.load(); }
  bool growing() const;
  void wait_grown() const;  // until the thread has nothing to do, or has grown by a chunk

  std::int64_t take();  // a free slot, or -1
  void give(std::int64_t slot);
  bool there(std::size_t slot) const;  // is it pinned
  char* address(std::int64_t slot) const { return base_ + static_cast<std::size_t>(slot) * page_size_; }
  // Why the latest growth failed (HostOutOfMemory with figures, CudaError), once; or null.
  std::exception_ptr take_failure();
  // Unpins and returns every chunk without a used slot; gives the bytes released.
  std::size_t trim();

  std::size_t chunk_bytes() const { return kSlotsPerChunk * page_size_; }
  std::size_t pinned_bytes() const { return pinned_.load(); }
  std::size_t used_bytes() const { return used_.load() * page_size_; }

 private:
  struct Chunk {
    bool there = false;
    std::size_t used = 0;
  };
  void run();
  void pin(std::size_t chunk);
  bool may_grow_locked() const;

  const Device& device_;
  const std::size_t page_size_;
  const std::function<void()> grown_;
  Fd memory_;
  const bool shared_;
  char* base_ = nullptr;
  std::size_t most_chunks_ = 0;
  std::size_t file_size_ = 0;  // the growing thread's own

  mutable std::mutex mutex_;  // guards what follows, to the next comment
  mutable std::condition_variable changed_;
  std::vector<Chunk> chunks_;  // a trimmed chunk keeps its place
  std::vector<std::int64_t> free_;
  std::size_t target_ = 0;  // chunks
  std::uint64_t attempts_ = 0;
  bool stop_ = false;
  std::exception_ptr failure_;

  std::atomic<std::size_t> pinned_{0}, used_{0}, allowed_{0};
  std::thread thread_;
};

}  // namespace pymux
