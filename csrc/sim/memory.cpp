// The simulated driver's memory calls: virtual addresses, mappings, handles, pinned host memory.
//
// A device address is an address of this process: reserving takes PROT_NONE space, mapping puts
// the allocation's file there without access, set-access opens it. Touching anything else faults
// as it should. Rules and error codes are those of the CUDA driver API reference.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "sim.h"

namespace sim {
namespace {

struct Mapping {
  std::size_t size = 0;
  std::shared_ptr<Physical> phys;
  bool access = false;
  bool closing = false;  // being unmapped
  int prot = PROT_NONE;
};

struct HostRange {
  std::size_t size = 0;
  bool allocated = false;  // by cuMemHostAlloc, else registered
};

// All of it is guarded by mapping_lock().
struct Tables {
  std::map<CUdeviceptr, std::size_t> reservations;
  std::map<CUdeviceptr, Mapping> mappings;
  std::map<CUdeviceptr, Mapping> plain;  // cuMemAlloc
  std::unordered_map<CUmemGenericAllocationHandle, std::pair<std::shared_ptr<Physical>, int>> handles;
  std::map<std::uintptr_t, HostRange> host;
  CUmemGenericAllocationHandle next_handle = 0x5000;
};
Tables& tables() {
  static auto* t = new Tables();
  return *t;
}

template <class M>
auto containing(M& map, typename M::key_type at) {
  auto it = map.upper_bound(at);
  return it == map.begin() ? map.end() : std::prev(it);
}

template <class M>
bool overlaps(M& map, typename M::key_type at, std::size_t size) {
  auto it = map.lower_bound(at + size);
  return it != map.begin() && std::prev(it)->first + std::prev(it)->second.size > at;
}

bool granular(std::uint64_t v) { return v % kGranularity == 0; }

void* addr(CUdeviceptr p) { return reinterpret_cast<void*>(p); }

// Returns the range to reserved space. Failing here would leave the address in an unknown state.
bool close_range(CUdeviceptr ptr, std::size_t size) {
  return mmap(addr(ptr), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

CUresult check_prop(const CUmemAllocationProp* prop) {
  if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  if (prop->location.id < 0 || prop->location.id >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  const auto types = static_cast<unsigned>(prop->requestedHandleTypes);
  if (types & ~static_cast<unsigned>(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

}  // namespace

std::shared_mutex& mapping_lock() {
  static auto* m = new std::shared_mutex();
  return *m;
}

bool device_range_accessible(CUdeviceptr ptr, std::size_t size) {
  auto& t = tables();
  CUdeviceptr at = ptr;
  const CUdeviceptr end = ptr + size;
  while (at < end) {
    auto it = containing(t.mappings, at);
    if (it == t.mappings.end() || at >= it->first + it->second.size) {
      it = containing(t.plain, at);
      if (it == t.plain.end() || at >= it->first + it->second.size) return false;
    }
    if (!it->second.access) return false;
    at = it->first + it->second.size;
  }
  return true;
}

bool host_range_pinned(const void* ptr, std::size_t size) {
  std::shared_lock lock(mapping_lock());
  auto& host = tables().host;
  auto at = reinterpret_cast<std::uintptr_t>(ptr);
  const std::uintptr_t end = at + size;
  while (at < end) {  // adjacent registrations serve one copy
    auto it = containing(host, at);
    if (it == host.end() || at >= it->first + it->second.size) return false;
    at = it->first + it->second.size;
  }
  return true;
}

namespace {

struct Parked {
  std::shared_ptr<Physical> phys;
  std::vector<char> contents;
};
std::vector<Parked>& parked() {
  static auto* p = new std::vector<Parked>();
  return *p;
}

std::vector<std::shared_ptr<Physical>> all_physical(Tables& t) {
  std::vector<std::shared_ptr<Physical>> out;
  auto add = [&](const std::shared_ptr<Physical>& p) {
    if (std::find(out.begin(), out.end(), p) == out.end()) out.push_back(p);
  };
  for (auto& [id, entry] : t.handles) add(entry.first);
  for (auto* map : {&t.mappings, &t.plain})
    for (auto& [at, m] : *map) add(m.phys);
  return out;
}

// Reads or writes all of an allocation's file.
template <class F>
bool whole_file(F call, int fd, char* at, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t n = call(fd, at + done, size - done, static_cast<off_t>(done));
    if (n <= 0) return false;
    done += static_cast<std::size_t>(n);
  }
  return true;
}

}  // namespace

CUresult park_memory() {
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  std::vector<Parked> out;
  for (auto& p : all_physical(t)) {
    if (p->shared) return CUDA_ERROR_NOT_SUPPORTED;  // memory of several processes cannot be checkpointed
    Parked entry{p, std::vector<char>(p->size)};
    if (!whole_file(pread, p->fd, entry.contents.data(), p->size)) return CUDA_ERROR_OPERATING_SYSTEM;
    out.push_back(std::move(entry));
  }
  for (auto* map : {&t.mappings, &t.plain})
    for (auto& [at, m] : *map) close_range(at, m.size);
  for (auto& entry : out) {
    Physical gone;  // drops the file with its lock
    gone.dev = entry.phys->dev;
    gone.path = entry.phys->path;
    gone.fd = std::exchange(entry.phys->fd, -1);
  }
  parked() = std::move(out);
  return CUDA_SUCCESS;
}

CUresult unpark_memory() {
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  std::vector<std::shared_ptr<Physical>> fresh;
  for (auto& entry : parked()) {
    std::shared_ptr<Physical> p;
    if (CUresult r = create_physical(*entry.phys->dev, entry.phys->size, entry.phys->exportable, &p)) return r;
    if (!whole_file(pwrite, p->fd, entry.contents.data(), p->size)) return CUDA_ERROR_OPERATING_SYSTEM;
    fresh.push_back(std::move(p));
  }
  for (std::size_t i = 0; i < fresh.size(); ++i) {
    std::swap(parked()[i].phys->fd, fresh[i]->fd);
    std::swap(parked()[i].phys->path, fresh[i]->path);
  }
  parked().clear();
  for (auto* map : {&t.mappings, &t.plain})
    for (auto& [at, m] : *map) {
      mmap(addr(at), m.size, m.prot, MAP_SHARED | MAP_FIXED, m.phys->fd, 0);
      madvise(addr(at), m.size, MADV_DONTFORK);
    }
  return CUDA_SUCCESS;
}

void memory_counts(Counts* out) {
  std::shared_lock lock(mapping_lock());
  auto& t = tables();
  out->handles = t.handles.size();
  out->mappings = t.mappings.size();
  out->reservations = t.reservations.size();
  out->allocations = t.plain.size();
  out->registrations = t.host.size();
}

}  // namespace sim

using namespace sim;

SIM_API CUresult CUDAAPI cuMemGetInfo(size_t* free, size_t* total) {
  SIM_ENTER("cuMemGetInfo", kContext);
  if (!free || !total) return CUDA_ERROR_INVALID_VALUE;
  Device& dev = *current_device();
  const std::uint64_t capacity = dev.control->capacity, used = used_bytes(dev);
  *total = capacity;
  *free = capacity > used ? capacity - used : 0;
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp* prop,
                                                       CUmemAllocationGranularity_flags option) {
  SIM_ENTER("cuMemGetAllocationGranularity", kInit);
  if (!out || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
    return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_prop(prop)) return r;
  *out = kGranularity;
  return CUDA_SUCCESS;
}

// ---- addresses -----------------------------------------------------------------------------

SIM_API CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr hint,
                                             unsigned long long flags) {
  SIM_ENTER("cuMemAddressReserve", kInit);
  (void)hint;
  if (!ptr || size == 0 || !granular(size) || flags != 0 || (alignment & (alignment - 1)))
    return CUDA_ERROR_INVALID_VALUE;
  const std::size_t align = std::max(alignment, kGranularity);
  void* raw = mmap(nullptr, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto base = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t start = (base + align - 1) / align * align;
  if (start > base) munmap(raw, start - base);
  if (start + size < base + size + align) munmap(addr(start + size), base + align - start);
  std::lock_guard lock(mapping_lock());
  tables().reservations[start] = size;
  *ptr = start;
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  SIM_ENTER("cuMemAddressFree", kInit);
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  auto it = t.reservations.find(ptr);
  if (it == t.reservations.end() || it->second != size || overlaps(t.mappings, ptr, size))
    return CUDA_ERROR_INVALID_VALUE;
  t.reservations.erase(it);
  munmap(addr(ptr), size);
  return CUDA_SUCCESS;
}

// ---- handles -------------------------------------------------------------------------------

SIM_API CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp* prop,
                                     unsigned long long flags) {
  SIM_ENTER("cuMemCreate", kInit);
  if (!out || size == 0 || !granular(size) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check_prop(prop)) return r;
  std::shared_ptr<Physical> phys;
  const bool exportable = prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (CUresult r = create_physical(device(prop->location.id), size, exportable, &phys)) return r;
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  *out = t.next_handle++;
  t.handles[*out] = {std::move(phys), 1};
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  SIM_ENTER("cuMemRelease", kInit);
  std::shared_ptr<Physical> last;  // dropped outside the lock
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  auto it = t.handles.find(handle);
  if (it == t.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--it->second.second == 0) {
    last = std::move(it->second.first);
    t.handles.erase(it);
  }
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* ptr) {
  SIM_ENTER("cuMemRetainAllocationHandle", kInit);
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  auto it = containing(t.mappings, reinterpret_cast<CUdeviceptr>(ptr));
  if (it == t.mappings.end() || reinterpret_cast<CUdeviceptr>(ptr) >= it->first + it->second.size)
    return CUDA_ERROR_INVALID_VALUE;
  for (auto& [id, entry] : t.handles) {
    if (entry.first != it->second.phys) continue;
    entry.second += 1;
    *out = id;
    return CUDA_SUCCESS;
  }
  *out = t.next_handle++;
  t.handles[*out] = {it->second.phys, 1};
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                                      CUmemAllocationHandleType type, unsigned long long flags) {
  SIM_ENTER("cuMemExportToShareableHandle", kInit);
  if (!out || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  auto it = t.handles.find(handle);
  if (it == t.handles.end() || !it->second.first->exportable) return CUDA_ERROR_INVALID_VALUE;
  int fd = fcntl(it->second.first->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  it->second.first->shared = true;
  *static_cast<int*>(out) = fd;
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* os_handle,
                                                        CUmemAllocationHandleType type) {
  SIM_ENTER("cuMemImportFromShareableHandle", kInit);
  if (!out || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Physical> phys;
  if (CUresult r = adopt_physical(static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle)), &phys)) return r;
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  *out = t.next_handle++;
  t.handles[*out] = {std::move(phys), 1};
  return CUDA_SUCCESS;
}

// ---- mappings ------------------------------------------------------------------------------

SIM_API CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                                  unsigned long long flags) {
  SIM_ENTER("cuMemMap", kInit);
  if (!granular(ptr) || size == 0 || !granular(size) || offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  auto h = t.handles.find(handle);
  if (h == t.handles.end() || size > h->second.first->size) return CUDA_ERROR_INVALID_VALUE;
  auto r = containing(t.reservations, ptr);
  if (r == t.reservations.end() || ptr + size > r->first + r->second) return CUDA_ERROR_INVALID_VALUE;
  if (overlaps(t.mappings, ptr, size)) return CUDA_ERROR_INVALID_VALUE;
  if (mmap(addr(ptr), size, PROT_NONE, MAP_SHARED | MAP_FIXED, h->second.first->fd, 0) == MAP_FAILED)
    return CUDA_ERROR_OPERATING_SYSTEM;
  madvise(addr(ptr), size, MADV_DONTFORK);
  t.mappings[ptr] = {size, h->second.first};
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size) {
  SIM_ENTER("cuMemUnmap", kInit);
  std::shared_ptr<Physical> last;
  auto& t = tables();
  bool access = false;
  {
    std::lock_guard lock(mapping_lock());
    auto it = t.mappings.find(ptr);
    if (it == t.mappings.end() || it->second.size != size || it->second.closing) return CUDA_ERROR_INVALID_VALUE;
    access = std::exchange(it->second.access, false);
    it->second.closing = true;
  }
  // Emptying page tables takes longer than copying a page: other copies go on meanwhile, as on a device.
  const bool closed = close_range(ptr, size);
  std::lock_guard lock(mapping_lock());
  auto it = t.mappings.find(ptr);
  it->second.closing = false;
  it->second.access = access;
  if (!closed) return CUDA_ERROR_OPERATING_SYSTEM;
  last = std::move(it->second.phys);
  t.mappings.erase(it);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
  SIM_ENTER("cuMemSetAccess", kInit);
  if (!granular(ptr) || size == 0 || !granular(size) || !desc || count == 0) return CUDA_ERROR_INVALID_VALUE;
  int prot = PROT_NONE;
  for (std::size_t i = 0; i < count; ++i) {
    if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (desc[i].location.id < 0 || desc[i].location.id >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
    if (desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ) prot |= PROT_READ;
    if (desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) prot |= PROT_READ | PROT_WRITE;
  }
  {
    std::lock_guard lock(mapping_lock());
    auto& t = tables();
    for (CUdeviceptr at = ptr; at < ptr + size;) {
      auto it = t.mappings.find(at);
      if (it == t.mappings.end() || it->second.closing || at + it->second.size > ptr + size)
        return CUDA_ERROR_INVALID_VALUE;
      at += it->second.size;
    }
    if (mprotect(addr(ptr), size, prot) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
    for (CUdeviceptr at = ptr; at < ptr + size;) {
      auto& m = t.mappings[at];
      m.access = prot != PROT_NONE;
      m.prot = prot;
      at += m.size;
    }
  }
  // Page tables are filled here, as a driver does, and not while copies wait for the lock. Populating for
  // reading maps 16 pages a fault, and of shared memory writable ones.
  if (prot != PROT_NONE) madvise(addr(ptr), size, MADV_POPULATE_READ);
  return CUDA_SUCCESS;
}

// ---- plain device memory -------------------------------------------------------------------

SIM_API CUresult CUDAAPI cuMemAlloc(CUdeviceptr* out, size_t size) {
  SIM_ENTER("cuMemAlloc", kContext);
  if (!out || size == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t whole = (size + kGranularity - 1) / kGranularity * kGranularity;
  std::shared_ptr<Physical> phys;
  if (CUresult r = create_physical(*current_device(), whole, false, &phys)) return r;
  void* p = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, phys->fd, 0);
  if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  madvise(p, whole, MADV_DONTFORK);
  std::lock_guard lock(mapping_lock());
  *out = reinterpret_cast<CUdeviceptr>(p);
  tables().plain[*out] = {whole, std::move(phys), true, false, PROT_READ | PROT_WRITE};
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemFree(CUdeviceptr ptr) {
  SIM_ENTER("cuMemFree", kContext);
  if (ptr == 0) return CUDA_SUCCESS;
  synchronize_all();  // documented: waits for the work that uses it
  std::shared_ptr<Physical> last;
  std::lock_guard lock(mapping_lock());
  auto& t = tables();
  auto it = t.plain.find(ptr);
  if (it == t.plain.end()) return CUDA_ERROR_INVALID_VALUE;
  munmap(addr(ptr), it->second.size);
  last = std::move(it->second.phys);
  t.plain.erase(it);
  return CUDA_SUCCESS;
}

// ---- pinned host memory --------------------------------------------------------------------

SIM_API CUresult CUDAAPI cuMemHostAlloc(void** out, size_t size, unsigned flags) {
  SIM_ENTER("cuMemHostAlloc", kContext);
  if (!out || size == 0 || (flags & ~7u)) return CUDA_ERROR_INVALID_VALUE;
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  if (madvise(p, size, MADV_POPULATE_WRITE) != 0) {
    munmap(p, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  std::lock_guard lock(mapping_lock());
  tables().host[reinterpret_cast<std::uintptr_t>(p)] = {size, true};
  *out = p;
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemFreeHost(void* ptr) {
  SIM_ENTER("cuMemFreeHost", kContext);
  std::lock_guard lock(mapping_lock());
  auto& host = tables().host;
  auto it = host.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (it == host.end() || !it->second.allocated) return CUDA_ERROR_INVALID_VALUE;
  munmap(ptr, it->second.size);
  host.erase(it);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemHostRegister(void* ptr, size_t size, unsigned flags) {
  SIM_ENTER("cuMemHostRegister", kContext);
  if (!ptr || size == 0 || (flags & ~15u)) return CUDA_ERROR_INVALID_VALUE;
  const auto at = reinterpret_cast<std::uintptr_t>(ptr);
  {
    std::shared_lock lock(mapping_lock());
    if (overlaps(tables().host, at, size)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = at / page * page, last = (at + size + page - 1) / page * page;
  if (madvise(addr(first), last - first, MADV_POPULATE_WRITE) != 0)
    return errno == ENOMEM || errno == EFAULT ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(mapping_lock());
  if (overlaps(tables().host, at, size)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  tables().host[at] = {size, false};
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuMemHostUnregister(void* ptr) {
  SIM_ENTER("cuMemHostUnregister", kContext);
  std::lock_guard lock(mapping_lock());
  auto& host = tables().host;
  auto it = host.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (it == host.end() || it->second.allocated) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  host.erase(it);
  return CUDA_SUCCESS;
}
