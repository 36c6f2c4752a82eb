// The loops of bench_arena.py: what torch does with an allocator, without Python in between.
#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

using Malloc = void* (*)(ssize_t, int, void*);
using Free = void (*)(void*, ssize_t, int, void*);

extern "C" {

// Allocates and frees blocks of a training step's sizes, which are cached by then; nanoseconds of each pair.
void pairs(Malloc allocate, Free release, const std::int64_t* sizes, std::size_t n, double* out, std::size_t rounds) {
  for (std::size_t i = 0; i < rounds; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t k = 0; k < n; ++k) release(allocate(sizes[k], 0, nullptr), sizes[k], 0, nullptr);
    out[i] = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() /
             static_cast<double>(n);
  }
}

// Random sizes (of `sizes`, or any from 512 bytes to 4 MiB, evenly by their logarithm) and lifetimes: at each step
// a block is allocated, and random ones are freed while more than `most` bytes are in use. `used` gets the peak of bytes in use, in blocks as they were asked for. Ends there, nearly.
void sweep(Malloc allocate, Free release, const std::int64_t* sizes, std::size_t n, std::size_t steps, std::size_t most,
           unsigned seed, std::uint64_t* used) {
  std::mt19937_64 rng(seed);
  std::uniform_real_distribution<double> exponent(9, 22);
  std::vector<std::pair<void*, std::size_t>> blocks;
  std::size_t now = 0;
  *used = 0;
  for (std::size_t i = 0; i < steps; ++i) {
    const auto size = static_cast<std::size_t>(n ? sizes[rng() % n] : static_cast<std::int64_t>(std::exp2(exponent(rng))));
    while (now + size > most) {
      auto& b = blocks[rng() % blocks.size()];
      release(b.first, static_cast<ssize_t>(b.second), 0, nullptr);
      now -= b.second;
      b = blocks.back();
      blocks.pop_back();
    }
    blocks.push_back({allocate(static_cast<ssize_t>(size), 0, nullptr), size});
    now += size;
    *used = std::max<std::uint64_t>(*used, now);
  }
}
}
