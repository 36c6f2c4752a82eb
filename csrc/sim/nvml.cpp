// The few NVML calls that the broker reads through nvidia-ml-py, over the simulated node.
// Signatures and structures are NVML's; its header does not come with the CUDA runtime wheel.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "sim.h"

using namespace sim;

namespace {

using nvmlReturn_t = int;
constexpr nvmlReturn_t kSuccess = 0, kUninitialized = 1, kInvalidArgument = 2, kNotFound = 6, kUnknown = 999;

struct Memory {
  unsigned long long total, free, used;
};

struct MemoryV2 {
  unsigned int version;
  unsigned long long total, reserved, free, used;
};

std::atomic<int> initialized{0};

std::string uuid_text(const unsigned char* b) {
  char text[48];
  std::snprintf(text, sizeof text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
  return text;
}

nvmlReturn_t give(const std::string& text, char* out, unsigned len) {
  if (!out) return kInvalidArgument;
  if (text.size() + 1 > len) return 7;  // NVML_ERROR_INSUFFICIENT_SIZE
  std::memcpy(out, text.c_str(), text.size() + 1);
  return kSuccess;
}

}  // namespace

SIM_API nvmlReturn_t nvmlInitWithFlags(unsigned) {
  if (open_node() != CUDA_SUCCESS) return kUnknown;
  initialized += 1;
  return kSuccess;
}
SIM_API nvmlReturn_t nvmlInit_v2() { return nvmlInitWithFlags(0); }

SIM_API nvmlReturn_t nvmlShutdown() {
  if (initialized == 0) return kUninitialized;
  initialized -= 1;
  return kSuccess;
}

SIM_API const char* nvmlErrorString(nvmlReturn_t r) {
  switch (r) {
    case kSuccess:
      return "The operation was successful";
    case kUninitialized:
      return "NVML was not first initialized with nvmlInit()";
    case kInvalidArgument:
      return "A supplied argument is invalid";
    case kNotFound:
      return "A query to find an object was unsuccessful";
    default:
      return "An internal driver error occurred";
  }
}

SIM_API nvmlReturn_t nvmlSystemGetDriverVersion(char* out, unsigned len) {
  return initialized ? give("pymux-sim", out, len) : kUninitialized;
}

SIM_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* out) {
  if (!initialized) return kUninitialized;
  if (!out) return kInvalidArgument;
  *out = static_cast<unsigned>(device_count());
  return kSuccess;
}

SIM_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, Device** out) {
  if (!initialized) return kUninitialized;
  if (!out || static_cast<int>(index) >= device_count()) return kInvalidArgument;
  *out = &device(static_cast<int>(index));
  return kSuccess;
}

SIM_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, Device** out) {
  if (!initialized) return kUninitialized;
  if (!uuid || !out) return kInvalidArgument;
  for (int i = 0; i < device_count(); ++i) {
    if (uuid_text(device(i).control->uuid) != uuid) continue;
    *out = &device(i);
    return kSuccess;
  }
  return kNotFound;
}

SIM_API nvmlReturn_t nvmlDeviceGetUUID(Device* dev, char* out, unsigned len) {
  if (!initialized) return kUninitialized;
  return dev ? give(uuid_text(dev->control->uuid), out, len) : kInvalidArgument;
}

SIM_API nvmlReturn_t nvmlDeviceGetName(Device* dev, char* out, unsigned len) {
  if (!initialized) return kUninitialized;
  return dev ? give("pymux simulated device " + std::to_string(dev->ordinal), out, len) : kInvalidArgument;
}

SIM_API nvmlReturn_t nvmlDeviceGetMemoryInfo(Device* dev, Memory* out) {
  if (!initialized) return kUninitialized;
  if (!dev || !out) return kInvalidArgument;
  out->total = dev->control->capacity;
  out->used = used_bytes(*dev);
  out->free = out->total - std::min(out->total, out->used);
  return kSuccess;
}

SIM_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(Device* dev, MemoryV2* out) {
  Memory m{};
  if (nvmlReturn_t r = nvmlDeviceGetMemoryInfo(dev, &m)) return r;
  if (!out) return kInvalidArgument;
  *out = {out->version, m.total, 0, m.free, m.used};
  return kSuccess;
}
