// Moves pages between the device and their copies, several in flight.
// What it is not: it does not choose pages or where their copies go, and knows no leases and no sockets.
//
// Invariants: a page's state changes only after the last step that can fail; bytes move while no
// lock is held; the page table is changed under the mutex given at construction. All calls come
// from one thread (the agent's), whose current context is the device's.
#pragma once

#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "backing.h"
#include "region.h"
#include "spill.h"

namespace pymux {

struct PageRef {
  Region* region = nullptr;
  std::size_t index = 0;
  PageEntry& entry() const { return region->pages[index]; }
};

// Where a page's contents are copied: a slot, or a place in the spill file by way of a slot.
struct Store {
  std::int64_t slot = -1, place = -1;
  bool fresh_slot = false, fresh_place = false;  // taken for this copy: given back if it fails
  bool shared = false;                           // in the segment's memory
};

struct SwapSpan {  // one page's move, for timelines; times are CLOCK_MONOTONIC seconds
  bool out = false, background = false;
  double begin = 0, end = 0;
  std::uint64_t bytes = 0;
};

enum class Reason { demand, prefetch, streaming };

double now_seconds();

class Pager {
 public:
  static constexpr std::size_t kDepth = 4;    // pages in flight on their way out
  static constexpr std::size_t kRun = 8;      // pages mapped by one set-access call; two runs more are in flight
  static constexpr std::size_t kSaves = 2;    // write-backs in flight: what a demand swap may have to wait for
  static constexpr std::size_t kStaging = 8;  // slots that pages pass through on their way to and from the file

  // poison: fill pages whose contents were discarded with 0xff bytes (NaN in every float format).
  Pager(const Device& device, Backing& backing, std::mutex& table_mutex, bool poison);
  ~Pager();

  // Gives the pager the file and its staging slots.
  void use_spill(Spill* spill) { spill_ = spill; }
  void add_staging(std::int64_t slot) { staging_.push_back(slot), staging_total_ += 1; }
  std::size_t staging_total() const { return staging_total_; }
  std::size_t staging_free() const { return staging_.size(); }
  std::int64_t take_staging();

  // Does a swap-out of the page copy anything? Clean, dead and discardable pages need none. The caller
  // holds the table mutex.
  static bool needs_copy(PageRef ref, bool always_copy);
  // Starts the swap-out of a resident page that the caller has marked `moving`; without a copy
  // `store` is not used. On an error the mark is taken back, what is fresh in `store` is given back,
  // and nothing else changed.
  void begin_out(PageRef ref, bool copy, Store store);
  bool out_full() const { return out_.size() >= kDepth; }
  bool out_empty() const { return out_.empty(); }
  bool out_ready() const;  // would finish_out() not wait
  // Waits for the oldest swap-out, unmaps, and gives the physical page. On an error the page is
  // resident as before, and the error is thrown.
  Page finish_out();
  PageRef first_out() const { return out_.front().ref; }  // that finish_out() is about

  // Starts bringing in a run of adjacent pages of one region with these physical pages. On an
  // error nothing changed and `physical` is whole again.
  void begin_in(const std::vector<PageRef>& run, std::vector<Page>& physical);
  bool in_full() const { return in_.size() >= 2 * kRun; }
  bool in_empty() const { return in_.empty(); }
  bool in_ready() const;
  bool arriving(const std::function<bool(const Region&)>& which) const;
  // Waits for the oldest page coming in; it is resident afterwards. On an error its state is as
  // before begin_in(), the error is in `failed`, and the physical page is given back.
  struct Arrival {
    PageRef ref;
    Page returned;
    std::exception_ptr failed;
  };
  Arrival finish_in(Reason reason);

  // Starts copying a dirty resident page, marked `saving` by the caller, to a slot; it stays in use.
  // Errors as begin_out().
  void begin_save(PageRef ref, Store store);
  bool save_full() const { return saves_.size() >= kSaves; }
  bool save_empty() const { return saves_.empty(); }
  bool save_ready() const { return saves_.front().done.done(); }
  // Waits for the oldest; the page is clean afterwards unless it was written meanwhile. On an error
  // it is dirty, and the error is thrown.
  void finish_save();

  // Starts what can be started of moves that have several steps (through the spill file).
  void advance();

  // Copies a page's contents to host memory from wherever they are; for readers without a lease.
  void read(PageRef ref, std::size_t offset, std::size_t bytes, void* to);

  std::deque<SwapSpan> spans;  // the latest; guarded by the table mutex

 private:
  struct Flight {
    PageRef ref{};
    Event done{};
    double begin = 0;
    bool copied = false;      // there is a copy to wait for
    bool kept = false;        // out: the contents survive
    std::size_t bytes = 0;    // of it
    Store store{};            // out: where to; in: the staging slot
    Spill::Handle request{};  // out: the write, once the copy is done; in: the read, until the copy runs
    std::uint32_t version = 0;
    std::exception_ptr error{};
  };
  void note(bool out, bool background, double begin, std::uint64_t bytes);
  void copy_out(Flight& f, const Stream& stream);
  void copy_in(Flight& f, const char* from);
  void adopt(Flight& f);  // a copy is complete: the page's slot, place and digest; caller holds the table mutex
  void undo(Flight& f, const Stream& stream);
  void start_write(Flight& f);
  void start_copy_in(Flight& f);
  Event take_event();
  const Device& device_;
  Backing& backing_;
  Spill* spill_ = nullptr;
  std::mutex& table_;
  const bool poison_;
  Stream out_stream_, in_stream_, low_stream_;
  std::deque<Flight> out_, in_, saves_;
  std::vector<Event> events_;  // reused
  std::vector<std::int64_t> staging_;
  std::size_t staging_total_ = 0;
};

}  // namespace pymux
