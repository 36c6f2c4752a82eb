// The agent thread: grants, and what it does for phases that another member of the group opened.
//
// A member that did not open the phase is "remote": no caller here waits for it. It fetches its regions
// when told, acknowledges, and drains its device when the phase is over, all without Python.
#include <algorithm>
#include <sstream>

#include "agent.h"
#include "error.h"

namespace pymux {
namespace {

// The lines of wire::Names: what a region is for, and its name.
std::vector<std::pair<char, std::string>> parse(const std::string& regions) {
  std::vector<std::pair<char, std::string>> out;
  std::istringstream lines(regions);
  for (std::string line; std::getline(lines, line);)
    if (!line.empty()) out.emplace_back(line[0], line.substr(1));
  return out;
}

}  // namespace

// Takes up a phase that another member asked for, with the regions of it that are here.
void Agent::open_remote_locked(const std::string& phase) {
  phase_ = Phase::waiting;
  remote_ = true;
  granted_ = attached_ = acknowledged_ = false;
  phase_name_ = phase;
  names_ = std::exchange(told_regions_, {});
  uses_.clear();
  lazy_.clear();
  writes_.clear();
  const auto named = parse(names_);
  auto says = [&](char kind, const std::string& name) {
    return std::find(named.begin(), named.end(), std::pair(kind, name)) != named.end();
  };
  for (auto& r : regions_) {
    const bool lazy = says('l', r->name), used = says('u', r->name) || (says('U', "") && !lazy);
    if (lazy) lazy_.push_back(r);
    if (used) uses_.push_back(r);
    if (says('w', r->name) || (says('W', "") && (lazy || used) && !r->frozen)) writes_.push_back(r);
  }
  clear_fill();
  for (auto* list : {&uses_, &lazy_})
    for (auto& r : *list) queue_missing(r, 0, r->used_pages());
  show_wishes_locked();
}

// A bit for each distinct name of the request that a region here has, in the order of first mention.
std::uint64_t Agent::known_locked() const {
  std::uint64_t bits = 0, bit = 1;
  std::vector<std::string> seen;
  for (const auto& [kind, name] : parse(names_)) {
    if (kind == 'U' || kind == 'W') continue;
    if (std::find(seen.begin(), seen.end(), name) != seen.end()) continue;
    seen.push_back(name);
    if (std::any_of(regions_.begin(), regions_.end(), [&](auto& r) { return r->name == name; })) bits |= bit;
    bit <<= 1;
  }
  return bits;
}

std::optional<std::vector<std::string>> Agent::remote_uses() {
  check_process();
  std::lock_guard lock(mutex_);
  if (!remote_ || phase_ != Phase::active) return std::nullopt;
  std::vector<std::string> out;
  for (auto& r : uses_) out.push_back(r->name);
  return out;
}

void Agent::on_prepare(const std::string& phase) {
  {
    std::lock_guard lock(mutex_);
    if (phase_ != Phase::idle) return;  // the grant will say it again
    open_remote_locked(phase);
  }
  send_want();
}

void Agent::on_grant(const wire::Grant& m) {
  std::unique_lock lock(mutex_);
  if (std::exchange(self_granted_, false) && m.generation == generation_) {  // the caller has seen it before
    lock.unlock();
    save_due_ = true;
    send_ready();
    plan_host();
    return;
  }
  const std::string phase = wire::get_text(m.phase, sizeof m.phase);
  if (m.seq == 0 && phase_ == Phase::waiting && !remote_ && phase_name_ != phase) {
    acquire_error_ = std::make_exception_ptr(
        Error("LeaseError", "phase '" + phase_name_ + "' was opened while another member of the group opened phase '" +
                                phase +
                                "'. The members of a group open the same phases in the same order, or leave "
                                "that to one of them."));
    auto c = wire::make<wire::Cancel>(wire::kCancel);
    c.seq = acquire_seq_;
    send(c);
    phase_ = Phase::idle;
    notify();
  }
  if (m.seq == 0) {
    if (phase_ == Phase::idle) open_remote_locked(phase);
    if (phase_ != Phase::waiting) return;
    (remote_ ? granted_ : attached_) = true;  // with a request of our own under way, the broker joins the two
  } else if (phase_ != Phase::waiting || remote_ || m.seq != acquire_seq_) {  // cancelled meanwhile
    // By its number: under the same generation a newer request of ours may have been granted.
    auto c = wire::make<wire::Cancel>(wire::kCancel);
    c.seq = m.seq;
    send(c);
    return;
  } else {
    granted_ = true;
    attached_ = false;
    grants_ += 1;
  }
  acknowledged_ = false;
  generation_ = m.generation;
  lock.unlock();
  if (options_.snapshot)
    for (auto& r : regions_) queue_missing(r, 0, r->used_pages());
  if (shares_) {  // what was there may have gone while nobody was to keep it
    std::lock_guard guard(mutex_);
    for (auto* list : {&uses_, &lazy_})
      for (auto& r : *list)
        if (r->segment) queue_missing(r, 0, r->used_pages());
  }
  if (options_.snapshot || shares_ || !alone()) send_want();
  settle();
}

// All members are ready: the caller's body may run.
void Agent::on_active(std::uint64_t generation) {
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::waiting || remote_ || !granted_ || generation != generation_ || !acknowledged_) return;
  activate_locked();
  notify();
  lock.unlock();
  save_due_ = true;
  send_ready();
  if (device_) plan_host();
}

void Agent::drain_device() {
  if (!device_) return;
  try {
    device_->synchronize();
  } catch (const CudaError&) {
    note_fault(std::current_exception());
  }
}

void Agent::on_drain(std::uint64_t generation) {
  bool ran = false;
  {
    std::lock_guard lock(mutex_);
    if (phase_ == Phase::waiting && remote_ && !granted_) {  // only prepared; the next grant says it again
      phase_ = Phase::idle;
      remote_ = false;
      clear_fill();
    }
    if (generation == 0) return;
    // Of a lease that this client has given up already, nothing is left to drain.
    ran = generation == generation_ && ((phase_ == Phase::active && remote_) || attached_);
  }
  if (ran) {
    drain_device();
    take_fingerprints(nullptr);
  }
  std::lock_guard lock(mutex_);
  const bool ours = generation == generation_;
  if (ours && remote_) {
    phase_ = Phase::idle;
    remote_ = granted_ = active_flag_ = false;
    clear_fill();
  } else if (ours && phase_ == Phase::waiting) {  // our own request goes on waiting
    granted_ = attached_ = acknowledged_ = false;
  }
  auto r = wire::make<wire::Release>(wire::kRelease);
  r.generation = generation;
  r.counts = counts_locked();
  send(r);
  save_due_ = true;
}

// In a group: our part of the grant cannot be had. The broker undoes it, and tries again or says why not.
void Agent::fail_grant_locked(std::exception_ptr error) {
  std::string text = "a swap failed";
  bool for_good = false;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    text = e.what();
    for_good = e.type == std::string("CapacityError");
  } catch (const std::exception& e) {
    text = e.what();
  }
  if (granted_ || attached_) {
    auto m = wire::make<wire::Failed>(wire::kFailed);
    m.generation = generation_;
    m.for_good = for_good;
    wire::put_text(m.text, sizeof m.text, text);
    send(m);
  }
  const bool waits = granted_ && !remote_;  // for the next try
  granted_ = attached_ = acknowledged_ = false;
  if (waits) return;
  if (!remote_) acquire_error_ = error;
  remote_ = false;
  phase_ = Phase::idle;
}

Error Agent::fenced_error(const Region& region) {
  return Error("LeaseFenced", "this process was stopped for so long that others got the device: region '" +
                                  region.name + "' cannot come in. Leave the phase and enter it again.");
}

// This process was stopped for so long that its lease went to others. What it computed and holds stays.
void Agent::on_fenced(const wire::Fenced& m) {
  bool again = false, ran = false;
  {
    std::lock_guard lock(mutex_);
    if (m.generation != generation_) return;
    fences_ += 1;
    ran = phase_ == Phase::active && remote_;
    if (phase_ == Phase::active && !remote_) {
      fenced_ = true;
      recalled_ = recalled_flag_ = pressed_flag_ = true;
      for (auto& e : ensures_)
        if (!e->done) e->error = std::make_exception_ptr(fenced_error(*e->region));
      clear_fill();
    } else if (phase_ == Phase::waiting && !remote_ && (granted_ || attached_)) {
      again = granted_ && !m.requeued;  // one that came after the fence waits already
      granted_ = attached_ = acknowledged_ = false;
    } else if (phase_ == Phase::parked || remote_) {
      phase_ = Phase::idle;
      remote_ = granted_ = active_flag_ = recalled_ = recalled_flag_ = pressed_flag_ = false;
      clear_fill();
    }
    ended_ = std::max(ended_, m.generation);
    notify();
  }
  if (ran) drain_device();
  if (again) begin_acquire();
}

}  // namespace pymux
