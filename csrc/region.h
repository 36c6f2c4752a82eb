// A named reservation of device addresses whose pages come and go.
// What it is not: it moves nothing (pager) and decides nothing (agent).
//
// Invariants: the base address never changes; a page belongs to one region; a page's contents
// are on the device (resident), in its backing slot (evicted) or nowhere (absent, discarded).
// `pages` and the counters are guarded by the agent's mutex and changed by the agent thread
// alone; the arena has a mutex of its own, since blocks are freed from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "vmm.h"

namespace pymux {

enum class OnEvict { keep, discard };
enum class PageState : std::uint8_t { absent, resident, evicted, discarded };

struct PageEntry {
  PageState state = PageState::absent;
  bool dirty = false;   // the slot, if any, does not have the current contents
  bool moving = false;  // a copy of it is in flight
  Page page;            // both set exactly when resident (or arriving)
  Mapping mapping;
  std::int64_t slot = -1;  // in the backing store; kept while the page is resident again
};

struct RegionCounters {
  std::uint64_t bytes_out = 0, bytes_in = 0;          // copied
  std::uint64_t avoided_clean = 0, avoided_dead = 0;  // bytes given away without a copy
  std::uint64_t lost_pages = 0, generation = 0;       // discarded contents; times it happened
};

class Region {
 public:
  Region(std::string name, OnEvict on_evict, const Device& device, std::size_t page_size);
  ~Region();

  const std::string name;
  const OnEvict on_evict;
  const std::size_t page_size;
  const Reservation addresses;
  std::vector<PageEntry> pages;
  RegionCounters counters;
  std::uint64_t last_used = 0;  // stamp of the last phase that used it

  CUdeviceptr at(std::size_t page) const { return addresses.base() + page * page_size; }
  bool contains(CUdeviceptr p) const { return p - addresses.base() < addresses.size(); }

  std::int64_t allocate(std::size_t bytes);
  bool free(std::size_t offset);
  bool live(std::size_t page) const;  // has the page any allocated block
  std::size_t used_pages() const;     // pages below the arena's extent
  std::size_t live_bytes() const;

 private:
  mutable std::mutex arena_mutex_;  // guards arena_
  Arena arena_;
};

}  // namespace pymux
