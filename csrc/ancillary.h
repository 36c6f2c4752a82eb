// A message on a unix socket, and the descriptors that travel beside it.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <vector>

#include "fd.h"

namespace pymux {

class Ancillary {
 public:
  static constexpr std::size_t kMost = 64;  // descriptors a message
  // Of these bytes, to be sent or received into.
  Ancillary(void* data, std::size_t size);
  Ancillary(const Ancillary&) = delete;
  Ancillary& operator=(const Ancillary&) = delete;
  msghdr* message() { return &message_; }
  // To be sent with it; without any nothing is attached.
  void attach(const std::vector<Fd>& fds);
  // Makes room for those that it brings.
  void expect();
  // Takes over what recvmsg() has put there; without `fds` it is closed.
  void take(std::vector<Fd>* fds);

 private:
  iovec bytes_;
  msghdr message_{};
  alignas(cmsghdr) char control_[CMSG_SPACE(kMost * sizeof(int))] = {};
};

}  // namespace pymux
