#include "ancillary.h"

namespace pymux {

Ancillary::Ancillary(void* data, std::size_t size) : bytes_{data, size} {
  message_.msg_iov = &bytes_;
  message_.msg_iovlen = 1;
}

void Ancillary::attach(const std::vector<Fd>& fds) {
  if (fds.empty()) return;
  message_.msg_control = control_;
  message_.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
  cmsghdr* c = CMSG_FIRSTHDR(&message_);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  int* out = reinterpret_cast<int*>(CMSG_DATA(c));
  for (std::size_t i = 0; i < fds.size(); ++i) out[i] = fds[i].get();
}

void Ancillary::expect() {
  message_.msg_control = control_;
  message_.msg_controllen = sizeof control_;
}

void Ancillary::take(std::vector<Fd>* fds) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message_); c; c = CMSG_NXTHDR(&message_, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const int* got = reinterpret_cast<const int*>(CMSG_DATA(c));
    for (std::size_t i = 0; i < count; ++i) {
      Fd fd(got[i]);
      if (fds) fds->push_back(std::move(fd));
    }
  }
}

}  // namespace pymux
