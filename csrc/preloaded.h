// What 'pymux run' gives a program that knows nothing of pymux: a connection and a region for each device that
// it allocates on. A Mux of the same process is made over the same connection.
// What it is not: the interposed functions; those are preload.cpp's, in a library of their own.
#pragma once

#include <cstddef>

// Of the functions below; preload.cpp has nothing else of pymux.
enum { PYMUX_PRELOAD_DONE, PYMUX_PRELOAD_NO_MEMORY, PYMUX_PRELOAD_FAILED, PYMUX_PRELOAD_NOT_OURS };

extern "C" {
// Once, before the others. False, and said on stderr: this CUDA runtime cannot be served.
__attribute__((visibility("default"))) bool pymux_preload_start(const char* runtime_file, int runtime_version);
// What goes wrong is said on stderr.
__attribute__((visibility("default"))) int pymux_preload_malloc(void** ptr, std::size_t bytes, int device);
// As cudaFree: once the device's work is done.
__attribute__((visibility("default"))) int pymux_preload_free(void* ptr);
}
