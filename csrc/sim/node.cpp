// The simulated node: devices as directories of shared memory, and physical allocations as
// files in them. What it is not: address mapping (memory.cpp) or work (stream.cpp).
//
// Invariant: an allocation's file exists while any process holds a shared flock on an open
// description of it. A handle, a mapping and an exported fd all keep that description, so the
// kernel itself does the counting, also when a process is killed.
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sim.h"

namespace sim {

std::int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void sleep_until_ns(std::int64_t when) {
  timespec t{.tv_sec = when / 1'000'000'000LL, .tv_nsec = when % 1'000'000'000LL};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
  }
}

namespace {

constexpr std::uint64_t kMagic = 0x324d49534d594d50ULL;
constexpr std::uint64_t kDefaultCapacity = 1ULL << 30;
constexpr std::uint64_t kDefaultRate = 4'000'000'000ULL;

std::mutex node_mutex;  // guards node_devices while opening
std::vector<std::unique_ptr<Device>>* node_devices = nullptr;

std::string env(const char* name, const std::string& fallback) {
  const char* v = std::getenv(name);
  return v && *v ? v : fallback;
}

// What cannot be said by an error code.
void complain(const char* name, const std::string& text, const char* example) {
  std::fprintf(stderr, "pymux's simulated driver: %s=%s is not usable; write it like %s\n", name, text.c_str(),
               example);
}

// A setting such as "512M", "2G", "4e9": a number with an optional binary suffix. False: it is something else.
bool read_size(const char* name, std::uint64_t* value) {
  const std::string text = env(name, "");
  if (text.empty()) return true;
  char* end = nullptr;
  double v = std::strtod(text.c_str(), &end);
  switch (*end++) {
    case 't':
    case 'T':
      v *= 1099511627776.0;
      break;
    case 'k':
    case 'K':
      v *= 1024.0;
      break;
    case 'm':
    case 'M':
      v *= 1048576.0;
      break;
    case 'g':
    case 'G':
      v *= 1073741824.0;
      break;
    default:
      end -= 1;
      break;
  }
  if (*end == 'i') end += 1;
  if (*end == 'b' || *end == 'B') end += 1;
  if (*end || !(v >= 1) || v > 1e18) {
    complain(name, text, "512M or 4e9");
    return false;
  }
  *value = static_cast<std::uint64_t>(v);
  return true;
}

// Serializes creation and reaping of a device's files between processes.
class DirLock {
 public:
  explicit DirLock(const std::string& dir) {
    fd_ = open((dir + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd_ >= 0) flock(fd_, LOCK_EX);
  }
  ~DirLock() {
    if (fd_ >= 0) close(fd_);
  }
  DirLock(const DirLock&) = delete;
  DirLock& operator=(const DirLock&) = delete;

 private:
  int fd_ = -1;
};

// Allocation files are named "p-<sequence>-<bytes>", so that a listing is the account.
template <class F>
void for_each_allocation(const Device& dev, F f) {
  DIR* d = opendir(dev.dir.c_str());
  if (!d) return;
  while (dirent* e = readdir(d)) {
    unsigned long long seq = 0, bytes = 0;
    if (std::sscanf(e->d_name, "p-%llu-%llu", &seq, &bytes) == 2) f(dev.dir + "/" + e->d_name, bytes);
  }
  closedir(d);
}

bool abandoned(const std::string& path) {
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return false;
  bool free = flock(fd, LOCK_EX | LOCK_NB) == 0;
  close(fd);
  return free;
}

std::uint64_t listed_bytes(const Device& dev) {
  std::uint64_t sum = 0;
  for_each_allocation(dev, [&](const std::string&, std::uint64_t b) { sum += b; });
  return sum;
}

std::uint64_t reap_locked(const Device& dev) {
  std::uint64_t sum = 0;
  for_each_allocation(dev, [&](const std::string& path, std::uint64_t b) {
    if (abandoned(path)) {
      unlink(path.c_str());
    } else {
      sum += b;
    }
  });
  return sum;
}

// Settings from the environment hold when this process is the device's first; a device in use
// keeps what it was created with.
bool open_device(Device& dev, std::uint64_t capacity, std::uint64_t rate) {
  if (mkdir(dev.dir.c_str(), 0700) != 0 && errno != EEXIST) return false;
  DirLock lock(dev.dir);
  int fd = open((dev.dir + "/control").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Control)) != 0) return false;
  bool first = flock(fd, LOCK_EX | LOCK_NB) == 0;
  void* p = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return false;
  dev.control = static_cast<Control*>(p);
  Control& c = *dev.control;
  if (first) {
    reap_locked(dev);  // what the last processes left when they were killed
    c.capacity = capacity;
    c.link_rate[0] = c.link_rate[1] = rate;
    c.link_free[0] = c.link_free[1] = 0;
    std::memset(c.uuid, 0, sizeof c.uuid);
    std::memcpy(c.uuid, "pymux-sim", 9);
    c.uuid[15] = static_cast<unsigned char>(dev.ordinal);
    c.magic = kMagic;
  }
  flock(fd, LOCK_SH);  // held by the mapping for the life of the process
  close(fd);
  return c.magic == kMagic;
}

}  // namespace

CUresult open_node() {
  std::lock_guard lock(node_mutex);
  if (node_devices) return CUDA_SUCCESS;
  std::string root = env("PYMUX_SIM_DIR", "/dev/shm/pymux-sim-" + std::to_string(static_cast<unsigned>(getuid())));
  if (mkdir(root.c_str(), 0700) != 0 && errno != EEXIST) return CUDA_ERROR_OPERATING_SYSTEM;
  std::uint64_t capacity = kDefaultCapacity, rate = kDefaultRate, count = 1;
  if (!read_size("PYMUX_SIM_CAPACITY", &capacity) || !read_size("PYMUX_SIM_LINK", &rate) ||
      !read_size("PYMUX_SIM_DEVICES", &count) || count > kMaxDevices)
    return CUDA_ERROR_INVALID_VALUE;
  auto devices = std::make_unique<std::vector<std::unique_ptr<Device>>>();
  for (int i = 0; i < static_cast<int>(count); ++i) {
    auto dev = std::make_unique<Device>();
    dev->ordinal = i;
    dev->dir = root + "/dev" + std::to_string(i);
    if (!open_device(*dev, capacity, rate)) return CUDA_ERROR_OPERATING_SYSTEM;
    devices->push_back(std::move(dev));
  }
  node_devices = devices.release();  // lives until the process ends
  return CUDA_SUCCESS;
}

int device_count() { return node_devices ? static_cast<int>(node_devices->size()) : 0; }
Device& device(int ordinal) { return *(*node_devices)[static_cast<std::size_t>(ordinal)]; }

std::uint64_t used_bytes(Device& dev) {
  DirLock lock(dev.dir);
  return reap_locked(dev);
}

// Allocations' descriptors, by number. A forked child has no device memory, and closes them: what its parent held
// is free when the parent ends.
constexpr int kMostFiles = 1 << 20;
std::atomic<std::uint64_t> files[kMostFiles / 64];

void note_file(int fd, bool is_open) {
  if (fd < 0 || fd >= kMostFiles) return;
  const std::uint64_t bit = std::uint64_t{1} << (fd & 63);
  is_open ? files[fd / 64].fetch_or(bit) : files[fd / 64].fetch_and(~bit);
}

void close_files_of_parent() {
  for (int i = 0; i < kMostFiles / 64; ++i)
    for (std::uint64_t left = files[i].exchange(0); left; left &= left - 1) close(i * 64 + __builtin_ctzll(left));
}

CUresult create_physical(Device& dev, std::size_t size, bool exportable, std::shared_ptr<Physical>* out) {
  auto phys = std::make_shared<Physical>();
  {
    DirLock lock(dev.dir);
    const std::uint64_t capacity = dev.control->capacity;
    if (listed_bytes(dev) + size > capacity && reap_locked(dev) + size > capacity) return CUDA_ERROR_OUT_OF_MEMORY;
    phys->path = dev.dir + "/p-" + std::to_string(dev.control->sequence.fetch_add(1)) + "-" + std::to_string(size);
    phys->fd = open(phys->path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (phys->fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    note_file(phys->fd, true);
    phys->dev = &dev;
    phys->size = size;
    phys->exportable = exportable;
    if (flock(phys->fd, LOCK_SH) != 0 || ftruncate(phys->fd, static_cast<off_t>(size)) != 0)
      return CUDA_ERROR_OPERATING_SYSTEM;
  }
  // Physical now, not at first touch: a full host must say so here and not fault later.
  if (fallocate(phys->fd, 0, 0, static_cast<off_t>(size)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = std::move(phys);
  return CUDA_SUCCESS;
}

CUresult adopt_physical(int fd, std::shared_ptr<Physical>* out) {
  char link[64], target[PATH_MAX];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, target, sizeof target - 1);
  if (n <= 0) return CUDA_ERROR_INVALID_VALUE;
  target[n] = 0;
  for (int i = 0; i < device_count(); ++i) {
    Device& dev = device(i);
    unsigned long long seq = 0, bytes = 0;
    std::string prefix = dev.dir + "/";
    if (std::strncmp(target, prefix.c_str(), prefix.size()) != 0 ||
        std::sscanf(target + prefix.size(), "p-%llu-%llu", &seq, &bytes) != 2)
      continue;
    auto phys = std::make_shared<Physical>();
    phys->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (phys->fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    note_file(phys->fd, true);
    phys->dev = &dev;
    phys->path = target;
    phys->size = bytes;
    phys->exportable = phys->shared = true;
    *out = std::move(phys);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

Physical::~Physical() {
  if (fd < 0) return;
  note_file(fd, false);
  close(fd);
  DirLock lock(dev->dir);
  if (abandoned(path)) unlink(path.c_str());
}

}  // namespace sim
