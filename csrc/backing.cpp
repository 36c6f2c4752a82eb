#include "backing.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "error.h"

namespace pymux {
namespace {

// Left to the rest of the machine; beyond it a swap would push others out of memory.
constexpr std::size_t kHostReserve = std::size_t{256} << 20;

std::size_t available_host_bytes() {
  std::FILE* f = std::fopen("/proc/meminfo", "re");
  if (!f) return SIZE_MAX;
  char line[128];
  unsigned long long kib = 0;
  std::size_t out = SIZE_MAX;
  while (std::fgets(line, sizeof line, f))
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) out = kib * 1024;
  std::fclose(f);
  return out;
}

std::size_t total_host_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

[[noreturn]] void no_room(std::size_t need, std::size_t have) {
  Error e("HostOutOfMemory", "the host has " + std::to_string(have >> 20) + " MiB available, and " +
                                 std::to_string(need >> 20) +
                                 " MiB more of pinned memory are needed to swap out. The pages stay on the device. "
                                 "Free host memory, or run fewer jobs on this device.");
  e.need = need;
  e.limit = have;
  throw e;
}

// Memory near the device, as far as there is some; a wish, like hugepages.
void prefer_node(void* p, std::size_t bytes, int node) {
  if (node < 0 || node >= 1024) return;
  unsigned long mask[1024 / (8 * sizeof(unsigned long))] = {};
  mask[static_cast<std::size_t>(node) / (8 * sizeof(unsigned long))] |=
      1ul << (static_cast<std::size_t>(node) % (8 * sizeof(unsigned long)));
  syscall(SYS_mbind, p, bytes, MPOL_PREFERRED, mask, 1024ul, 0u);
}

}  // namespace

Backing::Backing(const Device& device, std::size_t page_size, std::function<void()> grown, Fd shared, std::size_t slots)
    : device_(device),
      page_size_(page_size),
      grown_(std::move(grown)),
      memory_(std::move(shared)),
      shared_(static_cast<bool>(memory_)) {
  most_chunks_ = (total_host_bytes() + chunk_bytes() - 1) / chunk_bytes();
  if (shared_) {
    file_size_ = slots * page_size_;
    most_chunks_ = std::min(most_chunks_, slots / kSlotsPerChunk);
  }
  void* p = mmap(nullptr, most_chunks_ * chunk_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw Error("HostOutOfMemory", "no addresses are left for the backing store.");
  base_ = static_cast<char*>(p);
  madvise(p, most_chunks_ * chunk_bytes(), MADV_DONTFORK);
  thread_ = std::thread([this] { run(); });
}

Backing::~Backing() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (std::size_t i = 0; i < chunks_.size(); ++i)
    if (chunks_[i].there) Driver::loaded()->cuMemHostUnregister(base_ + i * chunk_bytes());
  munmap(base_, most_chunks_ * chunk_bytes());
}

bool Backing::may_grow_locked() const {
  return !stop_ && pinned_ < target_ * chunk_bytes() && pinned_ + chunk_bytes() <= allowed_;
}

void Backing::expect(std::size_t slots) {
  {
    std::lock_guard lock(mutex_);
    target_ = std::min(most_chunks_, std::max(target_, (slots + kSlotsPerChunk - 1) / kSlotsPerChunk));
  }
  changed_.notify_all();
}

void Backing::allow(std::size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    allowed_ = bytes;
  }
  changed_.notify_all();
}

bool Backing::growing() const {
  std::lock_guard lock(mutex_);
  return may_grow_locked();
}

void Backing::wait_grown() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, before = attempts_] { return attempts_ != before || !may_grow_locked(); });
}

void Backing::run() {
  bool current = false;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || may_grow_locked(); });
    if (stop_) return;
    std::size_t index = 0;
    while (index < chunks_.size() && chunks_[index].there) ++index;
    lock.unlock();
    std::exception_ptr failed;
    try {
      if (!current) device_.make_current();
      current = true;
      pin(index);
    } catch (...) {
      failed = std::current_exception();
    }
    lock.lock();
    attempts_ += 1;
    if (failed) {
      failure_ = failed;
      target_ = pinned_ / chunk_bytes();  // until somebody expects more
    } else {
      if (index == chunks_.size()) chunks_.emplace_back();
      chunks_[index] = {true, 0};
      for (std::size_t i = kSlotsPerChunk; i-- > 0;)
        free_.push_back(static_cast<std::int64_t>(index * kSlotsPerChunk + i));
      pinned_ += chunk_bytes();
    }
    lock.unlock();
    changed_.notify_all();
    grown_();
    lock.lock();
  }
}

void Backing::pin(std::size_t chunk) {
  const std::size_t bytes = chunk_bytes(), offset = chunk * bytes;
  const std::size_t have = available_host_bytes();
  if (have < bytes + kHostReserve) no_room(bytes, have);
  if (!memory_) memory_ = Fd(memfd_create("pymux-backing", MFD_CLOEXEC));
  if (!memory_) no_room(bytes, have);
  char* at = base_ + offset;
  auto undo = [&] {
    mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (shared_) return;  // others may have contents there
    fallocate(memory_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
  };
  if (offset + bytes > file_size_) {
    if (ftruncate(memory_.get(), static_cast<off_t>(offset + bytes)) != 0) no_room(bytes, have);
    file_size_ = offset + bytes;
  }
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory_.get(), static_cast<off_t>(offset)) ==
      MAP_FAILED) {
    undo();
    no_room(bytes, have);
  }
  madvise(at, bytes, MADV_HUGEPAGE);  // a wish; pinning is faster when it is granted
  madvise(at, bytes, MADV_DONTFORK);
  prefer_node(at, bytes, device_.host_numa_node());
  // Faulting in before registering is about twice as fast as letting the driver do it.
  if (madvise(at, bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    undo();
    no_room(bytes, have);
  }
  if (CUresult r = Driver::loaded()->cuMemHostRegister(at, bytes, 0); r != CUDA_SUCCESS) {
    undo();
    if (r == CUDA_ERROR_OUT_OF_MEMORY) no_room(bytes, have);
    check(r, "cuMemHostRegister", std::to_string(bytes) + " bytes");
  }
}

bool Backing::there(std::size_t slot) const {
  std::lock_guard lock(mutex_);
  const std::size_t chunk = slot / kSlotsPerChunk;
  return chunk < chunks_.size() && chunks_[chunk].there;
}

std::int64_t Backing::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return -1;
  const std::int64_t slot = free_.back();
  free_.pop_back();
  chunks_[static_cast<std::size_t>(slot) / kSlotsPerChunk].used += 1;
  used_ += 1;
  return slot;
}

void Backing::give(std::int64_t slot) {
  std::lock_guard lock(mutex_);
  free_.push_back(slot);
  chunks_[static_cast<std::size_t>(slot) / kSlotsPerChunk].used -= 1;
  used_ -= 1;
}

std::exception_ptr Backing::take_failure() {
  std::lock_guard lock(mutex_);
  return std::exchange(failure_, nullptr);
}

std::size_t Backing::trim() {
  std::lock_guard lock(mutex_);
  target_ = 0;  // what is not needed now may be asked for again
  std::size_t released = 0;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    if (!chunks_[i].there || chunks_[i].used) continue;
    char* at = base_ + i * chunk_bytes();
    check(Driver::loaded()->cuMemHostUnregister(at), "cuMemHostUnregister");
    chunks_[i].there = false;
    std::erase_if(free_, [&](std::int64_t s) { return static_cast<std::size_t>(s) / kSlotsPerChunk == i; });
    mmap(at, chunk_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    fallocate(memory_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(i * chunk_bytes()),
              static_cast<off_t>(chunk_bytes()));
    released += chunk_bytes();
    pinned_ -= chunk_bytes();
  }
  allowed_ = pinned_.load();
  return released;
}

}  // namespace pymux
