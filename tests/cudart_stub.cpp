// A stand-in for libcudart.so: what it allocates itself is host memory, which a test can tell by its count.
#include <cstdlib>

extern "C" {
int cudart_stub_calls = 0;

int cudaGetDevice(int* device) { return *device = 0; }
int cudaRuntimeGetVersion(int* version) {
  const char* said = std::getenv("STUB_VERSION");
  *version = said ? std::atoi(said) : 13000;
  return 0;
}
int cudaMalloc(void** ptr, std::size_t bytes) {
  cudart_stub_calls += 1;
  return bytes && !(*ptr = std::malloc(bytes));
}
int cudaFree(void* ptr) {
  cudart_stub_calls += ptr != nullptr;
  std::free(ptr);
  return 0;
}
int cudaMallocManaged(void** ptr, std::size_t bytes, unsigned) { return cudaMalloc(ptr, bytes); }
int cudaMallocAsync(void** ptr, std::size_t bytes, void*) { return cudaMalloc(ptr, bytes); }
}
