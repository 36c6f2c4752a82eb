#include "ancillary.h"

namespace pymux {

void Ancillary::attach(msghdr& m, const std::vector<Fd>& fds) {
  if (fds.empty()) return;
  m.msg_control = control_;
  m.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
  cmsghdr* c = CMSG_FIRSTHDR(&m);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  int* out = reinterpret_cast<int*>(CMSG_DATA(c));
  for (std::size_t i = 0; i < fds.size(); ++i) out[i] = fds[i].get();
}

void Ancillary::expect(msghdr& m) {
  m.msg_control = control_;
  m.msg_controllen = sizeof control_;
}

void Ancillary::take(msghdr& m, std::vector<Fd>* fds) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
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
