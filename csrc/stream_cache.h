// Blocks of one region that are used again in stream order: what was freed on a stream serves later
// allocations on that stream at once, and everybody's after the device was waited for. Blocks of a size that
// is asked for again come from a bin; the rest is free in the region's arena, tagged with its stream.
// What it is not: it owns no addresses (the arena does) and brings no pages in (the agent does).
//
// Invariants: a block that is live, in a bin, pending or kept is allocated in the arena. What a capture's
// pool has had stays with the pool until that is released: its graph uses it, and its pages are live.
// While anything is captured no event is recorded or asked for, since that would end the capture.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "agent.h"

namespace pymux {

class StreamCache {
 public:
  using PoolId = std::pair<unsigned long long, unsigned long long>;  // torch's; {0, 0}: no pool
  using Filter = std::function<bool(CUstream)>;
  static constexpr std::size_t kRound = 512;  // bytes; sizes that differ by less share a bin

  struct Stats {  // bytes
    std::uint64_t allocated = 0, peak_allocated = 0, cached = 0, pending = 0;
    std::uint64_t allocations = 0, hits = 0;  // counts
  };

  StreamCache(std::weak_ptr<Agent> agent, std::shared_ptr<Region> region);

  // A resident block, in the stream's order. Outside a phase it takes a lease, which the next phase ends. Throws
  // DeviceOutOfMemory after giving up what is cached, ...
  CUdeviceptr allocate(std::size_t bytes, CUstream stream);
  // From any thread, in a phase or not. False when no live block of the cache's starts there.
  bool free(CUdeviceptr ptr);
  // Work of another stream uses the block: once freed, it is not used again before that is done.
  void record_stream(CUdeviceptr ptr, CUstream stream);
  // Allocations on streams that the filter accepts belong to the pool, until end_pool().
  void begin_pool(PoolId id, Filter filter);
  void end_pool(PoolId id);
  void release_pool(PoolId id);  // no graph uses it any more
  // Waits for the device and gives all that is free to the arena; not while something is captured.
  void empty();
  Stats stats() const;
  void reset_peak();

 private:
  struct Bins {
    CUstream stream = nullptr;
    PoolId pool;
    std::uint32_t tag = 0;  // of the stream's free blocks in the arena; none are of a pool
    std::unordered_map<std::size_t, std::vector<CUdeviceptr>> by_size;
  };
  struct Live {
    std::size_t size = 0, asked = 0;
    Bins* home = nullptr;
    std::vector<CUstream> others;  // streams that use it beside its own
  };
  struct Kept {  // may be in use by any stream
    PoolId pool;
    CUdeviceptr ptr = 0;
    std::size_t size = 0;
  };
  struct Pending {
    std::vector<Event> events;
    CUdeviceptr ptr = 0;
    std::size_t size = 0;
  };

  Bins& bins_locked(PoolId pool, CUstream stream);
  void drain_locked(Bins& bins);
  bool defer_locked(const std::vector<CUstream>& streams, CUdeviceptr ptr, std::size_t size);
  void poll_locked();
  void give(CUdeviceptr ptr, std::uint32_t tag) { region_->free(ptr - region_->addresses.base(), tag); }

  const std::weak_ptr<Agent> agent_;
  const std::shared_ptr<Region> region_;
  std::atomic<std::uint64_t> ready_for_{0};  // the agent's stamp when the region was last made resident
  mutable std::mutex mutex_;                 // guards what follows
  std::vector<std::unique_ptr<Bins>> bins_;
  Bins* latest_ = nullptr;  // the bins of the latest allocation
  std::unordered_map<CUdeviceptr, Live> live_;
  std::deque<Pending> pending_;
  std::vector<Kept> kept_;
  std::vector<std::pair<PoolId, Filter>> capturing_;
  std::uint32_t tags_ = 0;            // handed out
  std::vector<std::uint32_t> freed_;  // tags of what waits for the device
  Stats stats_;
};

}  // namespace pymux
