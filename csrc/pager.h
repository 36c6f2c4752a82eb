// Moves pages between the device and the backing store, several in flight.
// What it is not: it does not choose pages, and knows no leases and no sockets.
//
// Invariants: a page's state changes only after the last step that can fail; bytes move while no
// lock is held; the page table is changed under the mutex given at construction. All calls come
// from one thread (the agent's), whose current context is the device's.
#pragma once

#include <deque>
#include <mutex>
#include <vector>

#include "backing.h"
#include "region.h"

namespace pymux {

struct PageRef {
  Region* region = nullptr;
  std::size_t index = 0;
  PageEntry& entry() const { return region->pages[index]; }
};

struct SwapSpan {  // one page's move, for timelines; times are CLOCK_MONOTONIC seconds
  bool out = false;
  double begin = 0, end = 0;
  std::uint64_t bytes = 0;
};

double now_seconds();

class Pager {
 public:
  static constexpr std::size_t kDepth = 4;  // pages in flight on their way out
  static constexpr std::size_t kRun = 8;    // pages mapped by one set-access call; two runs more are in flight

  Pager(const Device& device, Backing& backing, std::mutex& table_mutex);

  // Starts the swap-out of a resident page that the caller has marked `moving`. A page that is
  // clean, dead or discardable needs no copy, unless `always_copy`. On an error the mark is taken
  // back and nothing else changed.
  void begin_out(PageRef ref, bool always_copy);
  bool out_full() const { return out_.size() >= kDepth; }
  bool out_empty() const { return out_.empty(); }
  bool out_ready() const;  // would finish_out() not wait
  // Waits for the oldest swap-out, unmaps, and gives the physical page. On an error the page is
  // resident as before, and the error is thrown.
  Page finish_out();

  // Starts bringing in a run of adjacent pages of one region with these physical pages. On an
  // error nothing changed and `physical` is whole again.
  void begin_in(const std::vector<PageRef>& run, std::vector<Page>& physical);
  bool in_full() const { return in_.size() >= 2 * kRun; }
  bool in_empty() const { return in_.empty(); }
  bool in_ready() const;
  // Waits for the oldest page coming in; it is resident afterwards. On an error its state is as
  // before begin_in(), the error is in `failed`, and the physical page is given back.
  struct Arrival {
    PageRef ref;
    Page returned;
    std::exception_ptr failed;
  };
  Arrival finish_in();

  // Copies a page's contents to host memory from wherever they are; for readers without a lease.
  void read(PageRef ref, std::size_t offset, std::size_t bytes, void* to);

  std::deque<SwapSpan> spans;  // the latest; guarded by the table mutex

 private:
  struct Flight {
    PageRef ref;
    Event done;
    double begin = 0;
    bool copied = false;
  };
  void note(bool out, double begin, std::uint64_t bytes);
  Event take_event();
  const Device& device_;
  Backing& backing_;
  std::mutex& table_;
  Stream out_stream_, in_stream_;
  std::deque<Flight> out_, in_;
  std::vector<Event> events_;  // reused
};

}  // namespace pymux
