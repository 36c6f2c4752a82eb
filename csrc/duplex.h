// Measures what this device gains from copies in both directions at once.
// What it is not: it decides nothing and stores nothing.
#pragma once

#include "vmm.h"

namespace pymux {

struct LinkRates {  // bytes per second
  double out = 0, in = 0, both = 0;
  // Whether both at once beat one after the other by enough to matter.
  bool gains() const { return both > 1.15 * 2 / (1 / out + 1 / in); }
};

// Copies for well under a second. Needs a few MiB of device memory; throws DeviceOutOfMemory, CudaError.
LinkRates measure_link(const Device& device);

}  // namespace pymux
