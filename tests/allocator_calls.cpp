// Calls the allocator's entry points as torch does: with C++ arguments, and catching what they throw.
#include <sys/types.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <utility>

using Pool = std::pair<unsigned long long, unsigned long long>;

extern "C" {

void* call_allocate(void* (*function)(ssize_t, int, void*), ssize_t size, int device, void* stream, char* error,
                    std::size_t room) {
  try {
    return function(size, device, stream);
  } catch (const std::exception& e) {
    std::snprintf(error, room, "%s", e.what());
    return nullptr;
  }
}

void call_begin_pool(void (*function)(int, Pool, std::function<bool(void*)>), unsigned long long id, void* stream) {
  function(0, {id, 0}, [stream](void* s) { return s == stream; });
}

void call_with_pool(void (*function)(int, Pool), unsigned long long id) { function(0, {id, 0}); }
}
