// Regions that several processes map: the agent's part.
//
// A page is on the device once, and the broker counts it for the process that brought it in, its carrier.
// Others get its descriptor from the carrier and map it too. It leaves when the carrier gives it away and all
// others have unmapped it, into host memory that all of them map; whose phase needs it next brings it in and
// is its carrier. A phase that uses it does not unmap it, so that it stays for as long.
#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "agent.h"
#include "error.h"

namespace pymux {
namespace {

constexpr double kAgreement = 1.0;  // how long the carrier waits for the others before it keeps a page
constexpr double kAskAgain = 0.2;
constexpr double kPatience = 10.0;  // after which a carrier that does not answer is an error
constexpr double kTend = 0.25;      // how soon a process that died is noticed
constexpr double kLastAsks = 0.1;   // how long who closes still answers
constexpr double kJoinWait = 5.0;

std::string directory_of(const std::string& socket) { return socket.substr(0, socket.rfind('/')); }

Fd duplicate(const Fd& fd) { return Fd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)); }

using Where = Segment::Where;

}  // namespace

// ---- caller threads ------------------------------------------------------------------------

std::string Agent::share(const std::shared_ptr<Region>& region) {
  run_on_agent([&] {
    if (region->segment) return;
    const std::string who = "region '" + region->name + "'";
    if (region->on_evict != OnEvict::keep || region->fingerprint)
      throw Error("RegionError", who + " cannot be shared: that needs on_evict=\"keep\" and track=\"phases\".");
    if (!pass_pages_)
      throw Error("DriverError", who + " cannot be shared: this driver does not export memory, or PYMUX_PASS_PAGES=0.");
    open_post();
    while (!pager_->save_empty()) finish_save();
    auto segment = Segment::create(*device_, region->name, page_size_, region->pages.size(), post_->path());
    segment->start_backing(*device_, [this] { wake(); });
    std::lock_guard lock(mutex_);
    std::size_t used = region->used_pages();
    for (std::size_t i = 0; i < used; ++i) {
      const PageEntry& e = region->pages[i];
      if (region->allocated(i) && (e.state != PageState::resident || e.moving))
        throw Error("LeaseError", who + " is not on the device: share it in a phase that uses it.");
    }
    for (std::size_t i = 0; i < region->pages.size(); ++i) {
      PageEntry& e = region->pages[i];
      if (e.slot >= 0) backing_->give(std::exchange(e.slot, -1));
      if (e.place >= 0) spill_->give(std::exchange(e.place, -1));
      if (e.state == PageState::resident) {
        segment->place(i);
        used = std::max(used, i + 1);
      } else {
        e.state = PageState::absent;
      }
    }
    segment->grow(used);
    region->segment = segment;
    shared_.push_back(region);
    shares_ = true;
  });
  return region->segment->id();
}

std::shared_ptr<Region> Agent::open_shared(const std::string& id, const std::string& name, bool writable) {
  check_process();
  {
    std::lock_guard lock(mutex_);
    check_usable_locked();
    if (!device_) throw Error("RegionError", "a controller has no device memory: open shared regions elsewhere.");
    for (auto& r : regions_)
      if (r->segment && r->segment->id() == id)
        throw Error("RegionError", "this process has the shared region already, as '" + r->name + "'.");
  }
  auto [control, memory] = SharePost::find(directory_of(options_.socket), id, kJoinWait);
  std::shared_ptr<Region> region;
  run_on_agent([&] {
    if (!pass_pages_)
      throw Error("DriverError", "shared regions need a driver that imports memory, and PYMUX_PASS_PAGES not 0.");
    open_post();
    auto segment = Segment::join(*device_, page_size_, std::move(control), std::move(memory), post_->path());
    segment->start_backing(*device_, [this] { wake(); });
    region = create_region(name.empty() ? segment->name() : name, {.frozen = !writable}, segment);
    shared_.push_back(region);
    shares_ = true;
  });
  return region;
}

void Agent::publish(const std::shared_ptr<Region>& region, const std::string& meta, CUstream stream) {
  check_process();
  {
    std::lock_guard lock(mutex_);
    check_usable_locked();
    if (phase_ != Phase::active)
      throw Error("LeaseError", "publishing region '" + region->name + "' needs the phase that wrote it to be open.");
  }
  region->segment->record(*device_, stream);
  region->segment->publish(meta);
}

void Agent::wait_published(const std::shared_ptr<Region>& region, CUstream stream) {
  check_process();
  {
    std::lock_guard lock(mutex_);
    check_usable_locked();
  }
  region->segment->wait_published(*device_, stream);
}

// ---- what others are told ------------------------------------------------------------------

void Agent::open_post() {
  if (!post_) post_ = std::make_unique<SharePost>(directory_of(options_.socket));
}

void Agent::show_wishes_locked() {
  if (!shares_) return;
  for (auto& r : regions_)
    if (r->segment)
      r->segment->set_wish(!in_use_locked(*r)         ? Segment::Wish::none
                           : running_locked()         ? Segment::Wish::uses
                           : phase_ == Phase::waiting ? Segment::Wish::waits
                                                      : Segment::Wish::none);
}

void Agent::note(Segment& segment, unsigned member, NoteKind kind, std::size_t page) {
  auto& pages = notes_[{&segment, member, kind}];
  const auto number = static_cast<std::uint32_t>(page);
  if (std::find(pages.begin(), pages.end(), number) == pages.end()) pages.push_back(number);
}

// Sends what can be sent without waiting; the rest later.
void Agent::send_notes() {
  for (auto it = notes_.begin(); it != notes_.end();) {
    auto& [to, pages] = *it;
    auto& [segment, member, kind] = to;
    bool later = false;
    while (!pages.empty() && !later) {
      Note n;
      n.kind = kind;
      n.sender = segment->self();
      wire::put_text(n.segment, sizeof n.segment, segment->id());
      std::vector<Fd> fds;
      const std::size_t count = std::min(pages.size(), Note::kPages);
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t page = pages[i];
        const Segment::Word w = segment->at(page);
        if (kind == NoteKind::have) {
          Fd fd = export_shared(*segment, page, w, member);
          if (!fd) continue;
          fds.push_back(std::move(fd));
        }
        n.pages[n.count] = pages[i];
        n.epochs[n.count++] = w.epoch;
      }
      later = n.count > 0 && post_->send(segment->socket_of(member), n, fds) == SharePost::Sent::later;
      if (!later) pages.erase(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(count));
    }
    it = pages.empty() ? notes_.erase(it) : std::next(it);
  }
}

// The descriptor of a page that we carry, for a member that has said it maps it; else nothing.
Fd Agent::export_shared(Segment& segment, std::size_t page, const Segment::Word& w, unsigned to) {
  if (w.where != Where::device || w.carrier != segment.self() || !segment.holds(to, page)) return {};
  for (auto& r : shared_) {
    if (r->segment.get() != &segment || r->pages[page].state != PageState::resident) continue;
    try {
      return r->pages[page].page.export_fd();
    } catch (const Error&) {
      note_fault(std::current_exception());
    }
  }
  return {};
}

// ---- what others say -----------------------------------------------------------------------

void Agent::take_notes() {
  if (!post_) return;
  Note n;
  std::vector<Fd> fds;
  for (; post_->receive(n, fds); fds.clear()) {
    std::shared_ptr<Region> region;
    for (auto& r : shared_)
      if (r->segment->id() == n.segment) region = r;
    if (n.kind == NoteKind::join) {
      Note answer;
      answer.kind = NoteKind::welcome;
      std::memcpy(answer.segment, n.segment, sizeof n.segment);
      std::vector<Fd> both;
      if (region)
        both.push_back(duplicate(region->segment->control())), both.push_back(duplicate(region->segment->memory()));
      post_->send(n.reply_to, answer, both);
      continue;
    }
    if (!region || n.sender >= Segment::kMembers || n.sender == region->segment->self()) continue;
    std::size_t fd = 0;
    for (std::uint32_t i = 0; i < n.count; ++i) {
      const std::size_t page = n.pages[i];
      if (page >= region->pages.size()) continue;
      switch (n.kind) {
        case NoteKind::ask:
          note(*region->segment, n.sender, NoteKind::have, page);
          break;
        case NoteKind::have:
          if (fd < fds.size()) map_shared(*region, page, n.epochs[i], std::move(fds[fd++]));
          break;
        case NoteKind::drop:
          note(*region->segment, n.sender, unmap_shared(*region, page) ? NoteKind::dropped : NoteKind::keep, page);
          break;
        case NoteKind::keep:
          for (Leaving& l : leaving_)
            if (l.ref.region == region.get() && l.ref.index == page) l.refused_by = static_cast<int>(n.sender);
          break;
        default:  // dropped: the segment says it too
          break;
      }
    }
  }
}

// A page that we asked for is here.
void Agent::map_shared(Region& region, std::size_t page, std::uint16_t epoch, Fd fd) {
  auto it = std::find_if(awaited_.begin(), awaited_.end(),
                         [&](const Awaited& a) { return a.ref.region == &region && a.ref.index == page; });
  if (it == awaited_.end() || it->asked_at == 0) return;  // not wanted any more
  const Segment::Word w = region.segment->at(page);
  if (w.epoch != epoch || !region.segment->holds(region.segment->self(), page)) return;
  Page physical;
  Mapping mapping;
  try {
    physical = Page::import(fd);
    mapping = Mapping(region.at(page), page_size_, physical);
    set_access(*device_, region.at(page), page_size_, region.read_only);
  } catch (const Error&) {
    note_fault(std::current_exception());
    return;  // asked for again in a while
  }
  std::lock_guard lock(mutex_);
  PageEntry& e = region.pages[page];
  e.page = std::move(physical);
  e.mapping = std::move(mapping);
  e.state = PageState::resident;
  e.owed = true;
  if (phase_ == Phase::active && written_locked(region)) region.mark_written(page);
  awaited_.erase(it);
}

// The carrier wants a page out. False: an open phase uses it.
bool Agent::unmap_shared(Region& region, std::size_t page) {
  PageEntry& e = region.pages[page];
  {
    std::lock_guard lock(mutex_);
    if (running_locked() && in_use_locked(region)) return false;
    if (e.moving || (e.state == PageState::resident && !e.owed)) return false;
    e.moving = e.state == PageState::resident;
  }
  if (e.moving) {
    try {
      e.mapping.unmap();
    } catch (const Error&) {
      note_fault(std::current_exception());
      std::lock_guard lock(mutex_);
      e.moving = false;
      return false;
    }
    e.page = Page();
    std::lock_guard lock(mutex_);
    e.state = PageState::absent;
    e.moving = e.owed = false;
  }
  for (Awaited& a : awaited_)
    if (a.ref.region == &region && a.ref.index == page) a.asked_at = 0;
  region.segment->drop(page);
  return true;
}

// ---- pages that come -----------------------------------------------------------------------

// A reader without a lease: the page is here, or in host memory.
void Agent::fetch_to_read(PageRef ref) {
  for (const double until = now_seconds() + kPatience;;) {
    const PageEntry& e = ref.entry();
    const Where where = ref.region->segment->at(ref.index).where;
    if (!e.moving && (e.state == PageState::resident || where == Where::host)) break;
    if (where == Where::lost || where == Where::empty)
      throw Error("ContentsLost", "shared region '" + ref.region->name + "' has no contents there.");
    if (now_seconds() > until)
      throw Error("MemberLost", "the process that has shared region '" + ref.region->name + "' does not answer.");
    if (std::none_of(awaited_.begin(), awaited_.end(),
                     [&](const Awaited& a) { return a.ref.region == ref.region && a.ref.index == ref.index; }))
      awaited_.push_back({ref, now_seconds(), 0});
    step();
    poll_once(1);
    take_notes();
  }
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::waiting || phase_ == Phase::active) return;  // a phase may want it too
  std::erase_if(fill_, [&](const PageRef& p) { return p.region == ref.region && p.index == ref.index; });
}

// Takes back that any of these pages are waited for.
void Agent::stop_awaiting(const Region* only) {
  std::erase_if(awaited_, [&](const Awaited& a) {
    if (only && a.ref.region != only) return false;
    const PageEntry& e = a.ref.entry();
    if (a.asked_at > 0 && e.state != PageState::resident) a.ref.region->segment->drop(a.ref.index);
    return true;
  });
}

void Agent::advance_awaited() {
  bool more = false;
  const double now = now_seconds();
  std::exception_ptr failed;
  std::erase_if(awaited_, [&](Awaited& a) {
    Region& r = *a.ref.region;
    const PageEntry& e = a.ref.entry();
    if (e.moving) return false;
    if (e.state == PageState::resident) return true;
    Segment& s = *r.segment;
    Segment::Word w = s.at(a.ref.index);
    if (w.where == Where::lost) {
      failed = std::make_exception_ptr(
          Error("ContentsLost", "shared region '" + r.name +
                                    "' is lost in part: the process that had it on the device has died, and nobody "
                                    "else had mapped it. Share it anew."));
      return false;
    }
    if (w.where == Where::host || w.where == Where::empty) {
      fill_.push_back(a.ref);
      return more = true;
    }
    if (w.where == Where::device && w.carrier == s.self()) {  // left to us by a dead one, unmapped
      s.hand_over(a.ref.index);
      a.asked_at = 0;
    } else if (w.where == Where::device && (a.asked_at == 0 || now > a.asked_at + kAskAgain) &&
               s.hold(a.ref.index, w)) {
      a.asked_at = now;
      note(s, w.carrier, NoteKind::ask, a.ref.index);
    }
    if (now > a.since + kPatience)
      failed = std::make_exception_ptr(
          Error("MemberLost", "the process that has shared region '" + r.name +
                                  "' on the device does not answer. 'pymux status' shows who is stopped."));
    return false;
  });
  if (failed) fail_waiters(failed);
  if (!more) return;
  bool running = false;
  {
    std::lock_guard lock(mutex_);
    running = running_locked();
  }
  running ? send_want() : send_counts();
}

// ---- pages that go -------------------------------------------------------------------------

// Begins the departure of a page that we carry, marked moving: first the others unmap it.
bool Agent::begin_leave(PageRef ref, bool copy) {
  Segment& s = *ref.region->segment;
  if (!s.begin_leave(ref.index)) return false;
  for (unsigned m : s.other_holders(ref.index)) note(s, m, NoteKind::drop, ref.index);
  leaving_.push_back({ref, now_seconds() + kAgreement, copy, -1});
  return true;
}

void Agent::advance_leaving() {
  bool waited = false;
  std::erase_if(leaving_, [&](const Leaving& l) {
    Segment& s = *l.ref.region->segment;
    if (!s.held_by_others(l.ref.index)) {
      if (pager_->out_full()) return false;
      try {
        pager_->begin_out(l.ref, l.copy, {.shared = true});
      } catch (const Error&) {
        missing_ += !l.ref.entry().owed;
        note_fault(std::current_exception());
      }
      return true;
    }
    if (l.refused_by < 0 && now_seconds() < l.until) return waited = true, false;
    std::lock_guard lock(mutex_);
    // What nobody's right covers is best carried by who uses it, and can get one.
    s.abort_leave(l.ref.index, l.ref.entry().owed ? l.refused_by : -1);
    l.ref.entry().moving = false;
    missing_ += !l.ref.entry().owed;
    return true;
  });
  if (waited && now_seconds() >= tend_at_) tend();
}

// Host memory for a page to go to; nothing: it is on its way. Throws HostOutOfMemory.
std::optional<Store> Agent::shared_store(PageRef ref) {
  Backing& b = ref.region->segment->backing();
  if (b.there(ref.index)) return Store{.shared = true};
  if (auto full = b.take_failure()) std::rethrow_exception(full);
  if (b.growing() || host_asked_) return std::nullopt;
  const std::size_t slots = (ref.index / Backing::kSlotsPerChunk + 1) * Backing::kSlotsPerChunk;
  if (spare_host(b, slots)) return std::nullopt;
  if (std::exchange(host_exhausted_, false)) throw host_budget_error();
  host_asked_ = true;
  ask_host(backing_->pinned_bytes() + slots * page_size_ - b.allowed(), true);
  return std::nullopt;
}

// Lets a segment's memory grow to so many slots out of what this process may pin; false: that is too little.
bool Agent::spare_host(Backing& b, std::size_t slots) {
  const std::size_t bytes = slots * page_size_ - std::min(slots * page_size_, b.allowed());
  if (backing_->allowed() < backing_->pinned_bytes() + bytes) return false;
  backing_->allow(backing_->allowed() - bytes);
  shared_host_ += bytes;
  b.allow(b.allowed() + bytes);
  b.expect(slots);
  return true;
}

// Pays for pages that were left to us in the middle of a phase with the rights that came for them.
void Agent::settle_debts() {
  std::lock_guard lock(mutex_);
  for (; !debts_.empty() && held_ > used_; debts_.pop_back()) {
    PageEntry& e = debts_.back().entry();
    if (!e.owed || e.state != PageState::resident) continue;
    e.owed = false;
    used_ += 1;
    drop_spare_memory();  // what came with the right is one page too much
  }
}

// Now and then: what dead processes left is somebody's again. What was left to us goes out, or is paid for
// while a phase uses it.
void Agent::tend() {
  tend_at_ = now_seconds() + kTend;
  debts_.clear();
  for (auto& r : shared_) {
    Segment& s = *r->segment;
    s.bury_dead();
    for (std::size_t i = 0, n = s.used(); i < n; ++i) {
      const Segment::Word w = s.at(i);
      PageEntry& e = r->pages[i];
      if (w.where != Where::device || w.carrier != s.self() || !e.owed) continue;
      {
        std::lock_guard lock(mutex_);
        if (e.moving || e.state != PageState::resident) continue;
        if (running_locked() && in_use_locked(*r)) {
          debts_.push_back({r.get(), i});
          continue;
        }
      }
      try {
        if (!w.copied && !shared_store({r.get(), i})) continue;
        std::lock_guard lock(mutex_);
        e.moving = true;
      } catch (const Error&) {
        note_fault(std::current_exception());
        continue;
      }
      if (begin_leave({r.get(), i}, !w.copied)) continue;
      std::lock_guard lock(mutex_);
      e.moving = false;
    }
  }
  if (debts_.empty()) return;
  settle_debts();
  send_want();  // also for what those rights had come for
}

bool Agent::carries_for_others(const Region& region) const {
  const Segment& s = *region.segment;
  for (std::size_t i = 0, n = s.used(); i < n; ++i) {
    const Segment::Word w = s.at(i);
    if (w.where == Where::device && w.carrier == s.self() && s.held_by_others(i)) return true;
  }
  return false;
}

// At close: contents that others may want are in host memory, or on the device with one of them.
void Agent::leave_segments() {
  for (auto& r : shared_) {
    Segment& s = *r->segment;
    s.set_wish(Segment::Wish::none);
    s.bury_dead();
    if (!s.alone()) evict_now(r.get(), false);
    for (const double until = now_seconds() + kLastAsks; now_seconds() < until && carries_for_others(*r);) {
      poll_once(5);  // who has just asked for a page still gets it
      take_notes();
      send_notes();
    }
    for (std::size_t i = 0; i < r->pages.size(); ++i) {
      PageEntry& e = r->pages[i];
      if (e.state != PageState::resident) continue;
      e.mapping.unmap();
      std::lock_guard lock(mutex_);
      const bool mapped_elsewhere = s.held_by_others(i);
      s.hand_over(i);
      e.state = PageState::absent;
      if (!std::exchange(e.owed, false)) {
        used_ -= 1;
        // What others still map is not free: only the right to a page goes back.
        if (!mapped_elsewhere) spare_.push_back(std::move(e.page));
      }
      e.page = Page();
    }
  }
}

}  // namespace pymux
