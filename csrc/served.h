// The connection and the region of a device in a process that 'pymux run' started.
#pragma once

#include <memory>

#include "agent.h"

namespace pymux {

struct Served {
  std::shared_ptr<Agent> agent;
  std::shared_ptr<Region> region;
};

// Connects at the first call for a device. Throws as connecting does; ConfigError without 'pymux run'.
Served served_on(int device);

}  // namespace pymux
