#include "fd.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pymux {
namespace {

std::atomic<unsigned> count{0};

// A bit for each number, so that nothing is locked or allocated between fork() and its return. Numbers beyond are
// not closed in a child; the system's own limit is about there.
constexpr std::size_t kMost = 1u << 20;
std::atomic<std::uint64_t> open_ones[kMost / 64];

void note(int fd, bool open) {
  if (fd < 0 || static_cast<std::size_t>(fd) >= kMost) return;
  const std::uint64_t bit = std::uint64_t{1} << (fd & 63);
  auto& word = open_ones[fd / 64];
  open ? word.fetch_or(bit, std::memory_order_relaxed) : word.fetch_and(~bit, std::memory_order_relaxed);
}

void in_child() {
  count.fetch_add(1);
  for (std::size_t i = 0; i < kMost / 64; ++i)
    for (std::uint64_t left = open_ones[i].exchange(0); left; left &= left - 1)
      ::close(static_cast<int>(i * 64) + __builtin_ctzll(left));
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, in_child);

}  // namespace

unsigned forks() { return count.load(std::memory_order_relaxed); }

Fd::Fd(int fd) : fd_(fd) { note(fd, true); }

Fd::~Fd() {
  if (fd_ < 0 || made_ != forks()) return;
  note(fd_, false);
  ::close(fd_);
}

}  // namespace pymux
