// One move-only owner per driver object. What it is not: it knows nothing of regions or leases.
//
// Invariants: a destructor never throws; an owner that was moved from owns nothing; explicit
// release calls throw. What a destructor could not give back is kept and tried again by
// retry_releases(), so that a driver call that fails once leaks nothing.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>
#include <utility>

#include "driver.h"
#include "fd.h"

namespace pymux {

// Tries again what destructors could not give back, once all work of the context is done; false when
// something is still left, and then no memory may be reused. Needs a current context.
bool retry_releases();
// Work that uses memory may still run, since waiting for it failed: destructors keep everything until
// retry_releases() has waited.
void hold_releases();

// A device and its primary context, which torch and the CUDA runtime use too.
class Device {
 public:
  // Throws DriverError for a bad ordinal or a device without virtual memory management.
  explicit Device(int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  const unsigned char* uuid() const { return uuid_; }
  std::size_t total() const { return total_; }
  std::size_t granularity() const { return granularity_; }
  bool can_export() const { return can_export_; }
  // Host code may touch device addresses directly.
  bool host_addressable() const { return host_addressable_; }
  int host_numa_node() const { return host_numa_node_; }  // nearest to the device; -1: none
  CUmemAllocationProp prop() const;
  // Creates, exports, imports and frees one allocation; throws what the driver says.
  void probe_export() const;
  // For a thread of our own: its calls do not end a capture (mode global) that another thread has begun.
  void make_current() const;
  void synchronize() const;  // all work of the context; from any thread
  template <class F>
  void in_context(F&& work) const {  // with the context current for so long, whatever the thread's is
    enter();
    try {
      work();
    } catch (...) {
      exit();
      throw;
    }
    exit();
  }

 private:
  int ordinal_ = 0;
  std::string name_;
  unsigned char uuid_[16] = {};
  std::size_t total_ = 0, granularity_ = 0;
  bool can_export_ = false, host_addressable_ = false;
  int host_numa_node_ = -1;
  void enter() const;
  static void exit();
  CUcontext context_ = nullptr;
};

// A physical allocation handle.
class Page {
 public:
  Page() = default;
  static Page create(const Device& device, std::size_t size, bool exportable);
  static Page import(const Fd& fd);
  Page(Page&& o) noexcept : handle_(std::exchange(o.handle_, 0)) {}
  Page& operator=(Page&& o) noexcept {
    std::swap(handle_, o.handle_);
    return *this;
  }
  ~Page();
  Fd export_fd() const;
  void release();
  CUmemGenericAllocationHandle get() const { return handle_; }
  explicit operator bool() const { return handle_ != 0; }

 private:
  explicit Page(CUmemGenericAllocationHandle h) : handle_(h) {}
  CUmemGenericAllocationHandle handle_ = 0;
};

// A range of device addresses without memory.
class Reservation {
 public:
  Reservation(std::size_t size, std::size_t alignment);
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  CUdeviceptr base() const { return base_; }
  std::size_t size() const { return size_; }

 private:
  CUdeviceptr base_ = 0;
  std::size_t size_ = 0;
};

// A page at an address. Access is granted for whole runs, by set_access().
class Mapping {
 public:
  Mapping() = default;
  Mapping(CUdeviceptr at, std::size_t size, const Page& page);
  Mapping(Mapping&& o) noexcept : at_(std::exchange(o.at_, 0)), size_(o.size_) {}
  Mapping& operator=(Mapping&& o) noexcept {
    std::swap(at_, o.at_);
    std::swap(size_, o.size_);
    return *this;
  }
  ~Mapping();
  void unmap();  // throws and keeps the mapping when the driver refuses
  explicit operator bool() const { return at_ != 0; }

 private:
  CUdeviceptr at_ = 0;
  std::size_t size_ = 0;
};

// read_only: where the driver knows such access; else it may be written too.
void set_access(const Device& device, CUdeviceptr at, std::size_t size, bool read_only = false);

class Stream {
 public:
  enum class Priority { lowest, highest };
  explicit Stream(Priority priority);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CUstream get() const { return stream_; }
  void synchronize() const;
  void quiesce() const;  // for error paths: waits, or else holds what may still be used

 private:
  CUstream stream_ = nullptr;
};

class Event {
 public:
  Event() = default;  // none
  static Event create();
  static Event create_interprocess();
  static Event open(const CUipcEventHandle& handle);  // of another process
  CUipcEventHandle ipc_handle() const;
  Event(Event&& o) noexcept : event_(std::exchange(o.event_, nullptr)) {}
  Event& operator=(Event&& o) noexcept {
    std::swap(event_, o.event_);
    return *this;
  }
  ~Event();
  void record(const Stream& stream) { record(stream.get()); }
  void record(CUstream stream);           // of others, such as torch's
  void make_wait(CUstream stream) const;  // what is submitted to it next comes after the last record()
  bool done() const;                      // also when asking fails: synchronize() then says why
  void synchronize() const;
  explicit operator bool() const { return event_ != nullptr; }

 private:
  CUevent event_ = nullptr;
};

}  // namespace pymux
