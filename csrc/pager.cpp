#include "pager.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "error.h"

namespace pymux {
namespace {
const Driver& cu() { return *Driver::loaded(); }
constexpr std::size_t kMaxSpans = 1u << 16;
}  // namespace

double now_seconds() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

Pager::Pager(const Device& device, Backing& backing, std::mutex& table_mutex, bool poison)
    : device_(device),
      backing_(backing),
      table_(table_mutex),
      poison_(poison),
      out_stream_(Stream::Priority::highest),
      in_stream_(Stream::Priority::highest),
      low_stream_(Stream::Priority::lowest) {}

Pager::~Pager() {
  for (std::int64_t slot : staging_) backing_.give(slot);
}

Event Pager::take_event() {
  if (events_.empty()) return Event::create();
  Event e = std::move(events_.back());
  events_.pop_back();
  return e;
}

std::int64_t Pager::take_staging() {
  const std::int64_t slot = staging_.back();
  staging_.pop_back();
  return slot;
}

void Pager::note(bool out, bool background, double begin, std::uint64_t bytes) {
  if (spans.size() == kMaxSpans) spans.pop_front();
  spans.push_back({out, background, begin, now_seconds(), bytes});
}

bool Pager::needs_copy(PageRef ref, bool always_copy) {
  const PageEntry& e = ref.entry();
  if (ref.region->segment) return !ref.region->clean(ref.index);
  return ref.region->live(ref.index) && (always_copy || (ref.region->on_evict == OnEvict::keep && !e.clean()));
}

// ---- out -----------------------------------------------------------------------------------

void Pager::copy_out(Flight& f, const Stream& stream) {
  const Region& r = *f.ref.region;
  char* to = f.store.shared ? r.segment->address(f.ref.index) : backing_.address(f.store.slot);
  for (const Range& piece : r.pieces(f.ref.index)) {
    check(cu().cuMemcpyDtoHAsync(to + piece.offset, r.at(f.ref.index) + piece.offset, piece.size, stream.get()),
          "cuMemcpyDtoHAsync", "swapping out region '" + r.name + "'");
    f.bytes += piece.size;
  }
  f.done.record(stream);
  f.copied = true;
}

// Gives back what a copy that failed had taken.
void Pager::undo(Flight& f, const Stream& stream) {
  stream.quiesce();  // the slot must be quiet before it is reused
  if (f.request) try {
      spill_->wait(f.request);
    } catch (const Error&) {
    }
  if (f.store.place >= 0) {
    staging_.push_back(f.store.slot);
    if (f.store.fresh_place) spill_->give(f.store.place);
  } else if (f.store.fresh_slot) {
    backing_.give(f.store.slot);
  }
}

void Pager::adopt(Flight& f) {
  PageEntry& e = f.ref.entry();
  if (f.store.place >= 0) {
    staging_.push_back(f.store.slot);
    e.place = f.store.place;
  } else {
    e.slot = f.store.slot;
    if (e.place >= 0) spill_->give(std::exchange(e.place, -1));
  }
  if (e.version == f.version) {
    e.dirty = false;
    e.copied = e.digest;
  }
}

void Pager::begin_out(PageRef ref, bool copy, Store store) {
  PageEntry& e = ref.entry();
  Flight f{.ref = ref, .begin = now_seconds(), .store = copy ? store : Store{}};
  {
    std::lock_guard lock(table_);
    f.version = e.version;
    f.kept = ref.region->on_evict == OnEvict::keep && (copy || e.clean());
  }
  try {
    if (copy) {
      f.done = take_event();
      copy_out(f, out_stream_);
    }
    out_.push_back(std::move(f));
  } catch (...) {
    undo(f, out_stream_);
    std::lock_guard lock(table_);
    e.moving = false;
    if (ref.region->segment) ref.region->segment->abort_leave(ref.index);
    throw;
  }
}

void Pager::start_write(Flight& f) { f.request = spill_->write(f.store.place, backing_.address(f.store.slot)); }

bool Pager::out_ready() const {
  const Flight& f = out_.front();
  return !f.copied || (f.store.place >= 0 ? f.request && spill_->done(f.request) : f.done.done());
}

Page Pager::finish_out() {
  Flight f = std::move(out_.front());
  out_.pop_front();
  PageEntry& e = f.ref.entry();
  Region& r = *f.ref.region;
  try {
    if (f.copied && !f.request) f.done.synchronize();
    if (f.store.place >= 0) {
      if (!f.request) start_write(f);
      while (!spill_->done(f.request) && !out_.empty()) {  // meanwhile the next ones reach the disk too
        advance();
        spill_->wait_briefly(f.request);
      }
      spill_->wait(f.request);
    }
    e.mapping.unmap();
  } catch (...) {
    if (f.copied) undo(f, out_stream_);
    std::lock_guard lock(table_);
    e.moving = false;
    if (r.segment) r.segment->abort_leave(f.ref.index);
    throw;
  }
  if (f.done) events_.push_back(std::move(f.done));
  // Nothing can fail any more.
  std::lock_guard lock(table_);
  e.moving = false;
  if (r.segment) {
    e.state = PageState::absent;
    r.segment->departed(f.ref.index);
    (f.copied ? r.counters.out_demand : r.counters.avoided_clean) += r.page_size;
    note(true, false, f.begin, f.bytes);
    return std::move(e.page);
  }
  const bool allocated = r.allocated(f.ref.index), live = r.live(f.ref.index);
  if (f.copied) {
    adopt(f);
    r.counters.out_demand += f.bytes;
    r.counters.avoided_not_live += r.page_size - f.bytes;
  }
  if (live && f.kept && e.has_copy()) {
    e.state = PageState::evicted;
    if (!f.copied) (e.proven ? r.counters.avoided_unchanged : r.counters.avoided_clean) += r.page_size;
  } else {
    // A block that came alive since begin_out() has no contents yet: nothing is lost.
    const bool lost = live && r.on_evict == OnEvict::discard;
    e.state = lost ? PageState::discarded : PageState::absent;
    if (lost) {
      r.counters.avoided_discarded += f.copied ? 0 : r.page_size;
      r.counters.lost_pages += 1;
      r.counters.generation += 1;
    } else if (!f.copied) {
      (allocated ? r.counters.avoided_not_live : r.counters.avoided_free) += r.page_size;
    }
    if (e.slot >= 0) backing_.give(std::exchange(e.slot, -1));
    if (e.place >= 0) spill_->give(std::exchange(e.place, -1));
    e.dirty = false;
  }
  note(true, false, f.begin, f.bytes);
  return std::move(e.page);
}

// ---- write-back ----------------------------------------------------------------------------

void Pager::begin_save(PageRef ref, Store store) {
  PageEntry& e = ref.entry();
  Flight f{.ref = ref, .begin = now_seconds(), .store = store};
  {
    std::lock_guard lock(table_);
    f.version = e.version;
  }
  try {
    f.done = take_event();
    copy_out(f, low_stream_);
    saves_.push_back(std::move(f));
  } catch (...) {
    undo(f, low_stream_);
    std::lock_guard lock(table_);
    e.saving = false;
    throw;
  }
}

void Pager::finish_save() {
  Flight f = std::move(saves_.front());
  saves_.pop_front();
  PageEntry& e = f.ref.entry();
  try {
    f.done.synchronize();
  } catch (...) {
    undo(f, low_stream_);
    std::lock_guard lock(table_);
    e.saving = false;
    throw;
  }
  events_.push_back(std::move(f.done));
  std::lock_guard lock(table_);
  e.saving = false;
  adopt(f);
  f.ref.region->counters.out_written_back += f.bytes;
  note(true, true, f.begin, f.bytes);
}

// ---- in ------------------------------------------------------------------------------------

void Pager::copy_in(Flight& f, const char* from) {
  const Region& r = *f.ref.region;
  for (const Range& piece : r.pieces(f.ref.index)) {
    check(cu().cuMemcpyHtoDAsync(r.at(f.ref.index) + piece.offset, from + piece.offset, piece.size, in_stream_.get()),
          "cuMemcpyHtoDAsync", "swapping in region '" + r.name + "'");
    f.bytes += piece.size;
  }
  f.done.record(in_stream_);
  f.copied = true;
}

void Pager::begin_in(const std::vector<PageRef>& run, std::vector<Page>& physical) {
  Region& r = *run.front().region;
  const double begin = now_seconds();
  std::vector<Mapping> mappings;
  std::vector<Flight> flights;
  for (std::size_t i = 0; i < run.size(); ++i) {
    mappings.emplace_back(r.at(run[i].index), r.page_size, physical[i]);
    flights.push_back({.ref = run[i], .done = take_event(), .begin = begin});
  }
  set_access(device_, r.at(run.front().index), r.page_size * run.size());
  try {
    for (Flight& f : flights) {
      const PageEntry& e = f.ref.entry();
      if (r.segment) {
        if (r.segment->at(f.ref.index).copied) copy_in(f, r.segment->address(f.ref.index));
      } else if (e.state == PageState::evicted && e.slot >= 0) {
        copy_in(f, backing_.address(e.slot));
      } else if (e.state == PageState::discarded && poison_) {
        check(cu().cuMemsetD8Async(r.at(f.ref.index), 0xff, r.page_size, in_stream_.get()), "cuMemsetD8Async");
        f.done.record(in_stream_);
        f.copied = true;
      }
    }
  } catch (...) {
    in_stream_.quiesce();  // copies in flight still use the mappings
    throw;
  }
  for (Flight& f : flights) {
    const PageEntry& e = f.ref.entry();
    if (e.state != PageState::evicted || e.slot >= 0) continue;
    f.store = {.slot = take_staging(), .place = e.place};
    f.request = spill_->read(e.place, backing_.address(f.store.slot));
  }
  std::lock_guard lock(table_);
  for (std::size_t i = 0; i < run.size(); ++i) {
    PageEntry& e = run[i].entry();
    e.moving = true;
    e.page = std::move(physical[i]);
    e.mapping = std::move(mappings[i]);
    in_.push_back(std::move(flights[i]));
  }
  physical.clear();
}

// The file has been read: on to the device.
void Pager::start_copy_in(Flight& f) {
  try {
    spill_->wait(f.request);
    copy_in(f, backing_.address(f.store.slot));
  } catch (...) {
    f.error = std::current_exception();
  }
  f.request.reset();
}

bool Pager::in_ready() const {
  const Flight& f = in_.front();
  return f.error || (!f.request && (!f.copied || f.done.done()));
}

bool Pager::arriving(const std::function<bool(const Region&)>& which) const {
  return std::any_of(in_.begin(), in_.end(), [&](auto& f) { return which(*f.ref.region); });
}

Pager::Arrival Pager::finish_in(Reason reason) {
  Flight f = std::move(in_.front());
  in_.pop_front();
  PageEntry& e = f.ref.entry();
  Arrival a{f.ref, Page(), nullptr};
  try {
    if (f.request) start_copy_in(f);
    if (f.error) std::rethrow_exception(f.error);
    if (f.copied) f.done.synchronize();
    if (f.ref.region->read_only) set_access(device_, f.ref.region->at(f.ref.index), f.ref.region->page_size, true);
  } catch (...) {
    a.failed = std::current_exception();
    in_stream_.quiesce();
    if (f.store.slot >= 0) staging_.push_back(f.store.slot);
    std::lock_guard lock(table_);
    e.moving = false;
    e.mapping = Mapping();
    a.returned = std::move(e.page);
    if (f.ref.region->segment) f.ref.region->segment->unclaim(f.ref.index);
    return a;
  }
  if (f.store.slot >= 0) staging_.push_back(f.store.slot);
  if (f.done) events_.push_back(std::move(f.done));
  Region& r = *f.ref.region;
  std::lock_guard lock(table_);
  e.moving = false;
  if (r.segment)
    r.segment->arrived(f.ref.index);
  else if (e.state != PageState::evicted)
    e.mark_written();
  e.state = PageState::resident;
  (reason == Reason::demand     ? r.counters.in_demand
   : reason == Reason::prefetch ? r.counters.in_prefetched
                                : r.counters.in_streamed) += f.bytes;
  note(false, reason != Reason::demand, f.begin, f.bytes);
  return a;
}

// ---- both ----------------------------------------------------------------------------------

void Pager::advance() {
  for (Flight& f : out_)
    if (f.store.place >= 0 && !f.request && f.done.done()) {
      try {
        f.done.synchronize();  // says whether the copy failed; else the page is not written
      } catch (...) {
        continue;  // finish_out() meets the same error
      }
      start_write(f);
    }
  for (Flight& f : in_)
    if (f.request && spill_->done(f.request)) start_copy_in(f);
}

void Pager::read(PageRef ref, std::size_t offset, std::size_t bytes, void* to) {
  const PageEntry& e = ref.entry();  // only this thread changes it
  const Region& r = *ref.region;
  if (r.segment && e.state != PageState::resident) {
    std::memcpy(to, r.segment->address(ref.index) + offset, bytes);
    return;
  }
  switch (e.state) {
    case PageState::resident:
      check(cu().cuMemcpyDtoHAsync(to, r.at(ref.index) + offset, bytes, low_stream_.get()), "cuMemcpyDtoHAsync");
      low_stream_.synchronize();
      return;
    case PageState::evicted:
      if (e.slot >= 0)
        std::memcpy(to, backing_.address(e.slot) + offset, bytes);
      else
        spill_->read_now(e.place, offset, bytes, to);
      return;
    default:
      throw Error("ContentsLost", "region '" + r.name + "' was discarded when its pages were given away (on_evict=" +
                                      "\"discard\"), so this tensor has no contents. Write it again inside a phase, or "
                                      "create the region with on_evict=\"keep\".");
  }
}

}  // namespace pymux
