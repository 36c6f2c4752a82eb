#include "error.h"

#include <cstdio>

#include "driver.h"

namespace pymux {

std::string hex(std::uint64_t v) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(v));
  return text;
}

namespace {
std::string describe(CUresult code, const char* call, const std::string& detail) {
  const char *name = nullptr, *words = nullptr;
  if (const Driver* d = Driver::loaded()) {
    d->cuGetErrorName(code, &name);
    d->cuGetErrorString(code, &words);
  }
  std::string out = std::string(call) + " failed: " + (name ? name : "error " + std::to_string(code));
  if (words) out += std::string(" (") + words + ")";
  if (!detail.empty()) out += "; " + detail;
  return out;
}
}  // namespace

CudaError::CudaError(CUresult code_, const char* call_, const std::string& detail)
    : Error(code_ == CUDA_ERROR_OUT_OF_MEMORY ? "DeviceOutOfMemory" : "CudaError", describe(code_, call_, detail)),
      code(code_),
      call(call_) {}

bool CudaError::sticky() const {
  switch (code) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
      return true;
    default:
      return false;
  }
}

Error forked_error() {
  return Error("LeaseError",
               "this process is a fork of the one that connected; CUDA does not survive fork. Use the 'spawn' start "
               "method and connect() in the child.");
}

void check(CUresult code, const char* call, const std::string& detail) {
  if (code != CUDA_SUCCESS) throw CudaError(code, call, detail);
}

}  // namespace pymux
