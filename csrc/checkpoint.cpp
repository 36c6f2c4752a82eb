#include "checkpoint.h"

#include <cuda.h>

#include "driver.h"
#include "error.h"

namespace pymux::checkpoint {
namespace {

template <class F>
F need(F function) {
  if (function) return function;
  throw Error("DriverError", "the driver " + Driver::loaded()->path +
                                 " cannot checkpoint processes: that came with CUDA 12.8 (R570). Update it.");
}

const Driver& cu() {
  if (const Driver* d = Driver::loaded()) return *d;
  throw Error("DriverError", "no driver is loaded yet; call load_driver() first.");
}

std::string about(int pid) { return "process " + std::to_string(pid); }

}  // namespace

std::string state(int pid) {
  CUprocessState s{};
  check(need(cu().cuCheckpointProcessGetState)(pid, &s), "cuCheckpointProcessGetState", about(pid));
  switch (s) {
    case CU_PROCESS_STATE_RUNNING:
      return "running";
    case CU_PROCESS_STATE_LOCKED:
      return "locked";
    case CU_PROCESS_STATE_CHECKPOINTED:
      return "checkpointed";
    case CU_PROCESS_STATE_FAILED:
      return "failed";
    default:
      return "busy";
  }
}

void lock(int pid, unsigned timeout_ms) {
  CUcheckpointLockArgs args{};
  args.timeoutMs = timeout_ms;
  check(need(cu().cuCheckpointProcessLock)(pid, &args), "cuCheckpointProcessLock", about(pid));
}

void save(int pid) {
  check(need(cu().cuCheckpointProcessCheckpoint)(pid, nullptr), "cuCheckpointProcessCheckpoint", about(pid));
}

void restore(int pid) {
  check(need(cu().cuCheckpointProcessRestore)(pid, nullptr), "cuCheckpointProcessRestore", about(pid));
}

void unlock(int pid) {
  check(need(cu().cuCheckpointProcessUnlock)(pid, nullptr), "cuCheckpointProcessUnlock", about(pid));
}

}  // namespace pymux::checkpoint
