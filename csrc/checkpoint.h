// A whole process's device memory, by the driver's checkpoint calls; for processes that use no regions.
// What it is not: it has no lease; pymux/opaque.py takes one.
#pragma once

#include <string>

namespace pymux::checkpoint {

// All throw CudaError as the driver says, and DriverError where it has no such calls.
std::string state(int pid);               // running, locked, checkpointed, failed or busy
void lock(int pid, unsigned timeout_ms);  // running -> locked: its CUDA calls wait
void save(int pid);                       // locked -> checkpointed: its memory is in the host's
void restore(int pid);                    // checkpointed -> locked
void unlock(int pid);                     // locked -> running

}  // namespace pymux::checkpoint
