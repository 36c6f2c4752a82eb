#include "fault.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "error.h"

namespace pymux::fault {
namespace {

// Read by a signal handler: fixed places, a base published last, never moved.
struct Range {
  std::atomic<std::uintptr_t> base{0};
  std::atomic<std::size_t> size{0};
  char text[768] = {};
};
constexpr std::size_t kRanges = 1024;
Range* ranges = new Range[kRanges];
std::mutex ranges_mutex;  // guards writers, and `previous` at installation
bool installed = false;
struct sigaction previous[2];

std::atomic<bool> claimed{false};

void handler(int sig, siginfo_t* info, void* context) {
  // Several compute threads tend to fault at once: the first one speaks.
  if (claimed.exchange(true))
    for (;;) pause();
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (std::size_t i = 0; i < kRanges; ++i) {
    const std::uintptr_t base = ranges[i].base.load(std::memory_order_acquire);
    if (!base || at - base >= ranges[i].size.load(std::memory_order_relaxed)) continue;
    usleep(20'000);  // let the others arrive above, before what follows gives their faults a default
    [[maybe_unused]] auto n = ::write(2, ranges[i].text, std::strlen(ranges[i].text));
    break;
  }
  const struct sigaction& before = previous[sig == SIGBUS];
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(sig, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(sig);  // faulthandler: prints Python's traceback and raises again
  }
  // Nobody ended the process: the access repeats and does.
  sigaction(sig, &before, nullptr);
  claimed = false;
}

}  // namespace

void watch(CUdeviceptr base, std::size_t size, const std::string& job, const std::string& region, bool read_only) {
  std::lock_guard lock(ranges_mutex);
  if (!installed) {
    struct sigaction a{};
    a.sa_sigaction = handler;
    a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&a.sa_mask);
    sigaction(SIGSEGV, &a, &previous[0]);
    sigaction(SIGBUS, &a, &previous[1]);
    installed = true;
  }
  for (std::size_t i = 0; i < kRanges; ++i) {
    Range& r = ranges[i];
    if (r.base) continue;
    std::snprintf(r.text, sizeof r.text,
                  "\npymux: RegionNotResident: job '%s' touched region '%s' while its pages were not on the device. "
                  "Use the region's tensors inside 'with mux.phase(...)' with '%s' in uses=, or read them with "
                  "mux.to_host(tensor). PYMUX_CHECK=1 raises an exception at the line that did it.%s\n",
                  job.c_str(), region.c_str(), region.c_str(),
                  read_only ? " Or the access wrote it: it was opened to be read; open_shared(writable=True)." : "");
    r.size.store(size, std::memory_order_relaxed);
    r.base.store(base, std::memory_order_release);
    return;
  }
}

void forget(CUdeviceptr base) {
  std::lock_guard lock(ranges_mutex);
  for (std::size_t i = 0; i < kRanges; ++i)
    if (ranges[i].base == base) ranges[i].base = 0;
}

}  // namespace pymux::fault
