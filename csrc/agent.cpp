#include "agent.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <system_error>

#include "error.h"
#include "fault.h"

extern char** environ;

namespace pymux {
namespace {

constexpr double kMintPatience = 5.0;  // a dying process gives its memory back within this
constexpr double kMintRetry = 0.002;
// A phase that followed the last one within this time last time may follow it once more although
// the device was recalled: two phases in a row cost one handoff, and a waiter one phase at most.
constexpr double kBackToBack = 0.005;
constexpr double kSignalSlice = 0.1;  // how soon a waiting caller notices Ctrl-C

// A 512th of the device, between 2 and 32 MiB: see DESIGN.md.
std::size_t choose_page_size(const Device& d, std::size_t asked) {
  constexpr std::size_t mib = 1u << 20;
  const std::size_t size = asked ? asked : std::clamp(std::bit_floor(d.total() / 512), 2 * mib, 32 * mib);
  const std::size_t g = d.granularity();
  return (size + g - 1) / g * g;
}

std::exception_ptr error_ptr(const char* type, const std::string& what) {
  return std::make_exception_ptr(Error(type, what));
}

const char* type_for(std::uint32_t code) {
  switch (code) {
    case wire::kVersionMismatch:
      return "VersionMismatch";
    case wire::kNameTaken:
      return "ClientExists";
    case wire::kNotAllowed:
      return "NotAllowed";
    case wire::kDevice:
      return "DriverError";
    case wire::kCapacity:
      return "CapacityError";
    case wire::kNoPages:
      return "DeviceOutOfMemory";
    default:
      return "ProtocolError";
  }
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

void spawn_detached(const std::vector<std::string>& command) {
  std::vector<char*> argv;
  for (const auto& a : command) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attr;
  posix_spawn_file_actions_init(&files);
  posix_spawnattr_init(&attr);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&files, 2, "/dev/null", O_WRONLY, 0);
  posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSID);
  pid_t pid = 0;
  int r = posix_spawn(&pid, argv[0], &files, &attr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attr);
  if (r != 0) throw Error("BrokerLost", "cannot start a broker with " + command[0] + ": " + std::strerror(r));
  // The command forks the broker off and ends at once, so that no zombie is left to us.
  while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

template <class M>
const M* as(const std::vector<char>& bytes) {
  return bytes.size() == sizeof(M) ? reinterpret_cast<const M*>(bytes.data()) : nullptr;
}

}  // namespace

// ---- life ----------------------------------------------------------------------------------

Agent::Agent(AgentOptions options)
    : options_(std::move(options)),
      device_(options_.device),
      page_size_(choose_page_size(device_, options_.page_size)),
      owner_pid_(getpid()),
      pass_pages_(options_.pass_pages && exports(device_)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
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

Agent::~Agent() {
  if (getpid() != owner_pid_) {  // a forked child has no agent thread to join
    if (thread_.joinable()) thread_.detach();
    return;
  }
  close();
}

void Agent::close() {
  if (getpid() != owner_pid_) return;
  {
    std::lock_guard lock(mutex_);
    if (!closed_) {
      closed_ = true;
      commands_.push_back([this] { stop_ = true; });
    }
  }
  std::uint64_t one = 1;
  [[maybe_unused]] auto n = ::write(wake_.get(), &one, sizeof one);
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// Connects and says hello; starts a broker when none answers.
void Agent::connect_broker(std::uint32_t flags) {
  const double deadline = now_seconds() + options_.connect_timeout;
  bool spawned = options_.spawn.empty();
  std::string why = "none listens";
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(10))) {
    try {
      socket_ = wire::Socket::connect(options_.socket);
      if (say_hello(flags)) return;
      why = "it closed the connection";  // one that is just dying does; its successor comes next
    } catch (const std::system_error& e) {
      const int code = e.code().value();
      if (code == EACCES || code == EPERM)
        throw Error("NotAllowed", "the broker's socket " + options_.socket +
                                      " belongs to another user. Set PYMUX_RUNTIME_DIR to a directory of your own.");
      if (code != ENOENT && code != ECONNREFUSED && code != EAGAIN)
        throw Error("BrokerLost", "cannot connect to " + options_.socket + ": " + e.code().message());
      if (!spawned) {
        spawn_detached(options_.spawn);
        spawned = true;
      }
    }
    if (now_seconds() > deadline)
      throw Error("BrokerLost",
                  "no broker answers at " + options_.socket + " (" + why + ")" +
                      (options_.spawn.empty() ? ". Start one with 'pymux broker'."
                                              : ", and starting one did not help. Run 'pymux broker' in a "
                                                "terminal to see why."));
  }
}

// False when the broker went away without a word.
bool Agent::say_hello(std::uint32_t flags) {
  auto hello = wire::make<wire::Hello>(wire::kHello);
  hello.version = wire::kVersion;
  hello.pid = static_cast<std::uint32_t>(getpid());
  hello.flags = flags | (pass_pages_ ? wire::kPassesPages : 0);
  hello.rank = options_.rank;
  hello.world = options_.world;
  hello.page_size = page_size_;
  std::memcpy(hello.uuid, device_.uuid(), sizeof hello.uuid);
  wire::put_text(hello.job, sizeof hello.job, options_.job);
  wire::put_text(hello.client, sizeof hello.client, options_.client);
  wire::put_text(hello.group, sizeof hello.group, options_.group);
  {
    std::lock_guard lock(mutex_);
    hello.held = held_;
    if (phase_ == Phase::active) hello.lease_generation = generation_;
    hello.counts = counts_locked();
  }
  std::vector<char> reply;
  try {
    socket_.send(&hello, sizeof hello);
    pollfd p{socket_.fd(), POLLIN, 0};
    const int wait_ms = static_cast<int>(options_.connect_timeout * 1000);
    if (poll(&p, 1, wait_ms) == 0)
      throw Error("BrokerLost", "the broker at " + options_.socket +
                                    " does not answer. 'pymux status' shows whether it "
                                    "is alive.");
    reply = socket_.receive(true, nullptr);
  } catch (const std::system_error&) {
    return false;
  }
  if (reply.empty()) return false;
  if (auto* m = as<wire::ErrorText>(reply); m && m->h.type == wire::kError)
    throw Error(type_for(m->code), wire::get_text(m->text, sizeof m->text));
  auto* m = as<wire::Welcome>(reply);
  if (!m || m->h.type != wire::kWelcome)
    throw Error("VersionMismatch",
                "what listens at " + options_.socket + " does not speak this pymux's protocol (version " +
                    std::to_string(wire::kVersion) + "). Stop it and start 'pymux broker' of the same version.");
  std::lock_guard lock(mutex_);
  budget_ = m->budget;
  {
    std::lock_guard order(send_mutex_);
    connected_ = true;
  }
  // The phase may have ended since it was told, and the lease's return went to nobody.
  if (hello.lease_generation && phase_ == Phase::idle) release_locked();
  return true;
}

// ---- caller threads ------------------------------------------------------------------------

void Agent::check_usable_locked() const {
  if (getpid() != owner_pid_)
    throw Error("LeaseError",
                "this process is a fork of the one that connected; CUDA does not survive fork. Use the "
                "'spawn' start method and connect() in the child.");
  if (broken_) std::rethrow_exception(broken_);
  if (closed_) throw Error("LeaseError", "this Mux is closed; connect() again.");
}

void Agent::post(std::function<void()> work) {
  commands_.push_back(std::move(work));
  std::uint64_t one = 1;
  [[maybe_unused]] auto n = ::write(wake_.get(), &one, sizeof one);
}

void Agent::run_on_agent(std::function<void()> work) {
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
    changed_.notify_all();
  });
  changed_.wait(lock, [&] { return done || finished_; });
  if (error) std::rethrow_exception(error);
  if (!done) check_usable_locked();
}

std::shared_ptr<Region> Agent::create_region(const std::string& name, OnEvict on_evict) {
  std::lock_guard lock(mutex_);
  check_usable_locked();
  for (auto& r : regions_)
    if (r->name == name) throw Error("RegionError", "region '" + name + "' exists already in this process.");
  auto r = std::make_shared<Region>(name, on_evict, device_, page_size_);
  regions_.push_back(r);
  fault::watch(r->addresses.base(), r->addresses.size(), options_.job, name);
  return r;
}

bool Agent::resident_locked(const Region& r, std::size_t first, std::size_t count) const {
  for (std::size_t i = first; i < first + count; ++i) {
    const PageEntry& e = r.pages[i];
    if ((e.state != PageState::resident || e.moving) && r.live(i)) return false;
  }
  return true;
}

bool Agent::resident_locked(const std::vector<std::shared_ptr<Region>>& regions) const {
  return std::all_of(regions.begin(), regions.end(), [&](auto& r) { return resident_locked(*r, 0, r->used_pages()); });
}

void Agent::activate_locked() {
  phase_ = Phase::active;
  active_flag_ = true;
  stamp_ += 1;
  for (auto& r : uses_) r->last_used = stamp_;
  for (auto& r : writes_)
    for (std::size_t i = 0, n = r->used_pages(); i < n; ++i)
      if (r->pages[i].state == PageState::resident) r->pages[i].dirty = true;
}

void Agent::acquire(const std::string& phase, std::vector<std::shared_ptr<Region>> uses,
                    std::vector<std::shared_ptr<Region>> writes, double expected, double timeout,
                    const std::function<bool()>& interrupted) {
  std::unique_lock lock(mutex_);
  check_usable_locked();
  if (phase_ == Phase::active || phase_ == Phase::waiting)
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
  uses_ = std::move(uses);
  writes_ = std::move(writes);
  expected_ = expected;
  if (phase_ == Phase::parked && resident_locked(uses_)) {  // nobody waits and nothing is missing
    reentries_ += 1;
    activate_locked();
    return;
  }
  granted_ = phase_ == Phase::parked;  // a slow re-entry: only pages are missing
  phase_ = Phase::waiting;
  acquire_error_ = nullptr;
  asked_ = false;
  post([this] {
    if (!asked_) begin_acquire();
  });
  auto over = [&] { return phase_ != Phase::waiting || broken_ || closed_; };
  const double deadline = timeout < 0 ? 0 : now_seconds() + timeout;
  while (!over()) {
    double slice = kSignalSlice;
    if (deadline > 0) slice = std::min(slice, std::max(0.0, deadline - now_seconds()));
    if (changed_.wait_for(lock, std::chrono::duration<double>(slice), over)) break;
    lock.unlock();
    const bool stop = interrupted();
    lock.lock();
    if (over() || (!stop && (deadline == 0 || now_seconds() < deadline))) continue;
    phase_ = Phase::idle;
    post([this, seq = acquire_seq_] { give_up(seq); });
    if (stop) throw Interrupted();
    throw Error("AcquireTimeout", "phase '" + phase + "' did not get the device within " + std::to_string(timeout) +
                                      " s. 'pymux status' shows who holds it.");
  }
  if (phase_ == Phase::active) return;
  if (acquire_error_) std::rethrow_exception(acquire_error_);
  check_usable_locked();
  throw Error("LeaseError", "the phase was not entered.");
}

bool Agent::follows_at_once_locked() const {
  auto it = gap_after_.find(phase_name_);
  return it != gap_after_.end() && it->second < kBackToBack;
}

void Agent::release_locked() {
  phase_ = Phase::idle;
  granted_ = recalled_ = extended_ = false;
  linger_until_ = 0;
  active_flag_ = recalled_flag_ = false;
  auto m = wire::make<wire::Release>(wire::kRelease);
  m.generation = generation_;
  m.counts = counts_locked();
  send(m);
}

void Agent::leave() {
  {
    std::lock_guard lock(mutex_);
    check_usable_locked();
    if (phase_ != Phase::active)
      throw Error("LeaseError", "there is no phase to leave: the lease was not acquired, or was given back already.");
  }
  std::exception_ptr failed;
  try {
    device_.synchronize();
  } catch (const CudaError& e) {
    failed = std::current_exception();
    std::lock_guard lock(mutex_);
    if (e.sticky()) broken_ = failed;
  }
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
  std::lock_guard lock(mutex_);
  active_flag_ = false;
  left_at_ = now_seconds();
  if (failed || (recalled_ && (extended_ || !follows_at_once_locked()))) {
    release_locked();
  } else {
    phase_ = Phase::parked;
    if (recalled_) {
      linger_until_ = left_at_ + kBackToBack;
      post([] {});  // the agent thread sets its clock
    }
  }
  if (failed) std::rethrow_exception(failed);
}

void Agent::evict_now(const Region* only, bool always_copy) {
  while (!pager_->in_empty()) finish_in();
  victims_ = candidates();
  if (only) std::erase_if(victims_, [&](const PageRef& p) { return p.region != only; });
  victims_known_ = true;
  always_copy_ = always_copy;
  const std::uint64_t spare = held_ - used_;
  quota_ += victims_.size() + (only ? 0 : spare);
  while (quota_ > 0 || !pager_->out_empty()) step();
  flush_pages();
  always_copy_ = false;
}

void Agent::evict(const std::shared_ptr<Region>& region) {
  run_on_agent([&] {
    {
      std::lock_guard lock(mutex_);
      if (phase_ == Phase::active || phase_ == Phase::waiting)
        throw Error("LeaseError", "evict() inside a phase would take away what the phase uses. Leave the phase first.");
    }
    fault_ = nullptr;
    evict_now(region.get(), false);
    if (fault_) std::rethrow_exception(fault_);
  });
}

CUdeviceptr Agent::allocate(const std::shared_ptr<Region>& region, std::size_t bytes) {
  auto ensure = std::make_shared<Ensure>();
  Ensure& e = *ensure;
  e.region = region;
  std::unique_lock lock(mutex_);
  check_usable_locked();
  if (phase_ != Phase::active)
    throw Error("LeaseError", "allocating in region '" + region->name +
                                  "' is device work and needs a phase: put it in "
                                  "'with mux.phase(...)', or in 'with mux.region(...)', which takes a lease.");
  const std::int64_t offset = region->allocate(bytes);
  if (offset < 0) {
    Error err("CapacityError", "region '" + region->name + "' has no addresses left for " + std::to_string(bytes) +
                                   " bytes, and the device has " + std::to_string(device_.total()) + " in all.");
    err.need = bytes;
    err.limit = device_.total();
    throw err;
  }
  const auto start = static_cast<std::size_t>(offset);
  e.first = start / page_size_;
  e.count = (start + std::max<std::size_t>(bytes, 1) - 1) / page_size_ - e.first + 1;
  if (!in_use_locked(*region)) uses_.push_back(region);
  if (!resident_locked(*region, e.first, e.count)) {
    ensures_.push_back(ensure);
    post([this, ensure] {
      queue_missing(ensure->region, ensure->first, ensure->count);
      send_want();
    });
    changed_.wait(lock, [&] { return e.done || e.error || broken_ || closed_; });
    std::erase(ensures_, ensure);
    if (!e.done) {
      region->free(start);
      if (e.error) std::rethrow_exception(e.error);
      check_usable_locked();
      throw Error("LeaseError", "the allocation was given up.");
    }
  }
  for (std::size_t i = e.first; i < e.first + e.count; ++i) region->pages[i].dirty = true;
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
      pager_->read({region.get(), page}, offset, n, out);
      out += n;
      at += n;
    }
  });
}

std::size_t Agent::trim_host() {
  std::size_t released = 0;
  run_on_agent([&] { released = backing_->trim(); });
  return released;
}

std::vector<SwapSpan> Agent::spans() {
  std::lock_guard lock(mutex_);
  if (!pager_) return {};
  return {pager_->spans.begin(), pager_->spans.end()};
}

AgentStats Agent::stats() {
  std::lock_guard lock(mutex_);
  static constexpr const char* names[] = {"idle", "waiting", "active", "parked"};
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
  s.last_fault = last_fault_;
  if (backing_) {
    s.host_pinned = backing_->pinned_bytes();
    s.host_used = backing_->used_bytes();
  }
  for (auto& r : regions_) {
    RegionStats rs;
    rs.name = r->name;
    rs.keep = r->on_evict == OnEvict::keep;
    rs.base = r->addresses.base();
    rs.live = r->live_bytes();
    for (const auto& e : r->pages) {
      switch (e.state) {
        case PageState::absent:
          break;
        case PageState::resident:
          rs.resident += page_size_;
          (e.slot >= 0 && !e.dirty ? rs.clean : rs.dirty) += page_size_;
          break;
        case PageState::evicted:
          rs.evicted += page_size_;
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
  return std::any_of(uses_.begin(), uses_.end(), [&](auto& u) { return u.get() == &r; });
}

wire::Counts Agent::counts_locked() {
  wire::Counts c{};
  c.resident = used_ + spare_physical_;
  c.discardable = held_ - used_;
  for (auto& r : regions_) {
    for (std::size_t i = 0, n = r->pages.size(); i < n; ++i) {
      const PageEntry& e = r->pages[i];
      if (e.state != PageState::resident || e.moving) continue;
      if (r->on_evict == OnEvict::discard || !r->live(i)) {
        c.discardable += 1;
      } else if (e.slot >= 0 && !e.dirty) {
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
    if (in_use_locked(*r)) continue;
    for (auto& e : r->pages) n += e.state == PageState::resident;
  }
  return n;
}

std::uint64_t Agent::want_locked() const {
  const std::uint64_t spare = held_ - used_;
  return held_ + (fill_.size() > spare ? fill_.size() - spare : 0);
}

// ---- agent thread: the loop ----------------------------------------------------------------

template <class M>
void Agent::send(const M& message, const std::vector<Fd>& fds) {
  std::lock_guard lock(send_mutex_);
  if (!connected_) return;  // the next hello says how things are
  try {
    socket_.send(&message, sizeof message, fds);
  } catch (const std::system_error&) {
    // The broker is gone: the agent thread sees the end of the stream next and reconnects.
  }
}

void Agent::drop_socket() {
  std::lock_guard lock(send_mutex_);
  connected_ = false;
  socket_ = wire::Socket();
}

void Agent::run(std::promise<void>& ready) {
  try {
    device_.make_current();
    auto backing = std::make_unique<Backing>(page_size_);
    auto pager = std::make_unique<Pager>(device_, *backing, mutex_);
    std::lock_guard lock(mutex_);
    backing_ = std::move(backing);
    pager_ = std::move(pager);
  } catch (...) {
    ready.set_exception(std::current_exception());
    return;
  }
  ready.set_value();
  while (!stop_) {
    try {
      wait_for_work();
      take_commands();
      take_messages();
      step();
    } catch (const std::system_error&) {
      reconnect();
    } catch (...) {
      fail_waiters(std::current_exception());
    }
  }
  give_all_back();
  std::lock_guard lock(mutex_);
  pager_.reset();
  backing_.reset();
  commands_.clear();
  finished_ = true;
  changed_.notify_all();
}

bool Agent::busy() {
  if (quota_ > 0 || !pager_->out_empty() || !pager_->in_empty()) return true;
  if (fill_.empty() || retry_at_ > 0) return false;
  std::lock_guard lock(mutex_);
  return held_ > used_;
}

void Agent::wait_for_work() {
  pollfd p[2] = {{socket_.fd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  int timeout = -1;
  if (busy()) {
    timeout = 0;
  } else if (retry_at_ > 0) {
    timeout = std::max(1, static_cast<int>((retry_at_ - now_seconds()) * 1000));
  }
  {
    std::lock_guard lock(mutex_);
    if (linger_until_ > 0 && timeout < 0)
      timeout = std::max(0, static_cast<int>((linger_until_ - now_seconds()) * 1000) + 1);
  }
  // A negative descriptor is passed over: without a broker only commands wake us.
  poll(p, 2, timeout);
  if (p[1].revents) {
    std::uint64_t n = 0;
    [[maybe_unused]] auto r = ::read(wake_.get(), &n, sizeof n);
  }
  std::lock_guard lock(mutex_);
  if (linger_until_ > 0 && now_seconds() >= linger_until_) release_locked();
}

void Agent::take_commands() {
  for (;;) {
    std::function<void()> work;
    {
      std::lock_guard lock(mutex_);
      if (commands_.empty()) return;
      work = std::move(commands_.front());
      commands_.pop_front();
    }
    work();
  }
}

void Agent::take_messages() {
  while (socket_) {
    std::vector<Fd> fds;
    std::vector<char> message;
    try {
      message = socket_.receive(false, &fds);
    } catch (const std::system_error& e) {
      if (e.code().value() == EAGAIN || e.code().value() == EWOULDBLOCK) return;
      throw;
    }
    if (message.empty()) throw std::system_error(EPIPE, std::generic_category(), "the broker is gone");
    handle(message, fds);
  }
}

void Agent::handle(const std::vector<char>& bytes, std::vector<Fd>& fds) {
  if (bytes.size() < sizeof(wire::Header)) return;
  switch (reinterpret_cast<const wire::Header*>(bytes.data())->type) {
    case wire::kGrant:
      if (auto* m = as<wire::Grant>(bytes)) {
        std::unique_lock lock(mutex_);
        if (phase_ != Phase::waiting || m->seq != acquire_seq_) {  // cancelled meanwhile
          auto r = wire::make<wire::Release>(wire::kRelease);
          r.generation = m->generation;
          r.counts = counts_locked();
          send(r);
          return;
        }
        granted_ = true;
        grants_ += 1;
        generation_ = m->generation;
        lock.unlock();
        if (options_.snapshot) {
          for (auto& r : regions_) queue_missing(r, 0, r->used_pages());
          send_want();
        }
        settle();
      }
      return;
    case wire::kRecall:
      if (auto* m = as<wire::Recall>(bytes)) {
        std::lock_guard lock(mutex_);
        if (m->generation != generation_ || phase_ == Phase::idle) return;
        if (phase_ == Phase::parked) {
          if (!recalled_) release_locked();  // else it lingers, or a snapshot is on its way out
        } else {
          recalled_ = true;
          recalled_flag_ = true;
        }
      }
      return;
    case wire::kTake:
      if (auto* m = as<wire::Take>(bytes)) {
        quota_ += m->count;
        victims_known_ = false;
      }
      return;
    case wire::kGive:
      if (auto* m = as<wire::Give>(bytes)) {
        for (auto& fd : fds) spare_fds_.push_back(std::move(fd));
        std::lock_guard lock(mutex_);
        held_ += m->count;
      }
      return;
    case wire::kDeny:
      if (auto* m = as<wire::Deny>(bytes)) {
        {
          std::lock_guard lock(mutex_);
          if (m->seq != seq_) return;
        }
        Error e(type_for(m->code), wire::get_text(m->text, sizeof m->text));
        e.need = m->need * page_size_;
        e.limit = m->budget * page_size_;
        fail_waiters(std::make_exception_ptr(e));
      }
      return;
    case wire::kError:
      if (auto* m = as<wire::ErrorText>(bytes)) {
        std::lock_guard lock(mutex_);
        broken_ = error_ptr(type_for(m->code), wire::get_text(m->text, sizeof m->text));
        changed_.notify_all();
      }
      return;
    default:
      return;
  }
}

// The broker is gone. Nothing of ours is: pages and leases stay, and a new broker is told.
void Agent::reconnect() {
  while (!pager_->out_empty()) {
    try {
      Page p = pager_->finish_out();
      std::lock_guard lock(mutex_);
      used_ -= 1;
      spare_.push_back(std::move(p));
    } catch (const Error&) {
      note_fault(std::current_exception());
    }
  }
  bool refused = false;
  {
    std::lock_guard lock(mutex_);
    drop_socket();
    refused = broken_ != nullptr;  // the broker said why; do not insist
    for (auto& fd : outgoing_) spare_fds_.push_back(std::move(fd));
    outgoing_.clear();
    outgoing_bare_ = 0;
    quota_ = missing_ = 0;
    held_ = used_ + spare_.size() + spare_fds_.size();
    if (phase_ == Phase::parked) phase_ = Phase::idle;
    if (phase_ == Phase::waiting) granted_ = false;
    recalled_ = extended_ = false;
    linger_until_ = 0;
    recalled_flag_ = false;
  }
  if (refused || stop_) return;
  try {
    connect_broker(wire::kReconnect);
  } catch (const Error&) {
    std::lock_guard lock(mutex_);
    drop_socket();
    broken_ = std::current_exception();
    changed_.notify_all();
    return;
  }
  bool waiting = false;
  {
    std::lock_guard lock(mutex_);
    reconnects_ += 1;
    waiting = phase_ == Phase::waiting && asked_;
  }
  if (waiting) {
    begin_acquire();
  } else if (!fill_.empty()) {
    send_want();
  }
}

// ---- agent thread: pages -------------------------------------------------------------------

void Agent::queue_missing(const std::shared_ptr<Region>& r, std::size_t first, std::size_t count) {
  std::set<std::size_t> queued;
  for (const PageRef& p : fill_)
    if (p.region == r.get()) queued.insert(p.index);
  for (std::size_t i = first; i < first + count; ++i) {
    const PageEntry& e = r->pages[i];
    const bool there = e.state == PageState::resident && !e.moving;
    const bool coming = e.state != PageState::resident && e.moving;
    if (!there && !coming && r->live(i) && !queued.contains(i)) fill_.push_back({r.get(), i});
  }
}

// A caller stopped waiting: takes the request back, or the lease if it was granted meanwhile.
void Agent::give_up(std::uint64_t seq) {
  std::lock_guard lock(mutex_);
  if (phase_ != Phase::idle || seq != acquire_seq_) return;  // the next request is under way
  fill_.clear();
  if (granted_) {
    release_locked();
  } else {
    auto m = wire::make<wire::Cancel>(wire::kCancel);
    m.seq = seq;
    send(m);
  }
}

void Agent::begin_acquire() {
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::waiting) return;  // timed out meanwhile
  asked_ = true;
  acquire_seq_ = ++seq_;
  fill_.clear();
  const bool ask = !granted_;
  if (!options_.snapshot || granted_)
    for (auto& r : uses_) queue_missing(r, 0, r->used_pages());
  if (ask) {
    auto m = wire::make<wire::Acquire>(wire::kAcquire);
    m.seq = acquire_seq_;
    m.want = want_locked();
    m.own = own_locked();
    m.expected_us = static_cast<std::uint64_t>(std::max(0.0, expected_) * 1e6);
    wire::put_text(m.phase, sizeof m.phase, phase_name_);
    m.counts = counts_locked();
    send(m);
    return;
  }
  lock.unlock();
  send_want();
  settle();
}

void Agent::send_want() {
  std::lock_guard lock(mutex_);
  if (fill_.size() <= held_ - used_) return;
  auto m = wire::make<wire::Want>(wire::kWant);
  m.seq = ++seq_;
  m.want = want_locked();
  m.own = own_locked();
  m.counts = counts_locked();
  send(m);
}

// Starts what can be started, finishes what is done; where neither is possible, waits for one page.
void Agent::step() {
  bool progress = false;
  while (quota_ > 0 && !pager_->out_full() && start_out()) progress = true;
  if (retry_at_ == 0 || now_seconds() >= retry_at_) {
    retry_at_ = 0;
    while (!fill_.empty() && !pager_->in_full() && start_in()) progress = true;
  }
  while (!pager_->out_empty() && pager_->out_ready()) finish_out(), progress = true;
  while (!pager_->in_empty() && pager_->in_ready()) finish_in(), progress = true;
  if (!progress) {
    flush_pages();  // somebody may wait for what is ready
    if (!pager_->out_empty()) {
      finish_out();
    } else if (!pager_->in_empty()) {
      finish_in();
    }
  }
  if (quota_ == 0 && pager_->out_empty()) flush_pages();
  settle();
}

// Pages that could go, the first to go last: those no phase here needs, then what a request that was
// not granted yet needs; discardable, clean, dirty; least recently used.
std::vector<PageRef> Agent::candidates() {
  using Rank = std::tuple<bool, int, std::uint64_t, std::size_t>;
  std::vector<std::pair<Rank, PageRef>> all;
  std::lock_guard lock(mutex_);
  const bool running = phase_ == Phase::active || (phase_ == Phase::waiting && granted_);
  for (auto& r : regions_) {
    const bool needed = (running || phase_ == Phase::waiting) && in_use_locked(*r);
    if (needed && running) continue;
    for (std::size_t i = 0; i < r->pages.size(); ++i) {
      const PageEntry& e = r->pages[i];
      if (e.state != PageState::resident || e.moving) continue;
      const bool worthless = r->on_evict == OnEvict::discard || !r->live(i);
      const int kind = worthless ? 0 : e.slot >= 0 && !e.dirty ? 1 : 2;
      all.push_back({{needed, kind, r->last_used, r->pages.size() - i}, {r.get(), i}});
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

// Gives away a page without contents that nobody here waits for; false when there is none.
bool Agent::give_spare() {
  {
    std::lock_guard lock(mutex_);
    if (held_ - used_ <= fill_.size()) return false;
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
    victims_ = candidates();
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
  {
    std::lock_guard lock(mutex_);
    PageEntry& e = ref.entry();
    const bool needed = phase_ == Phase::active || (phase_ == Phase::waiting && granted_);
    if (e.state != PageState::resident || e.moving || (needed && in_use_locked(*ref.region))) return true;
    e.moving = true;  // from here on a phase that needs the page waits for it
  }
  try {
    pager_->begin_out(ref, always_copy_);
    quota_ -= 1;
  } catch (const Error&) {
    // The host is full, or the driver refuses: what is left is dirty too, and stays where it is.
    missing_ += static_cast<std::uint32_t>(quota_);
    quota_ = 0;
    victims_.clear();
    note_fault(std::current_exception());
    return false;
  }
  return true;
}

void Agent::finish_out() {
  try {
    Page page = pager_->finish_out();
    {
      std::lock_guard lock(mutex_);
      used_ -= 1;
      held_ -= 1;
    }
    hand_out(std::move(page));
  } catch (const Error&) {
    missing_ += 1;
    note_fault(std::current_exception());
  }
  if (outgoing_.size() >= wire::kMaxFds / 2) flush_pages();
}

// A swap failed and was undone: keep the reason, and whether the device is lost.
void Agent::note_fault(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  fault_ = error;
  try {
    std::rethrow_exception(error);
  } catch (const CudaError& e) {
    last_fault_ = e.what();
    if (e.sticky()) broken_ = error;
  } catch (const std::exception& e) {
    last_fault_ = e.what();
  }
}

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
      for (auto& r : uses_) queue_missing(r, 0, r->used_pages());
    }
    m.want = phase_ == Phase::waiting || !ensures_.empty() ? want_locked() : 0;
    m.counts = counts_locked();
    send(m, fds);
  }
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
        physical.push_back(Page::create(device_, page_size_, pass_pages_));
        mint_deadline_ = 0;
      } catch (const CudaError& e) {
        if (!physical.empty()) return true;
        if (e.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
        // The broker counted this page free: whoever had it may still be dying.
        if (mint_deadline_ == 0) mint_deadline_ = now_seconds() + kMintPatience;
        if (now_seconds() > mint_deadline_) {
          mint_deadline_ = 0;
          throw;
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
  std::vector<PageRef> run;
  while (!fill_.empty() && run.size() < std::min(room, Pager::kRun)) {
    PageRef ref = fill_.front();
    const PageEntry& e = ref.entry();
    if (e.moving && e.state == PageState::resident) break;  // on its way out: first let it arrive there
    if (e.state == PageState::resident || e.moving) {
      fill_.pop_front();
      continue;
    }
    if (!run.empty() && (run.back().region != ref.region || run.back().index + 1 != ref.index)) break;
    run.push_back(ref);
    fill_.pop_front();
  }
  if (run.empty()) return false;
  std::vector<Page> physical;
  try {
    if (!obtain(physical, run.size())) {
      fill_.insert(fill_.begin(), run.begin(), run.end());
      return false;
    }
    while (run.size() > physical.size()) {
      fill_.push_front(run.back());
      run.pop_back();
    }
    pager_->begin_in(run, physical);
  } catch (...) {
    for (auto& p : physical) spare_.push_back(std::move(p));
    fail_waiters(std::current_exception());
    return false;
  }
  std::lock_guard lock(mutex_);
  used_ += run.size();
  return true;
}

void Agent::finish_in() {
  Pager::Arrival a = pager_->finish_in();
  if (!a.failed) return;
  spare_.push_back(std::move(a.returned));
  {
    std::lock_guard lock(mutex_);
    used_ -= 1;
  }
  fail_waiters(a.failed);
}

// Wakes those whose pages are all there.
void Agent::settle() {
  spare_physical_ = spare_.size() + spare_fds_.size();
  if (!pager_->in_empty()) {
    // An allocation may still be complete; a phase is not.
    std::lock_guard lock(mutex_);
    if (ensures_.empty()) return;
  }
  std::unique_lock lock(mutex_);
  bool wake = false;
  for (auto& e : ensures_) {
    if (!e->done && resident_locked(*e->region, e->first, e->count)) e->done = wake = true;
  }
  if (phase_ == Phase::waiting && granted_ && fill_.empty() && pager_->in_empty() && resident_locked(uses_)) {
    activate_locked();
    wake = true;
    auto m = wire::make<wire::Ready>(wire::kReady);
    m.generation = generation_;
    send(m);
  }
  if (wake) changed_.notify_all();
}

void Agent::fail_waiters(std::exception_ptr error) {
  fill_.clear();
  retry_at_ = mint_deadline_ = 0;
  note_fault(error);
  std::lock_guard lock(mutex_);
  for (auto& e : ensures_)
    if (!e->done) e->error = error;
  if (phase_ == Phase::waiting) {
    acquire_error_ = error;
    if (granted_) {
      release_locked();
    } else {
      auto m = wire::make<wire::Cancel>(wire::kCancel);
      m.seq = acquire_seq_;
      send(m);
      phase_ = Phase::idle;
    }
  }
  changed_.notify_all();
}

// At close: pages go back to the bank without their contents.
void Agent::give_all_back() {
  try {
    fill_.clear();
    while (!pager_->in_empty()) finish_in();
    while (!pager_->out_empty()) finish_out();
    quota_ = 0;
    std::vector<PageRef> all;
    {
      std::lock_guard lock(mutex_);
      if (phase_ == Phase::active) device_.synchronize();
      for (auto& r : regions_)
        for (std::size_t i = 0; i < r->pages.size(); ++i) {
          PageEntry& e = r->pages[i];
          if (e.slot >= 0) backing_->give(std::exchange(e.slot, -1));
          if (e.state == PageState::resident)
            all.push_back({r.get(), i});
          else
            e.state = PageState::absent;
        }
    }
    for (PageRef ref : all) {
      PageEntry& e = ref.entry();
      e.mapping.unmap();
      std::lock_guard lock(mutex_);
      e.state = PageState::absent;
      used_ -= 1;
      spare_.push_back(std::move(e.page));
    }
    fill_.clear();
    victims_.clear();
    victims_known_ = true;
    quota_ = held_;
    while (quota_ > 0 && start_out())
      if (outgoing_.size() >= wire::kMaxFds / 2) flush_pages();
    flush_pages();
    std::lock_guard lock(mutex_);
    if (phase_ != Phase::idle || granted_) release_locked();
  } catch (const std::exception&) {
    // The process ends or the driver is gone: the kernel and the broker take back what is left.
    note_fault(std::current_exception());
  }
  drop_socket();
}

}  // namespace pymux
