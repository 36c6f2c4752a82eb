// The agent thread: which pages go, come and are written back, and where their copies are kept.
#include <algorithm>
#include <cerrno>
#include <set>
#include <system_error>

#include "agent.h"
#include "error.h"

namespace pymux {
namespace {
constexpr double kMintPatience = 5.0;  // a dying process gives its memory back within this
constexpr double kMintRetry = 0.002;
constexpr double kSpare = 1.0;      // what is asked for again within this is given although others wait for it
constexpr double kHostRetry = 1.0;  // how long a full host is not asked again when there is a spill file
}  // namespace

void Agent::clear_fill() {
  fill_.clear();
  stop_awaiting(nullptr);
}

void Agent::queue_missing(const std::shared_ptr<Region>& r, std::size_t first, std::size_t count) {
  std::set<std::size_t> queued;
  for (const PageRef& p : fill_)
    if (p.region == r.get()) queued.insert(p.index);
  for (const Awaited& a : awaited_)
    if (a.ref.region == r.get()) queued.insert(a.ref.index);
  for (std::size_t i = first; i < first + count; ++i) {
    const PageEntry& e = r->pages[i];
    const bool there = e.state == PageState::resident && !e.moving;
    const bool coming = e.state != PageState::resident && e.moving;
    if (there || coming || !r->allocated(i) || queued.contains(i)) continue;
    const auto where = r->segment ? r->segment->at(i).where : Segment::Where::host;
    if (where == Segment::Where::host || where == Segment::Where::empty)
      fill_.push_back({r.get(), i});
    else  // another process has it
      awaited_.push_back({{r.get(), i}, now_seconds(), 0});
  }
}

// A swap that somebody waits for; write-back pauses meanwhile.
bool Agent::demand() const { return quota_ > 0 || !fill_.empty() || !pager_->out_empty() || !pager_->in_empty(); }

// Starts what can be started, finishes what is done; where neither is possible, waits for one page.
void Agent::step() {
  bool progress = false;
  stalled_ = false;
  const bool quiet = retry_releases();
  if (!quiet) refuse_work();
  pager_->advance();
  if (shares_) {
    if (now_seconds() >= tend_at_) tend();
    settle_debts();
    advance_awaited();
  }
  while (quota_ > 0 && !pager_->out_full() && (options_.duplex || pager_->in_empty()) && start_out()) progress = true;
  if (!leaving_.empty()) advance_leaving();
  if (retry_at_ == 0 || now_seconds() >= retry_at_) {
    retry_at_ = 0;
    while (!fill_.empty() && !pager_->in_full() && (options_.duplex || pager_->out_empty()) && start_in())
      progress = true;
  }
  while (!pager_->out_empty() && pager_->out_ready()) finish_out(), progress = true;
  while (!pager_->in_empty() && pager_->in_ready()) finish_in(), progress = true;
  while (!pager_->save_empty() && pager_->save_ready()) finish_save(), progress = true;
  if (!demand()) {
    if (std::exchange(save_due_, false)) plan_saves();
    while (!saves_.empty() && !pager_->save_full() && start_save()) progress = true;
    if (saved_ && saves_.empty() && pager_->save_empty()) {
      saved_ = false;
      send_counts();
    }
  }
  if (!progress) {
    flush_pages();  // somebody may wait for what is ready
    if (!pager_->out_empty()) {
      finish_out();
    } else if (!pager_->in_empty()) {
      finish_in();
    } else if (!pager_->save_empty()) {
      finish_save();
    }
  }
  if (quota_ == 0 && pager_->out_empty() && leaving_.empty()) flush_pages();
  if (!notes_.empty()) send_notes();
  settle();
}

// Memory of an earlier failure may still be in use, and waiting for that fails too: nothing new begins.
void Agent::refuse_work() {
  const auto why = std::make_exception_ptr(Error(
      "CudaError",
      "the driver does not finish, or give back, what an earlier failure left. Nothing is lost; the next phase or "
      "evict() tries again."));
  if (quota_ > 0) fail_out(why);
  if (!fill_.empty()) fail_waiters(why);
  saves_.clear();
  save_due_ = false;
}

// Pages that could go, the first to go last: those no phase here needs, then what a request that was
// not granted yet needs; discardable, clean, dirty; least recently used. For saving also those that an
// open phase uses and does not write: they go next.
std::vector<PageRef> Agent::candidates(bool for_saving) {
  using Rank = std::tuple<bool, int, std::uint64_t, std::size_t>;
  std::vector<std::pair<Rank, PageRef>> all;
  std::lock_guard lock(mutex_);
  const bool running = running_locked();
  // What others wait for is asked for again if nobody else has any, and goes then.
  const bool spare = !local_ && now_seconds() > spared_at_ + kSpare;
  for (auto& r : regions_) {
    const bool needed = (running || phase_ == Phase::waiting) && in_use_locked(*r);
    if ((running && (for_saving ? written_locked(*r) : needed)) || !r->pinned.empty()) continue;
    const auto wish = r->segment ? r->segment->wish_of_others() : Segment::Wish::none;
    if (wish == Segment::Wish::uses || (r->segment && for_saving)) continue;
    if (wish == Segment::Wish::waits && spare) {
      spared_at_ = now_seconds();
      continue;
    }
    for (std::size_t i = 0; i < r->pages.size(); ++i) {
      const PageEntry& e = r->pages[i];
      if (e.state != PageState::resident || e.moving || e.owed) continue;
      const bool worthless = r->on_evict == OnEvict::discard || !r->live(i);
      const int kind = worthless ? 0 : r->clean(i) ? 1 : 2;
      all.push_back({{(needed && !for_saving) || wish == Segment::Wish::waits, kind, r->last_used, r->pages.size() - i},
                     {r.get(), i}});
    }
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<PageRef> out;
  for (auto& [rank, ref] : all) out.push_back(ref);
  return out;
}

// Sends a physical page along with its credit: as a descriptor, or by freeing it.
void Agent::hand_out(Page page) {
  if (pass_pages_) {
    try {
      outgoing_.push_back(page.export_fd());
      return;
    } catch (const Error&) {
      note_fault(std::current_exception());
    }
  }
  page = Page();  // released before the broker hears of it
  outgoing_bare_ += 1;
}

// A right is used for memory that is there already: what came with it goes back to the driver.
void Agent::drop_spare_memory() {
  if (!spare_fds_.empty())
    spare_fds_.pop_back();
  else if (!spare_.empty())
    spare_.pop_back();
}

// Gives away a page without contents that nobody here waits for; false when there is none.
bool Agent::give_spare() {
  {
    std::lock_guard lock(mutex_);
    if (held_ - used_ <= fill_.size() + debts_.size()) return false;
    held_ -= 1;
  }
  quota_ -= 1;
  if (!spare_fds_.empty()) {
    outgoing_.push_back(std::move(spare_fds_.back()));
    spare_fds_.pop_back();
  } else if (!spare_.empty()) {
    Page page = std::move(spare_.back());
    spare_.pop_back();
    hand_out(std::move(page));
  } else {
    outgoing_bare_ += 1;
  }
  return true;
}

// Gives one page away, or starts to; false when there is nothing to give.
bool Agent::start_out() {
  if (give_spare()) return true;
  if (!victims_known_) {
    victims_ = candidates(false);
    victims_known_ = true;
  }
  if (victims_.empty()) {
    victims_known_ = false;
    if (!pager_->in_empty()) return false;  // what is on its way in may go when it is there
    missing_ += static_cast<std::uint32_t>(quota_);
    quota_ = 0;
    return false;
  }
  PageRef ref = victims_.back();
  victims_.pop_back();
  PageEntry& e = ref.entry();
  if (ref.region->claim) {
    std::lock_guard lock(mutex_);
    if (running_locked() && in_use_locked(*ref.region)) return true;
    e.state = PageState::absent;
    used_ -= 1;
    held_ -= 1;
    quota_ -= 1;
    outgoing_bare_ += 1;
    return true;
  }
  while (e.saving) finish_save();  // clean in a moment
  bool copy = false;
  {
    std::lock_guard lock(mutex_);
    if (e.state != PageState::resident || e.moving || (running_locked() && in_use_locked(*ref.region))) return true;
    e.moving = true;  // from here on a phase that needs the page waits for it
    copy = Pager::needs_copy(ref, always_copy_);
  }
  std::optional<Store> store = Store{};
  auto unmark = [&] {
    std::lock_guard lock(mutex_);
    e.moving = false;
  };
  try {
    if (copy) store = ref.region->segment ? shared_store(ref) : store_for(ref);
  } catch (const Error&) {
    unmark();
    fail_out(std::current_exception());
    return false;
  }
  if (!store) {
    unmark();
    victims_.push_back(ref);
    stalled_ = true;
    return false;
  }
  if (ref.region->segment) {
    if (!begin_leave(ref, copy)) return unmark(), true;
    quota_ -= 1;
    advance_leaving();
    return true;
  }
  try {
    pager_->begin_out(ref, copy, *store);
  } catch (const Error&) {
    fail_out(std::current_exception());
    return false;
  }
  quota_ -= 1;
  if (!local_ && ref.region->on_evict == OnEvict::keep && ref.region->live(ref.index)) {
    std::lock_guard lock(mutex_);
    taken_ += 1;
  }
  return true;
}

// The host is full, or the driver refuses: what is left is dirty too, and stays where it is.
void Agent::fail_out(std::exception_ptr why) {
  missing_ += static_cast<std::uint32_t>(quota_);
  quota_ = 0;
  victims_.clear();
  note_fault(why);
}

void Agent::finish_out() {
  PageEntry& e = pager_->first_out().entry();
  try {
    Page page = pager_->finish_out();
    if (std::exchange(e.owed, false)) return;  // nobody's: it is freed
    {
      std::lock_guard lock(mutex_);
      used_ -= 1;
      held_ -= 1;
    }
    hand_out(std::move(page));
  } catch (const Error&) {
    missing_ += !e.owed;
    note_fault(std::current_exception());
  }
  if (outgoing_.size() >= wire::kMaxFds / 2) flush_pages();
}

void Agent::evict_now(const Region* only, bool always_copy) {
  while (!pager_->in_empty()) finish_in();
  local_ = true;
  always_copy_ = always_copy;
  victims_ = candidates(false);
  if (only) std::erase_if(victims_, [&](const PageRef& p) { return p.region != only; });
  victims_known_ = true;
  quota_ += victims_.size() + held_ - used_;  // spare pages go first
  try {
    while (quota_ > 0 || !pager_->out_empty() || !leaving_.empty()) {
      step();
      if (!pager_->out_empty() || (!stalled_ && leaving_.empty())) continue;
      poll_once(leaving_.empty() ? 1000 : 1);  // for host memory, or those who map the pages too
      take_notes();
      try {
        take_messages();
      } catch (const std::system_error&) {
        reconnect();
      }
    }
    flush_pages();
  } catch (...) {
    always_copy_ = local_ = false;
    throw;
  }
  always_copy_ = local_ = false;
}

// ---- copies --------------------------------------------------------------------------------

// A free slot, or -1. The first ones are set aside for what passes through to the spill file.
std::int64_t Agent::take_slot() {
  while (spill_ && pager_->staging_total() < Pager::kStaging) {
    const std::int64_t slot = backing_->take();
    if (slot < 0) return slot;
    pager_->add_staging(slot);
  }
  return backing_->take();
}

// Copies whose page has no live contents any more.
bool Agent::reclaim_dead() {
  bool any = false;
  std::lock_guard lock(mutex_);
  for (auto& r : regions_)
    for (std::size_t i = 0; i < r->pages.size(); ++i) {
      PageEntry& e = r->pages[i];
      if (e.moving || e.saving || !e.has_copy() || r->live(i)) continue;
      if (e.state == PageState::evicted) e.state = PageState::absent;
      if (e.slot >= 0) backing_->give(std::exchange(e.slot, -1)), any = true;
      if (e.place >= 0) spill_->give(std::exchange(e.place, -1));
    }
  return any;
}

// bytes: pinned for regions that are this process's own.
void Agent::ask_host(std::size_t bytes, bool urgent) {
  auto m = wire::make<wire::Host>(wire::kHost);
  m.want = bytes + shared_host_;
  m.urgent = urgent;
  send(m);
}

// Unpins what is not in use; bytes released.
std::size_t Agent::give_host_back() {
  if (!backing_) return 0;
  reclaim_dead();
  std::size_t released = backing_->trim();
  if (spill_) released += spill_->trim();
  host_told_ = 0;
  ask_host(backing_->pinned_bytes(), false);  // the rest goes back to the node's budget
  return released;
}

// Where to copy a page: a slot it has, a free one, a new one if the host and the node's budget have
// room, else the spill file. Nothing: not now, memory is on its way. Throws HostOutOfMemory.
std::optional<Store> Agent::store_for(PageRef ref) {
  PageEntry& e = ref.entry();
  if (!spill_) {
    std::lock_guard lock(mutex_);
    if (!spill_dir_.empty()) spill_ = std::make_unique<Spill>(spill_dir_, page_size_, [this] { wake(); });
  }
  if (spill_) pager_->use_spill(spill_.get());
  if (e.slot >= 0) return Store{.slot = e.slot};
  std::int64_t slot = take_slot();
  if (slot < 0 && reclaim_dead()) slot = take_slot();
  if (slot >= 0) return Store{.slot = slot, .fresh_slot = true};
  std::exception_ptr full;
  if (now_seconds() >= host_full_until_) {
    if (host_asked_ || backing_->growing()) return std::nullopt;
    full = backing_->take_failure();
    const std::size_t need = backing_->pinned_bytes() + backing_->chunk_bytes();
    if (!full && backing_->allowed() >= need) {
      backing_->expect(need / page_size_);
      return std::nullopt;
    }
    if (!full && !std::exchange(host_exhausted_, false)) {
      host_asked_ = true;
      ask_host(need, true);
      return std::nullopt;
    }
  }
  if (spill_ && pager_->staging_total() > 0) {
    if (now_seconds() >= host_full_until_) host_full_until_ = now_seconds() + kHostRetry;
    if (pager_->staging_free() == 0) return std::nullopt;
    const std::int64_t place = e.place >= 0 ? e.place : spill_->take();
    return Store{.slot = pager_->take_staging(), .place = place, .fresh_place = e.place < 0};
  }
  if (full) std::rethrow_exception(full);
  throw host_budget_error();
}

Error Agent::host_budget_error() const {
  Error error("HostOutOfMemory",
              "this node's host budget for swapped-out pages is used up: this process has " +
                  std::to_string((backing_->pinned_bytes() + shared_host_) >> 20) + " MiB of it, and " +
                  std::to_string(backing_->chunk_bytes() >> 20) + " MiB more are needed (" +
                  std::to_string(backing_->chunk_bytes() >> 20) +
                  " are kept for each process). The pages stay on the device. Start the broker with a larger "
                  "--host-budget, or with a --spill-dir for the rest.");
  error.need = backing_->chunk_bytes();
  error.limit = 0;
  return error;
}

// Lets the backing store grow, in the background, to what a swap-out of everything would need.
void Agent::plan_host() {
  std::size_t slots = backing_->used_bytes() / page_size_;
  {
    std::lock_guard lock(mutex_);
    if (!spill_dir_.empty() && pager_->staging_total() == 0) slots += Pager::kStaging;
    for (auto& r : regions_) {
      if (r->on_evict != OnEvict::keep || r->segment) continue;
      for (std::size_t i = 0, n = r->used_pages(); i < n; ++i) {
        const PageEntry& e = r->pages[i];
        slots += e.state == PageState::resident && !e.has_copy() && r->live(i);
      }
    }
  }
  const std::size_t chunks = (slots + Backing::kSlotsPerChunk - 1) / Backing::kSlotsPerChunk;
  std::size_t bytes = chunks * backing_->chunk_bytes();
  if (bytes > backing_->pinned_bytes()) backing_->expect(slots);
  for (auto& r : shared_) {  // what a segment lacks is on top, and handed on when it is there
    Backing& b = r->segment->backing();
    const std::size_t all = (r->segment->used() + Backing::kSlotsPerChunk - 1) / Backing::kSlotsPerChunk;
    if (all * b.chunk_bytes() <= b.allowed()) continue;
    const std::size_t lacks = all * b.chunk_bytes() - b.allowed();
    if (backing_->allowed() >= bytes + lacks && spare_host(b, all * Backing::kSlotsPerChunk)) continue;
    bytes += lacks;
  }
  if (bytes <= std::max({backing_->pinned_bytes(), backing_->allowed(), host_told_})) return;
  host_told_ = bytes;
  ask_host(bytes, false);
}

// ---- write-back ----------------------------------------------------------------------------

// Looks for pages worth writing back: the dirty ones among those that would be taken first, as many
// as were taken between phases lately.
void Agent::plan_saves() {
  saves_.clear();
  std::uint64_t n = 0;
  {
    std::lock_guard lock(mutex_);
    n = options_.snapshot ? 0 : expected_takes_locked();
  }
  if (n == 0) return;
  const std::vector<PageRef> order = candidates(true);
  std::lock_guard lock(mutex_);
  for (auto it = order.rbegin(); it != order.rend() && n > 0; ++it, --n)
    if (Pager::needs_copy(*it, false)) saves_.push_back(*it);
}

// Starts one write-back; false when it must wait.
bool Agent::start_save() {
  const PageRef ref = saves_.front();
  PageEntry& e = ref.entry();
  saves_.pop_front();
  {
    std::lock_guard lock(mutex_);
    if (e.state != PageState::resident || e.moving || e.saving || !e.dirty || !ref.region->live(ref.index)) return true;
    if (running_locked() && written_locked(*ref.region)) return true;
  }
  Store store{.slot = e.slot};
  if (store.slot < 0) store = {.slot = take_slot(), .fresh_slot = true};
  if (store.slot < 0) {  // no host memory yet: a swap-out will ask for it
    saves_.clear();
    return false;
  }
  {
    std::lock_guard lock(mutex_);
    e.saving = true;
  }
  try {
    pager_->begin_save(ref, store);
  } catch (const Error&) {
    saves_.clear();
    note_fault(std::current_exception());
    return false;
  }
  return true;
}

void Agent::finish_save() {
  try {
    pager_->finish_save();
    saved_ = true;
  } catch (const Error&) {
    note_fault(std::current_exception());
  }
}

// Finds the pages that the phase left as they were when they were last copied.
void Agent::take_fingerprints(const Region* only) {
  if (!fingerprinter_) fingerprinter_ = std::make_unique<Fingerprinter>();
  std::vector<PageRef> refs;
  std::vector<CUdeviceptr> at;
  {
    std::lock_guard lock(mutex_);
    fingerprints_ = fingerprinter_->available();
    if (!fingerprints_) return;
    for (auto& r : writes_) {
      if (!r->fingerprint || (only && r.get() != only)) continue;
      for (std::size_t i = 0, n = r->used_pages(); i < n; ++i) {
        const PageEntry& e = r->pages[i];
        if (e.state != PageState::resident || e.moving || !e.dirty || !r->live(i)) continue;
        refs.push_back({r.get(), i});
        at.push_back(r->at(i));
      }
    }
  }
  try {
    const std::vector<Digest> now = fingerprinter_->digest(at, page_size_);
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < refs.size(); ++i) {
      PageEntry& e = refs[i].entry();
      e.digest = now[i];
      if (!e.has_copy() || e.copied != e.digest) continue;
      e.dirty = false;
      e.proven = true;
    }
  } catch (const Error&) {
    note_fault(std::current_exception());  // dirty, then
  }
}

// ---- messages about pages ------------------------------------------------------------------

void Agent::flush_pages() {
  while (!outgoing_.empty() || outgoing_bare_ > 0 || missing_ > 0) {
    auto m = wire::make<wire::Pages>(wire::kPages);
    std::vector<Fd> fds;
    while (!outgoing_.empty() && fds.size() < wire::kMaxFds) {
      fds.push_back(std::move(outgoing_.back()));
      outgoing_.pop_back();
    }
    m.count = std::exchange(outgoing_bare_, 0) + static_cast<std::uint32_t>(fds.size());
    m.missing = std::exchange(missing_, 0);
    std::lock_guard lock(mutex_);
    if (phase_ == Phase::waiting && !options_.snapshot) {  // what was taken from a waiter is needed again
      for (auto* list : {&uses_, &lazy_})
        for (auto& r : *list) queue_missing(r, 0, r->used_pages());
    }
    m.want = phase_ == Phase::waiting || !fill_.empty() ? want_locked() : 0;
    m.counts = counts_locked();
    send(m, fds);
  }
}

// Pages that were dirty are clean now: the broker takes such ones first.
void Agent::send_counts() {
  auto m = wire::make<wire::Pages>(wire::kPages);
  std::lock_guard lock(mutex_);
  m.want = phase_ == Phase::waiting || !fill_.empty() ? want_locked() : 0;
  m.counts = counts_locked();
  send(m);
}

// Physical memory for up to `count` pages: passed ones first, then new ones.
bool Agent::obtain(std::vector<Page>& physical, std::size_t count) {
  while (physical.size() < count) {
    if (!spare_.empty()) {
      physical.push_back(std::move(spare_.back()));
      spare_.pop_back();
    } else if (!spare_fds_.empty()) {
      Page p = Page::import(spare_fds_.back());
      spare_fds_.pop_back();
      physical.push_back(std::move(p));
    } else {
      try {
        physical.push_back(Page::create(*device_, page_size_, pass_pages_));
        mint_deadline_ = 0;
      } catch (const CudaError& e) {
        if (!physical.empty()) return true;
        if (e.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
        // The broker counted this page free: whoever had it may still be dying.
        if (mint_deadline_ == 0) mint_deadline_ = now_seconds() + kMintPatience;
        if (now_seconds() > mint_deadline_) {
          mint_deadline_ = 0;
          Error error(
              "DeviceOutOfMemory",
              "the device has no memory left (" + std::string(e.what()) +
                  ") although the broker counts it as free: something outside pymux has taken it. 'pymux status' "
                  "shows what regions hold, nvidia-smi the rest; PYMUX_CAPACITY sets memory aside for others.");
          error.need = page_size_ * count;
          throw error;
        }
        retry_at_ = now_seconds() + kMintRetry;
        return false;
      }
    }
  }
  return true;
}

// Starts a run of adjacent pages; false when it must wait.
bool Agent::start_in() {
  std::size_t room = 0;
  {
    std::lock_guard lock(mutex_);
    room = static_cast<std::size_t>(held_ - used_);
  }
  if (room == 0) return false;
  if (fill_.front().region->claim) {  // what it stands for needs the memory itself
    PageEntry& e = fill_.front().entry();
    fill_.pop_front();
    if (e.state == PageState::resident) return true;
    drop_spare_memory();
    std::lock_guard lock(mutex_);
    e.state = PageState::resident;
    used_ += 1;
    return true;
  }
  std::vector<PageRef> run;
  std::size_t staging = pager_->staging_free();
  auto unclaim = [](const PageRef& p) {
    if (p.region->segment) p.region->segment->unclaim(p.index);
  };
  while (!fill_.empty() && run.size() < std::min(room, Pager::kRun)) {
    PageRef ref = fill_.front();
    const PageEntry& e = ref.entry();
    if (e.moving && e.state == PageState::resident) break;  // on its way out: first let it arrive there
    if (e.state == PageState::resident || e.moving) {
      fill_.pop_front();
      continue;
    }
    if (ref.region->claim) break;
    if (!run.empty() && (run.back().region != ref.region || run.back().index + 1 != ref.index)) break;
    if (e.state == PageState::evicted && e.slot < 0) {  // by way of a staging slot
      if (staging == 0) break;
      staging -= 1;
    }
    if (ref.region->segment && !ref.region->segment->claim(ref.index)) {  // another process was first
      awaited_.push_back({ref, now_seconds(), 0});
      fill_.pop_front();
      continue;
    }
    run.push_back(ref);
    fill_.pop_front();
  }
  if (run.empty()) return false;
  std::vector<Page> physical;
  try {
    if (!obtain(physical, run.size())) {
      for (const PageRef& p : run) unclaim(p);
      fill_.insert(fill_.begin(), run.begin(), run.end());
      return false;
    }
    while (run.size() > physical.size()) {
      unclaim(run.back());
      fill_.push_front(run.back());
      run.pop_back();
    }
    pager_->begin_in(run, physical);
  } catch (...) {
    for (const PageRef& p : run) unclaim(p);
    for (auto& p : physical) spare_.push_back(std::move(p));
    fail_waiters(std::current_exception());
    return false;
  }
  std::lock_guard lock(mutex_);
  used_ += run.size();
  return true;
}

void Agent::finish_in() {
  Reason reason = Reason::demand;
  {
    std::lock_guard lock(mutex_);
    if (phase_ == Phase::waiting && !granted_) reason = Reason::prefetch;
    if (phase_ == Phase::active) reason = Reason::streaming;
  }
  Pager::Arrival a = pager_->finish_in(reason);
  std::unique_lock lock(mutex_);
  if (!a.failed) {
    if (phase_ == Phase::active && written_locked(*a.ref.region)) a.ref.region->mark_written(a.ref.index);
    return;
  }
  spare_.push_back(std::move(a.returned));
  used_ -= 1;
  lock.unlock();
  fail_waiters(a.failed);
}

}  // namespace pymux
