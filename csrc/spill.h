// The spill file: contents of evicted pages that the host has no memory for. Direct I/O, several
// requests in flight on threads of its own.
// What it is not: it chooses no pages, and buffers nothing.
//
// Invariants: a place in the file is free or belongs to one page, and has disk space before take()
// gives it away; a request's buffer stays its own until the request is done. The file has no
// name: it is gone with the process. All but the I/O happens on the agent thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "vmm.h"

namespace pymux {

class Spill {
 public:
  static constexpr std::size_t kThreads = 4;

  // done: called from an I/O thread when a request is.
  Spill(std::string dir, std::size_t page_size, std::function<void()> done);
  ~Spill();
  Spill(const Spill&) = delete;
  Spill& operator=(const Spill&) = delete;

  // Throws HostOutOfMemory, with figures, when the disk is full; SpillError when the directory cannot be used.
  std::int64_t take();
  void give(std::int64_t place);
  std::size_t trim();  // returns the disk space of free places; bytes

  struct Request;
  using Handle = std::shared_ptr<Request>;
  // Whole pages, buffers aligned to the file system's blocks.
  Handle write(std::int64_t place, const char* from);
  Handle read(std::int64_t place, char* to);
  bool done(const Handle& r) const;
  void wait(const Handle& r) const;          // throws SpillError with what the disk said
  void wait_briefly(const Handle& r) const;  // a fraction of a millisecond at most
  // Part of a page, at once.
  void read_now(std::int64_t place, std::size_t offset, std::size_t bytes, void* to) const;

 private:
  Handle submit(std::int64_t place, char* buffer, bool write);
  void open();
  void run();
  const std::string dir_;
  const std::size_t page_size_;
  const std::function<void()> done_;
  Fd file_;
  std::vector<std::int64_t> free_;
  std::int64_t places_ = 0;

  mutable std::mutex mutex_;  // guards what follows
  mutable std::condition_variable changed_;
  std::deque<Handle> queue_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace pymux
