#include "resting_neurons.h"

#include <algorithm>

RestingNeurons::RestingNeurons(ExpertMatrices all, std::shared_ptr<Workspace> workspace)
    : BundledExperts(all, std::move(workspace)),
      slots_(std::move(all.slots)),
      resting_(slots_, parts_),
      rows_part_(predictor_ ? 0 : 1),
      groups_(neurons / PI_GROUP),
      loaded_((size_t)(experts * groups_)),
      needed_(loaded_.size()),
      read_at_((size_t)experts) {}

RestingNeurons::~RestingNeurons() {
  for (const Coming& coming : coming_) {
    try {
      slots_->reads().cancel(coming.ticket);
    } catch (const ReadError&) {}
  }
}

void RestingNeurons::begin(const ExpertRows& rows, int64_t tokens) {
  // What was guessed, or of a step that failed: of experts that stay it goes on, other memory is to be used again.
  const bool stay = leaves_out(tokens) && (int64_t)rows.active.size() <= slots_->slots();
  for (const Coming& item : std::vector<Coming>(coming_)) {
    const int32_t e = item.expert;
    if (stay && rows.begin[(size_t)e + 1] > rows.begin[(size_t)e] && (slots_->held(e) || slots_->coming(e))) continue;
    try {
      wait_for_rows(&e);
    } catch (const ReadError&) {
      if (coming(e)) throw;  // the disk does not answer
    }
  }
  expected_.clear();
  resting_.pinned = nullptr;
  if (!leaves_out(tokens))
    resting_.pinned = [this](int32_t e) {
      read_rows(e, true);
    };  // behind its up, and before what is read of the next one
  resting_.begin(rows);
}

void RestingNeurons::expect(const int32_t* expected, int64_t n) {
  expected_.clear();
  if (!coming_.empty()) return;
  resting_.expect(expected, n);
  if (!predictor_ || !slots_->reads().direct()) return;  // copies from the system's cache would take the CPU's time
  expected_.assign(expected, expected + n);
  std::sort(expected_.begin(), expected_.end());
  expected_.erase(std::unique(expected_.begin(), expected_.end()), expected_.end());
}

bool RestingNeurons::foresee(int thread, const Rows& x, const Attempt& attempt) {
  if (expected_.empty()) return false;
  Workspace& w = *workspace_;
  NeuronLists& lists = w.lists();
  const PiActs* const hidden = predictor_->hide(thread, w, x);
  int64_t begin, end;  // groups of neurons
  share((int64_t)expected_.size() * groups_, 1, w.pool->threads(), thread, &begin, &end);
  for (int64_t at = begin, count; at < end; at += count) {
    const int64_t g = at % groups_;
    count = std::min(end - at, groups_ - g);
    const size_t e = (size_t)expected_[(size_t)(at / groups_)];
    const int64_t panel = PI_GROUP / PI_LANES, first = (int64_t)e * neurons;
    w.linear(thread, out_[e], NO_BIAS, hidden, lists.z.data() + first, lists.ldz, x.tokens, false, g * panel,
             (g + count) * panel);
    for (int64_t group = g; group < g + count; group++) {
      uint32_t& needed = needed_[(size_t)((int64_t)e * groups_ + group)] = 0;
      for (int64_t i = 0; i < x.tokens; i++)
        for (int64_t j = 0; j < PI_GROUP; j++)
          needed |= (uint32_t)predictor_->candidate(lists.z[(size_t)(i * lists.ldz + first + group * PI_GROUP + j)])
                    << j;
    }
  }
  w.pool->barrier();
  if (thread != 0) return true;
  attempt([&] {
    for (const int32_t e : expected_)
      if (slots_->held(e) || slots_->coming(e)) read_rows(e, false, true);
  });
  return true;
}

// ---- Rows of neurons ------------------------------------------------------------------------------------------------

// Says where the rows of an expert lie that was read since this was said: none of them is there.
void RestingNeurons::place(int32_t e) {
  if (read_at_[(size_t)e] == slots_->times_read(e)) return;
  read_at_[(size_t)e] = slots_->times_read(e);
  std::fill_n(loaded_.begin() + e * groups_, groups_, 0u);
  Bundles& b = *bundled_->bundles;
  const int64_t row = b.resting_bytes() / 64, shared = pi_shared_bytes(b.down.type, b.down.k) / 64;
  const auto line = [&](size_t part) { return (slots_->writable(e, part) - b.down.groups) / 64; };
  for (int64_t i = 0, first = line(rows_part_); i < neurons; i++)
    b.lines[(size_t)(e * neurons + i)] = (uint32_t)(first + i * row);
  if (!shared) return;
  for (int64_t g = 0, first = line(rows_part_ + 1); g < groups_; g++)
    b.shared_lines[(size_t)(e * groups_ + g)] = (uint32_t)(first + g * shared);
}

// The neurons of an expert that fire are needed.
void RestingNeurons::need_fired(int32_t e) {
  const ExpertRows& rows = *step_.rows;
  const int64_t words = rows.ldh / PI_LANES;
  for (int64_t g = 0; g < groups_; g++) {
    uint32_t& needed = needed_[(size_t)(e * groups_ + g)] = 0;
    for (int64_t r = rows.begin[(size_t)e]; r < rows.begin[(size_t)e + 1]; r++) {
      const uint16_t* const bits = rows.fired.data() + r * words + g * PI_GROUP / PI_LANES;
      needed |= bits[0] | (uint32_t)bits[1] << PI_LANES;
    }
  }
}

// Those that the threads have taken, of the experts of the step.
void RestingNeurons::need_listed(const NeuronLists& lists) {
  for (const int32_t e : active_) std::fill_n(needed_.begin() + e * groups_, groups_, 0u);
  for (const NeuronLists::Share& share : lists.shares)
    for (int64_t j = 0; j < share.n_taken; j++) {
      const int32_t i = share.taken[(size_t)j];
      if (i < experts * neurons) needed_[(size_t)(i / PI_GROUP)] |= 1u << i % PI_GROUP;
    }
}

// Begins to read the rows of an expert, pinned, that are not there: those that are needed, or all. What lies between two of
// them, and takes the disk less time than another read, is read with them.
void RestingNeurons::read_rows(int32_t e, bool all, bool guessed) {
  place(e);
  const int64_t row = bundled_->bundles->resting_bytes(), gap = slots_->reads().gap / row;
  uint32_t* const loaded = loaded_.data() + e * groups_;
  int64_t first = -1, last = -1;
  const auto note = [&] {
    if (first < 0) return;
    slots_->read_later(e, rows_part_, first * row, (last + 1 - first) * row);
    for (int64_t i = first; i <= last; i++) loaded[i / PI_GROUP] |= 1u << i % PI_GROUP;
  };
  for (int64_t g = 0; g < groups_; g++) {
    const uint32_t needed = all ? UINT32_MAX : needed_[(size_t)(e * groups_ + g)];
    for (uint32_t lacking = needed & ~loaded[g]; lacking; lacking &= lacking - 1) {
      const int64_t i = g * PI_GROUP + __builtin_ctz(lacking);
      if (first < 0 || i - last - 1 > gap) {
        note();
        first = i;
      }
      last = i;
    }
  }
  if (first < 0) return;
  note();
  coming_.push_back({-1, e, guessed});
  try {
    coming_.back().ticket = slots_->begin_later();
  } catch (...) {
    coming_.pop_back();
    forget(e);
    throw;
  }
}

bool RestingNeurons::coming(int32_t e) const {
  return std::any_of(coming_.begin(), coming_.end(), [e](const Coming& item) { return item.expert == e; });
}

// Waits for the rows of an expert; null: for all. ReadError: they are not there. lost: gets whether guessed ones could not
// be read, for which nothing is thrown then.
void RestingNeurons::wait_for_rows(const int32_t* e, bool* lost) {
  Reads& reads = slots_->reads();
  for (size_t i = 0; i < coming_.size();) {
    const auto [ticket, expert, guessed] = coming_[i];
    if (e && expert != *e) {
      i++;
      continue;
    }
    try {
      reads.wait(ticket);
    } catch (const ReadError&) {
      forget(expert);
      const bool over = reads.done(ticket);
      if (over) coming_.erase(coming_.begin() + (int64_t)i);
      if (!over || !guessed || !lost) throw;
      *lost = true;
      continue;
    }
    coming_.erase(coming_.begin() + (int64_t)i);
  }
}

// The same of those that the step needs. Of others that were guessed none matters: without them these are read again.
void RestingNeurons::wait_for_needed(int32_t e) {
  bool lost = false;
  wait_for_rows(&e, &lost);
  if (!lost) return;
  read_rows(e, false);
  wait_for_rows(&e);
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

// ---- Some neurons ---------------------------------------------------------------------------------------------------

// By thread 0.
void RestingNeurons::begin_sum(const ExpertRows& rows, const Rows& x, const Attempt& attempt) {
  active_ = rows.active;
  step_ = {&rows, &attempt, x, (int64_t)active_.size() <= slots_->slots()};
}

void RestingNeurons::sum_some(Thread& t, ExpertRows& rows, const PiActs* acts, const Rows& x,
                              const NeuronSum::Piece& piece, int64_t top_k, const SharedExpert& shared,
                              const Attempt& attempt) {
  Workspace& w = *workspace_;
  NeuronSum::Piece waves = piece;
  waves.waves = this;
  if (t.id == 0) begin_sum(rows, x, attempt);
  if (predictor_) {
    sum_predicted(t, rows, x, waves, top_k, shared);
    if (t.id == 0) slots_->let_go();
    return;
  }
  const int64_t tokens = piece.x.tokens, words = rows.ldh / PI_LANES;
  const bool single = tokens == 1;
  const PiActs inputs = single ? *acts : gather(t.id, rows, acts, d_model, forms_);
  if (shared_) note_shared(t, rows, acts, tokens, shared);
  bool could = true;  // of thread 0
  for (;;) {
    if (t.id == 0) {
      could = attempt([&] {
        for (const int32_t e : resting_.now()) {
          if (!step_.fits) break;
          need_fired(e);
          read_rows(e, false);
        }
        resting_.next(rows, step_.fits);
      });
      if (!could) rows.compute({});
    }
    w.pool->barrier();
    if (rows.active.empty()) break;
    const bool settles = resting_.settles();
    share_panels(t.id, rows, parts_[UP][0].panels, [&](const Block& block) {
      float* const h = hidden_rows(rows, block).rows;
      const PiActs x_of = pi_acts_from(&inputs, single ? 0 : block.first, 0);
      product(t.id, UP, block, x_of, h, rows.ldh);
      activate(rows, block, h, rows.ldh);
      for (int64_t i = 0; i < block.n; i++)
        w.kernels->neurons.fires(h + i * rows.ldh, block.lanes(), 0.0f,
                                 rows.fired.data() + (block.first + i) * words + block.p0);
    });
    w.pool->barrier();
    if (!settles) continue;
    w.settle(t.id);
    w.pool->barrier();
  }
  w.pool->barrier();  // all have seen that
  if (t.id == 0 && could) rows.compute(active_);
  w.pool->barrier();
  share_panels(t.id, rows, parts_[UP][0].panels, [&](const Block& block) { note_firing(rows, block, tokens); });
  waves.noted = noted(t.id, rows.copy(t.id));
  waves.first_rows = (int64_t)rows.active.size() * neurons + shared_;
  w.pool->barrier();
  bundled_->sum_noted(t.id, waves, acts, rows.floats(rows.activations), experts * neurons + shared_, false);
  if (t.id == 0) slots_->let_go();
}

// Begins to read what the predictor has selected, then what it selects for the next layer.
bool RestingNeurons::begin(int thread, const NeuronLists& lists) {
  if (!predictor_) return false;
  if (thread == 0)
    (*step_.attempt)([&] {
      need_listed(lists);
      for (const int32_t e : active_)
        if (step_.fits) read_rows(e, false);
    });
  ExpertStore* const ahead = step_.rows->ahead;
  return ahead && ahead->foresee(thread, step_.x, *step_.attempt);
}

// Where the slots hold all experts of the step, what is there at once, then as rows arrive.
bool RestingNeurons::next(NeuronLists& lists) {
  bool more = false;
  const bool could = (*step_.attempt)([&] {
    more = take_some(lists);
    if (!step_.fits) {
      slots_->wait();  // else what could not be read at the step's beginning would be tried again unseen
      slots_->let_go();
      const int64_t n = (int64_t)chosen_.size();
      check(slots_->want(chosen_.data(), n) == n, "the slots have no room for the experts of a step");
      slots_->wait();
      for (const int32_t e : chosen_) {
        if (!predictor_) need_fired(e);
        read_rows(e, false);
      }
    }
    for (const int32_t e : chosen_) {
      slots_->wait(e);
      check(slots_->held(e), "an expert of the step is not in memory");
      wait_for_needed(e);
    }
  });
  if (could) return more;
  for (NeuronLists::Share& share : lists.shares) share.begin = share.end = share.n_taken;  // the sum is void
  return false;
}

// Chooses what each thread adds next, an expert of each thread in turn: where these fit, up to one that is to be waited for,
// else of as many experts as there are slots. Returns whether more is left.
bool RestingNeurons::take_some(NeuronLists& lists) {
  chosen_.clear();
  const auto chosen = [&](int64_t e) {
    return e >= experts || std::find(chosen_.begin(), chosen_.end(), (int32_t)e) != chosen_.end();
  };
  for (NeuronLists::Share& share : lists.shares) share.begin = share.end;
  bool left = true;
  for (bool first = true, more = true; more; first = false) {
    more = left = false;
    for (NeuronLists::Share& share : lists.shares) {
      if (share.end == share.n_taken) continue;
      left = true;
      const int64_t e = share.next() / neurons;
      if (!chosen(e)) {
        const bool room = step_.fits ? first || !coming((int32_t)e) : (int64_t)chosen_.size() < slots_->slots();
        if (!room) continue;
        chosen_.push_back((int32_t)e);
      }
      while (share.end < share.n_taken && share.next() / neurons == e) share.end++;
      more = true;
    }
  }
  return left;
}
