// The fingerprint kernel: each block sums its share of a page and writes it to out[block].
// Compiled to a fatbin and embedded where nvcc is there; reads at memory bandwidth.
#include "fingerprint_hash.h"

extern "C" __global__ void pymux_fingerprint(const ulonglong2* page, unsigned long long pairs, pymux::Lanes* out) {
  pymux::Lanes sum{0, 0};
  const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs;
       i += step) {
    const ulonglong2 v = page[i];
    pymux::absorb(sum, v.x, 2 * i);
    pymux::absorb(sum, v.y, 2 * i + 1);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    sum.a += __shfl_down_sync(0xffffffffu, sum.a, offset);
    sum.b += __shfl_down_sync(0xffffffffu, sum.b, offset);
  }
  __shared__ pymux::Lanes warps[32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned w = 1; w < blockDim.x / 32; ++w) {
    sum.a += warps[w].a;
    sum.b += warps[w].b;
  }
  out[blockIdx.x] = sum;
}
