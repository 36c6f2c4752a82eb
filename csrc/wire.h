// The messages between an agent and the broker: fixed little-endian structs over SOCK_SEQPACKET,
// one message a packet, page file descriptors as ancillary data. pymux/wire.py has the same
// table; layout() lets a test compare them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "vmm.h"

namespace pymux::wire {

constexpr std::uint32_t kVersion = 2;
constexpr std::size_t kMaxFds = 64;
constexpr std::size_t kMaxMessage = 1u << 20;  // a status reply is the longest

enum Type : std::uint16_t {
  kHello = 1,
  kAcquire,
  kRelease,
  kReady,
  kWant,
  kPages,
  kCancel,
  kStatus,
  kHost,
  kFigures,
  kWelcome = 101,
  kError,
  kGrant,
  kRecall,
  kTake,
  kGive,
  kDeny,
  kStatusReply,
  kHostGrant,
  kReport,
};

#pragma pack(push, 1)
struct Header {
  std::uint16_t type;
  std::uint16_t reserved;
  std::uint32_t length;  // of the whole message
};

// What a client could give away, in pages.
struct Counts {
  std::uint64_t resident, discardable, clean, dirty;
};

// flags of Hello
constexpr std::uint32_t kPassesPages = 1, kObserver = 2, kReconnect = 4;

struct Hello {
  Header h;
  std::uint32_t version, pid, flags, rank, world, reserved;
  std::uint64_t page_size, held, lease_generation, host_pinned;
  std::uint8_t uuid[16];
  char job[64], client[64], group[64];
  Counts counts;
};
// want: pages the client must hold for what it waits for. own: held pages it could do without.
struct Acquire {
  Header h;
  std::uint64_t seq, want, own, expected_us;
  char phase[64];
  Counts counts;
};
struct Release {
  Header h;
  std::uint64_t generation;
  Counts counts;
};
// The body of the phase runs; sent again when what the client can give meanwhile has changed.
// want: pages it must hold for the lazy regions that are still to come.
struct Ready {
  Header h;
  std::uint64_t generation, want;
  Counts counts;
};
struct Want {
  Header h;
  std::uint64_t seq, want, own;
  Counts counts;
};
// count pages given back, the fds among them attached; missing: pages of a Take that the client
// cannot give now.
struct Pages {
  Header h;
  std::uint32_t count, missing;
  std::uint64_t want;
  Counts counts;
};
struct Cancel {
  Header h;
  std::uint64_t seq;
};
struct Status {
  Header h;
};
// Pinned host memory, in bytes. want: in all, what is pinned included; below the last grant it gives
// the rest back. urgent: a swap-out waits for it.
struct Host {
  Header h;
  std::uint64_t want;
  std::uint32_t urgent, reserved;
};
// One region's bytes, in answer to Report; an empty name ends the answer.
struct Figures {
  Header h;
  char region[64];
  std::uint64_t resident, clean, dirty, evicted, spilled, lost, copied_out, copied_in, avoided;
};

struct Welcome {
  Header h;
  std::uint32_t version, client;
  std::uint64_t budget;
  char spill_dir[256];  // empty: there is none
};
struct ErrorText {
  Header h;
  std::uint32_t code, reserved;
  char text[512];
};
struct Grant {
  Header h;
  std::uint64_t seq, generation;
};
struct Recall {
  Header h;
  std::uint64_t generation;
};
struct Take {
  Header h;
  std::uint32_t count, reserved;
};
struct Give {
  Header h;
  std::uint32_t count, reserved;
};
struct Deny {
  Header h;
  std::uint64_t seq, need, budget;
  std::uint32_t code, reserved;
  char text[512];
};
// Bytes of host memory that the client may have pinned; exhausted: no more for now.
struct HostGrant {
  Header h;
  std::uint64_t granted;
  std::uint32_t exhausted, reserved;
};
struct Report {
  Header h;
};
#pragma pack(pop)

enum ErrorCode : std::uint32_t {
  kProtocol = 1,
  kVersionMismatch,
  kNameTaken,
  kNotAllowed,
  kDevice,
  kCapacity,
  kNoPages,
};

struct Layout {
  const char* name;
  std::uint16_t type;
  std::size_t size;
};
std::vector<Layout> layout();

template <class M>
M make(Type type) {
  M m{};
  m.h = {type, 0, sizeof(M)};
  return m;
}

void put_text(char* field, std::size_t size, const std::string& text);
std::string get_text(const char* field, std::size_t size);

// A connected seqpacket socket. send() may be called from any thread.
class Socket {
 public:
  static Socket connect(const std::string& path);  // throws std::system_error
  int fd() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  // Throws std::system_error when the peer is gone.
  void send(const void* data, std::size_t size, const std::vector<Fd>& fds = {}) const;
  // The next message, or an empty vector at the end of the stream. wait=false: throws
  // std::system_error(EAGAIN) when none is there.
  std::vector<char> receive(bool wait, std::vector<Fd>* fds) const;
  Socket() = default;

 private:
  explicit Socket(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};

}  // namespace pymux::wire
