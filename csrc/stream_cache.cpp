#include "stream_cache.h"

#include <algorithm>

#include "error.h"

namespace pymux {
namespace {
constexpr StreamCache::PoolId kNoPool{0, 0};
// What bins may hold when something is not in them: pages, or a part of the most that was ever allocated.
constexpr std::size_t kKeepPages = 6, kKeepPart = 32;
}  // namespace

StreamCache::StreamCache(std::weak_ptr<Agent> agent, std::shared_ptr<Region> region)
    : agent_(std::move(agent)), region_(std::move(region)) {}

StreamCache::Bins& StreamCache::bins_locked(PoolId pool, CUstream stream) {
  auto is = [&](const Bins& b) { return b.stream == stream && b.pool == pool; };
  if (latest_ && is(*latest_)) return *latest_;
  auto it = std::find_if(bins_.begin(), bins_.end(), [&](auto& b) { return is(*b); });
  if (it == bins_.end()) it = bins_.insert(it, std::make_unique<Bins>(Bins{stream, pool, ++tags_, {}}));
  latest_ = it->get();
  return *latest_;
}

CUdeviceptr StreamCache::allocate(std::size_t bytes, CUstream stream) {
  const auto agent = agent_.lock();
  if (!agent) throw Error("LeaseError", "the Mux of region '" + region_->name + "' is closed.");
  if (!agent->stamp()) agent->enter_implicitly();
  if (const std::uint64_t stamp = agent->stamp(); stamp == 0 || stamp != ready_for_) {
    agent->require(region_);
    agent->touch(region_);
    ready_for_ = stamp;
  }
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kRound - 1) / kRound * kRound;
  CUdeviceptr ptr = 0;
  Bins* home = nullptr;
  auto hand_out = [&] {
    live_[ptr] = {size, bytes, home, {}};
    stats_.allocated += bytes;
    stats_.peak_allocated = std::max(stats_.peak_allocated, stats_.allocated);
    stats_.allocations += 1;
    return ptr;
  };
  {
    std::lock_guard lock(mutex_);
    PoolId pool = kNoPool;
    for (auto& [id, filter] : capturing_)
      if (filter(stream)) pool = id;
    home = &bins_locked(pool, stream);
    if (!pending_.empty()) poll_locked();
    if (auto it = home->by_size.find(size); it != home->by_size.end() && !it->second.empty()) {
      ptr = it->second.back();
      it->second.pop_back();
      stats_.cached -= size;
      stats_.hits += 1;
      return hand_out();
    }
    const std::size_t most = std::max(kKeepPages * region_->page_size, stats_.peak_allocated / kKeepPart);
    if (pool == kNoPool && stats_.cached > most) drain_locked(*home);
  }
  try {
    ptr = agent->allocate(region_, size, home->tag);
  } catch (const Error& e) {
    if (!e.no_memory()) throw;
    empty();
    ptr = agent->allocate(region_, size, home->tag);
  }
  std::lock_guard lock(mutex_);
  return hand_out();
}

bool StreamCache::free(CUdeviceptr ptr) {
  std::lock_guard lock(mutex_);
  auto it = live_.find(ptr);
  if (it == live_.end()) return false;
  const Live block = std::move(it->second);
  live_.erase(it);
  stats_.allocated -= block.asked;
  if (block.others.empty()) {
    block.home->by_size[block.size].push_back(ptr);
    stats_.cached += block.size;
    return true;
  }
  std::vector<CUstream> streams = block.others;
  streams.push_back(block.home->stream);
  if (block.home->pool == kNoPool && capturing_.empty() && defer_locked(streams, ptr, block.size)) return true;
  kept_.push_back({block.home->pool, ptr, block.size});
  stats_.cached += block.size;
  return true;
}

// What no allocation of its size wanted: the arena joins it with its neighbours, for the same stream.
void StreamCache::drain_locked(Bins& bins) {
  for (auto& [size, list] : bins.by_size)
    for (CUdeviceptr p : list) {
      give(p, bins.tag);
      stats_.cached -= size;
    }
  bins.by_size.clear();
}

// Nobody uses the block before these streams have come to here; false when there is no event to be had.
bool StreamCache::defer_locked(const std::vector<CUstream>& streams, CUdeviceptr ptr, std::size_t size) {
  Pending p{{}, ptr, size};
  try {
    for (CUstream s : streams) {
      p.events.push_back(Event::create());
      p.events.back().record(s);
    }
  } catch (const CudaError&) {  // the stream is gone, or this thread has no context
    return false;
  }
  stats_.pending += size;
  pending_.push_back(std::move(p));
  return true;
}

void StreamCache::poll_locked() {
  while (!pending_.empty() && capturing_.empty()) {
    Pending& p = pending_.front();
    if (!std::all_of(p.events.begin(), p.events.end(), [](const Event& e) { return e.done(); })) return;
    stats_.pending -= p.size;
    give(p.ptr, 0);
    pending_.pop_front();
  }
}

void StreamCache::record_stream(CUdeviceptr ptr, CUstream stream) {
  std::lock_guard lock(mutex_);
  auto it = live_.find(ptr);
  if (it == live_.end() || it->second.home->stream == stream) return;
  auto& others = it->second.others;
  if (std::find(others.begin(), others.end(), stream) == others.end()) others.push_back(stream);
}

void StreamCache::begin_pool(PoolId id, Filter filter) {
  std::lock_guard lock(mutex_);
  capturing_.push_back({id, std::move(filter)});
}

void StreamCache::end_pool(PoolId id) {
  std::lock_guard lock(mutex_);
  std::erase_if(capturing_, [&](auto& c) { return c.first == id; });
}

void StreamCache::release_pool(PoolId id) {
  std::lock_guard lock(mutex_);
  std::erase_if(capturing_, [&](auto& c) { return c.first == id; });
  latest_ = nullptr;
  for (auto& bins : bins_) {
    if (bins->pool != id) continue;
    for (auto& [size, list] : bins->by_size)  // the graph may have run on any stream
      for (CUdeviceptr p : list) kept_.push_back({kNoPool, p, size});
    bins->by_size.clear();
    bins->pool = kNoPool;  // for blocks that outlive it
  }
  for (auto& k : kept_)
    if (k.pool == id) k.pool = kNoPool;
}

void StreamCache::empty() {
  const auto agent = agent_.lock();
  std::vector<Kept> kept;
  std::vector<std::uint32_t> freed;
  {
    std::lock_guard lock(mutex_);
    if (!capturing_.empty() || !agent) return;
    freed_.push_back(++tags_);  // what is freed from here on is not under it
    freed = freed_;
    for (auto& bins : bins_) {
      if (bins->pool != kNoPool) continue;
      drain_locked(*bins);
      region_->retag(bins->tag, freed.back());
    }
    const auto released = std::partition(kept_.begin(), kept_.end(), [](const Kept& k) { return k.pool != kNoPool; });
    kept.assign(released, kept_.end());
    kept_.erase(released, kept_.end());
  }
  try {
    agent->device().synchronize();
  } catch (...) {
    std::lock_guard lock(mutex_);
    kept_.insert(kept_.end(), kept.begin(), kept.end());
    throw;
  }
  std::lock_guard lock(mutex_);
  for (const Kept& k : kept) give(k.ptr, 0), stats_.cached -= k.size;
  for (const std::uint32_t tag : freed) {
    region_->retag(tag, 0);
    std::erase(freed_, tag);
  }
  poll_locked();
}

void StreamCache::reset_peak() {
  std::lock_guard lock(mutex_);
  stats_.peak_allocated = stats_.allocated;
}

StreamCache::Stats StreamCache::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace pymux
