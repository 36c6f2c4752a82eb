// The driver table: every CUDA driver function that pymux calls, and nothing else.
// The only seam between pymux and what is behind it, a GPU or a simulation.
//
// Invariant: the table is complete (but for what is marked optional) or does not exist. pymux links no CUDA library.
#pragma once

#include <cuda.h>

#include <string>

namespace pymux {

// clang-format off: it never settles on a list like this
#define PYMUX_DRIVER_FUNCTIONS(X)                                                                  \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString)                            \
  X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceTotalMem)     \
  X(cuDeviceGetAttribute) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease)                 \
  X(cuCtxSetCurrent) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxSynchronize)                    \
  X(cuCtxGetStreamPriorityRange) X(cuStreamCreateWithPriority) X(cuStreamDestroy)                  \
  X(cuStreamSynchronize) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery)       \
  X(cuEventSynchronize) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemGetAllocationGranularity) \
  X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemCreate) X(cuMemRelease) X(cuMemMap)            \
  X(cuMemUnmap) X(cuMemSetAccess) X(cuMemExportToShareableHandle)                                  \
  X(cuMemImportFromShareableHandle) X(cuMemHostRegister) X(cuMemHostUnregister)                    \
  X(cuMemsetD8Async) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuModuleLoadData) X(cuModuleUnload)      \
  X(cuModuleGetFunction) X(cuLaunchKernel) X(cuThreadExchangeStreamCaptureMode)            \
  X(cuIpcGetEventHandle) X(cuIpcOpenEventHandle) X(cuStreamWaitEvent)
// What older drivers lack, and only checkpoint.cpp calls: null there.
#define PYMUX_DRIVER_OPTIONAL(X)                                                                   \
  X(cuCheckpointProcessGetState) X(cuCheckpointProcessLock) X(cuCheckpointProcessCheckpoint)       \
  X(cuCheckpointProcessRestore) X(cuCheckpointProcessUnlock)
// clang-format on

struct Driver {
#define X(name) decltype(&::name) name = nullptr;
  PYMUX_DRIVER_FUNCTIONS(X)
  PYMUX_DRIVER_OPTIONAL(X)
#undef X
  std::string path;

  // Loads the library once per process and calls cuInit. `choice`: "" for the machine's driver
  // where it has a device and the simulated one elsewhere, "sim", or the path of a library.
  // Throws DriverError naming the file and the missing function. Later calls return the same
  // table and refuse another choice.
  static const Driver& load(const std::string& choice);
  static const Driver* loaded();  // null before load()
  static bool lost();             // it was loaded, by a process that this one is a fork of
};

}  // namespace pymux
