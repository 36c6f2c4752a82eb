#include "arena.h"

#include <algorithm>

namespace pymux {

Arena::Arena(std::size_t size) { add_free(0, size); }

void Arena::add_free(std::size_t offset, std::size_t size) {
  free_[offset] = size;
  free_by_size_.insert({size, offset});
}

void Arena::drop_free(std::map<std::size_t, std::size_t>::iterator it) {
  free_by_size_.erase({it->second, it->first});
  free_.erase(it);
}

std::int64_t Arena::allocate(std::size_t bytes) {
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  if (size < bytes) return -1;
  auto best = free_by_size_.lower_bound({size, 0});
  if (best == free_by_size_.end()) return -1;
  const auto [have, offset] = *best;
  drop_free(free_.find(offset));
  if (have > size) add_free(offset + size, have - size);
  live_[offset] = size;
  live_bytes_ += size;
  return static_cast<std::int64_t>(offset);
}

bool Arena::free(std::size_t offset) {
  auto it = live_.find(offset);
  if (it == live_.end()) return false;
  std::size_t size = it->second;
  live_bytes_ -= size;
  live_.erase(it);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    drop_free(next);
  }
  auto prev = free_.lower_bound(offset);
  if (prev != free_.begin() && std::prev(prev)->first + std::prev(prev)->second == offset) {
    prev = std::prev(prev);
    offset = prev->first;
    size += prev->second;
    drop_free(prev);
  }
  add_free(offset, size);
  return true;
}

bool Arena::any_live(std::size_t offset, std::size_t bytes) const {
  auto it = live_.lower_bound(offset + bytes);
  return it != live_.begin() && std::prev(it)->first + std::prev(it)->second > offset;
}

std::size_t Arena::extent() const { return live_.empty() ? 0 : live_.rbegin()->first + live_.rbegin()->second; }

}  // namespace pymux
