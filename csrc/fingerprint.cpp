#include "fingerprint.h"

#include <algorithm>

#include "driver.h"
#include "error.h"
#include "fingerprint_hash.h"
#include "vmm.h"

// The fatbin, or without nvcc four bytes that no driver of a GPU takes.
extern const unsigned char pymux_fingerprint_image[];

namespace pymux {
namespace {
const Driver& cu() { return *Driver::loaded(); }
constexpr unsigned kBlocks = 256, kThreads = 256;
constexpr std::size_t kBatch = 64;  // pages whose sums fit the buffer
}  // namespace

Fingerprinter::Fingerprinter() {
  if (cu().cuModuleLoadData(&module_, pymux_fingerprint_image) != CUDA_SUCCESS) {
    module_ = nullptr;
    return;
  }
  int least = 0;
  CUfunction f = nullptr;
  if (cu().cuModuleGetFunction(&f, module_, "pymux_fingerprint") == CUDA_SUCCESS &&
      cu().cuCtxGetStreamPriorityRange(&least, nullptr) == CUDA_SUCCESS &&
      cu().cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, least) == CUDA_SUCCESS &&
      cu().cuMemHostAlloc(&out_, kBatch * kBlocks * sizeof(Lanes), 0) == CUDA_SUCCESS)
    function_ = f;
}

Fingerprinter::~Fingerprinter() {
  if (out_) cu().cuMemFreeHost(out_);
  if (stream_) cu().cuStreamDestroy(stream_);
  if (module_) cu().cuModuleUnload(module_);
}

std::vector<Digest> Fingerprinter::digest(const std::vector<CUdeviceptr>& pages, std::size_t page_size) {
  std::vector<Digest> out(pages.size());
  auto* sums = static_cast<Lanes*>(out_);
  unsigned long long pairs = page_size / 16;
  for (std::size_t first = 0; first < pages.size(); first += kBatch) {
    const std::size_t n = std::min(kBatch, pages.size() - first);
    try {
      for (std::size_t i = 0; i < n; ++i) {
        CUdeviceptr page = pages[first + i];
        Lanes* to = sums + i * kBlocks;
        void* params[] = {&page, &pairs, &to};
        check(cu().cuLaunchKernel(function_, kBlocks, 1, 1, kThreads, 1, 1, 0, stream_, params, nullptr),
              "cuLaunchKernel", "fingerprint");
      }
    } catch (...) {
      if (cu().cuStreamSynchronize(stream_) != CUDA_SUCCESS) hold_releases();
      throw;
    }
    check(cu().cuStreamSynchronize(stream_), "cuStreamSynchronize", "fingerprint");
    for (std::size_t i = 0; i < n; ++i)
      for (unsigned b = 0; b < kBlocks; ++b) {
        out[first + i].a += sums[i * kBlocks + b].a;
        out[first + i].b += sums[i * kBlocks + b].b;
      }
  }
  return out;
}

}  // namespace pymux
