// The agent thread: its loop, its messages, and the lease's state as they change it.
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "agent.h"
#include "error.h"

extern char** environ;

namespace pymux {
namespace {

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
    case wire::kNoHostMemory:
      return "HostOutOfMemory";
    case wire::kMemberLost:
      return "MemberLost";
    case wire::kNoRegion:
      return "UnknownRegion";
    case wire::kDeadlock:
      return "DeadlockError";
    case wire::kConfig:
      return "ConfigError";
    default:
      return "ProtocolError";
  }
}

// A type of pymux/errors.py that a broker ends with, or nothing.
const char* named_type(const std::string& name) {
  for (const char* type : {"NotAllowed", "ConfigError", "DriverError", "HostOutOfMemory", "CapacityError"})
    if (name == type) return type;
  return nullptr;
}

// Why a broker ended, from the last line that it wrote: "Error: NotAllowed: ...", or the end of a traceback.
Error broker_error(const std::string& said) {
  const auto end = said.find_last_not_of("\n ");
  std::string line = end == std::string::npos ? "" : said.substr(0, end + 1);
  line = line.substr(line.rfind('\n') + 1);
  if (line.starts_with("Error: ")) line.erase(0, 7);
  const auto colon = line.find(": ");
  if (const char* type = colon == std::string::npos ? nullptr : named_type(line.substr(0, colon)))
    return Error(type, line.substr(colon + 2));
  return Error("BrokerLost", "the broker that was started here ended: " + (line.empty() ? "it did not say why" : line) +
                                 ". Run 'pymux broker' in a terminal to see more.");
}

// Runs the command that starts a broker in the background. It ends when the broker serves, and throws what the
// broker says when it cannot.
void start_broker(const std::vector<std::string>& command, double deadline) {
  std::vector<char*> argv;
  for (const auto& a : command) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  int ends[2] = {-1, -1};
  if (pipe2(ends, O_CLOEXEC) != 0) throw Error("BrokerLost", std::string("no pipe: ") + std::strerror(errno));
  Fd reads(ends[0]);
  pid_t pid = 0;
  {
    Fd writes(ends[1]);
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&files, writes.get(), 2);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSID);
    const int r = posix_spawn(&pid, argv[0], &files, &attr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    if (r != 0) throw Error("BrokerLost", "cannot start a broker with " + command[0] + ": " + std::strerror(r));
  }
  std::string said;
  for (;;) {
    pollfd p{reads.get(), POLLIN, 0};
    const int left = static_cast<int>((deadline - now_seconds()) * 1000);
    const int ready = left > 0 ? poll(&p, 1, left) : 0;
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return;  // slow, and in the background: who connects says that none answers
    char buffer[4096];
    const ssize_t n = ::read(reads.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    said.append(buffer, static_cast<std::size_t>(n));
  }
  int status = 0;
  // The command forks the broker off and ends, so that no zombie is left to us. Who ignores SIGCHLD is told nothing.
  while (waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) return;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw broker_error(said);
}

template <class M>
const M* as(const std::vector<char>& bytes) {
  return bytes.size() == sizeof(M) ? reinterpret_cast<const M*>(bytes.data()) : nullptr;
}

}  // namespace

// ---- connecting ----------------------------------------------------------------------------

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
        throw Error("BrokerLost", "cannot connect to " + options_.socket + ": " + e.code().message() +
                                      ". Set PYMUX_RUNTIME_DIR to a directory of your own with a short path.");
      if (!spawned) {
        start_broker(options_.spawn, deadline);
        spawned = true;
        continue;
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
  hello.flags =
      flags | (pass_pages_ ? wire::kPassesPages : 0) | (device_ ? 0 : wire::kController) | (alone() ? 0 : wire::kJoint);
  hello.rank = options_.rank;
  hello.world = options_.world;
  hello.page_size = page_size_;
  hello.need = options_.need;
  hello.host_need = options_.host_need;
  if (device_) std::memcpy(hello.uuid, device_->uuid(), sizeof hello.uuid);
  wire::put_text(hello.job, sizeof hello.job, options_.job);
  wire::put_text(hello.client, sizeof hello.client, options_.client);
  wire::put_text(hello.group, sizeof hello.group, options_.group);
  {
    std::lock_guard lock(mutex_);
    hello.held = held_;
    if (backing_) hello.host_pinned = backing_->pinned_bytes() + shared_host_;
    if ((phase_ == Phase::active && !fenced_) || phase_ == Phase::leaving) {
      hello.lease_generation = generation_;
      if (!remote_) hello.flags |= wire::kOpener;
      wire::put_text(hello.phase, sizeof hello.phase, phase_name_);
    }
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
  if (auto* m = as<wire::ErrorText>(reply); m && m->h.type == wire::kError) {
    Error e(type_for(m->code), wire::get_text(m->text, sizeof m->text));
    e.need = m->need;
    e.limit = m->limit;
    throw e;
  }
  auto* m = as<wire::Welcome>(reply);
  if (!m || m->h.type != wire::kWelcome)
    throw Error("VersionMismatch",
                "what listens at " + options_.socket + " does not speak this pymux's protocol (version " +
                    std::to_string(wire::kVersion) + "). Stop it and start 'pymux broker' of the same version.");
  std::lock_guard lock(mutex_);
  budget_ = m->budget;
  spill_dir_ = wire::get_text(m->spill_dir, sizeof m->spill_dir);
  {
    std::lock_guard order(send_mutex_);
    connected_ = true;
  }
  // The phase may have ended since it was told, and the lease's return went to nobody.
  if (hello.lease_generation && phase_ == Phase::idle) release_locked();
  return true;
}

// ---- the loop ------------------------------------------------------------------------------

void Agent::send_bytes(const void* message, std::size_t size, const std::vector<Fd>& fds) {
  std::lock_guard lock(send_mutex_);
  if (!connected_) return;  // the next hello says how things are
  try {
    socket_.send(message, size, fds);
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
    if (device_) {
      device_->make_current();
      auto backing = std::make_unique<Backing>(*device_, page_size_, [this] { wake(); });
      auto pager = std::make_unique<Pager>(*device_, *backing, mutex_, options_.poison);
      std::lock_guard lock(mutex_);
      backing_ = std::move(backing);
      pager_ = std::move(pager);
    }
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
      take_notes();
      if (device_)
        step();
      else
        settle();
    } catch (const std::system_error&) {
      reconnect();
    } catch (...) {
      fail_waiters(std::current_exception());
    }
  }
  if (device_) give_all_back();
  for (auto& r : shared_) r->segment->resign();
  drop_socket();
  std::lock_guard lock(mutex_);
  pager_.reset();
  fingerprinter_.reset();
  spill_.reset();
  backing_.reset();
  retry_releases();
  commands_.clear();
  finished_ = true;
  notify();
}

bool Agent::busy() {
  if (!device_) return false;
  if (!pager_->out_empty() || !pager_->in_empty() || !pager_->save_empty()) return true;
  if (quota_ > 0) return !stalled_;
  if (!demand() && (save_due_ || !saves_.empty())) return true;
  if (fill_.empty() || retry_at_ > 0) return false;
  std::lock_guard lock(mutex_);
  return held_ > used_;
}

void Agent::wait_for_work() {
  int timeout = -1;
  if (busy()) {
    timeout = 0;
  } else if (retry_at_ > 0) {
    timeout = std::max(1, static_cast<int>((retry_at_ - now_seconds()) * 1000));
  }
  // What other processes are about to do to shared pages is seen by looking.
  const bool soon = !awaited_.empty() || !leaving_.empty() || !notes_.empty();
  if (shares_ && timeout != 0) timeout = soon ? 1 : timeout < 0 ? 250 : std::min(timeout, 250);
  {
    std::lock_guard lock(mutex_);
    if (linger_until_ > 0) {
      const int lingers = std::max(0, static_cast<int>((linger_until_ - now_seconds()) * 1000) + 1);
      timeout = timeout < 0 ? lingers : std::min(timeout, lingers);
    }
  }
  poll_once(timeout);
  std::lock_guard lock(mutex_);
  if (linger_until_ > 0 && now_seconds() >= linger_until_) release_locked();
}

void Agent::poll_once(int timeout_ms) {
  // A negative descriptor is passed over: without a broker only commands wake us.
  pollfd p[3] = {{socket_.fd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}, {post_ ? post_->fd() : -1, POLLIN, 0}};
  poll(p, 3, timeout_ms);
  if (p[1].revents) {
    std::uint64_t n = 0;
    [[maybe_unused]] auto r = ::read(wake_.get(), &n, sizeof n);
  }
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
      if (auto* m = as<wire::Grant>(bytes)) on_grant(*m);
      return;
    case wire::kRegions:
      if (auto* m = as<wire::Regions>(bytes)) told_regions_ = wire::get_text(m->regions, sizeof m->regions);
      return;
    case wire::kPrepare:
      if (auto* m = as<wire::Prepare>(bytes)) on_prepare(wire::get_text(m->phase, sizeof m->phase));
      return;
    case wire::kActive:
      if (auto* m = as<wire::Active>(bytes)) on_active(m->generation);
      return;
    case wire::kDrain:
      if (auto* m = as<wire::Drain>(bytes)) on_drain(m->generation);
      return;
    case wire::kEnded:
      if (auto* m = as<wire::Ended>(bytes)) {
        std::lock_guard lock(mutex_);
        ended_ = std::max(ended_, m->generation);
        notify();
      }
      return;
    case wire::kFenced:
      if (auto* m = as<wire::Fenced>(bytes)) on_fenced(*m);
      return;
    case wire::kPing:
      send(wire::make<wire::Pong>(wire::kPong));
      return;
    case wire::kRecall:
      if (auto* m = as<wire::Recall>(bytes)) {
        std::lock_guard lock(mutex_);
        if (m->generation != generation_ || phase_ == Phase::idle || phase_ == Phase::leaving) return;
        extend_until_ = now_seconds() + static_cast<double>(m->extend_us) * 1e-6;
        if (phase_ == Phase::parked) {
          if (recalled_) return;  // it lingers already, or a snapshot is on its way out
          if (m->extend_us > 0 && back_at_ == 0 && follows_at_once_locked()) {
            recalled_ = recalled_flag_ = true;
            linger_locked();
          } else {
            release_locked();
          }
        } else {
          recalled_ = true;
          recalled_flag_ = true;
          if (m->press) pressed_flag_ = true;
          if (phase_ == Phase::active && !remote_) tell_kept_locked(opener_);
        }
      }
      return;
    case wire::kTake:
      if (auto* m = as<wire::Take>(bytes)) {
        if (!device_) return;
        std::lock_guard lock(mutex_);
        const std::uint64_t more = std::min<std::uint64_t>(m->count, held_ - std::min(held_, quota_));
        quota_ += more;
        missing_ += m->count - static_cast<std::uint32_t>(more);  // more than there is
        victims_known_ = false;
      }
      return;
    case wire::kGive:
      if (auto* m = as<wire::Give>(bytes)) {
        std::lock_guard lock(mutex_);
        if (!device_ || m->count > device_->total() / page_size_ - std::min(device_->total() / page_size_, held_))
          return;
        for (auto& fd : fds) spare_fds_.push_back(std::move(fd));
        held_ += m->count;
      }
      return;
    case wire::kDeny:
      if (auto* m = as<wire::Deny>(bytes)) {
        {
          std::lock_guard lock(mutex_);
          for (auto& [opener, wait] : local_waits_)
            if (wait.seq == m->seq) wait.error = error_ptr(type_for(m->code), wire::get_text(m->text, sizeof m->text));
          if (m->seq != seq_ && m->seq != acquire_seq_) return;
          if (m->seq != seq_ && phase_ != Phase::waiting) return;
        }
        Error e(type_for(m->code), wire::get_text(m->text, sizeof m->text));
        e.need = m->need * page_size_;
        e.limit = m->budget * page_size_;
        fail_waiters(std::make_exception_ptr(e));
      }
      return;
    case wire::kHostGrant:
      if (auto* m = as<wire::HostGrant>(bytes)) {
        host_asked_ = false;
        host_exhausted_ = m->exhausted != 0;
        backing_->allow(static_cast<std::size_t>(m->granted) - std::min<std::size_t>(m->granted, shared_host_));
      }
      return;
    case wire::kReport:
      send_figures();
      return;
    case wire::kTrim:
      give_host_back();
      return;
    case wire::kNotice:
      if (auto* m = as<wire::Notice>(bytes))
        std::fprintf(stderr, "pymux: %s\n", wire::get_text(m->text, sizeof m->text).c_str());
      return;
    case wire::kError:
      if (auto* m = as<wire::ErrorText>(bytes)) {
        std::lock_guard lock(mutex_);
        broken_ = error_ptr(type_for(m->code), wire::get_text(m->text, sizeof m->text));
        notify();
      }
      return;
    default:
      return;
  }
}

// The broker is gone. Nothing of ours is: pages and leases stay, and a new broker is told.
void Agent::reconnect() {
  while (device_ && !pager_->out_empty()) {
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
    host_asked_ = host_exhausted_ = false;
    host_told_ = 0;
    held_ = used_ + spare_.size() + spare_fds_.size();
    if (phase_ == Phase::parked) phase_ = Phase::idle;
    if (phase_ == Phase::waiting) {
      granted_ = attached_ = acknowledged_ = false;
      if (std::exchange(remote_, false)) phase_ = Phase::idle;  // who opened it asks again
    }
    recalled_ = extended_ = self_granted_ = false;
    linger_until_ = 0;
    for (auto& [opener, wait] : local_waits_) wait.behind = 0;  // the next broker is told anew
    recalled_flag_ = pressed_flag_ = fenced_;
  }
  if (refused || stop_) return;
  try {
    connect_broker(wire::kReconnect);
  } catch (const Error&) {
    std::lock_guard lock(mutex_);
    drop_socket();
    broken_ = std::current_exception();
    notify();
    return;
  }
  bool waiting = false;
  {
    std::lock_guard lock(mutex_);
    reconnects_ += 1;
    waiting = phase_ == Phase::waiting && asked_;
    if (phase_ == Phase::leaving) {  // the old broker may have heard of it, or not
      release_locked();
      phase_ = Phase::leaving;
    }
  }
  if (waiting) {
    begin_acquire();
  } else if (!fill_.empty()) {
    send_want();
  }
}

// A caller stopped waiting: takes the request back, or the lease if it was granted meanwhile.
void Agent::give_up(std::uint64_t seq) {
  save_due_ = true;
  std::lock_guard lock(mutex_);
  if ((phase_ != Phase::idle && !remote_) || seq != acquire_seq_) return;  // the next request is under way
  if (!remote_) fill_.clear();
  if (granted_ && !remote_) {
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
  clear_fill();
  const bool ask = !granted_;
  if (!options_.snapshot || granted_)
    for (auto* list : {&uses_, &lazy_})
      for (auto& r : *list) queue_missing(r, 0, r->used_pages());
  show_wishes_locked();  // before the broker asks for pages that this phase maps
  if (ask) {
    auto m = wire::make<wire::Acquire>(wire::kAcquire);
    m.seq = acquire_seq_;
    m.want = want_locked();
    m.own = own_locked();
    m.expected_us = static_cast<std::uint64_t>(std::max(0.0, expected_) * 1e6);
    m.ran_us = static_cast<std::uint64_t>(ran_ * 1e6);
    m.priority = priority_;
    m.flags = overlap_ ? wire::kOverlap : 0;
    m.ranks = ranks_;
    m.opener = opener_;
    wire::put_text(m.phase, sizeof m.phase, phase_name_);
    m.counts = counts_locked();
    if (!alone()) {
      auto names = wire::make<wire::Names>(wire::kNames);
      wire::put_text(names.regions, sizeof names.regions, names_);
      send(names);
    }
    send(m);
    return;
  }
  lock.unlock();
  send_want();
  settle();
}

void Agent::send_want() {
  std::lock_guard lock(mutex_);
  if (fill_.size() + debts_.size() <= held_ - used_) return;
  auto m = wire::make<wire::Want>(wire::kWant);
  m.seq = ++seq_;
  m.want = want_locked();
  m.own = own_locked();
  m.counts = counts_locked();
  send(m);
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

// Tells the broker that the phase runs, and what it could give meanwhile.
void Agent::send_ready() {
  std::lock_guard lock(mutex_);
  const bool parked = phase_ == Phase::parked;  // a short phase is over already
  if (phase_ != Phase::active && !parked && !(phase_ == Phase::waiting && acknowledged_)) return;
  auto m = wire::make<wire::Ready>(wire::kReady);
  m.generation = generation_;
  m.want = fill_.empty() ? 0 : want_locked();
  if (!alone()) m.known = known_locked();
  m.counts = counts_locked();
  send(m);
}

void Agent::send_figures() {
  for (const RegionStats& r : stats().regions) {
    auto m = wire::make<wire::Figures>(wire::kFigures);
    wire::put_text(m.region, sizeof m.region, r.name);
    m.resident = r.resident;
    m.clean = r.clean;
    m.dirty = r.dirty;
    m.evicted = r.evicted;
    m.spilled = r.spilled;
    m.lost = r.counters.lost_pages * page_size_;
    m.copied_out = r.counters.out();
    m.copied_in = r.counters.in();
    m.avoided = r.counters.avoided();
    send(m);
  }
  send(wire::make<wire::Figures>(wire::kFigures));
}

// Wakes those whose pages are all there.
void Agent::settle() {
  spare_physical_ = spare_.size() + spare_fds_.size();
  std::unique_lock lock(mutex_);
  // Pages come in the order of fill_, so a look at its front saves counting at every arrival.
  auto coming = [&](const std::function<bool(const Region&)>& which) {
    return (!fill_.empty() && which(*fill_.front().region)) || (device_ && pager_->arriving(which));
  };
  bool grown = false, active = false, acknowledge = false;
  show_wishes_locked();
  for (auto& e : ensures_) {
    if (e->done || coming([&](const Region& r) { return &r == e->region.get(); })) continue;
    if (resident_locked(*e->region, e->first, e->count)) e->done = grown = true;
  }
  if (phase_ == Phase::waiting && (granted_ || attached_) && !acknowledged_) {
    auto eager = [&](const Region& r) {
      return std::any_of(uses_.begin(), uses_.end(), [&](auto& u) { return u.get() == &r; });
    };
    const bool all = !options_.snapshot || (fill_.empty() && pager_->in_empty());
    if (all && !coming(eager) && resident_locked(uses_)) {
      acknowledge = acknowledged_ = true;
      if (alone() || remote_) {  // else when all members have acknowledged
        activate_locked();
        active = true;
      }
    }
  }
  lock.unlock();
  if (grown || active) notify();
  if (active) save_due_ = true;
  if (acknowledge) send_ready();
  if (device_ && (grown || active)) plan_host();
}

void Agent::fail_waiters(std::exception_ptr error) {
  clear_fill();
  retry_at_ = mint_deadline_ = 0;
  note_fault(error);
  std::lock_guard lock(mutex_);
  for (auto& e : ensures_)
    if (!e->done) e->error = error;
  if (phase_ == Phase::waiting && !alone()) {
    fail_grant_locked(error);
  } else if (phase_ == Phase::waiting) {
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
  notify();
}

// At close: pages go back to the bank without their contents.
void Agent::give_all_back() {
  try {
    if (!retry_releases()) throw Error("CudaError", "the driver does not finish what an earlier failure left.");
    clear_fill();
    saves_.clear();
    while (!pager_->in_empty()) finish_in();
    while (!pager_->out_empty()) finish_out();
    while (!pager_->save_empty()) finish_save();
    quota_ = 0;
    std::vector<PageRef> all;
    {
      std::unique_lock lock(mutex_);
      if (phase_ == Phase::active) {
        lock.unlock();
        device_->synchronize();
        lock.lock();
      }
      if (shares_) {
        uses_.clear();
        lazy_.clear();
        lock.unlock();
        leave_segments();
        lock.lock();
      }
      for (auto& r : regions_)
        for (std::size_t i = 0; i < r->pages.size(); ++i) {
          PageEntry& e = r->pages[i];
          if (e.slot >= 0) backing_->give(std::exchange(e.slot, -1));
          if (e.place >= 0) spill_->give(std::exchange(e.place, -1));
          if (e.state == PageState::resident)
            all.push_back({r.get(), i});
          else
            e.state = PageState::absent;
        }
    }
    for (PageRef ref : all) {
      PageEntry& e = ref.entry();
      if (e.mapping) e.mapping.unmap();
      std::lock_guard lock(mutex_);
      e.state = PageState::absent;
      used_ -= 1;
      if (e.page) spare_.push_back(std::move(e.page));
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
}

}  // namespace pymux
