// Descriptors that travel beside a message on a unix socket.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <vector>

#include "vmm.h"

namespace pymux {

class Ancillary {
 public:
  static constexpr std::size_t kMost = 64;  // descriptors a message
  // To be sent with a message; without any nothing is attached.
  void attach(msghdr& m, const std::vector<Fd>& fds);
  // Makes room for those that a message brings.
  void expect(msghdr& m);
  // Takes over what recvmsg() has put there; without `fds` it is closed.
  static void take(msghdr& m, std::vector<Fd>* fds);

 private:
  alignas(cmsghdr) char control_[CMSG_SPACE(kMost * sizeof(int))] = {};
};

}  // namespace pymux
