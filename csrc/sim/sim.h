// The simulated driver's insides: what its files share. Not part of pymux's own code, which
// reaches this library only through the exported cu* names.
//
// Invariants: every exported function starts with SIM_ENTER; device memory is a file per
// physical allocation, alive exactly as long as somebody holds a lock on its open description.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define SIM_API extern "C" __attribute__((visibility("default")))

namespace sim {

constexpr std::size_t kGranularity = 2u << 20;
constexpr int kMaxDevices = 64;

std::int64_t now_ns();
void sleep_until_ns(std::int64_t when);

// ---- process state -------------------------------------------------------------------------

// The status every entry point starts from: forked child, injected fault, sticky error,
// missing cuInit. `needs` says which of them apply to the call.
enum Needs : unsigned { kNothing = 0, kInit = 1, kContext = 3 };
CUresult enter(const char* call, unsigned needs);
void set_sticky(CUresult code);

// Inside, no other process can lock this one; waits while one has.
class Gate {
 public:
  Gate();
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

 private:
  bool mine_;
};
bool is_fork();
void close_files_of_parent();
void answer_checkpoints();  // from other processes; once

#define SIM_ENTER(call, needs)                                    \
  ::sim::Gate sim_gate;                                           \
  do {                                                            \
    if (CUresult sim_r = ::sim::enter(call, needs)) return sim_r; \
  } while (0)

// ---- the node: devices shared by processes -------------------------------------------------

enum Direction { kHostToDevice = 0, kDeviceToHost = 1 };

// Lives in the device's control file, mapped by every process.
struct Control {
  std::atomic<std::uint64_t> magic;
  std::atomic<std::uint64_t> capacity;      // bytes
  std::atomic<std::uint64_t> link_rate[2];  // bytes per second, by Direction
  std::atomic<std::int64_t> link_free[2];   // ns: when each direction is next idle
  std::atomic<std::uint64_t> sequence;      // names of allocations and events
  unsigned char uuid[16];
};

struct Device {
  int ordinal = 0;
  std::string dir;
  Control* control = nullptr;
};

CUresult open_node();  // idempotent; called by cuInit and nvmlInit
int device_count();
Device& device(int ordinal);
std::uint64_t used_bytes(Device& dev);  // after dropping what dead processes left

// Physical memory: one file, one open description, one shared lock.
struct Physical {
  Device* dev = nullptr;
  std::string path;
  int fd = -1;
  std::size_t size = 0;
  bool exportable = false;
  bool shared = false;  // was exported or imported: another process may have it
  Physical() = default;
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;
  ~Physical();
};
CUresult create_physical(Device& dev, std::size_t size, bool exportable, std::shared_ptr<Physical>* out);
CUresult adopt_physical(int fd, std::shared_ptr<Physical>* out);

// ---- contexts ------------------------------------------------------------------------------

Device* current_device();  // of the calling thread; null without a current context

// ---- memory --------------------------------------------------------------------------------

// Held shared while bytes are touched, exclusively while mappings change.
std::shared_mutex& mapping_lock();
bool device_range_accessible(CUdeviceptr ptr, std::size_t size);  // caller holds mapping_lock
bool host_range_pinned(const void* ptr, std::size_t size);

// Contents of all this process's device memory to the host, and back; all or nothing.
CUresult park_memory();
CUresult unpark_memory();

struct Counts {
  std::uint64_t handles, mappings, reservations, allocations, streams, events, registrations;
};
void memory_counts(Counts* out);
void stream_counts(Counts* out);

// ---- streams -------------------------------------------------------------------------------

struct Stream;
struct Ticket {  // a point in a stream's order
  std::shared_ptr<Stream> stream;
  std::uint64_t number = 0;
};

struct Op {
  std::function<void(std::int64_t* clock)> run;  // clock: simulated ns at which the stream is
  std::vector<Ticket> waits;
};

struct Stream {
  int priority = 0;
  unsigned flags = 0;
  std::mutex m;  // guards all below
  std::condition_variable cv;
  std::deque<Op> queue;
  std::uint64_t submitted = 0, completed = 0;
  bool closing = false, started = false;
  std::int64_t clock = 0;
};

// Finds a stream; null handle (and the two legacy constants) is the default stream.
CUresult find_stream(CUstream handle, std::shared_ptr<Stream>* out);
void submit(const std::shared_ptr<Stream>& stream, Op op);
void wait_ticket(const Ticket& ticket);
void synchronize_all();

}  // namespace sim
