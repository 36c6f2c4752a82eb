#include "arena.h"

#include <algorithm>
#include <vector>

namespace pymux {

Arena::Arena(std::size_t size) { add_free(0, {size, 0}); }

void Arena::add_free(std::size_t offset, Free block) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + block.size && next->second.tag == block.tag) {
    block.size += next->second.size;
    drop_free(next++);
  }
  if (next != free_.begin()) {
    const auto prev = std::prev(next);
    if (prev->first + prev->second.size == offset && prev->second.tag == block.tag) {
      offset = prev->first;
      block.size += prev->second.size;
      drop_free(prev);
    }
  }
  free_[offset] = block;
  free_by_size_.insert({block.tag, block.size, offset});
}

void Arena::drop_free(std::map<std::size_t, Free>::iterator it) {
  free_by_size_.erase({it->second.tag, it->second.size, it->first});
  free_.erase(it);
}

std::int64_t Arena::allocate(std::size_t bytes, std::uint32_t tag) {
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  if (size < bytes) return -1;
  for (const std::uint32_t from : {tag, 0u}) {
    auto best = free_by_size_.lower_bound({from, size, 0});
    if (best == free_by_size_.end() || std::get<0>(*best) != from) continue;
    const auto [t, have, offset] = *best;
    drop_free(free_.find(offset));
    if (have > size) add_free(offset + size, {have - size, from});
    live_[offset] = size;
    live_bytes_ += size;
    return static_cast<std::int64_t>(offset);
  }
  return -1;
}

bool Arena::free(std::size_t offset, std::uint32_t tag) {
  auto it = live_.find(offset);
  if (it == live_.end()) return false;
  const std::size_t size = it->second;
  live_bytes_ -= size;
  live_.erase(it);
  add_free(offset, {size, tag});
  return true;
}

void Arena::retag(std::uint32_t from, std::uint32_t to) {
  std::vector<std::size_t> offsets;
  for (auto it = free_by_size_.lower_bound({from, 0, 0}); it != free_by_size_.end() && std::get<0>(*it) == from; ++it)
    offsets.push_back(std::get<2>(*it));
  for (const std::size_t offset : offsets) {
    const auto it = free_.find(offset);
    const std::size_t size = it->second.size;
    drop_free(it);
    add_free(offset, {size, to});
  }
}

bool Arena::any_live(std::size_t offset, std::size_t bytes) const {
  auto it = live_.lower_bound(offset + bytes);
  return it != live_.begin() && std::prev(it)->first + std::prev(it)->second > offset;
}

std::size_t Arena::extent() const { return live_.empty() ? 0 : live_.rbegin()->first + live_.rbegin()->second; }

}  // namespace pymux
