// A CUDA program as far as memory goes: does what its arguments say, and prints the results.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

extern "C" {
int cudaMalloc(void** ptr, std::size_t bytes);
int cudaFree(void* ptr);
int cudaMallocManaged(void** ptr, std::size_t bytes, unsigned flags);
int cudaMallocAsync(void** ptr, std::size_t bytes, void* stream);
extern int cudart_stub_calls;
}

int main(int argc, char** argv) {
  std::map<std::string, char*> blocks;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string what = argv[i], argument = argv[i + 1];
    const std::size_t mib = std::strtoul(argument.c_str(), nullptr, 10) << 20;
    void* p = nullptr;
    if (what == "malloc") {
      const int r = cudaMalloc(&p, mib);
      if (r == 0) std::memset(p, 7, mib), blocks[argument] = static_cast<char*>(p);
      std::printf("%d\n", r);
    } else if (what == "managed" || what == "async") {
      const int r = what == "managed" ? cudaMallocManaged(&p, mib, 1) : cudaMallocAsync(&p, mib, nullptr);
      std::printf("%d\n", r);
      blocks[what] = static_cast<char*>(p);
    } else if (what == "free") {
      std::printf("%d\n", cudaFree(blocks[argument]));
    } else if (what == "inside") {  // an address that was not handed out
      std::printf("%d\n", cudaFree(blocks[argument] + 4096));
    } else if (what == "real") {
      std::printf("%d\n", cudart_stub_calls);
    } else if (what == "wait") {
      std::fflush(stdout);
      std::getchar();
    }
  }
}
