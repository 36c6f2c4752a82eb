#include "wire.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace pymux::wire {
namespace {
[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }
}  // namespace

std::vector<Layout> layout() {
  return {
      {"hello", kHello, sizeof(Hello)},       {"acquire", kAcquire, sizeof(Acquire)},
      {"release", kRelease, sizeof(Release)}, {"ready", kReady, sizeof(Ready)},
      {"want", kWant, sizeof(Want)},          {"pages", kPages, sizeof(Pages)},
      {"cancel", kCancel, sizeof(Cancel)},    {"status", kStatus, sizeof(Status)},
      {"welcome", kWelcome, sizeof(Welcome)}, {"error", kError, sizeof(ErrorText)},
      {"grant", kGrant, sizeof(Grant)},       {"recall", kRecall, sizeof(Recall)},
      {"take", kTake, sizeof(Take)},          {"give", kGive, sizeof(Give)},
      {"deny", kDeny, sizeof(Deny)},          {"host", kHost, sizeof(Host)},
      {"figures", kFigures, sizeof(Figures)}, {"host_grant", kHostGrant, sizeof(HostGrant)},
      {"report", kReport, sizeof(Report)},    {"names", kNames, sizeof(Names)},
      {"failed", kFailed, sizeof(Failed)},    {"ran", kRan, sizeof(Ran)},
      {"pong", kPong, sizeof(Pong)},          {"regions", kRegions, sizeof(Regions)},
      {"prepare", kPrepare, sizeof(Prepare)}, {"active", kActive, sizeof(Active)},
      {"drain", kDrain, sizeof(Drain)},       {"ended", kEnded, sizeof(Ended)},
      {"ping", kPing, sizeof(Ping)},          {"fenced", kFenced, sizeof(Fenced)},
      {"kept", kKept, sizeof(Kept)},          {"queued", kQueued, sizeof(Queued)},
      {"trim", kTrim, sizeof(Trim)},          {"notice", kNotice, sizeof(Notice)},
  };
}

void put_text(char* field, std::size_t size, const std::string& text) {
  std::memset(field, 0, size);
  std::memcpy(field, text.data(), std::min(text.size(), size - 1));
}

std::string get_text(const char* field, std::size_t size) { return std::string(field, strnlen(field, size)); }

Socket Socket::connect(const std::string& path) {
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  if (path.size() >= sizeof a.sun_path) {
    errno = ENAMETOOLONG;
    fail(path.c_str());
  }
  std::memcpy(a.sun_path, path.c_str(), path.size());
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) fail("socket");
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&a), sizeof a) != 0) fail("connect");
  return Socket(std::move(fd));
}

void Socket::send(const void* data, std::size_t size, const std::vector<Fd>& fds) const {
  Ancillary packet(const_cast<void*>(data), size);
  packet.attach(fds);
  while (::sendmsg(this->fd(), packet.message(), MSG_NOSIGNAL) < 0)
    if (errno != EINTR) fail("send to the broker");
}

std::vector<char> Socket::receive(bool wait, std::vector<Fd>* fds) const {
  // One buffer a thread: messages are small, and this runs for each.
  thread_local std::vector<char> buffer(kMaxMessage);
  Ancillary packet(buffer.data(), buffer.size());
  packet.expect();
  ssize_t n = 0;
  while ((n = ::recvmsg(this->fd(), packet.message(), MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT))) < 0)
    if (errno != EINTR) fail("receive from the broker");
  packet.take(fds);
  return {buffer.begin(), buffer.begin() + n};
}

bool Socket::peek_bytes(void* to, std::size_t size) const {
  return ::recv(this->fd(), to, size, MSG_PEEK | MSG_DONTWAIT) == static_cast<ssize_t>(size);
}

}  // namespace pymux::wire
