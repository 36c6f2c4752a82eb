#include "preloaded.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "error.h"
#include "served.h"
#include "torch_allocator.h"

namespace pymux {
namespace {

std::mutex mutex;  // guards what follows
std::map<int, Served>& all() {
  static auto* m = new std::map<int, Served>();  // by device; outlives the program's own statics
  return *m;
}

void say(const std::string& what) {
  static std::mutex one;
  static std::string last;
  std::lock_guard lock(one);
  if (what == std::exchange(last, what)) return;
  std::fprintf(stderr, "pymux run: %s\n", what.c_str());
}

void close_all() {
  if (Driver::lost()) return;
  std::vector<std::shared_ptr<Agent>> agents;
  {
    std::lock_guard lock(mutex);
    for (auto& [device, s] : all()) agents.push_back(s.agent);
  }
  for (auto& a : agents) a->close();
}

// PYMUX_RUN, as pymux/run.py writes it: a line for each setting.
AgentOptions options(int device, std::string& driver) {
  const char* text = std::getenv("PYMUX_RUN");
  if (!text) throw Error("ConfigError", "this process was not started by 'pymux run'.");
  AgentOptions o;
  o.device = device;
  o.client = "run." + std::to_string(getpid());
  if (device) o.client.append(".").append(std::to_string(device));
  o.group = o.client;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto at = line.find('=');
    const std::string key = line.substr(0, at), value = at == std::string::npos ? "" : line.substr(at + 1);
    if (key == "socket") o.socket = value;
    if (key == "driver") driver = value;
    if (key == "job") o.job = value;
    if (key == "spawn") o.spawn.push_back(value);
    if (key == "page_size") o.page_size = std::stoull(value);
    if (key == "pass_pages") o.pass_pages = value == "1";
  }
  return o;
}

}  // namespace

Served served_on(int device) {
  std::lock_guard lock(mutex);
  if (auto it = all().find(device); it != all().end()) return it->second;
  std::string driver;
  AgentOptions o = options(device, driver);
  Driver::load(driver);
  Served s;
  s.agent = std::make_shared<Agent>(std::move(o));
  s.region = s.agent->create_region("default", {});
  torch_allocator::add(s.region);
  if (all().empty()) std::atexit(close_all);
  return all()[device] = s;
}

}  // namespace pymux

using namespace pymux;

bool pymux_preload_start(const char* runtime_file, int runtime_version) {
  try {
    std::string choice;
    options(0, choice);
    const Driver& driver = Driver::load(choice);
    int version = 0;
    check(driver.cuDriverGetVersion(&version), "cuDriverGetVersion");
    if (runtime_version / 1000 <= version / 1000 && runtime_version >= 11000) return true;
    say(std::string(runtime_file) + " is CUDA " + std::to_string(runtime_version / 1000) + ", and " +
        (runtime_version < 11000 ? "pymux needs a program built for CUDA 11 or newer."
                                 : "the driver " + driver.path + " is of CUDA " + std::to_string(version / 1000) +
                                       ". Install a build for that, or a newer driver."));
  } catch (const std::exception& e) {
    say(e.what());
  }
  return false;
}

int pymux_preload_malloc(void** ptr, std::size_t bytes, int device) {
  try {
    if (Driver::lost()) throw forked_error();
    const Served s = served_on(device);
    if (!s.agent->active()) s.agent->enter_implicitly();
    *ptr = reinterpret_cast<void*>(s.agent->allocate(s.region, bytes));
    return PYMUX_PRELOAD_DONE;
  } catch (const Error& e) {
    say(e.what());
    return e.no_memory() ? PYMUX_PRELOAD_NO_MEMORY : PYMUX_PRELOAD_FAILED;
  } catch (const std::exception& e) {
    say(e.what());
    return PYMUX_PRELOAD_FAILED;
  }
}

int pymux_preload_free(void* ptr) {
  if (Driver::lost()) return PYMUX_PRELOAD_NOT_OURS;
  const auto at = reinterpret_cast<CUdeviceptr>(ptr);
  Served s;
  {
    std::lock_guard lock(mutex);
    for (auto& [device, known] : all())
      if (known.region->contains(at)) s = known;
  }
  if (!s.region) return PYMUX_PRELOAD_NOT_OURS;
  try {
    s.agent->device().synchronize();
  } catch (const Error& e) {
    say(e.what());
    return PYMUX_PRELOAD_FAILED;
  }
  return s.region->free(at - s.region->addresses.base()) ? PYMUX_PRELOAD_DONE : PYMUX_PRELOAD_FAILED;
}
