#include "arena.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace pymux {
namespace {

constexpr int kTries = 16;  // with free blocks of the wanted class, which may be too small

// Two for each power of two, the measured middle: more of them pack large ranges better, fewer small ones.
std::size_t class_of(std::size_t bytes) {
  const auto power = static_cast<std::size_t>(std::bit_width(bytes)) - 1;
  return 2 * power + (2 * bytes >> power) % 2;
}

}  // namespace

Arena::Arena(std::size_t size, std::size_t page_size) : page_size_(page_size) { add_free(0, {size, 0}); }

std::size_t Arena::edge(std::size_t offset, std::size_t size) const {
  const std::size_t whole = (offset + page_size_ - 1) / page_size_ * page_size_;
  return whole + page_size_ <= offset + size ? whole - offset : size;
}

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
  if (const std::size_t e = edge(offset, block.size)) edges_.insert({block.tag, class_of(e), offset});
}

void Arena::drop_free(std::map<std::size_t, Free>::iterator it) {
  free_by_size_.erase({it->second.tag, it->second.size, it->first});
  if (const std::size_t e = edge(it->first, it->second.size)) edges_.erase({it->second.tag, class_of(e), it->first});
  free_.erase(it);
}

Arena::FreeMap::iterator Arena::find_edge(std::size_t size, std::uint32_t tag) {
  auto e = edges_.lower_bound({tag, class_of(size), 0});
  for (int tries = kTries; e != edges_.end() && std::get<0>(*e) == tag; ++e) {
    const auto it = free_.find(std::get<2>(*e));
    if (edge(it->first, it->second.size) >= size) return it;
    if (--tries == 0) e = std::prev(edges_.lower_bound({tag, class_of(size) + 1, 0}));  // there every one fits
  }
  return free_.end();
}

Arena::FreeMap::iterator Arena::find_fit(std::size_t size, std::uint32_t tag) {
  const auto best = free_by_size_.lower_bound({tag, size, 0});
  return best == free_by_size_.end() || std::get<0>(*best) != tag ? free_.end() : free_.find(std::get<2>(*best));
}

std::int64_t Arena::allocate(std::size_t bytes, std::uint32_t tag) {
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  if (size < bytes) return -1;
  auto it = free_.end();
  if (size < page_size_) {
    it = find_edge(size, tag);
    if (it == free_.end()) it = find_edge(size, 0);
  }
  if (it == free_.end()) it = find_fit(size, tag);
  if (it == free_.end()) it = find_fit(size, 0);
  if (it == free_.end()) return -1;
  const auto [offset, block] = *it;
  drop_free(it);
  if (block.size > size) add_free(offset + size, {block.size - size, block.tag});
  live_[offset] = size;
  live_bytes_ += size;
  return static_cast<std::int64_t>(offset);
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
