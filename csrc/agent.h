// A client's agent: one thread that talks to the broker and moves this process's pages, so that
// pages are given back while Python is busy with something else. It never needs the GIL.
// What it is not: it decides nothing about other clients; that is the broker's.
//
// Invariants: only the agent thread changes page states and reads the socket; `mutex_` guards the
// lease state and the page table and is never held while bytes move or a message is waited for;
// held_ = pages the broker counts for this client = in regions + spare + not yet minted.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backing.h"
#include "error.h"
#include "fingerprint.h"
#include "pager.h"
#include "region.h"
#include "share_post.h"
#include "spill.h"
#include "wire.h"

namespace pymux {

struct AgentOptions {
  std::string socket;              // path of the broker's socket
  std::vector<std::string> spawn;  // command that starts a broker; empty: do not
  std::string job, client, group;
  std::uint32_t rank = 0, world = 1;
  bool joint = false;  // the group has, or may have, other members
  int device = 0;
  bool controller = false;              // no device memory: it opens phases of its group
  std::size_t page_size = 0;            // bytes; 0: by the device's size
  std::size_t need = 0, host_need = 0;  // bytes of device and host memory needed at most; 0: unknown
  bool pass_pages = true;               // hand physical pages over as file descriptors
  bool snapshot = false;                // swap everything out at every yield, for comparison
  bool duplex = true;                   // copy in both directions at once
  bool poison = false;                  // fill pages that were discarded
  double connect_timeout = 10;          // seconds, for starting or finding a broker
};

struct RegionStats {
  std::string name;
  bool keep = true;
  // bytes; resident = clean + dirty, and spilled is the part of evicted that is in the file
  // borrowed: mapped here, and counted for another process
  std::uint64_t base = 0, live = 0, resident = 0, clean = 0, dirty = 0, evicted = 0, spilled = 0, discarded = 0;
  std::uint64_t borrowed = 0;
  RegionCounters counters;
};

struct AgentStats {
  std::string phase;                                                             // idle, waiting, active or parked
  std::uint64_t generation = 0, held = 0, spare = 0, page_size = 0, budget = 0;  // pages but page_size
  std::uint64_t host_pinned = 0, host_used = 0, host_granted = 0;                // bytes
  bool duplex = true, fingerprints = true;
  std::uint64_t grants = 0, reentries = 0, reconnects = 0, fenced = 0;
  std::string last_fault;  // of a swap that was undone
  std::vector<RegionStats> regions;
};

// What a caller wants of a phase.
struct PhaseRequest {
  std::string name;
  std::vector<std::shared_ptr<Region>> uses, lazy, writes;
  std::string regions;  // the same for the group's other members; see wire::Names
  double expected = 0;  // seconds
  int priority = 0;
  bool overlap = false;
  std::uint64_t ranks = 0;  // bits of the members whose devices are wanted; 0: all
};

// Why a phase is left: its end, or a break in it, after which it goes on.
enum class Leave { end, yield, lend };

struct Interrupted {};  // a signal ended the wait; the caller knows which

// Who enters a phase.
struct Entrance {
  std::uint64_t opener = 0;  // a thread or task of this process; 0: none that could wait for others
  double ran = 0;            // seconds of the phase that are done, before a break
};

class Agent {
 public:
  explicit Agent(AgentOptions options);  // connects; throws BrokerLost, ProtocolError, ClientExists, ...
  ~Agent();

  // segment: of a region that another process shares.
  std::shared_ptr<Region> create_region(const std::string& name, RegionOptions options,
                                        std::shared_ptr<Segment> segment = nullptr);
  bool controller() const { return !device_; }
  const Device& device() const { return *device_; }  // not of a controller
  std::size_t page_size() const { return page_size_; }

  // Blocks until the lease is active with every page of `uses` resident, in the order named; the
  // regions of `lazy` follow meanwhile. `writes` are the regions whose pages may become dirty. In a
  // group, until all members have acknowledged. timeout: seconds; < 0 waits for ever. `interrupted` is asked
  // now and then, without a lock; true gives up and throws Interrupted.
  void acquire(const PhaseRequest& request, Entrance entrance, double timeout,
               const std::function<bool()>& interrupted);
  // The same in steps, for who must not block. True: the phase is entered. Else entered() says when it is, or throws
  // why it cannot be, and withdraw() gives up, whatever has happened meanwhile.
  bool enter(const PhaseRequest& request, Entrance entrance);
  bool entered();
  void withdraw();
  // A descriptor (of an eventfd) that is readable when entered() may have changed.
  int watch();
  // A caller waits for its turn in this process: its opener, and that of who has it (0: it does not wait any more).
  // Throws DeadlockError when that would be for ever; call it again now and then.
  void tell_wait(std::uint64_t opener, std::uint64_t behind);
  // Waits until a region that the phase uses is resident.
  void require(const std::shared_ptr<Region>& region);
  // The phase does not touch the region any more: waits for the device, then its pages may be
  // written back, and given away.
  void done_with(const std::shared_ptr<Region>& region);
  // The open phase writes the region, whatever it said.
  void touch(const std::shared_ptr<Region>& region);
  // Waits for the device work of this process, then parks or returns the lease; in a group, until all
  // members' devices are drained. back: seconds after which a lent device is wanted again.
  void leave(Leave why, double back);
  bool recalled() const { return recalled_flag_.load(std::memory_order_relaxed); }
  // Whether the phase should give way at its next yield point.
  bool pressed() const { return pressed_flag_.load(std::memory_order_relaxed); }
  // The regions that a phase opened by another member uses, without the lazy ones; nothing: there is none.
  std::optional<std::vector<std::string>> remote_uses();
  bool active() const { return active_flag_.load(std::memory_order_relaxed); }
  // A number that changes whenever what is resident for the open phase may have; 0: no phase is open.
  std::uint64_t stamp() const { return active() ? stamp_.load(std::memory_order_relaxed) : 0; }
  // Opens a phase of its own accord, if none is open; it lasts until the next one begins, or evict().
  void enter_implicitly();

  // A block of the region, resident; needs an active lease. Throws DeviceOutOfMemory, ...
  // Tags: see Arena.
  CUdeviceptr allocate(const std::shared_ptr<Region>& region, std::size_t bytes, std::uint32_t tag = 0);
  // See Region::set_live().
  void set_live(const std::shared_ptr<Region>& region, std::optional<std::vector<Range>> ranges);
  // Contents of [ptr, ptr + bytes) from wherever they are, without a lease.
  void read(const std::shared_ptr<Region>& region, CUdeviceptr ptr, std::size_t bytes, void* to);
  // Swaps the region (all regions without one) out and gives its pages to the bank. Not in a phase.
  // Bytes given. Throws what kept a page on the device, after trying the others.
  std::size_t evict(const std::shared_ptr<Region>& region);
  // The region's pages stay on the device, for this reason; empty: no longer.
  void pin(const std::shared_ptr<Region>& region, const std::string& reason);
  // Lets other processes map the region's pages too; what they find it by. In a phase that uses it.
  std::string share(const std::shared_ptr<Region>& region);
  // A region of another process; its name there unless another is given.
  std::shared_ptr<Region> open_shared(const std::string& id, const std::string& name, bool writable);
  // The region's contents are a new generation, once the work submitted to the stream is done. In a phase.
  void publish(const std::shared_ptr<Region>& region, const std::string& meta, CUstream stream);
  void wait_published(const std::shared_ptr<Region>& region, CUstream stream);
  std::size_t trim_host();  // unpins free backing memory, shortens the spill file; bytes released
  AgentStats stats();
  std::vector<SwapSpan> spans();
  // Gives lease and pages back and ends the thread. Contents of regions are gone. Idempotent.
  void close();

 private:
  enum class Phase { idle, waiting, active, parked, leaving };
  struct Ensure {  // a caller in a phase that waits for pages
    std::shared_ptr<Region> region;
    std::size_t first = 0, count = 0;
    bool done = false;
    std::exception_ptr error;
  };

  struct LocalWait {  // see tell_wait()
    std::uint64_t seq = 0, behind = 0;
    std::exception_ptr error;
  };

  // caller threads
  void check_process() const;
  void check_usable_locked() const;
  void withdraw_locked();
  void finish_entry_locked() const;
  void tell_kept_locked(std::uint64_t opener);
  void post(std::function<void()> work);
  void run_on_agent(std::function<void()> work);
  bool resident_locked(const std::vector<std::shared_ptr<Region>>& regions) const;
  bool resident_locked(const Region& r, std::size_t first, std::size_t count) const;
  void wait_for(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Ensure>& ensure);
  void wait_at_socket(std::unique_lock<std::mutex>& lock, double seconds);
  void notify();
  void activate_locked();
  std::uint64_t expected_takes_locked() const;
  void release_locked();
  void count_run_locked(Leave why);
  void end_implicit();
  bool alone() const { return !options_.joint; }
  bool follows_at_once_locked() const;
  bool may_extend_locked() const;
  void linger_locked();

  // agent thread: the loop (agent_loop.cpp)
  void run(std::promise<void>& ready);
  void connect_broker(std::uint32_t flags);
  bool say_hello(std::uint32_t flags);
  void drop_socket();
  void reconnect();
  bool busy();
  void wait_for_work();
  void poll_once(int timeout_ms);
  void wake();
  void take_commands();
  void take_messages();
  void handle(const std::vector<char>& message, std::vector<Fd>& fds);
  void begin_acquire();
  void give_up(std::uint64_t seq);
  void send_want();
  void send_ready();
  void send_figures();
  void settle();
  void fail_waiters(std::exception_ptr error);
  void note_fault(std::exception_ptr error);
  void give_all_back();

  // agent thread: what the other members of the group do (agent_group.cpp)
  void on_prepare(const std::string& phase);
  void on_grant(const wire::Grant& m);
  void on_active(std::uint64_t generation);
  void on_drain(std::uint64_t generation);
  void on_fenced(const wire::Fenced& m);
  void open_remote_locked(const std::string& phase);
  std::uint64_t known_locked() const;
  void drain_device();
  void fail_grant_locked(std::exception_ptr error);
  static Error fenced_error(const Region& region);

  // agent thread: regions that several processes map (agent_share.cpp)
  struct Awaited {  // a page that another process has on the device, or on its way
    PageRef ref;
    double since = 0, asked_at = 0;  // asked_at > 0: we are among its holders, and its carrier knows
  };
  struct Leaving {  // a page that goes once the others have unmapped it
    PageRef ref;
    double until = 0;
    bool copy = false;
    int refused_by = -1;  // member
  };
  void open_post();
  void show_wishes_locked();
  void note(Segment& segment, unsigned member, NoteKind kind, std::size_t page);
  void send_notes();
  Fd export_shared(Segment& segment, std::size_t page, const Segment::Word& w, unsigned to);
  void take_notes();
  void map_shared(Region& region, std::size_t page, std::uint16_t epoch, Fd fd);
  bool unmap_shared(Region& region, std::size_t page);
  void fetch_to_read(PageRef ref);
  void stop_awaiting(const Region* only);
  void advance_awaited();
  bool begin_leave(PageRef ref, bool copy);
  void advance_leaving();
  std::optional<Store> shared_store(PageRef ref);
  bool spare_host(Backing& b, std::size_t slots);
  void settle_debts();
  void tend();
  bool carries_for_others(const Region& region) const;
  void leave_segments();

  // agent thread: pages (agent_pages.cpp)
  void step();
  bool demand() const;
  void hand_out(Page page);
  void drop_spare_memory();
  bool give_spare();
  bool start_out();
  void fail_out(std::exception_ptr why);
  void refuse_work();
  void finish_out();
  bool start_in();
  void finish_in();
  bool start_save();
  void finish_save();
  void plan_saves();
  bool obtain(std::vector<Page>& physical, std::size_t count);
  std::vector<PageRef> candidates(bool for_saving);
  void clear_fill();
  void queue_missing(const std::shared_ptr<Region>& r, std::size_t first, std::size_t count);
  std::int64_t take_slot();
  std::optional<Store> store_for(PageRef ref);
  bool reclaim_dead();
  std::size_t give_host_back();
  Error host_budget_error() const;
  void plan_host();
  void ask_host(std::size_t bytes, bool urgent);
  void take_fingerprints(const Region* only);
  void flush_pages();
  void send_counts();
  void evict_now(const Region* only, bool always_copy);

  template <class M>
  void send(const M& message, const std::vector<Fd>& fds = {}) {
    send_bytes(&message, sizeof message, fds);
  }
  void send_bytes(const void* message, std::size_t size, const std::vector<Fd>& fds);
  wire::Counts counts_locked();
  std::uint64_t want_locked() const;
  std::uint64_t own_locked() const;
  bool in_use_locked(const Region& r) const;
  bool written_locked(const Region& r) const;
  bool running_locked() const {
    return phase_ == Phase::active || (phase_ == Phase::waiting && (granted_ || attached_));
  }

  const AgentOptions options_;
  std::optional<Device> device_;
  const std::size_t page_size_;
  const unsigned forks_ = forks();
  bool pass_pages_;

  std::mutex mutex_;  // guards what follows, to the next comment
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Region>> regions_;
  Phase phase_ = Phase::idle;
  bool granted_ = false, recalled_ = false, closed_ = false, finished_ = false;
  bool asked_ = false;         // the agent thread has taken the request up
  bool self_granted_ = false;  // the caller has seen a grant that the agent thread is still to receive
  bool remote_ = false;        // another member opened the phase; no caller here waits for it
  bool attached_ = false;      // a caller asks for the phase that another member has open
  bool acknowledged_ = false;  // the broker knows that our part of the grant is resident
  bool fenced_ = false;        // the open phase's lease went to others
  std::exception_ptr broken_;  // the broker is gone for good, or the device is
  std::exception_ptr acquire_error_;
  std::uint64_t seq_ = 0, acquire_seq_ = 0, generation_ = 0;
  std::string phase_name_;                   // the open phase, or the last one
  std::map<std::string, double> gap_after_;  // seconds from a phase's end to the next acquire, last time
  double left_at_ = 0, linger_until_ = 0;    // 0: not
  bool extended_ = false;                    // this lease had a phase after its recall
  double extend_until_ = 0;                  // before this, it may have more of them
  double expected_ = 0;
  std::uint64_t opener_ = 0;                        // of the open phase, or the one that is waited for
  std::map<std::uint64_t, LocalWait> local_waits_;  // by opener
  std::uint64_t wait_seq_ = 0;
  int priority_ = 0;
  bool overlap_ = false;
  std::uint64_t ranks_ = 0, ended_ = 0;  // ended_: generation of the latest lease that all members have drained
  std::string names_;                    // regions of the open phase, as members are told
  double entered_at_ = 0, ran_ = 0;      // of the open phase: when it was entered, seconds before its last break
  double back_at_ = 0;                   // when a lent device is wanted again; 0: it is not lent
  std::map<std::string, std::pair<std::uint64_t, double>> ran_phases_;  // ended and not yet told: how many, seconds
  std::vector<std::shared_ptr<Region>> uses_, lazy_, writes_;           // uses_: without the lazy ones
  // Pages taken for others between two phases: now, and the latest times. What may be expected of
  // the next time bounds write-back, so that it copies nothing in vain.
  std::uint64_t taken_ = 0;
  std::array<std::uint64_t, 4> recent_taken_{};
  std::vector<std::shared_ptr<Ensure>> ensures_;
  std::deque<std::function<void()>> commands_;
  std::uint64_t held_ = 0, used_ = 0, budget_ = 0;
  std::uint64_t grants_ = 0, reentries_ = 0, reconnects_ = 0, fences_ = 0;
  std::string last_fault_;
  std::string spill_dir_;
  bool fingerprints_ = true;  // there is a kernel for this device, as far as known

  // the agent thread's own
  std::deque<PageRef> fill_;      // pages that somebody waits for
  std::vector<PageRef> victims_;  // in the order to go, best last
  bool victims_known_ = false;
  std::deque<PageRef> saves_;                 // to be written back
  bool save_due_ = false;                     // look for such
  bool saved_ = false;                        // some became clean, and the broker does not know yet
  bool stalled_ = false;                      // a swap-out waits for host memory
  std::uint64_t quota_ = 0;                   // pages still to give away
  std::uint32_t missing_ = 0;                 // of those, found impossible
  bool always_copy_ = false, local_ = false;  // of an evict() of our own
  std::vector<Page> spare_;
  std::vector<Fd> spare_fds_;
  std::vector<Fd> outgoing_;
  std::uint32_t outgoing_bare_ = 0;
  double mint_deadline_ = 0, retry_at_ = 0;
  std::unique_ptr<Backing> backing_;
  std::unique_ptr<Spill> spill_;
  std::unique_ptr<Pager> pager_;
  std::unique_ptr<Fingerprinter> fingerprinter_;
  bool host_asked_ = false, host_exhausted_ = false;
  std::size_t host_told_ = 0;  // bytes last asked for without urgency
  double host_full_until_ = 0;
  std::exception_ptr fault_;                     // the latest
  std::string told_regions_;                     // by the message before this one
  std::vector<std::shared_ptr<Region>> shared_;  // those with a segment
  std::unique_ptr<SharePost> post_;
  std::vector<Awaited> awaited_;
  std::vector<Leaving> leaving_;
  std::vector<PageRef> debts_;  // pages of ours that the broker does not count, and a phase uses
  std::map<std::tuple<Segment*, unsigned, NoteKind>, std::vector<std::uint32_t>> notes_;  // to be sent
  double tend_at_ = 0, spared_at_ = 0;
  std::atomic<std::size_t> shared_host_{0};  // bytes of what this process may pin that went to segments
  std::atomic<bool> shares_{false};
  bool stop_ = false;
  std::atomic<std::uint64_t> spare_physical_{0};  // spare_ and spare_fds_, for other threads

  std::mutex send_mutex_;   // guards the two below and the order of messages; taken after mutex_
  bool connected_ = false;  // hello was answered
  wire::Socket socket_;
  Fd wake_, caller_wake_, watch_;
  std::atomic<bool> watched_{false};    // watch_ is there
  std::atomic<bool> at_socket_{false};  // a caller polls, and does not wait for changed_
  std::atomic<bool> recalled_flag_{false}, pressed_flag_{false}, active_flag_{false};
  std::atomic<std::uint64_t> stamp_{0};  // counts entries of phases, and calls of done_with()
  std::mutex implicit_mutex_;            // one thread opens an implicit phase; taken before mutex_
  std::atomic<bool> implicit_{false};    // the open phase is one
  std::thread thread_;
};

}  // namespace pymux
