// Converts and documents; nothing else. Every call that can reach the driver or wait releases
// the GIL. Exceptions are the classes of pymux/errors.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <future>
#include <optional>

#include "agent.h"
#include "checkpoint.h"
#include "driver.h"
#include "duplex.h"
#include "error.h"
#include "served.h"
#include "torch_allocator.h"

namespace py = pybind11;
using namespace pymux;
using Released = py::call_guard<py::gil_scoped_release>;

namespace {

// A live block of a region; freed when Python drops it, resident or not.
struct Block {
  std::shared_ptr<Region> region;
  CUdeviceptr ptr = 0;
  std::size_t size = 0;
  bool host_addressable = false;
  Block(std::shared_ptr<Region> r, CUdeviceptr p, std::size_t n, bool h)
      : region(std::move(r)), ptr(p), size(n), host_addressable(h) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (!Driver::lost()) region->free(ptr - region->addresses.base());
  }
};

// A range of a region that another process allocated in; keeps the addresses.
struct RegionView {
  std::shared_ptr<Region> region;
  CUdeviceptr ptr = 0;
  std::size_t size = 0;
  bool host_addressable = false;
};

// A block that is freed in stream order.
struct StreamBlock {
  std::shared_ptr<StreamCache> cache;
  CUdeviceptr ptr = 0;
  StreamBlock(const std::shared_ptr<Agent>& a, const std::shared_ptr<Region>& r, std::size_t bytes,
              std::uintptr_t stream)
      : cache(torch_allocator::cache_of(a, r)), ptr(cache->allocate(bytes, reinterpret_cast<CUstream>(stream))) {}
  StreamBlock(const StreamBlock&) = delete;
  StreamBlock& operator=(const StreamBlock&) = delete;
  ~StreamBlock() {
    if (!Driver::lost()) cache->free(ptr);
  }
};

py::dict to_dict(const AgentStats& s) {
  py::dict d;
  d["phase"] = s.phase;
  d["generation"] = s.generation;
  d["pages_held"] = s.held;
  d["pages_spare"] = s.spare;
  d["page_size"] = s.page_size;
  d["budget_pages"] = s.budget;
  d["host_pinned_bytes"] = s.host_pinned;
  d["host_used_bytes"] = s.host_used;
  d["host_granted_bytes"] = s.host_granted;
  d["duplex"] = s.duplex;
  d["fingerprints"] = s.fingerprints;
  d["grants"] = s.grants;
  d["reentries"] = s.reentries;
  d["reconnects"] = s.reconnects;
  d["fenced"] = s.fenced;
  d["last_fault"] = s.last_fault;
  py::dict regions;
  for (const auto& r : s.regions) {
    py::dict e;
    e["on_evict"] = r.keep ? "keep" : "discard";
    e["live_bytes"] = r.live;
    e["resident_bytes"] = r.resident;
    e["clean_bytes"] = r.clean;
    e["dirty_bytes"] = r.dirty;
    e["evicted_bytes"] = r.evicted;
    e["spilled_bytes"] = r.spilled;
    e["discarded_bytes"] = r.discarded;
    e["borrowed_bytes"] = r.borrowed;
    e["swapped_out_bytes"] = r.counters.out();
    e["written_back_bytes"] = r.counters.out_written_back;
    e["swapped_in_bytes"] = r.counters.in();
    e["prefetched_bytes"] = r.counters.in_prefetched;
    e["streamed_bytes"] = r.counters.in_streamed;
    e["avoided_bytes"] = r.counters.avoided();
    e["avoided_clean_bytes"] = r.counters.avoided_clean;
    e["avoided_unchanged_bytes"] = r.counters.avoided_unchanged;
    e["avoided_free_bytes"] = r.counters.avoided_free;
    e["avoided_not_live_bytes"] = r.counters.avoided_not_live;
    e["avoided_discarded_bytes"] = r.counters.avoided_discarded;
    e["lost_bytes"] = r.counters.lost_pages * s.page_size;
    e["lost_generation"] = r.counters.generation;
    regions[py::str(r.name)] = e;
  }
  d["regions"] = regions;
  return d;
}

const Driver& driver() {
  if (const Driver* d = Driver::loaded()) return *d;
  throw Error("DriverError", "no driver is loaded yet; call load_driver() first.");
}

void raise(const Error& e) {
  py::object type = py::module_::import("pymux.errors").attr(e.type);
  // A broker's text may have been cut in the middle of a character.
  const std::string what = e.what();
  auto text = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(what.data(), static_cast<Py_ssize_t>(what.size()), "replace"));
  py::object value = type(text);
  if (e.need || e.limit) {
    value.attr("need") = e.need;
    value.attr("limit") = e.limit;
  }
  if (auto* c = dynamic_cast<const CudaError*>(&e)) {
    value.attr("code") = static_cast<int>(c->code);
    value.attr("call") = c->call;
  }
  PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "pymux's extension: regions, pager and agent. Use the pymux package, not this module.";
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& e) {
      raise(e);
    }
  });

  m.def(
      "load_driver", [](const std::string& choice) { return Driver::load(choice).path; }, py::arg("choice") = "",
      Released(), "Load the CUDA driver table once per process; returns the library's path.");
  m.def(
      "driver_version",
      [] {
        int v = 0;
        check(driver().cuDriverGetVersion(&v), "cuDriverGetVersion");
        return v;
      },
      "The loaded driver's CUDA version, as 1000 * major + 10 * minor.");
  m.def(
      "device_count",
      [] {
        int n = 0;
        check(driver().cuDeviceGetCount(&n), "cuDeviceGetCount");
        return n;
      },
      "How many devices the loaded driver has.");
  m.def(
      "wire_layout",
      [] {
        std::vector<std::tuple<std::string, int, std::size_t>> out;
        for (auto& l : wire::layout()) out.emplace_back(l.name, l.type, l.size);
        return out;
      },
      "(name, type, bytes) of every message, to compare with pymux.wire.");

  py::class_<Device>(m, "Device", "Facts about a device. Holds its primary context while alive.")
      .def(py::init<int>(), py::arg("ordinal"), Released())
      .def_property_readonly("name", &Device::name)
      .def_property_readonly("uuid",
                             [](const Device& d) { return py::bytes(reinterpret_cast<const char*>(d.uuid()), 16); })
      .def_property_readonly("total_bytes", &Device::total)
      .def_property_readonly("granularity", &Device::granularity)
      .def_property_readonly("can_export", &Device::can_export)
      .def_property_readonly("host_addressable", &Device::host_addressable)
      .def("probe_export", &Device::probe_export, Released(),
           "Create, export, import and free one allocation; raises what the driver says.");

  m.def(
      "measure_link",
      [](int ordinal) {
        // On a thread of its own: the caller's current context stays as it is.
        LinkRates r = std::async(std::launch::async, [&] { return measure_link(Device(ordinal)); }).get();
        return std::make_tuple(r.out, r.in, r.both, r.gains());
      },
      py::arg("ordinal"), Released(),
      "Copy rates to the host, to the device and both at once, in bytes per second, and whether both at once gain.");

  py::class_<Block>(m, "Block", py::buffer_protocol(), "A live block of a region's memory.")
      .def_readonly("ptr", &Block::ptr)
      .def_readonly("size", &Block::size)
      .def_buffer([](Block& b) {
        if (!b.host_addressable) throw py::buffer_error("this device's memory cannot be addressed by the host");
        return py::buffer_info(reinterpret_cast<unsigned char*>(b.ptr), static_cast<py::ssize_t>(b.size));
      });

  py::class_<Region, std::shared_ptr<Region>>(m, "Region", "A named range of device addresses whose pages come and go.")
      .def_readonly("name", &Region::name)
      .def_property_readonly("on_evict",
                             [](const Region& r) { return r.on_evict == OnEvict::keep ? "keep" : "discard"; })
      .def_readonly("fingerprint", &Region::fingerprint)
      .def_property_readonly("base", [](const Region& r) { return r.addresses.base(); })
      .def_property_readonly("size", [](const Region& r) { return r.addresses.size(); })
      .def_property_readonly("live_bytes", &Region::live_bytes)
      .def("contains", &Region::contains, py::arg("ptr"))
      .def_readonly("read_only", &Region::read_only)
      .def_property_readonly("shared", [](const Region& r) { return r.segment != nullptr; })
      .def_property_readonly("generation",
                             [](const Region& r) { return r.segment ? r.segment->generation() : std::uint64_t{0}; })
      .def(
          "published",
          [](const Region& r) {
            const Segment::Published p = r.segment->published();
            return std::make_tuple(p.generation, py::bytes(p.meta));
          },
          "Of a shared region: the latest generation, and what publish() said of it.");

  py::class_<RegionView>(m, "RegionView", py::buffer_protocol(), "A range of a region's addresses.")
      .def_readonly("ptr", &RegionView::ptr)
      .def_readonly("size", &RegionView::size)
      .def_buffer([](RegionView& v) {
        if (!v.host_addressable) throw py::buffer_error("this device's memory cannot be addressed by the host");
        return py::buffer_info(reinterpret_cast<unsigned char*>(v.ptr), static_cast<py::ssize_t>(v.size));
      });

  py::class_<SwapSpan>(m, "SwapSpan", "One page's swap; times are CLOCK_MONOTONIC seconds, bytes those copied.")
      .def_readonly("out", &SwapSpan::out)
      .def_readonly("begin", &SwapSpan::begin)
      .def_readonly("end", &SwapSpan::end)
      .def_readonly("background", &SwapSpan::background)
      .def_readonly("bytes", &SwapSpan::bytes);

  py::class_<PhaseRequest>(m, "PhaseRequest", "What a phase needs; made once, used for each time it is entered.")
      .def(py::init([](std::string name, std::vector<std::shared_ptr<Region>> uses,
                       std::vector<std::shared_ptr<Region>> lazy, std::vector<std::shared_ptr<Region>> writes,
                       std::string regions, double expected, int priority, bool overlap, std::uint64_t ranks) {
             return PhaseRequest{.name = std::move(name),
                                 .uses = std::move(uses),
                                 .lazy = std::move(lazy),
                                 .writes = std::move(writes),
                                 .regions = std::move(regions),
                                 .expected = expected,
                                 .priority = priority,
                                 .overlap = overlap,
                                 .ranks = ranks};
           }),
           py::kw_only(), py::arg("name"), py::arg("uses"), py::arg("lazy"), py::arg("writes"), py::arg("regions"),
           py::arg("expected"), py::arg("priority"), py::arg("overlap"), py::arg("ranks"), "expected: seconds.");

  py::class_<Agent, std::shared_ptr<Agent>>(m, "Agent", "This process's connection to the broker, and its pages.")
      .def(py::init([](std::string socket, std::vector<std::string> spawn, std::string job, std::string client,
                       std::string group, std::uint32_t rank, std::uint32_t world, bool joint, int device,
                       bool controller, std::size_t page_size, std::size_t need, std::size_t host_need, bool pass_pages,
                       bool snapshot, bool duplex, bool poison, double connect_timeout) {
             AgentOptions o;
             o.socket = std::move(socket);
             o.spawn = std::move(spawn);
             o.job = std::move(job);
             o.client = std::move(client);
             o.group = std::move(group);
             o.rank = rank;
             o.world = world;
             o.joint = joint;
             o.device = device;
             o.controller = controller;
             o.page_size = page_size;
             o.need = need;
             o.host_need = host_need;
             o.pass_pages = pass_pages;
             o.snapshot = snapshot;
             o.duplex = duplex;
             o.poison = poison;
             o.connect_timeout = connect_timeout;
             py::gil_scoped_release release;
             return std::shared_ptr<Agent>(new Agent(std::move(o)), OwnerDeletes<Agent>{});
           }),
           py::kw_only(), py::arg("socket"), py::arg("spawn"), py::arg("job"), py::arg("client"), py::arg("group"),
           py::arg("rank"), py::arg("world"), py::arg("joint"), py::arg("device"), py::arg("controller"),
           py::arg("page_size"), py::arg("need"), py::arg("host_need"), py::arg("pass_pages"), py::arg("snapshot"),
           py::arg("duplex"), py::arg("poison"), py::arg("connect_timeout"))
      .def(
          "create_region",
          [](Agent& a, const std::string& name, bool keep, bool fingerprint, bool frozen, bool claim) {
            auto r = a.create_region(name, {.on_evict = keep ? OnEvict::keep : OnEvict::discard,
                                            .fingerprint = fingerprint,
                                            .frozen = frozen,
                                            .claim = claim});
            torch_allocator::add(r);
            return r;
          },
          py::arg("name"), py::arg("keep"), py::arg("fingerprint"), py::arg("frozen"), py::arg("claim") = false,
          Released())
      .def(
          "acquire",
          [](Agent& a, const PhaseRequest& request, std::uint64_t opener, double ran, double timeout) {
            bool interrupted = false;
            {
              py::gil_scoped_release release;
              try {
                a.acquire(request, {opener, ran}, timeout, [] {
                  py::gil_scoped_acquire gil;
                  return PyErr_CheckSignals() != 0;
                });
              } catch (const Interrupted&) {
                interrupted = true;
              }
            }
            if (interrupted) throw py::error_already_set();
          },
          py::arg("request"), py::arg("opener") = 0, py::arg("ran") = 0.0, py::arg("timeout") = -1.0,
          "Block until the lease is active with every page that the request uses resident. opener: which thread or "
          "task asks; ran: seconds of the phase that are done; timeout: seconds, < 0 waits for ever.")
      .def(
          "enter",
          [](Agent& a, const PhaseRequest& request, std::uint64_t opener, double ran) {
            return a.enter(request, {opener, ran});
          },
          py::arg("request"), py::arg("opener") = 0, py::arg("ran") = 0.0, Released(),
          "As acquire, without waiting: whether the phase is entered. Else entered() says when it is.")
      .def("entered", &Agent::entered, Released(),
           "Whether the phase of enter() is entered by now; raises why it cannot be.")
      .def("withdraw", &Agent::withdraw, Released(), "Give up the phase of enter(), entered or not.")
      .def("watch", &Agent::watch, Released(),
           "Descriptor of an eventfd that is readable when entered() may have changed.")
      .def("tell_wait", &Agent::tell_wait, py::arg("opener"), py::arg("behind"), Released(),
           "A thread or task waits for another's phase to end (0: not any more); raises DeadlockError if that is for "
           "ever.")
      .def("require", &Agent::require, py::arg("region"), Released(), "Wait, in a phase, until a region is resident.")
      .def("done_with", &Agent::done_with, py::arg("region"), Released(),
           "Wait for the device, then let the region's pages be written back and given away within the phase.")
      .def("touch", &Agent::touch, py::arg("region"), Released(), "The open phase writes the region.")
      .def(
          "set_live",
          [](Agent& a, const std::shared_ptr<Region>& region,
             const std::optional<std::vector<std::pair<std::size_t, std::size_t>>>& ranges) {
            std::optional<std::vector<Range>> out;
            if (ranges) {
              out.emplace();
              for (auto& [offset, size] : *ranges) out->push_back({offset, size});
            }
            a.set_live(region, std::move(out));
          },
          py::arg("region"), py::arg("ranges"), Released(),
          "Only these (offset, bytes) of the region, and later allocations, must survive an eviction; None: all.")
      .def(
          "leave",
          [](Agent& a, bool end, double back) {
            a.leave(end ? Leave::end : back > 0 ? Leave::lend : Leave::yield, back);
          },
          py::arg("end") = true, py::arg("back") = 0.0, Released(),
          "Wait for this process's device work, then park or return the lease. end=False: the phase goes on later, in "
          "`back` seconds if that is known.")
      .def_property_readonly("recalled", &Agent::recalled)
      .def("pressed", &Agent::pressed, "Whether the phase should give way at its next yield point.")
      .def_property_readonly("remote_uses", &Agent::remote_uses,
                             "Names of the regions that a phase opened by another member of the group uses, or None.")
      .def_property_readonly("active", &Agent::active)
      .def(
          "allocate",
          [](Agent& a, const std::shared_ptr<Region>& region, std::size_t bytes) {
            CUdeviceptr p = 0;
            {
              py::gil_scoped_release release;
              p = a.allocate(region, bytes);
            }
            return std::make_unique<Block>(region, p, bytes, a.device().host_addressable());
          },
          py::arg("region"), py::arg("bytes"))
      .def(
          "read",
          [](Agent& a, const std::shared_ptr<Region>& region, CUdeviceptr ptr, py::buffer to) {
            py::buffer_info info = to.request(true);
            const auto bytes = static_cast<std::size_t>(info.size * info.itemsize);
            py::gil_scoped_release release;
            a.read(region, ptr, bytes, info.ptr);
          },
          py::arg("region"), py::arg("ptr"), py::arg("to"),
          "Copy a region's contents from wherever they are into a contiguous writable buffer.")
      .def(
          "evict",
          [](Agent& a, std::optional<std::shared_ptr<Region>> region) { return a.evict(region.value_or(nullptr)); },
          py::arg("region"), Released(), "Swap a region out (None: all) and give its pages to the bank; bytes given.")
      .def("pin", &Agent::pin, py::arg("region"), py::arg("reason"), Released(),
           "The region's pages stay on the device, for this reason; empty: no longer.")
      .def("share", &Agent::share, py::arg("region"), Released(),
           "Let other processes map the region's pages; returns what open_shared() takes.")
      .def(
          "open_shared",
          [](Agent& a, const std::string& id, const std::string& name, bool writable) {
            auto r = a.open_shared(id, name, writable);
            torch_allocator::add(r);
            return r;
          },
          py::arg("id"), py::arg("name"), py::arg("writable"), Released())
      .def(
          "publish",
          [](Agent& a, const std::shared_ptr<Region>& region, const std::string& meta, std::uintptr_t stream) {
            a.publish(region, meta, reinterpret_cast<CUstream>(stream));
          },
          py::arg("region"), py::arg("meta"), py::arg("stream"), Released(),
          "A new generation of a shared region, complete once the stream's work is done.")
      .def(
          "wait_published",
          [](Agent& a, const std::shared_ptr<Region>& region, std::uintptr_t stream) {
            a.wait_published(region, reinterpret_cast<CUstream>(stream));
          },
          py::arg("region"), py::arg("stream"), Released(),
          "What is submitted to the stream next comes after the work of the latest publish().")
      .def(
          "view",
          [](const Agent& a, const std::shared_ptr<Region>& r, std::size_t offset, std::size_t bytes) {
            if (offset > r->addresses.size() || bytes > r->addresses.size() - offset)
              throw py::value_error("outside of the region");
            return RegionView{r, r->at(0) + offset, bytes, a.device().host_addressable()};
          },
          py::arg("region"), py::arg("offset"), py::arg("bytes"), "Addresses of a region, resident or not.")
      .def("trim_host", &Agent::trim_host, Released())
      .def("stats", [](Agent& a) { return to_dict(a.stats()); })
      .def("spans", &Agent::spans, Released())
      .def("close", &Agent::close, Released())
      .def_property_readonly("host_addressable",
                             [](const Agent& a) { return !a.controller() && a.device().host_addressable(); })
      .def_property_readonly("uuid",
                             [](const Agent& a) {
                               const std::string none(16, '\0');
                               return a.controller() ? py::bytes(none)
                                                     : py::bytes(reinterpret_cast<const char*>(a.device().uuid()), 16);
                             })
      .def_property_readonly("page_size", &Agent::page_size);

  py::class_<StreamBlock>(m, "StreamBlock", "A block of a region, used again in the order of a stream once dropped.")
      .def(py::init<const std::shared_ptr<Agent>&, const std::shared_ptr<Region>&, std::size_t, std::uintptr_t>(),
           py::arg("agent"), py::arg("region"), py::arg("bytes"), py::arg("stream"), Released())
      .def_readonly("ptr", &StreamBlock::ptr);

  m.def("torch_enter", &torch_allocator::enter, py::arg("agent"), py::arg("region"),
        "This thread's torch allocations come from the region until torch_leave().");
  m.def("torch_leave", &torch_allocator::leave);
  m.def("torch_install", &torch_allocator::install, py::arg("agent"), py::arg("region"),
        "Torch's allocations on the agent's device come from the region, outside of torch_enter().");
  m.def("torch_empty_cache", &torch_allocator::empty_cache, Released(),
        "Wait for the device and give up what freed blocks are cached.");
  m.def(
      "torch_stats",
      [](const std::shared_ptr<Region>& region) {
        const StreamCache::Stats s = torch_allocator::stats(region);
        py::dict d;
        d["allocated_bytes"] = s.allocated;
        d["peak_allocated_bytes"] = s.peak_allocated;
        d["cached_bytes"] = s.cached;
        d["pending_bytes"] = s.pending;
        d["allocations"] = s.allocations;
        d["hits"] = s.hits;
        return d;
      },
      py::arg("region"), "Of the allocations that torch_install() serves from the region.");
  m.def("torch_reset_peak", &torch_allocator::reset_peak, py::arg("region"));
  m.def("checkpoint_state", &checkpoint::state, py::arg("pid"), Released());
  m.def("checkpoint_lock", &checkpoint::lock, py::arg("pid"), py::arg("timeout_ms"), Released(),
        "A process's CUDA calls wait from now on; timeout_ms=0 waits as long as it takes.");
  m.def("checkpoint_save", &checkpoint::save, py::arg("pid"), Released(),
        "A locked process's device memory goes to the host.");
  m.def("checkpoint_restore", &checkpoint::restore, py::arg("pid"), Released());
  m.def("checkpoint_unlock", &checkpoint::unlock, py::arg("pid"), Released());
  m.def(
      "served",
      [](int device) {
        const Served s = served_on(device);
        return std::make_pair(s.agent, s.region);
      },
      py::arg("device"), Released(),
      "In a process that 'pymux run' started: its connection, and the region that cudaMalloc allocates in.");
  m.def("torch_last_error", &torch_allocator::last_error);
}
