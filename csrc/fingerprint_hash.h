// The hash of a page's contents: 128 bit, the same in the kernel and in the simulated driver.
// What it is not: proof against somebody who wants a collision.
//
// Each 8-byte word is mixed with its position (splitmix64's finalizer: Steele, Lea, Flood, "Fast
// splittable pseudorandom number generators", OOPSLA 2014), and the results are summed in two lanes.
// Sums do not depend on the order, so that any number of threads may share a page.
#pragma once

#ifdef __CUDACC__
#define PYMUX_BOTH __host__ __device__
#else
#define PYMUX_BOTH
#endif

namespace pymux {

struct Lanes {
  unsigned long long a, b;
};

PYMUX_BOTH inline void absorb(Lanes& sum, unsigned long long word, unsigned long long index) {
  unsigned long long x = word ^ ((index + 1) * 0x9e3779b97f4a7c15ull);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  sum.a += x;
  sum.b += (x ^ (x >> 29)) * 0xd6e8feb86659fd93ull;
}

}  // namespace pymux
