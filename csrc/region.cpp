#include "region.h"

#include <algorithm>

#include "fault.h"

namespace pymux {
namespace {

constexpr std::size_t kLine = 128;  // ranges grow to lines of the device's memory
constexpr std::size_t kGap = 4096;  // a smaller gap is cheaper to copy than to skip

// Sorted, without overlap; those nearer than `gap` joined.
void normalize(std::vector<Range>& ranges, std::size_t gap) {
  std::sort(ranges.begin(), ranges.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
  std::size_t n = 0;
  for (const Range& r : ranges) {
    if (r.size == 0) continue;
    if (n > 0 && r.offset <= ranges[n - 1].offset + ranges[n - 1].size + gap) {
      ranges[n - 1].size = std::max(ranges[n - 1].size, r.offset + r.size - ranges[n - 1].offset);
    } else {
      ranges[n++] = r;
    }
  }
  ranges.resize(n);
}

bool covers(const std::vector<Range>& outer, const Range& r) {
  return std::any_of(outer.begin(), outer.end(),
                     [&](auto& o) { return o.offset <= r.offset && r.offset + r.size <= o.offset + o.size; });
}

}  // namespace

Region::Region(std::string name_, RegionOptions options, const Device& device, std::size_t page_size_)
    : name(std::move(name_)),
      on_evict(options.claim ? OnEvict::discard : options.on_evict),
      fingerprint(options.fingerprint),
      frozen(options.frozen),
      claim(options.claim),
      page_size(page_size_),
      // Addresses cost nothing: twice the device, so that memory runs out before they do.
      addresses((2 * device.total() + page_size_ - 1) / page_size_ * page_size_, page_size_),
      pages(addresses.size() / page_size_),
      arena_(addresses.size(), page_size_) {}

Region::~Region() { fault::forget(addresses.base()); }

std::int64_t Region::allocate(std::size_t bytes, std::uint32_t tag) {
  std::lock_guard lock(mutex_);
  const std::int64_t offset = arena_.allocate(bytes, tag);
  if (offset >= 0 && live_) {
    live_->push_back({static_cast<std::size_t>(offset), bytes});
    normalize(*live_, 0);
  }
  return offset;
}

bool Region::free(std::size_t offset, std::uint32_t tag) {
  std::lock_guard lock(mutex_);
  return arena_.free(offset, tag);
}

void Region::retag(std::uint32_t from, std::uint32_t to) {
  std::lock_guard lock(mutex_);
  arena_.retag(from, to);
}

void Region::mark_written(std::size_t page) {
  pages[page].mark_written();
  if (segment) segment->wrote(page);
}

bool Region::clean(std::size_t page) const { return segment ? segment->at(page).copied : pages[page].clean(); }

bool Region::allocated(std::size_t page) const {
  if (joined) return page < segment->used() && segment->at(page).where != Segment::Where::empty;
  std::lock_guard lock(mutex_);
  return arena_.any_live(page * page_size, page_size);
}

bool Region::live(std::size_t page) const {
  if (segment) return page < segment->used() && segment->at(page).where != Segment::Where::empty;
  std::lock_guard lock(mutex_);
  return arena_.any_live(page * page_size, page_size) && (!live_ || !pieces_locked(page).empty());
}

std::vector<Range> Region::pieces(std::size_t page) const {
  std::lock_guard lock(mutex_);
  return pieces_locked(page);
}

std::vector<Range> Region::pieces_locked(std::size_t page) const {
  if (!live_ || segment) return {{0, page_size}};
  const std::size_t begin = page * page_size, end = begin + page_size;
  std::vector<Range> out;
  auto it = std::lower_bound(live_->begin(), live_->end(), begin,
                             [](const Range& r, std::size_t at) { return r.offset + r.size <= at; });
  for (; it != live_->end() && it->offset < end; ++it) {
    const std::size_t from = std::max(it->offset, begin) / kLine * kLine;
    const std::size_t to = std::min((std::min(it->offset + it->size, end) + kLine - 1) / kLine * kLine, end);
    out.push_back({from - begin, to - from});
  }
  normalize(out, kGap);
  return out;
}

std::size_t Region::used_pages() const {
  if (joined) return segment->used();
  std::lock_guard lock(mutex_);
  return (arena_.extent() + page_size - 1) / page_size;
}

std::size_t Region::live_bytes() const {
  if (joined) return segment->used() * page_size;
  std::lock_guard lock(mutex_);
  return arena_.live_bytes();
}

std::vector<std::size_t> Region::set_live(std::optional<std::vector<Range>> ranges) {
  if (ranges) normalize(*ranges, 0);
  std::lock_guard lock(mutex_);
  const std::size_t used = (arena_.extent() + page_size - 1) / page_size;
  std::vector<std::vector<Range>> before(used);
  for (std::size_t i = 0; i < used; ++i) before[i] = pieces_locked(i);
  live_ = std::move(ranges);
  std::vector<std::size_t> grown;
  for (std::size_t i = 0; i < used; ++i) {
    const auto now = pieces_locked(i);
    if (!std::all_of(now.begin(), now.end(), [&](auto& r) { return covers(before[i], r); })) grown.push_back(i);
  }
  return grown;
}

}  // namespace pymux
