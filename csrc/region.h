// A named reservation of device addresses whose pages come and go.
// What it is not: it moves nothing (pager) and decides nothing (agent).
//
// Invariants: the base address never changes; a page belongs to one region; a page's contents
// are on the device (resident), in its slot or its place in the spill file (evicted) or nowhere
// (absent, discarded). `pages` and the counters are guarded by the agent's mutex and changed by the
// agent thread alone, but for marks of writing; the arena and the live ranges have a mutex of their
// own, since blocks are freed from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "fingerprint.h"
#include "segment.h"
#include "vmm.h"

namespace pymux {

enum class OnEvict { keep, discard };

struct RegionOptions {
  OnEvict on_evict = OnEvict::keep;
  bool fingerprint = false;  // compare contents at the end of phases that may write
  bool frozen = false;       // phases that do not say what they write do not write it
  // It stands for memory that something else uses: pages are counted, and none are created. Discarded.
  bool claim = false;
};

enum class PageState : std::uint8_t { absent, resident, evicted, discarded };

struct Range {  // bytes, from a region's base or a page's beginning
  std::size_t offset = 0, size = 0;
  bool operator==(const Range&) const = default;
};

struct PageEntry {
  PageState state = PageState::absent;
  bool dirty = false;         // the copy, if any, does not have the current contents
  bool moving = false;        // on its way in or out: not to be used
  bool saving = false;        // being written back: usable, not to be unmapped
  bool owed = false;          // shared, and the broker counts it for another process
  bool proven = false;        // clean because its fingerprint did not change
  std::uint32_t version = 0;  // of the contents, as far as known: grows with every mark of writing
  Page page;                  // both set exactly when resident (or arriving)
  Mapping mapping;
  std::int64_t slot = -1;                // of its copy in host memory; kept while the page is resident again
  std::int64_t place = -1;               // of its copy in the spill file; never both
  std::optional<Digest> digest, copied;  // of the contents at the last phase's end, and of the copy

  bool has_copy() const { return slot >= 0 || place >= 0; }
  bool clean() const { return has_copy() && !dirty; }
  void mark_written() {
    dirty = true;
    version += 1;
    proven = false;
    digest.reset();
  }
};

struct RegionCounters {
  // bytes copied: for a client that waited, in advance, and behind the phase body
  std::uint64_t out_demand = 0, out_written_back = 0;
  std::uint64_t in_demand = 0, in_prefetched = 0, in_streamed = 0;
  // bytes given away without a copy: the copy is current (by what the phases write, or by fingerprint),
  // no block is there, set_live() says so, contents need not survive
  std::uint64_t avoided_clean = 0, avoided_unchanged = 0, avoided_free = 0, avoided_not_live = 0;
  std::uint64_t avoided_discarded = 0;
  std::uint64_t lost_pages = 0, generation = 0;  // discarded contents; times it happened

  std::uint64_t out() const { return out_demand + out_written_back; }
  std::uint64_t in() const { return in_demand + in_prefetched + in_streamed; }
  std::uint64_t avoided() const {
    return avoided_clean + avoided_unchanged + avoided_free + avoided_not_live + avoided_discarded;
  }
};

class Region {
 public:
  Region(std::string name, RegionOptions options, const Device& device, std::size_t page_size);
  ~Region();

  const std::string name;
  const OnEvict on_evict;
  const bool fingerprint, frozen, claim;
  const std::size_t page_size;
  const Reservation addresses;
  std::vector<PageEntry> pages;
  RegionCounters counters;
  std::uint64_t last_used = 0;  // stamp of the last phase that used it
  // Where other processes map the pages too: set once, with its pages' entries. Then a page is resident or
  // absent here, and the segment says where its contents are.
  std::shared_ptr<Segment> segment;
  std::string pinned;      // why its pages must stay where they are; empty: they need not
  bool joined = false;     // another process made the segment, and allocates in it
  bool read_only = false;  // joined to be read

  CUdeviceptr at(std::size_t page) const { return addresses.base() + page * page_size; }
  bool contains(CUdeviceptr p) const { return p - addresses.base() < addresses.size(); }

  std::int64_t allocate(std::size_t bytes, std::uint32_t tag = 0);  // tags: see Arena
  bool free(std::size_t offset, std::uint32_t tag = 0);
  void retag(std::uint32_t from, std::uint32_t to);
  void mark_written(std::size_t page);
  bool clean(std::size_t page) const;                 // is there a copy of its contents
  bool allocated(std::size_t page) const;             // has the page any allocated block
  bool live(std::size_t page) const;                  // and any of it contents that must survive
  std::vector<Range> pieces(std::size_t page) const;  // of the page that must survive
  std::size_t used_pages() const;                     // pages below the arena's extent
  std::size_t live_bytes() const;                     // allocated

  // Only these ranges' contents must survive an eviction, and blocks allocated later; nullopt: all.
  // Sorted and joined here. Returns the pages with ranges that were not live before.
  std::vector<std::size_t> set_live(std::optional<std::vector<Range>> ranges);

 private:
  std::vector<Range> pieces_locked(std::size_t page) const;
  mutable std::mutex mutex_;  // guards the two below
  Arena arena_;
  std::optional<std::vector<Range>> live_;
};

}  // namespace pymux
