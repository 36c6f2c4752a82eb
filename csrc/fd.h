// A file descriptor, and what a forked child has of this process: nothing.
// What it is not: it knows nothing of CUDA.
//
// Invariants: every Fd is closed in a forked child before fork() returns there, so that a child keeps no connection,
// lock or page of its parent alive; the numbers stay, and nothing may be done with them. forks() tells a child from
// the process that made an object.
#pragma once

#include <utility>

namespace pymux {

// How many forks lie between the process that loaded this library and the running one.
unsigned forks();

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);
  Fd(Fd&& o) noexcept : fd_(std::exchange(o.fd_, -1)), made_(o.made_) {}
  Fd& operator=(Fd&& o) noexcept {
    std::swap(fd_, o.fd_);
    std::swap(made_, o.made_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
  unsigned made_ = forks();
};

// A deleter for what Python may drop in a forked child, where locks may be held by threads that are not there.
template <class T>
struct OwnerDeletes {
  unsigned made = forks();
  void operator()(T* p) const {
    if (forks() == made) delete p;
  }
};

}  // namespace pymux
