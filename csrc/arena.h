// Hands out blocks of an address range, coalescing, 256-byte aligned. So that few pages have a block: one smaller
// than a page goes where it needs no page that has none, at the lowest address where it about fits. Else best fit.
// What it is not: it touches no memory, and does not know what a tag means (see stream_cache).
//
// Invariants: live and free blocks tile the range; a free block has a tag, 0 for everybody; no two free
// blocks of a tag touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>

namespace pymux {

class Arena {
 public:
  static constexpr std::size_t kAlign = 256;
  Arena(std::size_t size, std::size_t page_size);

  // The offset of a block of at least `bytes` (rounded up), or -1 when no free block of the tag, or else
  // of everybody's, fits.
  std::int64_t allocate(std::size_t bytes, std::uint32_t tag = 0);
  // False when no live block starts there.
  bool free(std::size_t offset, std::uint32_t tag = 0);
  // Gives the free blocks of a tag to another.
  void retag(std::uint32_t from, std::uint32_t to);
  bool any_live(std::size_t offset, std::size_t bytes) const;
  std::size_t live_bytes() const { return live_bytes_; }
  std::size_t blocks() const { return live_.size(); }
  std::size_t extent() const;  // end of the highest live block

 private:
  struct Free {
    std::size_t size = 0;
    std::uint32_t tag = 0;
  };
  using FreeMap = std::map<std::size_t, Free>;
  FreeMap::iterator find_edge(std::size_t size, std::uint32_t tag);
  FreeMap::iterator find_fit(std::size_t size, std::uint32_t tag);
  std::size_t edge(std::size_t offset, std::size_t size) const;  // bytes before its first page without a block
  void add_free(std::size_t offset, Free block);                 // joins it with its neighbours
  void drop_free(FreeMap::iterator it);
  const std::size_t page_size_;
  std::map<std::size_t, std::size_t> live_;                                     // offset -> size
  FreeMap free_;                                                                // by offset
  std::set<std::tuple<std::uint32_t, std::size_t, std::size_t>> free_by_size_;  // (tag, size, offset)
  std::set<std::tuple<std::uint32_t, std::size_t, std::size_t>> edges_;         // (tag, class of the edge, offset)
  std::size_t live_bytes_ = 0;
};

}  // namespace pymux
