#include "backing.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "error.h"

namespace pymux {
namespace {

constexpr std::size_t kSlotsPerChunk = 16;
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

[[noreturn]] void no_room(std::size_t need, std::size_t have) {
  Error e("HostOutOfMemory", "the host has " + std::to_string(have >> 20) + " MiB available, and " +
                                 std::to_string(need >> 20) +
                                 " MiB more of pinned memory are needed to swap out. The pages stay on the device. "
                                 "Free host memory, or run fewer jobs on this device.");
  e.need = need;
  e.limit = have;
  throw e;
}

}  // namespace

Backing::~Backing() {
  for (auto& c : chunks_) {
    if (!c.base) continue;
    Driver::loaded()->cuMemHostUnregister(c.base);
    munmap(c.base, kSlotsPerChunk * page_size_);
  }
}

void Backing::grow() {
  const std::size_t bytes = kSlotsPerChunk * page_size_;
  const std::size_t have = available_host_bytes();
  if (have < bytes + kHostReserve) no_room(bytes, have);
  int raw = memfd_create("pymux-backing", MFD_CLOEXEC);
  if (raw < 0) no_room(bytes, have);
  Fd fd(raw);
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) no_room(bytes, have);
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (p == MAP_FAILED) no_room(bytes, have);
  madvise(p, bytes, MADV_HUGEPAGE);  // a wish; pinning is faster when it is granted
  madvise(p, bytes, MADV_DONTFORK);
  // Faulting in before registering is about twice as fast as letting the driver do it.
  if (madvise(p, bytes, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
    munmap(p, bytes);
    no_room(bytes, have);
  }
  CUresult r = Driver::loaded()->cuMemHostRegister(p, bytes, 0);
  if (r != CUDA_SUCCESS) {
    munmap(p, bytes);
    if (r == CUDA_ERROR_OUT_OF_MEMORY) no_room(bytes, have);
    check(r, "cuMemHostRegister", std::to_string(bytes) + " bytes");
  }
  std::size_t index = chunks_.size();
  for (std::size_t i = 0; i < chunks_.size(); ++i)
    if (!chunks_[i].base) index = i;
  if (index == chunks_.size()) chunks_.emplace_back();
  chunks_[index] = {static_cast<char*>(p), 0};
  for (std::size_t i = kSlotsPerChunk; i-- > 0;) free_.push_back(static_cast<std::int64_t>(index * kSlotsPerChunk + i));
  pinned_ += bytes;
}

std::int64_t Backing::take() {
  if (free_.empty()) grow();
  std::int64_t slot = free_.back();
  free_.pop_back();
  chunks_[static_cast<std::size_t>(slot) / kSlotsPerChunk].used += 1;
  used_ += 1;
  return slot;
}

void Backing::give(std::int64_t slot) {
  free_.push_back(slot);
  chunks_[static_cast<std::size_t>(slot) / kSlotsPerChunk].used -= 1;
  used_ -= 1;
}

char* Backing::address(std::int64_t slot) const {
  const auto s = static_cast<std::size_t>(slot);
  return chunks_[s / kSlotsPerChunk].base + (s % kSlotsPerChunk) * page_size_;
}

std::size_t Backing::trim() {
  std::size_t released = 0;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    Chunk& c = chunks_[i];
    if (!c.base || c.used) continue;
    check(Driver::loaded()->cuMemHostUnregister(c.base), "cuMemHostUnregister");
    munmap(c.base, kSlotsPerChunk * page_size_);
    c.base = nullptr;
    std::erase_if(free_, [&](std::int64_t s) { return static_cast<std::size_t>(s) / kSlotsPerChunk == i; });
    released += kSlotsPerChunk * page_size_;
  }
  pinned_ -= released;
  return released;
}

}  // namespace pymux
