// The agent as its callers see it: what may be called from any thread.
#include "agent.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>

#include "error.h"
#include "fault.h"

namespace pymux {
namespace {

// A phase that followed the last one within this time last time may follow it once more although
// the device was recalled: two phases in a row cost one handoff, and a waiter one phase at most.
constexpr double kBackToBack = 0.005;
constexpr double kSignalSlice = 0.1;  // how soon a waiting caller notices Ctrl-C

// A 512th of the device, between 2 and 32 MiB: see DESIGN.md.
std::size_t choose_page_size(const Device& d, std::size_t asked) {
  constexpr std::size_t mib = 1u << 20;
  const std::size_t size = asked ? asked : std::clamp(std::bit_floor(d.total() / 512), 2 * mib, 32 * mib);
  const std::size_t g = d.granularity();
  if (asked % g)
    throw Error("ConfigError", "PYMUX_PAGE_SIZE is " + std::to_string(asked) + " bytes, and pages of " + d.name() +
                                   " are multiples of " + std::to_string(g) + ".");
  return (size + g - 1) / g * g;
}

// Asked, not believed: in some containers the attribute says yes and the call fails.
bool exports(const Device& device) {
  if (!device.can_export()) return false;
  try {
    device.probe_export();
  } catch (const CudaError& e) {
    return e.code == CUDA_ERROR_OUT_OF_MEMORY;  // full says nothing about exporting
  }
  return true;
}

}  // namespace

// ---- life ----------------------------------------------------------------------------------

Agent::Agent(AgentOptions options)
    : options_(std::move(options)),
      device_(options_.controller ? std::nullopt : std::optional<Device>(std::in_place, options_.device)),
      page_size_(device_ ? choose_page_size(*device_, options_.page_size) : 0),
      pass_pages_(device_ && options_.pass_pages && exports(*device_)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      caller_wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  connect_broker(0);
  std::promise<void> ready;
  auto started = ready.get_future();
  thread_ = std::thread([this, &ready] { run(ready); });
  try {
    started.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

Agent::~Agent() { close(); }

void Agent::close() {
  if (forks() != forks_) return;  // the parent's
  {
    std::lock_guard lock(mutex_);
    if (!closed_) {
      closed_ = true;
      commands_.push_back([this] { stop_ = true; });
    }
  }
  wake();
  notify();
  if (thread_.joinable()) thread_.join();
}

// ---- caller threads ------------------------------------------------------------------------

// Before any lock is taken: in a forked child, threads that are not there may have it.
void Agent::check_process() const {
  if (forks() != forks_) throw forked_error();
}

void Agent::check_usable_locked() const {
  if (broken_) std::rethrow_exception(broken_);
  if (closed_) throw Error("LeaseError", "this Mux is closed; connect() again.");
}

void Agent::wake() {
  std::uint64_t one = 1;
  [[maybe_unused]] auto n = ::write(wake_.get(), &one, sizeof one);
}

void Agent::notify() {
  changed_.notify_all();
  std::uint64_t one = 1;
  if (watched_) [[maybe_unused]]
    auto w = ::write(watch_.get(), &one, sizeof one);
  if (!at_socket_) return;
  [[maybe_unused]] auto n = ::write(caller_wake_.get(), &one, sizeof one);
}

// Waits for the grant where it arrives: of a phase that lacks no page, the caller needs no help of the agent
// thread, and a wake-up less. The message stays, and the agent thread does the rest.
void Agent::wait_at_socket(std::unique_lock<std::mutex>& lock, double seconds) {
  wire::Socket socket;
  {
    std::lock_guard order(send_mutex_);
    socket = socket_;
  }
  at_socket_ = true;
  lock.unlock();
  pollfd p[2] = {{socket.fd(), POLLIN, 0}, {caller_wake_.get(), POLLIN, 0}};
  poll(p, 2, static_cast<int>(seconds * 1000) + 1);
  lock.lock();
  at_socket_ = false;
  std::uint64_t n = 0;
  if (p[1].revents) [[maybe_unused]]
    auto r = ::read(caller_wake_.get(), &n, sizeof n);
  wire::Grant m;
  if (!p[0].revents || phase_ != Phase::waiting || granted_ || broken_ || closed_) return;
  if (!socket.peek(wire::kGrant, m) || m.seq != acquire_seq_ || !asked_ || !resident_locked(uses_)) return;
  granted_ = self_granted_ = true;
  grants_ += 1;
  generation_ = m.generation;
  activate_locked();
}

void Agent::post(std::function<void()> work) {
  commands_.push_back(std::move(work));
  wake();
}

void Agent::run_on_agent(std::function<void()> work) {
  check_process();
  bool done = false;
  std::exception_ptr error;
  std::unique_lock lock(mutex_);
  check_usable_locked();
  post([&] {
    std::exception_ptr caught;
    try {
      work();
    } catch (...) {
      caught = std::current_exception();
    }
    std::lock_guard guard(mutex_);
    error = caught;
    done = true;
    notify();
  });
  changed_.wait(lock, [&] { return done || finished_; });
  if (error) std::rethrow_exception(error);
  if (!done) check_usable_locked();
}

std::shared_ptr<Region> Agent::create_region(const std::string& name, RegionOptions options,
                                             std::shared_ptr<Segment> segment) {
  check_process();
  std::lock_guard lock(mutex_);
  check_usable_locked();
  if (!device_)
    throw Error("RegionError", "a controller has no device memory: make region '" + name +
                                   "' in the processes that do the device work.");
  for (auto& r : regions_)
    if (r->name == name) throw Error("RegionError", "region '" + name + "' exists already in this process.");
  std::shared_ptr<Region> r(new Region(name, options, *device_, page_size_), OwnerDeletes<Region>{});
  if (segment) {
    r->segment = std::move(segment);
    r->joined = true;
    r->read_only = options.frozen;
  }
  regions_.push_back(r);
  fault::watch(r->addresses.base(), r->addresses.size(), options_.job, name, r->read_only);
  return r;
}

bool Agent::resident_locked(const Region& r, std::size_t first, std::size_t count) const {
  for (std::size_t i = first; i < first + count; ++i) {
    const PageEntry& e = r.pages[i];
    if ((e.state != PageState::resident || e.moving) && r.allocated(i)) return false;
  }
  return true;
}

bool Agent::resident_locked(const std::vector<std::shared_ptr<Region>>& regions) const {
  return std::all_of(regions.begin(), regions.end(), [&](auto& r) { return resident_locked(*r, 0, r->used_pages()); });
}

void Agent::activate_locked() {
  phase_ = Phase::active;
  active_flag_ = true;
  if (recalled_) tell_kept_locked(opener_);
  entered_at_ = now_seconds();
  back_at_ = 0;
  stamp_ += 1;
  for (auto* list : {&uses_, &lazy_})
    for (auto& r : *list) r->last_used = stamp_;
  for (auto& r : writes_)
    for (std::size_t i = 0, n = r->used_pages(); i < n; ++i)
      if (r->pages[i].state == PageState::resident) r->mark_written(i);
  std::rotate(recent_taken_.begin(), recent_taken_.begin() + 1, recent_taken_.end());
  recent_taken_.back() = std::exchange(taken_, 0);
  show_wishes_locked();
}

std::uint64_t Agent::expected_takes_locked() const {
  const std::uint64_t most = *std::max_element(recent_taken_.begin(), recent_taken_.end());
  return most > taken_ ? most - taken_ : 0;
}

void Agent::enter_implicitly() {
  check_process();
  std::lock_guard one(implicit_mutex_);
  if (active()) return;
  PhaseRequest request;
  request.name = "implicit";
  {
    std::lock_guard lock(mutex_);
    request.uses = regions_;
    for (auto& r : regions_)
      if (!r->frozen) request.writes.push_back(r);
  }
  acquire(request, {}, -1, [] { return false; });
  implicit_ = true;
}

void Agent::end_implicit() {
  if (implicit_.exchange(false)) leave(Leave::end, 0);
}

bool Agent::enter(const PhaseRequest& request, Entrance entrance) {
  check_process();
  end_implicit();
  const std::string& phase = request.name;
  std::lock_guard lock(mutex_);
  check_usable_locked();
  if (remote_ && phase != phase_name_)
    throw Error("LeaseError", "phase '" + phase + "' was opened while another member of the group has phase '" +
                                  phase_name_ +
                                  "' open. The members of a group open the same phases in the same "
                                  "order, or leave that to one of them.");
  if (!remote_ && (phase_ == Phase::active || phase_ == Phase::waiting || phase_ == Phase::leaving))
    throw Error("LeaseError", "phase '" + phase + "' was opened inside phase '" + phase_name_ +
                                  "' of the same client. Phases do not nest: leave the outer one first, or use "
                                  "lease.idle() for a wait inside it.");
  if (left_at_ > 0) gap_after_[phase_name_] = now_seconds() - left_at_;
  left_at_ = 0;
  if (linger_until_ > 0) {
    linger_until_ = 0;
    extended_ = true;
  }
  phase_name_ = phase;
  uses_ = request.uses;
  lazy_ = request.lazy;
  writes_ = request.writes;
  names_ = request.regions;
  expected_ = request.expected;
  priority_ = request.priority;
  overlap_ = request.overlap;
  ranks_ = request.ranks;
  ran_ = entrance.ran;
  opener_ = entrance.opener;
  if (phase_ == Phase::parked && resident_locked(uses_)) {  // nobody waits and nothing is missing
    reentries_ += 1;
    activate_locked();
    if (!lazy_.empty() || recalled_ || expected_takes_locked() > 0)
      post([this] {
        for (auto& r : lazy_) queue_missing(r, 0, r->used_pages());
        save_due_ = true;
        send_want();
        send_ready();
      });
    return true;
  }
  attached_ = remote_ && running_locked();
  remote_ = acknowledged_ = active_flag_ = false;
  granted_ = phase_ == Phase::parked;  // a slow re-entry: only pages are missing
  phase_ = Phase::waiting;
  acquire_error_ = nullptr;
  asked_ = false;
  post([this] {
    if (!asked_) begin_acquire();
  });
  return false;
}

void Agent::acquire(const PhaseRequest& request, Entrance entrance, double timeout,
                    const std::function<bool()>& interrupted) {
  const double deadline = timeout < 0 ? 0 : now_seconds() + timeout;
  if (enter(request, entrance)) return;
  std::unique_lock lock(mutex_);
  auto over = [&] { return phase_ != Phase::waiting || broken_ || closed_; };
  while (!over()) {
    double slice = kSignalSlice;
    if (deadline > 0) slice = std::min(slice, std::max(0.0, deadline - now_seconds()));
    if (alone() && !options_.snapshot && !granted_ && resident_locked(uses_)) {
      wait_at_socket(lock, slice);
      if (over()) break;
    } else if (changed_.wait_for(lock, std::chrono::duration<double>(slice), over)) {
      break;
    }
    lock.unlock();
    const bool stop = interrupted();
    lock.lock();
    if (over() || (!stop && (deadline == 0 || now_seconds() < deadline))) continue;
    withdraw_locked();
    if (stop) throw Interrupted();
    char within[32];
    std::snprintf(within, sizeof within, "%g", timeout);
    throw Error("AcquireTimeout", "phase '" + request.name + "' did not get the device within " + within +
                                      " s. 'pymux status' shows who holds it.");
  }
  finish_entry_locked();
}

bool Agent::entered() {
  check_process();
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::waiting && !broken_ && !closed_) return false;
  finish_entry_locked();
  return true;
}

// Nobody waits for the phase any more: it is entered, or throws why it is not.
void Agent::finish_entry_locked() const {
  if (phase_ == Phase::active) return;
  if (acquire_error_) std::rethrow_exception(acquire_error_);
  check_usable_locked();
  throw Error("LeaseError", "the phase was not entered.");
}

void Agent::withdraw() {
  check_process();
  {
    std::lock_guard lock(mutex_);
    if (phase_ == Phase::waiting) withdraw_locked();
    if (phase_ != Phase::active || remote_) return;
  }
  leave(Leave::end, 0);  // it was entered in the same moment
}

void Agent::withdraw_locked() {
  if (attached_) {  // the phase that another member opened goes on
    attached_ = acknowledged_ = false;
    remote_ = granted_ = true;
  } else {
    phase_ = Phase::idle;
  }
  post([this, seq = acquire_seq_] { give_up(seq); });
}

int Agent::watch() {
  check_process();
  std::lock_guard lock(mutex_);
  if (!watch_) watch_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  watched_ = true;
  return watch_.get();
}

void Agent::tell_wait(std::uint64_t opener, std::uint64_t behind) {
  check_process();
  std::lock_guard lock(mutex_);
  auto it = local_waits_.find(opener);
  if (behind != 0) {
    check_usable_locked();
    if (it == local_waits_.end()) {
      it = local_waits_.emplace(opener, LocalWait{}).first;
      it->second.seq = std::uint64_t{1} << 63 | ++wait_seq_;  // not of a request's numbers
    }
    if (it->second.error) std::rethrow_exception(it->second.error);
  } else if (it == local_waits_.end()) {
    return;
  }
  if (it->second.behind != behind) {
    it->second.behind = behind;
    auto m = wire::make<wire::Queued>(wire::kQueued);
    m.seq = it->second.seq;
    m.opener = opener;
    m.behind = behind;
    send(m);
  }
  if (behind == 0) local_waits_.erase(it);
}

// The broker finds waits that would never end by who has a phase open.
void Agent::tell_kept_locked(std::uint64_t opener) {
  auto m = wire::make<wire::Kept>(wire::kKept);
  m.generation = generation_;
  m.opener = opener;
  send(m);
}

bool Agent::follows_at_once_locked() const {
  auto it = gap_after_.find(phase_name_);
  return it != gap_after_.end() && it->second < kBackToBack;
}

// Whether a phase may follow at once though somebody waits.
bool Agent::may_extend_locked() const {
  return follows_at_once_locked() && (!extended_ || now_seconds() < extend_until_);
}

// Parked, and recalled: the lease is kept for as long as it takes to see whether the phase follows.
void Agent::linger_locked() { linger_until_ = left_at_ + kBackToBack; }

void Agent::release_locked() {
  phase_ = Phase::idle;
  granted_ = attached_ = remote_ = recalled_ = extended_ = false;
  linger_until_ = 0;
  active_flag_ = recalled_flag_ = pressed_flag_ = false;
  show_wishes_locked();
  if (std::exchange(fenced_, false)) return;  // it is others' already
  auto m = wire::make<wire::Release>(wire::kRelease);
  m.generation = generation_;
  if (back_at_ > 0) m.back_us = static_cast<std::uint64_t>(std::max(0.0, back_at_ - now_seconds()) * 1e6);
  m.counts = counts_locked();
  send(m);
  for (auto& [name, ran] : ran_phases_) {  // afterwards: somebody waits for the release
    auto r = wire::make<wire::Ran>(wire::kRan);
    wire::put_text(r.phase, sizeof r.phase, name);
    r.count = ran.first;
    r.total_us = static_cast<std::uint64_t>(ran.second * 1e6);
    send(r);
  }
  ran_phases_.clear();
}

// Accounts for the time that the phase ran.
void Agent::count_run_locked(Leave why) {
  ran_ += left_at_ - entered_at_;
  if (why != Leave::end) return;
  auto& [count, seconds] = ran_phases_[phase_name_];
  count += 1;
  seconds += std::exchange(ran_, 0);
}

void Agent::leave(Leave why, double back) {
  check_process();
  bool compare = false;
  {
    std::lock_guard lock(mutex_);
    check_usable_locked();
    if (phase_ != Phase::active || remote_)
      throw Error("LeaseError", "there is no phase to leave: the lease was not acquired, or was given back already.");
    compare = std::any_of(writes_.begin(), writes_.end(), [](auto& r) { return r->fingerprint; });
  }
  std::exception_ptr failed;
  try {
    if (device_) device_->synchronize();
  } catch (const CudaError& e) {
    failed = std::current_exception();
    std::lock_guard lock(mutex_);
    if (e.sticky()) broken_ = failed;
  }
  if (compare && !failed) run_on_agent([this] { take_fingerprints(nullptr); });
  if (options_.snapshot && !failed) {
    {
      std::lock_guard lock(mutex_);
      active_flag_ = false;
      phase_ = Phase::parked;
      recalled_ = true;  // no local re-entry: a snapshot gives everything away
    }
    run_on_agent([this] { evict_now(nullptr, true); });
    std::lock_guard lock(mutex_);
    release_locked();
    return;
  }
  std::unique_lock lock(mutex_);
  active_flag_ = false;
  left_at_ = now_seconds();
  count_run_locked(why);
  back_at_ = why == Leave::lend && back > 0 ? left_at_ + back : 0;
  const bool work = !lazy_.empty() || expected_takes_locked() > 0;
  const bool save = !follows_at_once_locked();  // else the next phase says better what will not be written
  const bool fenced = fenced_;
  if (!alone()) {
    const std::uint64_t generation = generation_;
    release_locked();
    if (!fenced) {
      phase_ = Phase::leaving;
      changed_.wait(lock, [&] { return ended_ >= generation || broken_ || closed_; });
      phase_ = Phase::idle;
    }
  } else if (failed || fenced || (recalled_ && (why != Leave::end || !may_extend_locked()))) {
    release_locked();
  } else {
    phase_ = Phase::parked;
    show_wishes_locked();
    if (recalled_) {
      tell_kept_locked(0);
      linger_locked();
    }
  }
  if (work)
    post([this, save] {
      save_due_ = save;
      std::lock_guard guard(mutex_);
      if (phase_ == Phase::idle || phase_ == Phase::parked) clear_fill();  // of lazy regions
    });
  else if (linger_until_ > 0)
    post([] {});  // the agent thread sets its clock
  if (failed) std::rethrow_exception(failed);
}

void Agent::require(const std::shared_ptr<Region>& region) {
  check_process();
  std::unique_lock lock(mutex_);
  check_usable_locked();
  if (phase_ != Phase::active) throw Error("LeaseError", "require('" + region->name + "') needs an open phase.");
  auto ensure = std::make_shared<Ensure>();
  ensure->region = region;
  ensure->count = region->used_pages();
  if (!in_use_locked(*region)) uses_.push_back(region);
  wait_for(lock, ensure);
}

void Agent::done_with(const std::shared_ptr<Region>& region) {
  check_process();
  bool compare = false;
  {
    std::lock_guard lock(mutex_);
    check_usable_locked();
    if (phase_ != Phase::active) throw Error("LeaseError", "done_with('" + region->name + "') needs an open phase.");
    compare = region->fingerprint && written_locked(*region);
  }
  device_->synchronize();
  if (compare) run_on_agent([&] { take_fingerprints(region.get()); });
  std::lock_guard lock(mutex_);
  stamp_ += 1;
  for (auto* list : {&uses_, &lazy_, &writes_}) std::erase(*list, region);
  post([this, region] {
    std::erase_if(fill_, [&](const PageRef& p) { return p.region == region.get(); });
    stop_awaiting(region.get());
    save_due_ = true;
    send_ready();
  });
}

void Agent::touch(const std::shared_ptr<Region>& region) {
  check_process();
  std::lock_guard lock(mutex_);
  if (phase_ != Phase::active || written_locked(*region)) return;
  if (!in_use_locked(*region)) uses_.push_back(region);
  writes_.push_back(region);
  for (std::size_t i = 0; i < region->pages.size(); ++i)
    if (region->pages[i].state == PageState::resident) region->mark_written(i);
}

void Agent::set_live(const std::shared_ptr<Region>& region, std::optional<std::vector<Range>> ranges) {
  check_process();
  std::lock_guard lock(mutex_);
  check_usable_locked();
  if (region->segment)
    throw Error("RegionError", "region '" + region->name + "' is shared, and moves as a whole: it has no live ranges.");
  for (std::size_t page : region->set_live(std::move(ranges)))
    region->mark_written(page);  // its copy, if there is one, lacks what is live now
}

void Agent::pin(const std::shared_ptr<Region>& region, const std::string& reason) {
  check_process();
  std::lock_guard lock(mutex_);
  check_usable_locked();
  region->pinned = reason;
}

std::size_t Agent::evict(const std::shared_ptr<Region>& region) {
  check_process();
  end_implicit();
  std::uint64_t before = 0, after = 0;
  run_on_agent([&] {
    {
      std::lock_guard lock(mutex_);
      before = held_;
      if (region && !region->pinned.empty())
        throw Error("RegionError", "region '" + region->name + "' stays on the device: " + region->pinned);
      if (phase_ == Phase::active || phase_ == Phase::waiting)
        throw Error("LeaseError", "evict() inside a phase would take away what the phase uses. Leave the phase first.");
    }
    fault_ = nullptr;
    evict_now(region.get(), false);
    if (fault_) std::rethrow_exception(fault_);
    std::lock_guard lock(mutex_);
    after = held_;
  });
  return (before - std::min(before, after)) * page_size_;
}

// Waits, in a phase, until a region's pages are resident; throws why they cannot be.
void Agent::wait_for(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Ensure>& ensure) {
  Ensure& e = *ensure;
  if (resident_locked(*e.region, e.first, e.count)) return;
  if (fenced_) throw fenced_error(*e.region);
  ensures_.push_back(ensure);
  post([this, ensure] {
    queue_missing(ensure->region, ensure->first, ensure->count);
    send_want();
  });
  changed_.wait(lock, [&] { return e.done || e.error || broken_ || closed_; });
  std::erase(ensures_, ensure);
  if (e.done) return;
  if (e.error) std::rethrow_exception(e.error);
  check_usable_locked();
  throw Error("LeaseError", "the wait for region '" + e.region->name + "' was given up.");
}

CUdeviceptr Agent::allocate(const std::shared_ptr<Region>& region, std::size_t bytes, std::uint32_t tag) {
  check_process();
  auto ensure = std::make_shared<Ensure>();
  Ensure& e = *ensure;
  e.region = region;
  std::unique_lock lock(mutex_);
  check_usable_locked();
  if (phase_ != Phase::active)
    throw Error("LeaseError", "allocating in region '" + region->name +
                                  "' is device work and needs a phase: put it in "
                                  "'with mux.phase(...)', or in 'with mux.region(...)', which takes a lease.");
  if (region->joined)
    throw Error("RegionError", "region '" + region->name + "' is another process's: that one allocates in it.");
  const std::int64_t offset = region->allocate(bytes, tag);
  if (offset < 0) {
    Error err("CapacityError", "region '" + region->name + "' has no addresses left for " + std::to_string(bytes) +
                                   " bytes, and the device has " + std::to_string(device_->total()) + " in all.");
    err.need = bytes;
    err.limit = device_->total();
    throw err;
  }
  const auto start = static_cast<std::size_t>(offset);
  e.first = start / page_size_;
  e.count = (start + std::max<std::size_t>(bytes, 1) - 1) / page_size_ - e.first + 1;
  if (region->segment) region->segment->grow(region->used_pages());
  if (!in_use_locked(*region)) uses_.push_back(region);
  if (!written_locked(*region)) writes_.push_back(region);
  try {
    wait_for(lock, ensure);
  } catch (...) {
    region->free(start, tag);
    throw;
  }
  for (std::size_t i = e.first; i < e.first + e.count; ++i) region->mark_written(i);
  return region->addresses.base() + start;
}

void Agent::read(const std::shared_ptr<Region>& region, CUdeviceptr ptr, std::size_t bytes, void* to) {
  run_on_agent([&] {
    auto* out = static_cast<char*>(to);
    for (std::size_t at = ptr - region->addresses.base(), end = at + bytes; at < end;) {
      const std::size_t page = at / page_size_, offset = at % page_size_;
      const std::size_t n = std::min(page_size_ - offset, end - at);
      // A page that is on its way arrives first.
      while (region->pages[page].moving) step();
      if (region->segment) fetch_to_read({region.get(), page});
      pager_->read({region.get(), page}, offset, n, out);
      out += n;
      at += n;
    }
  });
}

std::size_t Agent::trim_host() {
  std::size_t released = 0;
  run_on_agent([&] { released = give_host_back(); });
  return released;
}

std::vector<SwapSpan> Agent::spans() {
  check_process();
  std::lock_guard lock(mutex_);
  if (!pager_) return {};
  return {pager_->spans.begin(), pager_->spans.end()};
}

AgentStats Agent::stats() {
  check_process();
  std::lock_guard lock(mutex_);
  static constexpr const char* names[] = {"idle", "waiting", "active", "parked", "leaving"};
  AgentStats s;
  s.phase = closed_ ? "closed" : names[static_cast<int>(phase_)];
  s.generation = generation_;
  s.held = held_;
  s.spare = held_ - used_;
  s.page_size = page_size_;
  s.budget = budget_;
  s.grants = grants_;
  s.reentries = reentries_;
  s.reconnects = reconnects_;
  s.fenced = fences_;
  s.last_fault = last_fault_;
  s.duplex = options_.duplex;
  s.fingerprints = fingerprints_;
  if (backing_) {
    s.host_pinned = backing_->pinned_bytes();
    s.host_used = backing_->used_bytes();
    s.host_granted = backing_->allowed() + shared_host_;
  }
  for (auto& r : regions_) {
    RegionStats rs;
    rs.name = r->name;
    rs.keep = r->on_evict == OnEvict::keep;
    rs.base = r->addresses.base();
    rs.live = r->live_bytes();
    for (std::size_t i = 0; i < r->pages.size(); ++i) {
      const PageEntry& e = r->pages[i];
      switch (e.state) {
        case PageState::absent:
          if (r->segment && r->segment->at(i).where == Segment::Where::host) rs.evicted += page_size_;
          break;
        case PageState::resident:
          if (e.owed) {
            rs.borrowed += page_size_;
            break;
          }
          rs.resident += page_size_;
          (r->clean(i) ? rs.clean : rs.dirty) += page_size_;
          break;
        case PageState::evicted:
          rs.evicted += page_size_;
          if (e.place >= 0) rs.spilled += page_size_;
          break;
        case PageState::discarded:
          rs.discarded += page_size_;
          break;
      }
    }
    rs.counters = r->counters;
    s.regions.push_back(std::move(rs));
  }
  return s;
}

bool Agent::in_use_locked(const Region& r) const {
  for (auto* list : {&uses_, &lazy_})
    if (std::any_of(list->begin(), list->end(), [&](auto& u) { return u.get() == &r; })) return true;
  return false;
}

bool Agent::written_locked(const Region& r) const {
  return std::any_of(writes_.begin(), writes_.end(), [&](auto& u) { return u.get() == &r; });
}

// What could be given away now. In a phase these are pages that it does not use, unless the next
// phase usually follows at once and would want them back.
wire::Counts Agent::counts_locked() {
  wire::Counts c{};
  c.resident = used_ + spare_physical_;
  c.discardable = held_ - used_;
  const bool running = running_locked();
  if (running && !extended_ && follows_at_once_locked()) return c;
  for (auto& r : regions_) {
    if ((running && in_use_locked(*r)) || !r->pinned.empty()) continue;
    if (r->segment && r->segment->wish_of_others() == Segment::Wish::uses) continue;
    for (std::size_t i = 0, n = r->pages.size(); i < n; ++i) {
      const PageEntry& e = r->pages[i];
      if (e.state != PageState::resident || e.moving || e.owed) continue;
      if (r->on_evict == OnEvict::discard || !r->live(i)) {
        c.discardable += 1;
      } else if (r->clean(i)) {
        c.clean += 1;
      } else {
        c.dirty += 1;
      }
    }
  }
  return c;
}

std::uint64_t Agent::own_locked() const {
  std::uint64_t n = 0;
  for (auto& r : regions_) {
    if (in_use_locked(*r) || !r->pinned.empty()) continue;
    for (auto& e : r->pages) n += e.state == PageState::resident && !e.owed;
  }
  return n;
}

std::uint64_t Agent::want_locked() const {
  const std::uint64_t spare = held_ - used_, missing = fill_.size() + debts_.size();
  return held_ + (missing > spare ? missing - spare : 0);
}

}  // namespace pymux
