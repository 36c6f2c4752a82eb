#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "error.h"

namespace pymux {
namespace {

constexpr std::uint32_t kMagic = 0x70'78'73'32;  // also the layout's version
constexpr std::size_t kSocketBytes = 108;

bool lock_byte(const Fd& fd, unsigned byte, short type) {
  struct flock l{};
  l.l_type = type;
  l.l_whence = SEEK_SET;
  l.l_start = static_cast<off_t>(byte);
  l.l_len = 1;
  return fcntl(fd.get(), F_OFD_SETLK, &l) == 0;
}

// Locks belong to an open description; a descriptor that was passed shares its sender's.
Fd reopen(const Fd& fd) { return Fd(open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDWR | O_CLOEXEC)); }

[[noreturn]] void fail(const std::string& what) { throw Error("RegionError", what); }

std::size_t row_words(std::size_t pages) { return (pages + 63) / 64; }

std::size_t file_bytes(const Fd& fd) { return static_cast<std::size_t>(lseek(fd.get(), 0, SEEK_END)); }

}  // namespace

// A bit for each member.
struct Mask {
  std::atomic<std::uint64_t> word[Segment::kMembers / 64];
  bool has(unsigned member) const { return word[member / 64].load() >> (member % 64) & 1; }
  void set(unsigned member, bool on) {
    if (has(member) == on) return;
    const std::uint64_t bit = std::uint64_t{1} << (member % 64);
    on ? word[member / 64].fetch_or(bit) : word[member / 64].fetch_and(~bit);
  }
  // The first member of at least `from` that is not `but`, or -1.
  int first(unsigned from, unsigned but) const {
    for (unsigned i = from / 64; i < Segment::kMembers / 64; ++i) {
      std::uint64_t left = word[i].load();
      if (i == from / 64) left &= ~std::uint64_t{0} << (from % 64);
      if (i == but / 64) left &= ~(std::uint64_t{1} << (but % 64));
      if (left) return static_cast<int>(i * 64) + __builtin_ctzll(left);
    }
    return -1;
  }
};

struct Segment::Header {
  std::uint32_t magic;
  std::uint32_t page_size;
  std::uint64_t pages;
  std::uint8_t uuid[16], id[16];
  char name[256];
  std::atomic<std::uint64_t> used;
  Mask wanted, using_it, members;
  std::atomic<std::uint64_t> joins;
  std::atomic<std::uint64_t> published;  // generation << 16 | member
  std::uint64_t meta_bytes[2];           // of odd and even generations
  struct Member {
    char socket[kSocketBytes];
    std::uint64_t joined;
    CUipcEventHandle event;
  } member[kMembers];
};

Segment::Word Segment::unpack(std::uint64_t w) {
  return {static_cast<Where>(w & 7), (w >> 3 & 1) != 0, static_cast<std::uint16_t>(w >> 16),
          static_cast<std::uint16_t>(w >> 32)};
}

std::uint64_t Segment::pack(const Word& w) {
  return static_cast<std::uint64_t>(w.where) | std::uint64_t{w.copied} << 3 | std::uint64_t{w.carrier} << 16 |
         std::uint64_t{w.epoch} << 32;
}

// Applies f to a page's word until nobody comes between; f says false where there is nothing to change.
template <class F>
bool Segment::change(std::size_t page, F&& f) {
  std::uint64_t seen = words_[page].load();
  for (;;) {
    Word w = unpack(seen);
    if (!f(w)) return false;
    if (words_[page].compare_exchange_weak(seen, pack(w))) return true;
  }
}

// ---- life ----------------------------------------------------------------------------------

Segment::Segment(const Device& device, Fd control, Fd memory)
    : control_(reopen(control)), probe_(reopen(control)), memory_(std::move(memory)) {
  // A mapping keeps its description open, in a forked child too: it must not be the one with our lock.
  const Fd mapped = reopen(control);
  if (!control_ || !probe_ || !mapped)
    fail("the shared region's control file cannot be opened again: is /proc mounted?");
  control_bytes_ = file_bytes(control_);
  memory_bytes_ = file_bytes(memory_);
  void* p = mmap(nullptr, control_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, mapped.get(), 0);
  void* q = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory_.get(), 0);
  if (p == MAP_FAILED || q == MAP_FAILED) fail("no addresses are left for the shared region's host memory.");
  madvise(q, memory_bytes_, MADV_DONTFORK);
  plain_ = static_cast<char*>(q);
  header_ = static_cast<Header*>(p);
  words_ = reinterpret_cast<std::atomic<std::uint64_t>*>(header_ + 1);
  if (header_->magic == 0) return;  // a new one
  if (header_->magic != kMagic) fail("the shared region was made by another version of pymux.");
  if (std::memcmp(header_->uuid, device.uuid(), sizeof header_->uuid) != 0)
    fail("region '" + name() + "' is on another device. Sharing is between processes on the same one.");
  lay_out();
}

void Segment::lay_out() {
  row_words_ = row_words(header_->pages);
  rows_ = words_ + header_->pages;
  meta_ = reinterpret_cast<char*>(rows_ + kMembers * row_words_);
}

std::shared_ptr<Segment> Segment::create(const Device& device, const std::string& name, std::size_t page_size,
                                         std::size_t pages, const std::string& socket) {
  Fd control(memfd_create("pymux-share", MFD_CLOEXEC)), memory(memfd_create("pymux-shared-backing", MFD_CLOEXEC));
  constexpr std::size_t chunk = Backing::kSlotsPerChunk;
  const std::size_t slots = (pages + chunk - 1) / chunk * chunk;
  const std::size_t words = pages + kMembers * row_words(pages);
  const std::size_t bytes = sizeof(Header) + words * sizeof(std::uint64_t) + 2 * kMetaBytes;
  if (!control || !memory || ftruncate(control.get(), static_cast<off_t>(bytes)) != 0 ||
      ftruncate(memory.get(), static_cast<off_t>(slots * page_size)) != 0)
    fail("no shared memory can be had for region '" + name + "': " + std::strerror(errno) + ".");
  std::shared_ptr<Segment> s(new Segment(device, std::move(control), std::move(memory)));
  Header& h = *s->header_;
  h.page_size = static_cast<std::uint32_t>(page_size);
  h.pages = pages;
  std::memcpy(h.uuid, device.uuid(), sizeof h.uuid);
  if (getrandom(h.id, sizeof h.id, 0) != sizeof h.id) fail("the system gives no random numbers.");
  std::memcpy(h.name, name.data(), std::min(name.size(), sizeof h.name - 1));
  s->lay_out();
  h.magic = kMagic;
  s->take_place(socket);
  return s;
}

std::shared_ptr<Segment> Segment::join(const Device& device, std::size_t page_size, Fd control, Fd memory,
                                       const std::string& socket) {
  std::shared_ptr<Segment> s(new Segment(device, std::move(control), std::move(memory)));
  if (s->header_->page_size != page_size)
    fail("region '" + s->name() + "' has pages of " + std::to_string(s->header_->page_size) +
         " bytes and this process of " + std::to_string(page_size) + ". Set the same PYMUX_PAGE_SIZE for both.");
  s->take_place(socket);
  return s;
}

// The lock on a place is what keeps it; whoever has it first clears what a predecessor left.
void Segment::take_place(const std::string& socket) {
  unsigned i = 0;
  while (i < kMembers && !lock_byte(control_, i, F_WRLCK)) ++i;
  if (i == kMembers)
    fail("region '" + name() + "' is shared by " + std::to_string(kMembers) +
         " processes already, the most there can be. Close it in some of them, or share a second region.");
  self_ = i;
  member_ = true;
  bury(i);
  auto& m = header_->member[i];
  std::memset(m.socket, 0, sizeof m.socket);
  std::memcpy(m.socket, socket.data(), std::min(socket.size(), sizeof m.socket - 1));
  m.joined = header_->joins.fetch_add(1) + 1;
  std::memset(&m.event, 0, sizeof m.event);
  header_->members.set(i, true);
}

void Segment::resign() {
  backing_.reset();
  if (plain_) munmap(std::exchange(plain_, nullptr), memory_bytes_);
  if (!std::exchange(member_, false)) return;
  bury(self_);
  lock_byte(control_, self_, F_UNLCK);
}

Segment::~Segment() {
  resign();
  munmap(header_, control_bytes_);
}

std::string Segment::id() const {
  static constexpr char digits[] = "0123456789abcdef";
  std::string out;
  for (std::uint8_t b : header_->id) out += {digits[b >> 4], digits[b & 15]};
  return out;
}

std::string Segment::name() const { return std::string(header_->name, strnlen(header_->name, sizeof header_->name)); }

std::string Segment::socket_of(unsigned member) const {
  const auto& m = header_->member[member % kMembers];
  return std::string(m.socket, strnlen(m.socket, sizeof m.socket));
}

std::size_t Segment::used() const { return std::min(header_->used.load(), header_->pages); }

void Segment::grow(std::size_t pages) {
  std::uint64_t now = header_->used;
  while (now < pages && !header_->used.compare_exchange_weak(now, pages)) {
  }
}

// ---- pages ---------------------------------------------------------------------------------

// Sets or clears a member's bit of a page; whether it was set before.
bool Segment::set_bit(unsigned member, std::size_t page, bool on) {
  const std::uint64_t bit = std::uint64_t{1} << (page % 64);
  auto& word = row(member)[page / 64];
  return ((on ? word.fetch_or(bit) : word.fetch_and(~bit)) & bit) != 0;
}

int Segment::first_other_holder(std::size_t page, int from) const {
  for (int m = from; (m = header_->members.first(static_cast<unsigned>(m + 1), self_)) >= 0;)
    if (holds(static_cast<unsigned>(m), page)) return m;
  return -1;
}

std::vector<unsigned> Segment::other_holders(std::size_t page) const {
  std::vector<unsigned> out;
  for (int m = -1; (m = first_other_holder(page, m)) >= 0;) out.push_back(static_cast<unsigned>(m));
  return out;
}

bool Segment::hold(std::size_t page, Word& seen) {
  const bool before = set_bit(self_, page, true);
  seen = at(page);
  if (seen.where == Where::device) return true;
  if (!before) set_bit(self_, page, false);
  return false;
}

void Segment::drop(std::size_t page) { set_bit(self_, page, false); }

bool Segment::claim(std::size_t page) {
  return change(page, [&](Word& w) {
    if (w.where != Where::host && w.where != Where::empty) return false;
    w.where = Where::arriving;
    w.carrier = static_cast<std::uint16_t>(self_);
    return true;
  });
}

void Segment::unclaim(std::size_t page) {
  change(page, [&](Word& w) {
    w.where = w.copied ? Where::host : Where::empty;
    return true;
  });
}

void Segment::arrived(std::size_t page) {
  set_bit(self_, page, true);
  change(page, [&](Word& w) {
    w.where = Where::device;
    w.epoch += 1;
    return true;
  });
}

void Segment::place(std::size_t page) {
  set_bit(self_, page, true);
  words_[page] = pack({Where::device, false, static_cast<std::uint16_t>(self_), 1});
}

bool Segment::begin_leave(std::size_t page) {
  return change(page, [&](Word& w) {
    if (w.where != Where::device || w.carrier != self_) return false;
    w.where = Where::leaving;
    return true;
  });
}

void Segment::abort_leave(std::size_t page, int carrier) {
  const auto own = static_cast<std::uint16_t>(self_);
  const auto next =
      carrier >= 0 && holds(static_cast<unsigned>(carrier), page) ? static_cast<std::uint16_t>(carrier) : own;
  change(page, [&](Word& w) {
    w.where = Where::device;
    w.carrier = next;
    return true;
  });
  if (next == own || holds(next, page)) return;
  change(page, [&](Word& w) {  // it has let go of it meanwhile
    if (w.where != Where::device || w.carrier != next) return false;
    w.carrier = own;
    return true;
  });
}

void Segment::departed(std::size_t page) {
  set_bit(self_, page, false);
  change(page, [](Word& w) {
    w.where = Where::host;
    w.copied = true;
    return true;
  });
}

void Segment::hand_over(std::size_t page) {
  set_bit(self_, page, false);
  pass_on(page, self_);
}

// Of a page on the device whose carrier `from` does not hold it any more: a holder is the carrier, or else its
// contents are where its copy is.
void Segment::pass_on(std::size_t page, unsigned from) {
  for (;;) {
    // Nobody may begin to hold it while the holders are looked at.
    if (!change(page, [&](Word& w) {
          if (w.carrier != from || (w.where != Where::device && w.where != Where::leaving)) return false;
          w.where = Where::leaving;
          return true;
        }))
      return;
    const int heir = holds(self_, page) ? static_cast<int>(self_) : first_other_holder(page);
    change(page, [&](Word& w) {
      if (w.carrier != from || w.where != Where::leaving) return false;
      if (heir < 0) {
        w.where = w.copied ? Where::host : Where::lost;
      } else {
        w.where = Where::device;
        w.carrier = static_cast<std::uint16_t>(heir);
      }
      return true;
    });
    if (heir < 0 || holds(static_cast<unsigned>(heir), page)) return;
    if (!change(page, [&](Word& w) {  // it has let go of it meanwhile, and did not know that it was the carrier
          if (w.where != Where::device || w.carrier != heir) return false;
          w.carrier = static_cast<std::uint16_t>(from);
          return true;
        }))
      return;
  }
}

void Segment::wrote(std::size_t page) {
  change(page, [](Word& w) {
    if (!w.copied) return false;
    w.copied = false;
    return true;
  });
}

void Segment::set_wish(Wish wish) {
  header_->wanted.set(self_, wish == Wish::waits);
  header_->using_it.set(self_, wish == Wish::uses);
}

Segment::Wish Segment::wish_of_others() const {
  if (header_->using_it.first(0, self_) >= 0) return Wish::uses;
  return header_->wanted.first(0, self_) >= 0 ? Wish::waits : Wish::none;
}

// ---- members -------------------------------------------------------------------------------

void Segment::bury_dead() {
  for (int m = -1; (m = header_->members.first(static_cast<unsigned>(m + 1), self_)) >= 0;) {
    const auto member = static_cast<unsigned>(m);
    if (!lock_byte(probe_, member, F_WRLCK)) continue;
    bury(member);
    lock_byte(probe_, member, F_UNLCK);
  }
}

// The caller has the lock of the place. It is in the list to the last, for who buries may die too.
void Segment::bury(unsigned member) {
  header_->wanted.set(member, false);
  header_->using_it.set(member, false);
  for (std::size_t i = 0, n = used(); i < n; ++i) {
    set_bit(member, i, false);
    change(i, [&](Word& w) {
      if (w.carrier != member || w.where != Where::arriving) return false;
      w.where = w.copied ? Where::host : Where::empty;
      return true;
    });
    pass_on(i, member);
  }
  header_->members.set(member, false);
}

bool Segment::alone() const { return header_->members.first(0, self_) < 0; }

// ---- host memory ---------------------------------------------------------------------------

void Segment::start_backing(const Device& device, std::function<void()> grown) {
  Fd again = reopen(memory_);
  if (!again) fail("the shared region's host memory cannot be opened again.");
  backing_ = std::make_unique<Backing>(device, header_->page_size, std::move(grown), std::move(again),
                                       memory_bytes_ / header_->page_size);
}

char* Segment::address(std::size_t page) const {
  if (backing_->there(page)) return backing_->address(static_cast<std::int64_t>(page));
  return plain_ + page * header_->page_size;
}

// ---- generations ---------------------------------------------------------------------------

std::uint64_t Segment::generation() const { return header_->published >> 16; }

void Segment::publish(const std::string& meta) {
  if (meta.size() > kMetaBytes)
    fail("what describes the tensors of region '" + name() + "' has " + std::to_string(meta.size()) +
         " bytes; there is room for " + std::to_string(kMetaBytes) + ". Share fewer tensors with shorter names.");
  const std::uint64_t next = generation() + 1;
  std::memcpy(meta_ + (next & 1) * kMetaBytes, meta.data(), meta.size());
  header_->meta_bytes[next & 1] = meta.size();
  header_->published = next << 16 | self_;
}

Segment::Published Segment::published() const {
  for (;;) {
    Published p{generation(), {}};
    const std::size_t area = p.generation & 1;
    p.meta.assign(meta_ + area * kMetaBytes, std::min<std::size_t>(header_->meta_bytes[area], kMetaBytes));
    // The other area is written for the next generation, this one again only for the one after it.
    if (generation() <= p.generation + 1) return p;
  }
}

void Segment::record(const Device& device, CUstream stream) {
  device.in_context([&] {
    if (!event_) {
      event_ = Event::create_interprocess();
      header_->member[self_].event = event_.ipc_handle();
    }
    event_.record(stream);
  });
}

void Segment::wait_published(const Device& device, CUstream stream) {
  const unsigned member = static_cast<unsigned>(header_->published & 0xffff);
  if (generation() == 0 || member >= kMembers) return;
  device.in_context([&] {
    if (member == self_) {
      if (event_) event_.make_wait(stream);
      return;
    }
    Opened& o = opened_[member];
    const auto& m = header_->member[member];
    if (!header_->members.has(member)) return;  // its work ended with it
    if (o.joined != m.joined) {
      o.event = Event::open(m.event);
      o.joined = m.joined;
    }
    o.event.make_wait(stream);
  });
}

}  // namespace pymux
