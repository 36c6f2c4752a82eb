// Checkpointing one process from another, as the CUDA driver does: lock, checkpoint, restore, unlock.
// Each process has a thread that answers on a socket of its own; the caller only asks.
//
// Invariant: whoever has an API call under way is inside the gate, and the gate is closed from lock to unlock.
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>

#include "sim.h"

namespace sim {
namespace {

struct GateState {
  std::mutex m;  // guards the two below
  std::condition_variable cv;
  int inside = 0;
  bool closed = false;
};
GateState& gate() {
  static auto* g = new GateState();
  return *g;
}
thread_local int depth = 0;

enum class Verb : int { state, lock, checkpoint, restore, unlock };
struct Request {
  Verb verb;
  unsigned timeout_ms;
};
struct Reply {
  CUresult result;
  CUprocessState state;
};

sockaddr_un address_of(int pid, socklen_t* size) {
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  const std::string name = "pymux-sim-" + std::to_string(std::hash<std::string>()(device(0).dir)) + "-" +
                           std::to_string(pid);  // abstract: it goes with the process
  std::memcpy(a.sun_path + 1, name.data(), name.size());
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return a;
}

bool close_gate(unsigned timeout_ms) {
  auto& g = gate();
  std::unique_lock lock(g.m);
  g.closed = true;
  auto quiet = [&] { return g.inside == 0; };
  if (timeout_ms == 0) {
    g.cv.wait(lock, quiet);
    return true;
  }
  if (g.cv.wait_for(lock, std::chrono::milliseconds(timeout_ms), quiet)) return true;
  g.closed = false;
  g.cv.notify_all();
  return false;
}

void open_gate() {
  auto& g = gate();
  std::lock_guard lock(g.m);
  g.closed = false;
  g.cv.notify_all();
}

CUresult act(const Request& r, CUprocessState& state) {
  auto step = [&](CUprocessState from, CUprocessState to, auto work) {
    if (state != from) return CUDA_ERROR_ILLEGAL_STATE;
    const CUresult result = work();
    if (result == CUDA_SUCCESS) state = to;
    return result;
  };
  switch (r.verb) {
    case Verb::lock:
      return step(CU_PROCESS_STATE_RUNNING, CU_PROCESS_STATE_LOCKED,
                  [&] { return close_gate(r.timeout_ms) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; });
    case Verb::checkpoint:
      return step(CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_CHECKPOINTED, [] {
        synchronize_all();
        return park_memory();
      });
    case Verb::restore:
      return step(CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED, unpark_memory);
    case Verb::unlock:
      return step(CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING, [] {
        open_gate();
        return CUDA_SUCCESS;
      });
    default:
      return CUDA_SUCCESS;
  }
}

void answer(int listener) {
  CUprocessState state = CU_PROCESS_STATE_RUNNING;
  for (;;) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    Request r{};
    if (recv(fd, &r, sizeof r, 0) == sizeof r) {
      const CUresult result = act(r, state);
      const Reply reply{result, state};
      send(fd, &reply, sizeof reply, MSG_NOSIGNAL);
    }
    close(fd);
  }
}

// `call` is for injected faults, which are the caller's.
CUresult ask(const char* call, int pid, Request request, CUprocessState* state = nullptr) {
  if (CUresult r = enter(call, kInit)) return r;
  socklen_t size = 0;
  sockaddr_un a = address_of(pid, &size);
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  Reply reply{CUDA_ERROR_INVALID_VALUE, CU_PROCESS_STATE_RUNNING};  // no CUDA process has this pid
  if (connect(fd, reinterpret_cast<sockaddr*>(&a), size) == 0 &&
      (send(fd, &request, sizeof request, MSG_NOSIGNAL) != sizeof request ||
       recv(fd, &reply, sizeof reply, 0) != sizeof reply))
    reply.result = CUDA_ERROR_INVALID_VALUE;
  close(fd);
  if (state) *state = reply.state;
  return reply.result;
}

}  // namespace

Gate::Gate() : mine_(!is_fork() && depth++ == 0) {
  if (!mine_) return;
  auto& g = gate();
  std::unique_lock lock(g.m);
  g.cv.wait(lock, [&] { return !g.closed; });
  g.inside += 1;
}

Gate::~Gate() {
  if (is_fork()) return;
  depth -= 1;
  if (!mine_) return;
  auto& g = gate();
  std::lock_guard lock(g.m);
  g.inside -= 1;
  if (g.closed) g.cv.notify_all();
}

void answer_checkpoints() {
  socklen_t size = 0;
  sockaddr_un a = address_of(getpid(), &size);
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (bind(fd, reinterpret_cast<sockaddr*>(&a), size) != 0 || listen(fd, 8) != 0) {
    close(fd);
    return;  // it cannot be checkpointed, then
  }
  std::thread(answer, fd).detach();
}

}  // namespace sim

using namespace sim;

SIM_API CUresult CUDAAPI cuCheckpointProcessGetState(int pid, CUprocessState* state) {
  if (!state) return CUDA_ERROR_INVALID_VALUE;
  return ask("cuCheckpointProcessGetState", pid, {Verb::state, 0}, state);
}

SIM_API CUresult CUDAAPI cuCheckpointProcessLock(int pid, CUcheckpointLockArgs* args) {
  if (args && args->reserved0) return CUDA_ERROR_INVALID_VALUE;
  return ask("cuCheckpointProcessLock", pid, {Verb::lock, args ? args->timeoutMs : 0});
}

SIM_API CUresult CUDAAPI cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs* args) {
  if (args && args->customStorageInfo_out) return CUDA_ERROR_NOT_SUPPORTED;
  return ask("cuCheckpointProcessCheckpoint", pid, {Verb::checkpoint, 0});
}

SIM_API CUresult CUDAAPI cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs* args) {
  if (args && (args->customStorageInfo_out || args->gpuPairsCount)) return CUDA_ERROR_NOT_SUPPORTED;
  return ask("cuCheckpointProcessRestore", pid, {Verb::restore, 0});
}

SIM_API CUresult CUDAAPI cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs*) {
  return ask("cuCheckpointProcessUnlock", pid, {Verb::unlock, 0});
}
