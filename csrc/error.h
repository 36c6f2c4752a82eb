// Errors that cross into Python: each names the class in pymux/errors.py that it becomes.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

namespace pymux {

struct Error : std::runtime_error {
  Error(const char* python_type, const std::string& what) : std::runtime_error(what), type(python_type) {}
  // The device, or what this process may have of it, is full.
  bool no_memory() const {
    return std::string_view(type) == "DeviceOutOfMemory" || std::string_view(type) == "CapacityError";
  }
  const char* type;         // a name in pymux/errors.py
  std::uint64_t need = 0;   // bytes, where figures belong to the error
  std::uint64_t limit = 0;  // bytes
};

struct CudaError : Error {
  CudaError(CUresult code, const char* call, const std::string& detail);
  CUresult code;
  std::string call;
  // The context is lost for good (illegal address, launch failure, ...): no call may be retried.
  bool sticky() const;
};

// What a fork of the process that connected is told, whatever it asks.
Error forked_error();

// Throws CudaError, or DeviceOutOfMemory when the driver said so.
void check(CUresult code, const char* call, const std::string& detail = "");

std::string hex(std::uint64_t v);

}  // namespace pymux
