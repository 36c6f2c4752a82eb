#include "region.h"

#include "fault.h"

namespace pymux {

Region::Region(std::string name_, OnEvict on_evict_, const Device& device, std::size_t page_size_)
    : name(std::move(name_)),
      on_evict(on_evict_),
      page_size(page_size_),
      // Addresses cost nothing: twice the device, so that memory runs out before they do.
      addresses((2 * device.total() + page_size_ - 1) / page_size_ * page_size_, page_size_),
      pages(addresses.size() / page_size_),
      arena_(addresses.size()) {}

Region::~Region() { fault::forget(addresses.base()); }

std::int64_t Region::allocate(std::size_t bytes) {
  std::lock_guard lock(arena_mutex_);
  return arena_.allocate(bytes);
}

bool Region::free(std::size_t offset) {
  std::lock_guard lock(arena_mutex_);
  return arena_.free(offset);
}

bool Region::live(std::size_t page) const {
  std::lock_guard lock(arena_mutex_);
  return arena_.any_live(page * page_size, page_size);
}

std::size_t Region::used_pages() const {
  std::lock_guard lock(arena_mutex_);
  return (arena_.extent() + page_size - 1) / page_size;
}

std::size_t Region::live_bytes() const {
  std::lock_guard lock(arena_mutex_);
  return arena_.live_bytes();
}

}  // namespace pymux
