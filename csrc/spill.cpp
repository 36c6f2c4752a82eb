#include "spill.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "error.h"

namespace pymux {

struct Spill::Request {
  std::int64_t place = 0;
  char* buffer = nullptr;
  bool write = false;
  bool done = false;  // guarded by the mutex
  int error = 0;
};

namespace {
constexpr std::size_t kBlock = 4096;  // direct I/O's alignment on every common file system

[[noreturn]] void fail(const std::string& dir, const char* what, int code) {
  throw Error("SpillError", std::string(what) + " the spill file in " + dir + ": " + std::strerror(code) +
                                ". Check the disk, or start the broker with another --spill-dir.");
}

// 0, or errno. A short transfer goes on; the end of the file is an error.
int transfer(int fd, char* p, std::size_t n, off_t at, bool write) {
  while (n > 0) {
    const ssize_t r = write ? pwrite(fd, p, n, at) : pread(fd, p, n, at);
    if (r < 0 && errno == EINTR) continue;
    if (r < 0) return errno;
    if (r == 0) return EIO;
    p += r;
    at += r;
    n -= static_cast<std::size_t>(r);
  }
  return 0;
}
}  // namespace

Spill::Spill(std::string dir, std::size_t page_size, std::function<void()> done)
    : dir_(std::move(dir)), page_size_(page_size), done_(std::move(done)) {}

Spill::~Spill() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (auto& t : threads_) t.join();
}

void Spill::open() {
  // Some file systems have no direct I/O (tmpfs), some no unnamed files.
  for (int direct : {O_DIRECT, 0}) {
    int fd = ::open(dir_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | direct, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {
      std::string name = dir_ + "/pymux-spill-XXXXXX";
      fd = mkostemp(name.data(), O_CLOEXEC | direct);
      if (fd >= 0) unlink(name.c_str());
    }
    if (fd >= 0) {
      file_ = Fd(fd);
      break;
    }
    if (errno != EINVAL) break;
  }
  if (!file_) fail(dir_, "cannot create", errno);
  for (std::size_t i = 0; i < kThreads; ++i) threads_.emplace_back([this] { run(); });
}

std::int64_t Spill::take() {
  if (!free_.empty()) {
    const std::int64_t place = free_.back();
    free_.pop_back();
    return place;
  }
  if (!file_) open();
  // Space first: a write that finds the disk full later would be too late to refuse.
  const auto at = static_cast<off_t>(places_) * static_cast<off_t>(page_size_);
  int r = 0;
  while ((r = posix_fallocate(file_.get(), at, static_cast<off_t>(page_size_))) == EINTR) {
  }
  if (r == ENOSPC || r == EFBIG || r == EDQUOT) {
    struct statvfs v{};
    const std::size_t have = statvfs(dir_.c_str(), &v) == 0 ? v.f_bavail * v.f_frsize : 0;
    Error e("HostOutOfMemory",
            "the host's memory for swapped-out pages is used up, and so is the spill directory " + dir_ + ": it has " +
                std::to_string(have >> 20) + " MiB available (" + std::strerror(r) +
                "). The pages stay on the device. Free disk space, raise the host budget, or run fewer jobs.");
    e.need = page_size_;
    e.limit = have;
    throw e;
  }
  if (r != 0) fail(dir_, "cannot enlarge", r);
  return places_++;
}

void Spill::give(std::int64_t place) { free_.push_back(place); }

std::size_t Spill::trim() {
  std::size_t released = 0;
  std::sort(free_.begin(), free_.end());
  while (!free_.empty() && free_.back() == places_ - 1) {  // only the end can go without losing its reservation
    free_.pop_back();
    places_ -= 1;
    released += page_size_;
  }
  if (released && ftruncate(file_.get(), static_cast<off_t>(places_) * static_cast<off_t>(page_size_)) != 0)
    fail(dir_, "cannot shorten", errno);
  return released;
}

Spill::Handle Spill::submit(std::int64_t place, char* buffer, bool write) {
  auto r = std::make_shared<Request>();
  r->place = place;
  r->buffer = buffer;
  r->write = write;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(r);
  }
  changed_.notify_all();
  return r;
}

Spill::Handle Spill::write(std::int64_t place, const char* from) {
  return submit(place, const_cast<char*>(from), true);
}

Spill::Handle Spill::read(std::int64_t place, char* to) { return submit(place, to, false); }

bool Spill::done(const Handle& r) const {
  std::lock_guard lock(mutex_);
  return r->done;
}

void Spill::wait(const Handle& r) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return r->done; });
  if (r->error) fail(dir_, r->write ? "cannot write" : "cannot read", r->error);
}

void Spill::wait_briefly(const Handle& r) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::microseconds(300), [&] { return r->done; });
}

void Spill::read_now(std::int64_t place, std::size_t offset, std::size_t bytes, void* to) const {
  const std::size_t first = offset / kBlock * kBlock, end = (offset + bytes + kBlock - 1) / kBlock * kBlock;
  std::unique_ptr<char, void (*)(void*)> p(static_cast<char*>(std::aligned_alloc(kBlock, end - first)), std::free);
  if (!p) throw std::bad_alloc();
  const auto at = static_cast<off_t>(place) * static_cast<off_t>(page_size_) + static_cast<off_t>(first);
  if (int e = transfer(file_.get(), p.get(), end - first, at, false)) fail(dir_, "cannot read", e);
  std::memcpy(to, p.get() + (offset - first), bytes);
}

void Spill::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Handle r = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const auto at = static_cast<off_t>(r->place) * static_cast<off_t>(page_size_);
    const int error = transfer(file_.get(), r->buffer, page_size_, at, r->write);
    lock.lock();
    r->error = error;
    r->done = true;
    changed_.notify_all();
    lock.unlock();
    done_();
    lock.lock();
  }
}

}  // namespace pymux
