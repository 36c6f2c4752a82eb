#include "pager.h"

#include <time.h>

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

Pager::Pager(const Device& device, Backing& backing, std::mutex& table_mutex)
    : device_(device),
      backing_(backing),
      table_(table_mutex),
      out_stream_(Stream::Priority::highest),
      in_stream_(Stream::Priority::highest) {}

Event Pager::take_event() {
  if (events_.empty()) return Event();
  Event e = std::move(events_.back());
  events_.pop_back();
  return e;
}

void Pager::note(bool out, double begin, std::uint64_t bytes) {
  if (spans.size() == kMaxSpans) spans.pop_front();
  spans.push_back({out, begin, now_seconds(), bytes});
}

void Pager::begin_out(PageRef ref, bool always_copy) {
  PageEntry& e = ref.entry();
  Region& r = *ref.region;
  const bool live = r.live(ref.index);
  const bool clean = e.slot >= 0 && !e.dirty;  // an unused page's mark does not change meanwhile
  std::int64_t fresh = -1;
  try {
    Flight f{ref, take_event(), now_seconds(), false};
    if (live && (always_copy || (r.on_evict == OnEvict::keep && !clean))) {
      std::int64_t slot = e.slot;
      if (slot < 0) slot = fresh = backing_.take();
      check(cu().cuMemcpyDtoHAsync(backing_.address(slot), r.at(ref.index), r.page_size, out_stream_.get()),
            "cuMemcpyDtoHAsync", "swapping out region '" + r.name + "'");
      f.copied = true;
      f.done.record(out_stream_);
    }
    if (fresh >= 0) {
      std::lock_guard lock(table_);
      e.slot = fresh;
      e.dirty = true;  // until the copy is done
    }
    out_.push_back(std::move(f));
  } catch (...) {
    cu().cuStreamSynchronize(out_stream_.get());  // the slot must be quiet before it is reused
    if (fresh >= 0) backing_.give(fresh);
    std::lock_guard lock(table_);
    e.moving = false;
    throw;
  }
}

bool Pager::out_ready() const { return !out_.front().copied || out_.front().done.done(); }
bool Pager::in_ready() const { return !in_.front().copied || in_.front().done.done(); }

Page Pager::finish_out() {
  Flight f = std::move(out_.front());
  out_.pop_front();
  PageEntry& e = f.ref.entry();
  Region& r = *f.ref.region;
  try {
    if (f.copied) f.done.synchronize();
    e.mapping.unmap();
  } catch (...) {
    std::lock_guard lock(table_);
    e.moving = false;
    throw;
  }
  events_.push_back(std::move(f.done));
  // Nothing can fail any more.
  std::lock_guard lock(table_);
  e.moving = false;
  if (f.copied) {
    r.counters.bytes_out += r.page_size;
    e.dirty = false;
  }
  const bool live = r.live(f.ref.index), saved = e.slot >= 0 && !e.dirty;
  if (live && saved && r.on_evict == OnEvict::keep) {
    e.state = PageState::evicted;
    if (!f.copied) r.counters.avoided_clean += r.page_size;
  } else {
    // A block that came alive since begin_out() has no contents yet: nothing is lost.
    const bool lost = live && r.on_evict == OnEvict::discard;
    e.state = lost ? PageState::discarded : PageState::absent;
    if (!f.copied) r.counters.avoided_dead += r.page_size;
    if (lost) {
      r.counters.lost_pages += 1;
      r.counters.generation += 1;
    }
    if (e.slot >= 0) backing_.give(std::exchange(e.slot, -1));
    e.dirty = false;
  }
  note(true, f.begin, f.copied ? r.page_size : 0);
  return std::move(e.page);
}

void Pager::begin_in(const std::vector<PageRef>& run, std::vector<Page>& physical) {
  Region& r = *run.front().region;
  const double begin = now_seconds();
  std::vector<Mapping> mappings;
  std::vector<Event> events;
  for (std::size_t i = 0; i < run.size(); ++i) {
    mappings.emplace_back(r.at(run[i].index), r.page_size, physical[i]);
    events.push_back(take_event());
  }
  set_access(device_, r.at(run.front().index), r.page_size * run.size());
  std::vector<bool> copied(run.size());
  try {
    for (std::size_t i = 0; i < run.size(); ++i) {
      const PageEntry& e = run[i].entry();
      if (e.state != PageState::evicted) continue;
      check(cu().cuMemcpyHtoDAsync(r.at(run[i].index), backing_.address(e.slot), r.page_size, in_stream_.get()),
            "cuMemcpyHtoDAsync", "swapping in region '" + r.name + "'");
      copied[i] = true;
      events[i].record(in_stream_);
    }
  } catch (...) {
    cu().cuStreamSynchronize(in_stream_.get());  // copies in flight still use the mappings
    throw;
  }
  std::lock_guard lock(table_);
  for (std::size_t i = 0; i < run.size(); ++i) {
    PageEntry& e = run[i].entry();
    e.moving = true;
    e.page = std::move(physical[i]);
    e.mapping = std::move(mappings[i]);
    in_.push_back({run[i], std::move(events[i]), begin, copied[i]});
  }
  physical.clear();
}

Pager::Arrival Pager::finish_in() {
  Flight f = std::move(in_.front());
  in_.pop_front();
  PageEntry& e = f.ref.entry();
  Arrival a{f.ref, Page(), nullptr};
  try {
    if (f.copied) f.done.synchronize();
  } catch (...) {
    a.failed = std::current_exception();
    cu().cuStreamSynchronize(in_stream_.get());
    std::lock_guard lock(table_);
    e.moving = false;
    e.mapping = Mapping();
    a.returned = std::move(e.page);
    return a;
  }
  events_.push_back(std::move(f.done));
  std::lock_guard lock(table_);
  e.moving = false;
  e.dirty = !f.copied;
  e.state = PageState::resident;
  if (f.copied) f.ref.region->counters.bytes_in += f.ref.region->page_size;
  note(false, f.begin, f.copied ? f.ref.region->page_size : 0);
  return a;
}

void Pager::read(PageRef ref, std::size_t offset, std::size_t bytes, void* to) {
  const PageEntry& e = ref.entry();  // only this thread changes it
  const Region& r = *ref.region;
  switch (e.state) {
    case PageState::resident:
      check(cu().cuMemcpyDtoHAsync(to, r.at(ref.index) + offset, bytes, out_stream_.get()), "cuMemcpyDtoHAsync");
      out_stream_.synchronize();
      return;
    case PageState::evicted:
      std::memcpy(to, backing_.address(e.slot) + offset, bytes);
      return;
    default:
      throw Error("ContentsLost", "region '" + r.name + "' was discarded when its pages were given away (on_evict=" +
                                      "\"discard\"), so this tensor has no contents. Write it again inside a phase, or "
                                      "create the region with on_evict=\"keep\".");
  }
}

}  // namespace pymux
