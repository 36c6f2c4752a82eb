// Streams, events and the link of the simulated device: ordered asynchronous work.
// What it is not: memory bookkeeping (memory.cpp).
//
// Model: every stream runs its operations in order on a thread of its own. A copy over the link
// occupies its direction for bytes / rate, shared by all streams of all processes; the thread
// sleeps through that time and moves the bytes at its end, so that work which does not wait for
// a copy sees old contents. A stream keeps a simulated clock: wake-up delays do not add up.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "sim.h"

#ifdef __SANITIZE_THREAD__  // from the sanitizer's run time
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#endif

namespace sim {
namespace {

constexpr std::size_t kPiece = 1u << 20;      // bytes that a copy moves before others get a turn
constexpr double kMemcpyRate = 10e9;          // about what this takes from the end of a sleep
constexpr std::int64_t kCatchUp = 5'000'000;  // ns a late thread may run ahead to make good
constexpr int kLowest = 0, kGreatest = -5;    // as cuCtxGetStreamPriorityRange says on GPUs

std::mutex table_mutex;  // guards streams and events
std::map<CUstream, std::shared_ptr<Stream>>& streams() {
  static auto* t = new std::map<CUstream, std::shared_ptr<Stream>>();
  return *t;
}

struct IpcState {  // in shared memory, by event
  std::atomic<std::uint64_t> recorded, completed;
};

struct Event {
  unsigned flags = 0;
  std::mutex m;  // guards the record
  bool recorded = false;
  Ticket at;
  std::shared_ptr<std::atomic<std::int64_t>> time = std::make_shared<std::atomic<std::int64_t>>(0);
  IpcState* ipc = nullptr;
  std::string ipc_name;
  bool owns_file = false;
  ~Event() {
    if (ipc) munmap(ipc, sizeof(IpcState));
    if (owns_file) unlink(ipc_name.c_str());
  }
};
std::map<CUevent, std::shared_ptr<Event>>& events() {
  static auto* t = new std::map<CUevent, std::shared_ptr<Event>>();
  return *t;
}

std::shared_ptr<Stream>& default_stream() {
  static auto* s = new std::shared_ptr<Stream>(std::make_shared<Stream>());
  return *s;
}

std::shared_ptr<Event> find_event(CUevent handle) {
  std::lock_guard lock(table_mutex);
  auto it = events().find(handle);
  return it == events().end() ? nullptr : it->second;
}

void run(std::shared_ptr<Stream> s) {
  std::unique_lock lock(s->m);
  for (;;) {
    s->cv.wait(lock, [&] { return !s->queue.empty() || s->closing; });
    if (s->queue.empty()) return;
    Op op = std::move(s->queue.front());
    s->queue.pop_front();
    lock.unlock();
    std::int64_t clock = s->clock;
    for (auto& w : op.waits) wait_ticket(w);
    if (!op.waits.empty()) clock = std::max(clock, now_ns());
    op.run(&clock);
    op = Op{};
    lock.lock();
    s->clock = clock;
    s->completed += 1;
    s->cv.notify_all();
  }
}

bool blocking(const Stream& s) { return (s.flags & CU_STREAM_NON_BLOCKING) == 0; }

Ticket tail(const std::shared_ptr<Stream>& s) {
  std::lock_guard lock(s->m);
  return {s, s->submitted};
}

// Takes the next slot of the link for `bytes`, not before `ready`; gives the slot's end.
std::int64_t take_slot(Control& c, Direction d, std::int64_t ready, std::size_t bytes) {
  const double rate = static_cast<double>(c.link_rate[d].load(std::memory_order_relaxed));
  const auto cost = static_cast<std::int64_t>(static_cast<double>(bytes) * 1e9 / rate);
  std::int64_t free = c.link_free[d].load();
  std::int64_t end = 0;
  do {
    end = std::max(free, ready) + cost;
  } while (!c.link_free[d].compare_exchange_weak(free, end));
  return end;
}

// A copy from the device may race with writes to it, as on a GPU: a write-back does, and throws away what
// it read (the page's version tells). The thread sanitizer must neither report these reads nor, one by one,
// suppress them.
class DeviceReads {
 public:
#ifdef __SANITIZE_THREAD__
  explicit DeviceReads(bool from_device) : ignored_(from_device) {
    if (ignored_) AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  }
  ~DeviceReads() {
    if (ignored_) AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  DeviceReads(const DeviceReads&) = delete;
  DeviceReads& operator=(const DeviceReads&) = delete;

 private:
  bool ignored_;
#else
  explicit DeviceReads(bool) {}
#endif
};

bool move_bytes(void* dst, const void* src, std::size_t n, CUdeviceptr on_device) {
  std::shared_lock lock(mapping_lock());
  if (!device_range_accessible(on_device, n)) {
    set_sticky(CUDA_ERROR_ILLEGAL_ADDRESS);
    return false;
  }
  DeviceReads reads(reinterpret_cast<CUdeviceptr>(src) == on_device);
  std::memcpy(dst, src, n);
  return true;
}

// A stream's priority makes no difference here: "Stream priorities have no effect on host-to-device
// and device-to-host memory operations" (cuStreamCreateWithPriority).
void link_copy(Control& control, Direction d, double slow, char* dst, const char* src, std::size_t n,
               CUdeviceptr dev_ptr, std::int64_t* clock) {
  for (std::size_t at = 0; at < n; at += kPiece) {
    const std::size_t piece = std::min(kPiece, n - at);
    std::int64_t ready = std::max(*clock, now_ns() - kCatchUp);
    std::int64_t end = take_slot(control, d, ready, static_cast<std::size_t>(static_cast<double>(piece) * slow));
    sleep_until_ns(end - static_cast<std::int64_t>(static_cast<double>(piece) * 1e9 / kMemcpyRate));
    *clock = end;
    if (!move_bytes(dst + at, src + at, piece, dev_ptr + at)) break;
  }
}

}  // namespace

void submit(const std::shared_ptr<Stream>& s, Op op) {
  std::vector<std::shared_ptr<Stream>> order;
  {
    std::lock_guard lock(table_mutex);
    if (s == default_stream()) {
      for (auto& [handle, other] : streams())
        if (blocking(*other)) order.push_back(other);
    } else if (blocking(*s)) {
      order.push_back(default_stream());
    }
  }
  for (auto& other : order) {
    Ticket t = tail(other);
    std::lock_guard lock(other->m);
    if (other->completed < t.number) op.waits.push_back(t);
  }
  std::lock_guard lock(s->m);
  if (!s->started) {
    s->started = true;
    std::thread(run, s).detach();
  }
  if (s->queue.empty() && s->completed == s->submitted) s->clock = std::max(s->clock, now_ns());
  s->queue.push_back(std::move(op));
  s->submitted += 1;
  s->cv.notify_all();
}

void wait_ticket(const Ticket& t) {
  if (!t.stream) return;
  std::unique_lock lock(t.stream->m);
  t.stream->cv.wait(lock, [&] { return t.stream->completed >= t.number; });
}

void synchronize_all() {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard lock(table_mutex);
    all.push_back(default_stream());
    for (auto& [handle, s] : streams()) all.push_back(s);
  }
  for (auto& s : all) wait_ticket(tail(s));
}

CUresult find_stream(CUstream handle, std::shared_ptr<Stream>* out) {
  if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
    *out = default_stream();
    return CUDA_SUCCESS;
  }
  std::lock_guard lock(table_mutex);
  auto it = streams().find(handle);
  if (it == streams().end()) return CUDA_ERROR_INVALID_HANDLE;
  *out = it->second;
  return CUDA_SUCCESS;
}

void stream_counts(Counts* out) {
  std::lock_guard lock(table_mutex);
  out->streams = streams().size();
  out->events = events().size();
}

}  // namespace sim

using namespace sim;

// ---- streams -------------------------------------------------------------------------------

SIM_API CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  SIM_ENTER("cuCtxGetStreamPriorityRange", kContext);
  if (least) *least = kLowest;
  if (greatest) *greatest = kGreatest;
  return CUDA_SUCCESS;
}

// Nothing can be captured here; the mode is kept by thread, as documented.
SIM_API CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  SIM_ENTER("cuThreadExchangeStreamCaptureMode", kInit);
  static thread_local CUstreamCaptureMode of_thread = CU_STREAM_CAPTURE_MODE_GLOBAL;
  if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, of_thread);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  SIM_ENTER("cuStreamCreateWithPriority", kContext);
  if (!out || (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING))) return CUDA_ERROR_INVALID_VALUE;
  auto s = std::make_shared<Stream>();
  s->flags = flags;
  s->priority = std::clamp(priority, kGreatest, kLowest);  // documented: clamped to the range
  std::lock_guard lock(table_mutex);
  *out = reinterpret_cast<CUstream>(s.get());
  streams()[*out] = std::move(s);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuStreamCreate(CUstream* out, unsigned flags) {
  return cuStreamCreateWithPriority(out, flags, 0);
}

SIM_API CUresult CUDAAPI cuStreamGetPriority(CUstream handle, int* priority) {
  SIM_ENTER("cuStreamGetPriority", kContext);
  std::shared_ptr<Stream> s;
  if (CUresult r = find_stream(handle, &s)) return r;
  if (!priority) return CUDA_ERROR_INVALID_VALUE;
  *priority = s->priority;
  return CUDA_SUCCESS;
}

// Returns at once; work that is queued still completes (the thread holds the stream).
SIM_API CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
  SIM_ENTER("cuStreamDestroy", kContext);
  std::shared_ptr<Stream> s;
  {
    std::lock_guard lock(table_mutex);
    auto it = streams().find(handle);
    if (it == streams().end()) return CUDA_ERROR_INVALID_HANDLE;
    s = std::move(it->second);
    streams().erase(it);
  }
  std::lock_guard lock(s->m);
  s->closing = true;
  s->cv.notify_all();
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
  SIM_ENTER("cuStreamSynchronize", kContext);
  std::shared_ptr<Stream> s;
  if (CUresult r = find_stream(handle, &s)) return r;
  wait_ticket(tail(s));
  return enter("cuStreamSynchronize.after", kContext);
}

SIM_API CUresult CUDAAPI cuStreamQuery(CUstream handle) {
  SIM_ENTER("cuStreamQuery", kContext);
  std::shared_ptr<Stream> s;
  if (CUresult r = find_stream(handle, &s)) return r;
  std::lock_guard lock(s->m);
  return s->completed >= s->submitted ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

SIM_API CUresult CUDAAPI cuCtxSynchronize(void) {
  SIM_ENTER("cuCtxSynchronize", kContext);
  synchronize_all();
  return enter("cuCtxSynchronize.after", kContext);
}

SIM_API CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn fn, void* data) {
  SIM_ENTER("cuLaunchHostFunc", kContext);
  std::shared_ptr<Stream> s;
  if (CUresult r = find_stream(handle, &s)) return r;
  if (!fn) return CUDA_ERROR_INVALID_VALUE;
  submit(s, {[=](std::int64_t* clock) {
               fn(data);
               *clock = now_ns();
             },
             {}});
  return CUDA_SUCCESS;
}

// ---- events --------------------------------------------------------------------------------

namespace {

void publish(CUevent* out, std::shared_ptr<Event> e) {
  std::lock_guard lock(table_mutex);
  *out = reinterpret_cast<CUevent>(e.get());
  events()[*out] = std::move(e);
}

bool map_ipc(Event& e, const std::string& path, int flags) {
  int fd = open(path.c_str(), flags, 0600);
  if (fd < 0) return false;
  bool ok = ((flags & O_CREAT) == 0) || ftruncate(fd, sizeof(IpcState)) == 0;
  void* p = ok ? mmap(nullptr, sizeof(IpcState), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  if (p == MAP_FAILED) return false;
  e.ipc = static_cast<IpcState*>(p);
  e.ipc_name = path;
  return true;
}

void wait_ipc(const IpcState& s, std::uint64_t number) {
  while (s.completed.load() < number) sleep_until_ns(now_ns() + 20'000);
}

}  // namespace

SIM_API CUresult CUDAAPI cuEventCreate(CUevent* out, unsigned flags) {
  SIM_ENTER("cuEventCreate", kContext);
  constexpr unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (!out || (flags & ~known)) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
  auto e = std::make_shared<Event>();
  e->flags = flags;
  if (flags & CU_EVENT_INTERPROCESS) {
    Device& dev = *current_device();
    std::string path = dev.dir + "/e-" + std::to_string(dev.control->sequence.fetch_add(1));
    if (!map_ipc(*e, path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC)) return CUDA_ERROR_OPERATING_SYSTEM;
    e->owns_file = true;
  }
  publish(out, std::move(e));
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuEventDestroy(CUevent handle) {
  SIM_ENTER("cuEventDestroy", kContext);
  std::lock_guard lock(table_mutex);
  return events().erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

SIM_API CUresult CUDAAPI cuEventRecord(CUevent handle, CUstream stream) {
  SIM_ENTER("cuEventRecord", kContext);
  auto e = find_event(handle);
  std::shared_ptr<Stream> s;
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = find_stream(stream, &s)) return r;
  std::lock_guard lock(e->m);
  std::uint64_t number = e->ipc ? e->ipc->recorded.fetch_add(1) + 1 : 0;
  submit(s, {[e, time = e->time, number](std::int64_t* clock) {
               sleep_until_ns(*clock);
               time->store(*clock);
               if (number) {
                 std::uint64_t seen = e->ipc->completed.load();
                 while (seen < number && !e->ipc->completed.compare_exchange_weak(seen, number)) {
                 }
               }
             },
             {}});
  e->at = tail(s);
  e->recorded = true;
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuEventQuery(CUevent handle) {
  SIM_ENTER("cuEventQuery", kContext);
  auto e = find_event(handle);
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  if (e->ipc) return e->ipc->completed.load() >= e->ipc->recorded.load() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  std::lock_guard lock(e->m);
  if (!e->recorded) return CUDA_SUCCESS;
  std::lock_guard inner(e->at.stream->m);
  return e->at.stream->completed >= e->at.number ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

SIM_API CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
  SIM_ENTER("cuEventSynchronize", kContext);
  auto e = find_event(handle);
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  if (e->ipc) {
    wait_ipc(*e->ipc, e->ipc->recorded.load());
    return CUDA_SUCCESS;
  }
  Ticket at;
  {
    std::lock_guard lock(e->m);
    at = e->at;
  }
  wait_ticket(at);
  return enter("cuEventSynchronize.after", kContext);
}

SIM_API CUresult CUDAAPI cuEventElapsedTime(float* ms, CUevent start, CUevent end) {
  SIM_ENTER("cuEventElapsedTime", kContext);
  auto a = find_event(start), b = find_event(end);
  if (!a || !b) return CUDA_ERROR_INVALID_HANDLE;
  if (!ms) return CUDA_ERROR_INVALID_VALUE;
  if ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  for (CUevent h : {start, end})
    if (CUresult r = cuEventQuery(h)) return r;
  if (!a->recorded || !b->recorded) return CUDA_ERROR_INVALID_HANDLE;
  *ms = static_cast<float>(static_cast<double>(b->time->load() - a->time->load()) / 1e6);
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned flags) {
  SIM_ENTER("cuStreamWaitEvent", kContext);
  auto e = find_event(handle);
  std::shared_ptr<Stream> s;
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = find_stream(stream, &s)) return r;
  if (flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
  if (e->ipc) {
    std::uint64_t number = e->ipc->recorded.load();
    submit(s, {[e, number](std::int64_t* clock) {
                 wait_ipc(*e->ipc, number);
                 *clock = now_ns();
               },
               {}});
    return CUDA_SUCCESS;
  }
  std::lock_guard lock(e->m);
  if (!e->recorded) return CUDA_SUCCESS;
  submit(s, {[](std::int64_t*) {}, {e->at}});
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuIpcGetEventHandle(CUipcEventHandle* out, CUevent handle) {
  SIM_ENTER("cuIpcGetEventHandle", kContext);
  auto e = find_event(handle);
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  if (!out || !e->ipc) return CUDA_ERROR_INVALID_VALUE;
  std::memset(out->reserved, 0, sizeof out->reserved);
  // "e-<n>" within the device's directory, and the device.
  std::string name = std::to_string(current_device()->ordinal) + " " + e->ipc_name.substr(e->ipc_name.rfind('/') + 1);
  if (name.size() >= sizeof out->reserved) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(out->reserved, name.data(), name.size());
  return CUDA_SUCCESS;
}

SIM_API CUresult CUDAAPI cuIpcOpenEventHandle(CUevent* out, CUipcEventHandle handle) {
  SIM_ENTER("cuIpcOpenEventHandle", kContext);
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  handle.reserved[sizeof handle.reserved - 1] = 0;
  std::string text = handle.reserved;
  auto space = text.find(' ');
  if (space == std::string::npos || text.compare(space + 1, 2, "e-") != 0 || text.find('/') != std::string::npos)
    return CUDA_ERROR_INVALID_HANDLE;
  int ordinal = std::atoi(text.c_str());
  if (ordinal < 0 || ordinal >= device_count()) return CUDA_ERROR_INVALID_HANDLE;
  auto e = std::make_shared<Event>();
  e->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
  if (!map_ipc(*e, device(ordinal).dir + "/" + text.substr(space + 1), O_RDWR | O_CLOEXEC))
    return CUDA_ERROR_INVALID_HANDLE;
  publish(out, std::move(e));
  return CUDA_SUCCESS;
}

// ---- copies --------------------------------------------------------------------------------

namespace {

// CUDA copies pageable memory through a staging buffer: about half the speed, and the call
// returns only when the buffer is free again.
CUresult copy_over_link(CUstream stream, Direction d, CUdeviceptr dev_ptr, void* host, std::size_t n, bool wait) {
  std::shared_ptr<Stream> s;
  if (CUresult r = find_stream(stream, &s)) return r;
  if (n == 0) return CUDA_SUCCESS;
  {
    std::shared_lock lock(mapping_lock());
    if (!host || !device_range_accessible(dev_ptr, n)) return CUDA_ERROR_INVALID_VALUE;
  }
  const bool pinned = host_range_pinned(host, n);
  auto* dev_bytes = reinterpret_cast<char*>(dev_ptr);
  auto* host_bytes = static_cast<char*>(host);
  char* dst = d == kHostToDevice ? dev_bytes : host_bytes;
  const char* src = d == kHostToDevice ? host_bytes : dev_bytes;
  Control& control = *current_device()->control;
  submit(s, {[=, &control](std::int64_t* clock) {
               link_copy(control, d, pinned ? 1.0 : 2.0, dst, src, n, dev_ptr, clock);
             },
             {}});
  if (wait || !pinned) {
    wait_ticket(tail(s));
    return enter("copy.after", kContext);
  }
  return CUDA_SUCCESS;
}

CUresult on_device(CUstream stream, std::size_t n, CUdeviceptr a, CUdeviceptr b, bool wait,
                   std::function<void()> work) {
  std::shared_ptr<Stream> s;
  if (CUresult r = find_stream(stream, &s)) return r;
  if (n == 0) return CUDA_SUCCESS;
  {
    std::shared_lock lock(mapping_lock());
    if (!device_range_accessible(a, n) || (b && !device_range_accessible(b, n))) return CUDA_ERROR_INVALID_VALUE;
  }
  submit(s, {[=](std::int64_t* clock) {
               std::shared_lock lock(mapping_lock());
               if (!device_range_accessible(a, n) || (b && !device_range_accessible(b, n)))
                 set_sticky(CUDA_ERROR_ILLEGAL_ADDRESS);
               else
                 work();
               *clock = std::max(*clock, now_ns());
             },
             {}});
  if (!wait) return CUDA_SUCCESS;
  wait_ticket(tail(s));
  return enter("copy.after", kContext);
}

}  // namespace

SIM_API CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr dst, const void* src, size_t n, CUstream stream) {
  SIM_ENTER("cuMemcpyHtoDAsync", kContext);
  return copy_over_link(stream, kHostToDevice, dst, const_cast<void*>(src), n, false);
}

SIM_API CUresult CUDAAPI cuMemcpyDtoHAsync(void* dst, CUdeviceptr src, size_t n, CUstream stream) {
  SIM_ENTER("cuMemcpyDtoHAsync", kContext);
  return copy_over_link(stream, kDeviceToHost, src, dst, n, false);
}

SIM_API CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr dst, const void* src, size_t n) {
  SIM_ENTER("cuMemcpyHtoD", kContext);
  return copy_over_link(nullptr, kHostToDevice, dst, const_cast<void*>(src), n, true);
}

SIM_API CUresult CUDAAPI cuMemcpyDtoH(void* dst, CUdeviceptr src, size_t n) {
  SIM_ENTER("cuMemcpyDtoH", kContext);
  return copy_over_link(nullptr, kDeviceToHost, src, dst, n, true);
}

SIM_API CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream stream) {
  SIM_ENTER("cuMemcpyDtoDAsync", kContext);
  return on_device(stream, n, dst, src, false,
                   [=] { std::memmove(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), n); });
}

SIM_API CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t n, CUstream stream) {
  SIM_ENTER("cuMemsetD8Async", kContext);
  return on_device(stream, n, dst, 0, false, [=] { std::memset(reinterpret_cast<void*>(dst), value, n); });
}

SIM_API CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr dst, unsigned value, size_t n, CUstream stream) {
  SIM_ENTER("cuMemsetD32Async", kContext);
  if (dst % sizeof value) return CUDA_ERROR_INVALID_VALUE;
  return on_device(stream, n * sizeof value, dst, 0, false,
                   [=] { std::fill_n(reinterpret_cast<unsigned*>(dst), n, value); });
}

SIM_API CUresult CUDAAPI cuMemsetD8(CUdeviceptr dst, unsigned char value, size_t n) {
  SIM_ENTER("cuMemsetD8", kContext);
  return on_device(nullptr, n, dst, 0, true, [=] { std::memset(reinterpret_cast<void*>(dst), value, n); });
}
