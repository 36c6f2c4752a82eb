#include "share_post.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "ancillary.h"
#include "error.h"
#include "wire.h"

namespace pymux {
namespace {

constexpr char kPrefix[] = "share-";

bool address(const std::string& path, sockaddr_un& a) {
  a = {};
  a.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof a.sun_path) return false;
  std::memcpy(a.sun_path, path.data(), path.size());
  return true;
}

// The sockets of all processes that share here, and those that dead ones have left.
std::vector<std::string> sockets(const std::string& directory) {
  std::vector<std::string> out;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored))
    if (entry.path().filename().string().starts_with(kPrefix)) out.push_back(entry.path().string());
  return out;
}

bool answers(const std::string& path) {
  sockaddr_un a{};
  Fd probe(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return !address(path, a) || connect(probe.get(), reinterpret_cast<sockaddr*>(&a), sizeof a) == 0 ||
         errno != ECONNREFUSED;
}

}  // namespace

SharePost::SharePost(const std::string& directory)
    : fd_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  static std::atomic<unsigned> number{0};
  for (const std::string& path : sockets(directory))
    if (!answers(path)) unlink(path.c_str());
  path_ = directory + "/" + kPrefix + std::to_string(getpid()) + "." + std::to_string(number++);
  sockaddr_un a{};
  if (!fd_ || !address(path_, a) || bind(fd_.get(), reinterpret_cast<sockaddr*>(&a), sizeof a) != 0) {
    const std::string why = std::strerror(errno);
    const std::string path = std::exchange(path_, "");
    throw Error("RegionError", "no socket for sharing can be made at " + path + ": " + why + ".");
  }
}

SharePost::~SharePost() {
  if (!path_.empty()) unlink(path_.c_str());
}

SharePost::Sent SharePost::send(const std::string& to, const Note& note, const std::vector<Fd>& fds) const {
  sockaddr_un a{};
  if (!address(to, a)) return Sent::gone;
  Ancillary packet(const_cast<Note*>(&note), sizeof note);
  packet.message()->msg_name = &a;
  packet.message()->msg_namelen = sizeof a;
  packet.attach(fds);
  while (sendmsg(fd_.get(), packet.message(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    // Too many descriptors on their way is a reason to wait too.
    return errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS ? Sent::later : Sent::gone;
  }
  return Sent::yes;
}

bool SharePost::receive(Note& note, std::vector<Fd>& fds) const {
  Ancillary packet(&note, sizeof note);
  packet.expect();
  ssize_t n = 0;
  while ((n = recvmsg(fd_.get(), packet.message(), MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0)
    if (errno != EINTR) return false;
  packet.take(&fds);
  if (n != static_cast<ssize_t>(sizeof note)) note = Note{};  // not one of ours: a join that nobody can answer
  note.count = std::min<std::uint32_t>(note.count, Note::kPages);
  note.segment[sizeof note.segment - 1] = note.reply_to[sizeof note.reply_to - 1] = 0;
  return true;
}

std::pair<Fd, Fd> SharePost::find(const std::string& directory, const std::string& segment, double seconds) {
  SharePost post(directory);
  Note ask;
  wire::put_text(ask.segment, sizeof ask.segment, segment);
  wire::put_text(ask.reply_to, sizeof ask.reply_to, post.path());
  std::size_t asked = 0;
  for (const std::string& path : sockets(directory))
    if (path != post.path() && post.send(path, ask) != Sent::gone) asked += 1;
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  while (asked > 0 && Clock::now() < until) {
    pollfd p{post.fd(), POLLIN, 0};
    poll(&p, 1, static_cast<int>(seconds * 1000));
    Note note;
    std::vector<Fd> fds;
    while (post.receive(note, fds)) {
      if (note.kind != NoteKind::welcome || segment != note.segment) continue;
      if (fds.size() == 2) return {std::move(fds[0]), std::move(fds[1])};
      asked -= std::min<std::size_t>(asked, 1);  // it has no such segment
    }
  }
  throw Error("RegionError",
              "no process has the shared region of this token: the one that shared it, and all that opened it, have "
              "ended, or they are another user's or another node's.");
}

}  // namespace pymux
