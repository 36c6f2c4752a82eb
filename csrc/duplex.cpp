#include "duplex.h"

#include <algorithm>
#include <functional>

#include "error.h"
#include "pager.h"

namespace pymux {
namespace {
const Driver& cu() { return *Driver::loaded(); }
constexpr std::size_t kBytes = 16u << 20;  // each way; long against a call, short against a second
constexpr int kRepeats = 3;

struct Pinned {
  void* p = nullptr;
  explicit Pinned(std::size_t n) { check(cu().cuMemHostAlloc(&p, n, 0), "cuMemHostAlloc"); }
  ~Pinned() { cu().cuMemFreeHost(p); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
};

double best_of(const std::function<void()>& f) {
  double best = 1e9;
  for (int i = 0; i < kRepeats; ++i) {
    const double begin = now_seconds();
    f();
    best = std::min(best, now_seconds() - begin);
  }
  return best;
}
}  // namespace

LinkRates measure_link(const Device& device) {
  device.make_current();
  const std::size_t size = (kBytes + device.granularity() - 1) / device.granularity() * device.granularity();
  Reservation addresses(2 * size, device.granularity());
  Page pages[2] = {Page::create(device, size, false), Page::create(device, size, false)};
  Mapping maps[2] = {{addresses.base(), size, pages[0]}, {addresses.base() + size, size, pages[1]}};
  set_access(device, addresses.base(), 2 * size);
  Pinned host(2 * size);
  Stream out(Stream::Priority::lowest), in(Stream::Priority::lowest);
  auto* bytes = static_cast<char*>(host.p);
  auto go = [&](bool outward, bool inward) {
    if (outward)
      check(cu().cuMemcpyDtoHAsync(bytes, addresses.base(), size, out.get()), "cuMemcpyDtoHAsync", "calibration");
    if (inward)
      check(cu().cuMemcpyHtoDAsync(addresses.base() + size, bytes + size, size, in.get()), "cuMemcpyHtoDAsync",
            "calibration");
    out.synchronize();
    in.synchronize();
  };
  try {
    go(true, true);  // everything touched once
    const auto n = static_cast<double>(size);
    LinkRates r;
    r.out = n / best_of([&] { go(true, false); });
    r.in = n / best_of([&] { go(false, true); });
    r.both = 2 * n / best_of([&] { go(true, true); });
    return r;
  } catch (...) {
    out.quiesce();  // the memory must be quiet before it goes
    in.quiesce();
    throw;
  }
}

}  // namespace pymux
