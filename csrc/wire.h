// The messages between an agent and the broker: fixed little-endian structs over SOCK_SEQPACKET,
// one message a packet, page file descriptors as ancillary data. pymux/wire.py has the same
// table; layout() lets a test compare them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ancillary.h"
#include "fd.h"

namespace pymux::wire {

constexpr std::uint32_t kVersion = 4;
constexpr std::size_t kMaxFds = Ancillary::kMost;
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
  kNames,
  kFailed,
  kRan,
  kPong,
  kKept,
  kQueued,
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
  kRegions,
  kPrepare,
  kActive,
  kDrain,
  kEnded,
  kPing,
  kFenced,
  kTrim,
  kNotice,
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
constexpr std::uint32_t kPassesPages = 1, kObserver = 2, kReconnect = 4, kController = 8, kOpener = 16, kJoint = 32;
// flags of Acquire
constexpr std::uint32_t kOverlap = 1;

// need, host_need: bytes of device and host memory that the process will need at most; 0: it does not say.
struct Hello {
  Header h;
  std::uint32_t version, pid, flags, rank, world, reserved;
  std::uint64_t page_size, held, lease_generation, host_pinned, need, host_need;
  std::uint8_t uuid[16];
  char job[64], client[64], group[64], phase[64];
  Counts counts;
};
// want: pages the client must hold for what it waits for. own: held pages it could do without.
// ran_us: of the phase, before a yield or a loan. ranks: a bit for each member whose device is wanted; 0: all.
// opener: the thread or task that asks, among those of its process; 0: none that could wait for others.
struct Acquire {
  Header h;
  std::uint64_t seq, want, own, expected_us, ran_us, ranks, opener;
  std::int32_t priority;
  std::uint32_t flags;
  char phase[64];
  Counts counts;
};
// back_us: it wants the device back after so long, in the middle of its phase; 0: no loan.
struct Release {
  Header h;
  std::uint64_t generation, back_us;
  Counts counts;
};
// The body of the phase runs; sent again when what the client can give meanwhile has changed.
// want: pages it must hold for the lazy regions that are still to come. known: a bit for each region
// of the request that this member has.
struct Ready {
  Header h;
  std::uint64_t generation, want, known;
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

// The regions of the Acquire that follows, for the group's other members: a line for each use, "u", "l" or
// "w" for used, lazy or written, and the name. "U": all are used but the lazy ones; "W": all that are used
// are written but the frozen ones.
struct Names {
  Header h;
  char regions[1024];
};
// A member cannot make its regions resident.
struct Failed {
  Header h;
  std::uint64_t generation;
  std::uint32_t for_good, reserved;
  char text[512];
};
// Phases of this name that have ended since it was last told.
struct Ran {
  Header h;
  char phase[64];
  std::uint64_t count, total_us;
};
struct Pong {
  Header h;
};
// In answer to a recall: who has the lease's phase open; 0: nobody any more. Again when that changes.
struct Kept {
  Header h;
  std::uint64_t generation, opener;
};
// A thread or task of the process waits until another (behind) is through with its phase of this client; 0: no more.
struct Queued {
  Header h;
  std::uint64_t seq, opener, behind;
};

struct Welcome {
  Header h;
  std::uint32_t version, client;
  std::uint64_t budget;
  char spill_dir[256];  // empty: there is none
};
struct ErrorText {
  Header h;
  std::uint64_t need, limit;  // bytes, of errors that have such
  std::uint32_t code, reserved;
  char text[512];
};
// seq: of the request, or 0 for a member that did not ask; such a one is told the phase.
struct Grant {
  Header h;
  std::uint64_t seq, generation;
  char phase[64];
};
// extend_us: for so long, phases that follow at once may go before who waits.
struct Recall {
  Header h;
  std::uint64_t generation, extend_us;
  std::uint32_t press, reserved;
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
// As Names, of the Prepare or Grant that follows.
struct Regions {
  Header h;
  char regions[1024];
};
struct Prepare {
  Header h;
  char phase[64];
};
struct Active {
  Header h;
  std::uint64_t generation;
};
struct Drain {
  Header h;
  std::uint64_t generation;  // 0: it was only prepared
};
struct Ended {
  Header h;
  std::uint64_t generation;
};
struct Ping {
  Header h;
};
struct Fenced {
  Header h;
  std::uint64_t generation;
  std::uint32_t requeued, reserved;  // requeued: the phase had not begun, and waits again
};
// Others need host memory: give back what is pinned and not in use, and answer with Host.
struct Trim {
  Header h;
};
// For the process's standard error.
struct Notice {
  Header h;
  char text[512];
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
  kNoHostMemory,
  kMemberLost,
  kNoRegion,
  kDeadlock,
  kConfig,
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

// A connected seqpacket socket, open as long as one copy is. send() and peek() may be called from any thread.
class Socket {
 public:
  static Socket connect(const std::string& path);  // throws std::system_error
  int fd() const { return fd_ ? fd_->get() : -1; }
  explicit operator bool() const { return fd() >= 0; }
  // Throws std::system_error when the peer is gone.
  void send(const void* data, std::size_t size, const std::vector<Fd>& fds = {}) const;
  // The next message, or an empty vector at the end of the stream. wait=false: throws
  // std::system_error(EAGAIN) when none is there.
  std::vector<char> receive(bool wait, std::vector<Fd>* fds) const;
  // The next message if it is of this type, which stays to be received.
  template <class M>
  bool peek(Type type, M& message) const {
    return peek_bytes(&message, sizeof message) && message.h.type == type;
  }
  Socket() = default;

 private:
  explicit Socket(Fd fd) : fd_(std::make_shared<Fd>(std::move(fd))) {}
  bool peek_bytes(void* to, std::size_t size) const;
  std::shared_ptr<Fd> fd_;
};

}  // namespace pymux::wire
