// Reads of files, and what is held of them in memory.
#include "bindings.h"
#include "reads.h"
#include "resting_experts.h"
#include "slots.h"
#include "window.h"

namespace {

// What says why a file cannot be read may quote any name of a file.
void bind_read_error(nb::module_& m) {
  const std::string name = nb::cast<std::string>(m.attr("__name__")) + ".ReadError";
  const nb::object type = nb::steal(PyErr_NewException(name.c_str(), PyExc_OSError, nullptr));
  m.attr("ReadError") = type;
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* type) {
        try {
          std::rethrow_exception(thrown);
        } catch (const ReadError& error) {
          const nb::object text = nb::steal(PyUnicode_DecodeFSDefault(error.what()));
          PyErr_SetObject((PyObject*)type, text.ptr());
        }
      },
      type.ptr());
}

void make_reads(Reads* reads, const std::vector<std::pair<nb::str, int64_t>>& files, bool direct,
                const std::string& engine, std::optional<double> latency, std::optional<double> rate,
                std::optional<int64_t> fail_at, std::optional<int64_t> failures, std::optional<int> error) {
  std::vector<Reads::File> all;
  for (const auto& [path, bytes] : files) {
    const nb::object name = nb::steal(PyUnicode_EncodeFSDefault(path.ptr()));
    if (!name) nb::raise_python_error();
    all.push_back({PyBytes_AsString(name.ptr()), bytes});
  }
  const EmulatedDisk disk{latency.value_or(0), rate.value_or(0), fail_at.value_or(-1), failures.value_or(-1),
                          error.value_or(0)};
  require(disk.latency >= 0 && disk.rate >= 0 && disk.error >= 0, "a disk has a latency, a rate and an errno");
  const bool emulated = latency || rate || fail_at || failures || error;
  nb::gil_scoped_release release;
  new (reads) Reads(std::move(all), direct, engine, emulated ? &disk : nullptr);
}

using Buffer = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int64_t begin_reads(Reads& reads, const std::vector<std::tuple<int, int64_t, int64_t, int64_t>>& list, Buffer buffer) {
  std::vector<Read> all;
  const int64_t room = (int64_t)buffer.shape(0);
  for (const auto& [file, offset, bytes, at] : list) {
    reads.check(file, offset, bytes);
    require(at >= 0 && bytes <= room - at, "the buffer has no room for a read");
    const int64_t align = reads.direct() ? (int64_t)Reads::ALIGN : 1, before = offset % align;
    require(at >= before && pi_round_up(before + bytes, align) <= room - (at - before),
            "the buffer has no room for the whole blocks of a read past the cache");
    all.push_back({file, offset, bytes, buffer.data() + at});
  }
  nb::gil_scoped_release release;
  return reads.begin(all.data(), all.size());
}

}  // namespace

void bind_reads(nb::module_& m) {
  bind_read_error(m);
  nb::class_<Reads::Stats>(
      m, "ReadStats",
      "What was read: reads, bytes: as it was asked for; small: of the reads those of small parts\n"
      "of `Slots` past the cache, joined: in how many the disk reads them; waited: seconds in\n"
      "`wait`; active: seconds in which any read was under way, as far as the calls of `Reads` saw.")
      .def_ro("reads", &Reads::Stats::reads)
      .def_ro("bytes", &Reads::Stats::bytes)
      .def_ro("small", &Reads::Stats::small)
      .def_ro("joined", &Reads::Stats::joined)
      .def_ro("waited", &Reads::Stats::waited)
      .def_ro("active", &Reads::Stats::active);
  nb::class_<Reads>(
      m, "Reads",
      "Reads of files that go on while the caller computes. For one thread at a time.\n\n"
      "files: their paths and bytes. direct: past the system's cache, if the file systems allow it.\n"
      "engine: \"uring\", \"threads\", or \"auto\": the first that works here. ReadError for a file that\n"
      "cannot be opened, or has another size.\n\n"
      "If any of the others is given, the disk is emulated, for tests: it serves one read after another,\n"
      "in latency seconds and at rate bytes a second (0: at once). The read number fail_at, from 0, and\n"
      "those after it, `failures` in all (None: every one), fail with the errno `error`, 0: as if the\n"
      "file ended.")
      .def("__init__", &make_reads, "files"_a, "direct"_a, "engine"_a = "auto", nb::kw_only(), "latency"_a = nb::none(),
           "rate"_a = nb::none(), "fail_at"_a = nb::none(), "failures"_a = nb::none(), "error"_a = nb::none())
      .def("begin", &begin_reads, "reads"_a, "buffer"_a.noconvert(), nb::keep_alive<1, 3>(),
           "Begin reads, (file, offset, bytes, place in the buffer) each, and return what to wait for.\n\n"
           "Where `direct`, the memory at that place must lie in a block of ALIGN bytes as the offset does, and the\n"
           "rest of the blocks that a read touches must be in the buffer: it is overwritten, too.")
      .def("wait", &Reads::wait, "ticket"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Wait until all of them are there; ReadError if one failed, or the file has changed. They are all over\n"
           "then, but of a disk that has not answered for `patience` seconds they can be waited for again.")
      .def("done", &Reads::done, "ticket"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Whether `wait` would return, or fail, at once.")
      .def("cancel", &Reads::cancel, "ticket"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Return when none of them is under way; some may not have been begun.")
      .def("stats", &Reads::stats)
      .def_prop_ro("engine", &Reads::engine, "Which one: \"uring\", \"threads\" or \"emulated\".")
      .def_prop_ro("direct", &Reads::direct)
      .def_prop_rw(
          "patience", [](const Reads& reads) { return reads.patience; },
          [](Reads& reads, double seconds) {
            require(seconds >= 0, "patience is a number of seconds");
            reads.patience = seconds;
          })
      .def_prop_rw(
          "gap", [](const Reads& reads) { return reads.gap; },
          [](Reads& reads, int64_t bytes) {
            require(bytes >= 0, "a gap has some bytes");
            reads.gap = bytes;
          },
          "Bytes between small parts of `Slots` up to which they are read past the cache as one.")
      .attr("ALIGN") = (int)Reads::ALIGN;
  m.attr("READ_COPIES") = Reads::COPIES;
}

void bind_slots(nb::module_& m) {
  nb::class_<Resting>(m, "Resting",
                      "Where a part of each of equal items rests in a file: item i at offset + i // each * outer\n"
                      "+ i % each * stride. later: what is needed of it is read when it is.")
      .def(
          "__init__",
          [](Resting* resting, int file, int64_t offset, int64_t bytes, int64_t stride, std::optional<int64_t> each,
             int64_t outer, bool later) {
            new (resting) Resting{file, offset, bytes, stride, each.value_or(1LL << 40), outer};
            resting->later = later;
          },
          "file"_a, "offset"_a, "bytes"_a, "stride"_a, "each"_a = nb::none(), "outer"_a = 0, "later"_a = false)
      .def_static(
          "matrices",
          [](const std::string& type, int64_t rows, int64_t k, const std::vector<std::pair<int, int64_t>>& places) {
            Resting resting{0, 0, rows * stored_row_bytes(type_of(type), k), 0};
            check_stored(type_of(type), rows, k, resting.bytes);
            resting.before = packed_excess(type_of(type), rows, k);
            for (const auto& [file, offset] : places) resting.places.push_back({file, offset});
            return resting;
          },
          "type"_a, "rows"_a, "k"_a, "places"_a,
          "A matrix [rows, k] of each item, at (file, offset), with room for its panels.");
  nb::class_<SlotMemory>(m, "SlotMemory",
                         "Memory for slots of equal size, which several `Slots` may share: each has its own number of\n"
                         "them, and of the rest, `common`, whichever needs more for a while. For one thread at a time.")
      .def(nb::init<int64_t, int64_t, int64_t>(), "slots"_a, "slot_bytes"_a, "common"_a = 0)
      .def(
          "use", &SlotMemory::use, "n"_a, nb::call_guard<nb::gil_scoped_release>(),
          "From now on only the first n slots have items; the memory of the others is given back, and all are let go.\n"
          "Between steps. ReadError: what was being read is not over.")
      .def_prop_ro("slots", &SlotMemory::slots);
  nb::class_<Slots>(m, "Slots",
                    "Items of equal size that rest on disk, and memory for some of them. For one thread at a time.\n\n"
                    "parts: of each item. What has least `priority` is replaced first, of equals the lowest item.\n"
                    "memory: which has as many slots left, and as large ones; None: of its own.")
      .def(nb::init<std::shared_ptr<Reads>, std::vector<Resting>, int64_t, int64_t, std::shared_ptr<SlotMemory>>(),
           "reads"_a, "parts"_a, "items"_a, "slots"_a, "memory"_a = nb::none())
      .def(
          "want",
          [](Slots& slots, Ints items) {
            nb::gil_scoped_release release;
            return slots.want(items.data(), (int64_t)items.shape(0));
          },
          "items"_a,
          "Pin these items, from the first on as many as there is room for beside those pinned, and begin to read\n"
          "those that are not there. How many.")
      .def(
          "fetch",
          [](Slots& slots, Ints items) {
            nb::gil_scoped_release release;
            return slots.fetch(items.data(), (int64_t)items.shape(0));
          },
          "items"_a,
          "Begin to read items that may be wanted later, in place of others of less priority. For how many there\n"
          "was room.")
      .def("wait", nb::overload_cast<>(&Slots::wait), nb::call_guard<nb::gil_scoped_release>(),
           "Wait for what is pinned. ReadError: an item that could not be read is not there, and all are let go.")
      .def("let_go", nb::overload_cast<>(&Slots::let_go), "Of all that is pinned.")
      .def("settle", &Slots::settle, "The same, and common slots are free again: what has least `priority` leaves.")
      .def(
          "held",
          [](const Slots& slots, int64_t item) {
            require(item >= 0 && item < slots.items(), "no such item");
            return slots.held(item);
          },
          "item"_a, "Whether it is in memory.")
      .def(
          "part",
          [](const Slots& slots, int64_t item, size_t part) {
            require(item >= 0 && item < slots.items() && part < slots.parts(), "no such item, or part");
            require(slots.held(item), "that item is not in memory");
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(
                slots.part(item, part), {(size_t)slots.part_bytes(part)}, nb::find(slots));
          },
          "item"_a, "part"_a, "A part of an item in memory, uint8; it is the item's while that is pinned.")
      .def_prop_ro(
          "lines",
          [](const Slots& slots) -> std::optional<nb::ndarray<nb::numpy, const uint32_t, nb::ndim<1>>> {
            if (!slots.lines()) return {};
            return nb::ndarray<nb::numpy, const uint32_t, nb::ndim<1>>(slots.lines(), {(size_t)slots.items()},
                                                                       nb::find(slots));
          },
          "Where part 0 of each item in memory lies, in units of 64 bytes; None if they do not begin at such.")
      .def_prop_ro(
          "priority",
          [](Slots& slots) {
            return nb::ndarray<nb::numpy, float, nb::ndim<1>>(slots.priority.data(), {slots.priority.size()},
                                                              nb::find(slots));
          },
          "Of each item: the slots' own memory, to be written between steps.")
      .def(
          "stats",
          [](const Slots& slots) {
            const Slots::Stats s = slots.stats();
            return Counts{{"wanted", s.wanted}, {"hits", s.hits}, {"bytes", s.bytes}, {"early", s.early}};
          },
          "wanted: items that were pinned; hits: of those, that needed no read; bytes: read for the others; early: of\n"
          "the hits those that `fetch` has read since they were last pinned, and since `settle`.")
      .def("clear", &Slots::clear, "Reset the counters.")
      .def_prop_ro("memory", &Slots::shared)
      .def_prop_ro("items", &Slots::items)
      .def_prop_ro("slots", &Slots::slots)
      .def_prop_ro("slot_bytes", &Slots::slot_bytes);
}

void bind_window(nb::module_& m) {
  nb::class_<Window>(m, "Window", "A ring of memory through which matrices on disk pass, in the order of operators.")
      .def(nb::init<std::shared_ptr<Reads>, int64_t>(), "reads"_a, "nbytes"_a)
      .def("forget", &Window::forget, nb::call_guard<nb::gil_scoped_release>(),
           "Between steps: drop what was read ahead, and give the ring's memory back until it is needed.");
}
