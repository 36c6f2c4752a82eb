// Hands out blocks of an address range. Best fit, coalescing, 256-byte aligned.
// What it is not: it touches no memory and knows no pages.
//
// Invariants: live and free blocks tile the range; no two free blocks touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

namespace pymux {

class Arena {
 public:
  static constexpr std::size_t kAlign = 256;
  explicit Arena(std::size_t size);

  // The offset of a block of at least `bytes` (rounded up), or -1 when no free block fits.
  std::int64_t allocate(std::size_t bytes);
  // False when no live block starts there.
  bool free(std::size_t offset);
  bool any_live(std::size_t offset, std::size_t bytes) const;
  std::size_t live_bytes() const { return live_bytes_; }
  std::size_t blocks() const { return live_.size(); }
  std::size_t extent() const;  // end of the highest live block

 private:
  void add_free(std::size_t offset, std::size_t size);
  void drop_free(std::map<std::size_t, std::size_t>::iterator it);
  std::map<std::size_t, std::size_t> live_, free_;              // offset -> size
  std::set<std::pair<std::size_t, std::size_t>> free_by_size_;  // (size, offset)
  std::size_t live_bytes_ = 0;
};

}  // namespace pymux
