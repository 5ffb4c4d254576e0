#include "resting_neurons.h"

#include <algorithm>

RestingNeurons::RestingNeurons(ExpertMatrices all, std::shared_ptr<Workspace> workspace)
    : BundledExperts(all, std::move(workspace)),
      slots_(std::move(all.slots)),
      resting_(slots_, parts_),
      groups_(neurons / PI_GROUP),
      loaded_((size_t)(experts * groups_)),
      read_at_((size_t)experts) {}

RestingNeurons::~RestingNeurons() {
  for (const Coming& coming : coming_) {
    try {
      slots_->reads().cancel(coming.ticket);
    } catch (const ReadError&) {}
  }
}

void RestingNeurons::begin(const ExpertRows& rows, int64_t tokens) {
  wait_for_rows(nullptr);  // of a step that failed: their memory is to be used again
  resting_.pinned = nullptr;
  if (!leaves_out(tokens))
    resting_.pinned = [this](int32_t e) {  // behind its up, and before what is read of the next one
      note_rows(e, nullptr);
      read_noted();
    };
  resting_.begin(rows);
}

void RestingNeurons::expect(const int32_t* expected, int64_t n) {
  if (coming_.empty()) resting_.expect(expected, n);
}

// ---- Rows of down ---------------------------------------------------------------------------------------------------

// Says where the rows of an expert lie that was read since this was said: none of them is there.
void RestingNeurons::place(int32_t e) {
  if (read_at_[(size_t)e] == slots_->times_read(e)) return;
  read_at_[(size_t)e] = slots_->times_read(e);
  std::fill_n(loaded_.begin() + e * groups_, groups_, 0u);
  Bundles& b = *bundled_->bundles;
  const int64_t row = pi_row_bytes(b.down.type, b.down.k) / 64, shared = pi_shared_bytes(b.down.type, b.down.k) / 64;
  const auto line = [&](size_t part) { return (slots_->writable(e, part) - b.down.groups) / 64; };
  for (int64_t i = 0, first = line(ROWS); i < neurons; i++)
    b.lines[(size_t)(e * neurons + i)] = (uint32_t)(first + i * row);
  if (!shared) return;
  for (int64_t g = 0, first = line(SCALES); g < groups_; g++)
    b.shared_lines[(size_t)(e * groups_ + g)] = (uint32_t)(first + g * shared);
}

// Notes the rows of an expert, pinned, that are not there: of neurons that fire; fired: null: all. What lies between two
// of them, and takes the disk less time than another read, is read with them.
void RestingNeurons::note_rows(int32_t e, const ExpertRows* fired) {
  place(e);
  const PiRows& down = bundled_->bundles->down;
  const int64_t row = pi_row_bytes(down.type, down.k), gap = slots_->reads().gap / row;
  uint32_t* const loaded = loaded_.data() + e * groups_;
  int64_t first = -1, last = -1;
  const auto note = [&] {
    if (first < 0) return;
    slots_->read_later(e, ROWS, first * row, (last + 1 - first) * row);
    for (int64_t i = first; i <= last; i++) loaded[i / PI_GROUP] |= 1u << i % PI_GROUP;
  };
  const int64_t words = fired ? fired->ldh / PI_LANES : 0;
  for (int64_t g = 0; g < groups_; g++) {
    uint32_t needed = fired ? 0 : UINT32_MAX;
    for (int64_t r = fired ? fired->begin[(size_t)e] : 0; fired && r < fired->begin[(size_t)e + 1]; r++) {
      const uint16_t* const bits = fired->fired.data() + r * words + g * PI_GROUP / PI_LANES;
      needed |= bits[0] | (uint32_t)bits[1] << PI_LANES;
    }
    for (needed &= ~loaded[g]; needed; needed &= needed - 1) {
      const int64_t i = g * PI_GROUP + __builtin_ctz(needed);
      if (first < 0 || i - last - 1 > gap) {
        note();
        first = i;
      }
      last = i;
    }
  }
  note();
  if (first >= 0) noted_.push_back(e);
}

void RestingNeurons::read_noted() {
  if (noted_.empty()) return;
  Coming coming{-1, std::move(noted_)};
  noted_.clear();
  try {
    coming.ticket = slots_->begin_later();
  } catch (...) {
    forget(coming.experts);
    throw;
  }
  coming_.push_back(std::move(coming));
}

// Nothing is there of the rows of these experts.
void RestingNeurons::forget(const std::vector<int32_t>& list) {
  for (const int32_t e : list) read_at_[(size_t)e] = slots_->times_read(e) - 1;
}

// Waits for the rows of an expert; null: for all. ReadError: they are not there.
void RestingNeurons::wait_for_rows(const int32_t* e) {
  Reads& reads = slots_->reads();
  for (size_t i = 0; i < coming_.size();) {
    const std::vector<int32_t>& list = coming_[i].experts;
    if (e && std::find(list.begin(), list.end(), *e) == list.end()) {
      i++;
      continue;
    }
    const int64_t ticket = coming_[i].ticket;
    try {
      reads.wait(ticket);
    } catch (const ReadError&) {
      forget(list);
      if (reads.done(ticket)) coming_.erase(coming_.begin() + (int64_t)i);
      throw;
    }
    coming_.erase(coming_.begin() + (int64_t)i);
  }
}

// ---- Whole experts --------------------------------------------------------------------------------------------------

void RestingNeurons::sum_rows(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                              const Attempt& attempt) {
  const auto next = [&] {
    const bool could = attempt([&] {
      resting_.next(rows);
      for (const int32_t e : resting_.now()) wait_for_rows(&e);
    });
    if (!could) rows.compute({});
  };
  sum_arriving(t, rows, acts, single, fired, next, resting_);
}

// ---- Neurons that fire ----------------------------------------------------------------------------------------------

void RestingNeurons::sum_some(Thread& t, ExpertRows& rows, const PiActs* acts, const Rows&,
                              const NeuronSum::Piece& piece, int64_t, const SharedExpert& shared,
                              const Attempt& attempt) {
  Workspace& w = *workspace_;
  const int64_t tokens = piece.x.tokens, words = rows.ldh / PI_LANES;
  const bool single = tokens == 1;
  const PiActs inputs = single ? *acts : gather(t, rows, acts, d_model, forms_);
  begin_list(t.id);
  if (shared_) list_shared(t, rows, acts, tokens, shared);
  if (t.id == 0) {
    active_ = rows.active;
    step_ = {&rows, &attempt, (int64_t)active_.size() <= slots_->slots()};
  }
  bool could = true;  // of thread 0
  for (;;) {
    if (t.id == 0) {
      could = attempt([&] {
        for (const int32_t e : resting_.now())
          if (step_.fits) note_rows(e, &rows);
        read_noted();
        resting_.next(rows, step_.fits);
      });
      if (!could) rows.compute({});
    }
    w.pool->barrier();
    if (rows.active.empty()) break;
    const bool settles = resting_.settles();
    share_panels(t.id, rows, parts_[UP][0].panels, false, [&](size_t e, int64_t p0, int64_t p1) {
      const int64_t begin = rows.begin[e], lanes = (p1 - p0) * PI_LANES;
      float* const h = rows.floats(rows.gate) + begin * rows.ldh;
      const PiActs x = pi_acts_from(&inputs, single ? 0 : begin, 0);
      w.linear(t.id, parts_[UP][e], NO_BIAS, &x, h, rows.ldh, rows.n(e), false, p0, p1);
      activate(rows, e, h + p0 * PI_LANES, lanes);
      for (int64_t i = 0; i < rows.n(e); i++)
        w.kernels->neurons.fires(h + i * rows.ldh + p0 * PI_LANES, lanes, 0.0f,
                                 rows.fired.data() + (begin + i) * words + p0);
    });
    w.pool->barrier();
    if (!settles) continue;
    w.settle(t.id);
    w.pool->barrier();
  }
  w.pool->barrier();  // all have seen that
  if (t.id == 0 && could) rows.compute(active_);
  w.pool->barrier();
  list_firing(t.id, rows, nullptr, tokens);
  w.pool->barrier();
  NeuronSum::Piece waves = piece;
  waves.waves = this;
  bundled_->sum_listed(t.id, waves, acts, rows.floats(rows.activations), experts * neurons + shared_, nullptr);
  if (t.id != 0) return;
  slots_->let_go();
  bundled_->count_gates((int64_t)rows.active.size() * neurons + shared_);
}

// Where the slots hold all experts of the step, all neurons at once.
bool RestingNeurons::next(NeuronLists& lists) {
  if (!step_.fits) take_some(lists);
  bool more = false;
  const bool could = (*step_.attempt)([&] {
    if (!step_.fits) {
      slots_->let_go();
      const int64_t n = (int64_t)chosen_.size();
      check(slots_->want(chosen_.data(), n) == n, "the slots have no room for the experts of a step");
      slots_->wait();
      for (const int32_t e : chosen_) note_rows(e, step_.rows);
      read_noted();
    }
    wait_for_rows(nullptr);
  });
  for (NeuronLists::Share& share : lists.shares) {
    if (step_.fits) share.end = share.n_taken;
    if (!could) share.begin = share.end = share.n_taken;  // they are not there, and the sum is void
    more = more || share.end < share.n_taken;
  }
  return more;
}

// Chooses what each thread adds next, of as many experts as there are slots: an expert of each thread in turn.
void RestingNeurons::take_some(NeuronLists& lists) {
  chosen_.clear();
  for (NeuronLists::Share& share : lists.shares) share.begin = share.end;
  for (bool more = true; more;) {
    more = false;
    for (NeuronLists::Share& share : lists.shares) {
      if (share.end == share.n_taken) continue;
      const int64_t e = share.next() / neurons;
      const bool chosen = e >= experts || std::find(chosen_.begin(), chosen_.end(), (int32_t)e) != chosen_.end();
      if (!chosen && (int64_t)chosen_.size() == slots_->slots()) continue;
      if (!chosen) chosen_.push_back((int32_t)e);
      while (share.end < share.n_taken && share.next() / neurons == e) share.end++;
      more = true;
    }
  }
}
