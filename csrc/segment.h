// What the processes that share a region have in common: where each page is and who maps it, host memory
// for those that are out, and what was published. In shared memory, changed without locks.
// What it is not: it maps no device memory, sends nothing and decides nothing (agent_share.cpp does).
//
// Invariants: a page's contents are on the device as long as any holder's bit is set, so that a holder may
// use what it has mapped without asking; the carrier is the holder whose pages the broker counts. Who begins to
// hold sets its bit and then looks where the page is; who puts a page out marks it leaving and then looks at the
// bits: at least one of the two sees the other. A member is alive while it holds the lock on its byte of the
// control file, which the kernel drops with the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backing.h"
#include "vmm.h"

namespace pymux {

class Segment {
 public:
  static constexpr unsigned kMembers = 1024;
  static constexpr std::size_t kMetaBytes = 4u << 20;  // of what describes a generation

  enum class Where : std::uint8_t { empty, device, host, arriving, leaving, lost };
  struct Word {
    Where where = Where::empty;
    bool copied = false;        // host memory has the contents
    std::uint16_t carrier = 0;  // member
    std::uint16_t epoch = 0;    // counts arrivals on the device
  };

  // A new one with this process as its first member, reached at `socket`. Throws RegionError.
  static std::shared_ptr<Segment> create(const Device& device, const std::string& name, std::size_t page_size,
                                         std::size_t pages, const std::string& socket);
  // Joins one. Throws RegionError: another device or page size, or no place left.
  static std::shared_ptr<Segment> join(const Device& device, std::size_t page_size, Fd control, Fd memory,
                                       const std::string& socket);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Not a member any more: nothing of it may be mapped here. What is told of the segment stays readable.
  void resign();

  std::string id() const;  // 32 hex digits
  std::string name() const;
  unsigned self() const { return self_; }
  // For another process; it has no lock of ours.
  const Fd& control() const { return probe_; }
  const Fd& memory() const { return memory_; }
  std::string socket_of(unsigned member) const;

  Word at(std::size_t page) const { return unpack(words_[page].load()); }
  // Holders: the members that map the page, or are about to.
  bool holds(unsigned member, std::size_t page) const { return row(member)[page / 64].load() >> (page % 64) & 1; }
  std::vector<unsigned> other_holders(std::size_t page) const;
  bool held_by_others(std::size_t page) const { return first_other_holder(page) >= 0; }
  // The pages that have been in use, from the first.
  std::size_t used() const;
  void grow(std::size_t pages);

  // Transitions; false (and nothing changed) where the page is not as they need it.
  bool hold(std::size_t page, Word& seen);               // we may map a page that is on the device
  void drop(std::size_t page);                           // we do not map it (any more)
  bool claim(std::size_t page);                          // we bring it in
  void unclaim(std::size_t page);                        // which failed
  void arrived(std::size_t page);                        // it is on the device and ours
  bool begin_leave(std::size_t page);                    // we are the carrier, and want it out
  void abort_leave(std::size_t page, int carrier = -1);  // carrier: a holder that is to be it from now on
  void departed(std::size_t page);                       // it is in host memory alone
  void hand_over(std::size_t page);  // we are leaving: another holder is the carrier, if there is one
  void wrote(std::size_t page);      // host memory does not have what it holds
  void place(std::size_t page);      // at creation: on the device, ours

  // What members' phases do with the segment. Only what is tried goes by it: holders are protected anyway.
  enum class Wish { none, waits, uses };
  void set_wish(Wish wish);
  Wish wish_of_others() const;  // the strongest

  bool alone() const;  // no other member is there, as far as known
  // Takes the dead out: what they mapped, and what they carried goes to a holder that lives.
  void bury_dead();

  // Host memory of a page: pinned where this process has pinned it, else plain.
  char* address(std::size_t page) const;
  Backing& backing() { return *backing_; }
  void start_backing(const Device& device, std::function<void()> grown);

  // What the latest publish() said: its generation from 1, and a description.
  struct Published {
    std::uint64_t generation = 0;
    std::string meta;
  };
  // Throws RegionError when the description is too long.
  void publish(const std::string& meta);
  Published published() const;
  std::uint64_t generation() const;
  // For readers in other processes, to wait for the writer's work.
  void record(const Device& device, CUstream stream);
  void wait_published(const Device& device, CUstream stream);

 private:
  struct Header;
  void lay_out();
  Segment(const Device& device, Fd control, Fd memory);
  void take_place(const std::string& socket);
  void bury(unsigned member);
  void pass_on(std::size_t page, unsigned from);
  int first_other_holder(std::size_t page, int from = -1) const;
  std::atomic<std::uint64_t>* row(unsigned member) const { return rows_ + member * row_words_; }
  bool set_bit(unsigned member, std::size_t page, bool on);
  static Word unpack(std::uint64_t w);
  static std::uint64_t pack(const Word& w);
  template <class F>
  bool change(std::size_t page, F&& f);

  Fd control_, probe_, memory_;
  Header* header_ = nullptr;
  std::atomic<std::uint64_t>* words_ = nullptr;  // a Word for each page
  std::atomic<std::uint64_t>* rows_ = nullptr;   // and a bit, for each member
  std::size_t row_words_ = 0;
  char* meta_ = nullptr;
  std::size_t control_bytes_ = 0, memory_bytes_ = 0;
  char* plain_ = nullptr;  // all of the memory, not pinned
  unsigned self_ = 0;
  bool member_ = false;
  std::unique_ptr<Backing> backing_;
  Event event_;
  struct Opened {
    std::uint64_t joined = 0;
    Event event;
  };
  std::map<unsigned, Opened> opened_;  // by member
};

}  // namespace pymux
