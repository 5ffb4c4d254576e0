#include "bundle_panels.h"

#include "repack.h"

namespace {

constexpr int64_t CACHED = 384 << 10;  // bytes that stay in a core's cache

// Of down a line of the rows, unless so many panels exceed a core's cache.
int64_t panels_at_once(BundlePart part, int64_t panel_bytes) {
  int64_t n = part == BundlePart::DOWN ? 8 : 2;
  while (n > 2 && n * panel_bytes > CACHED) n /= 2;
  return n;
}

class BundlePanels : public PanelSource {
 public:
  BundlePanels(std::shared_ptr<const Bundles> bundles, BundlePart part, int64_t first, int64_t neurons, int64_t panels)
      : PanelSource(panels), bundles_(std::move(bundles)), part_(part), first_(first), neurons_(neurons) {}

  void make(const PiKernels* kernels, int64_t p, int64_t n, uint8_t* out) const override {
    const Bundles& b = *bundles_;
    if (part_ == BundlePart::DOWN) panels_of_outputs(kernels, b.down, first_, neurons_, p * PI_LANES, (int)n, out);
    else panels_of_neurons(part_ == BundlePart::GATE ? b.gate : b.up, first_ + p * PI_LANES, (int)n, out);
  }

  bool ahead(int64_t p, PiAhead (&ahead)[8]) const override {
    const PiRows& down = bundles_->down;
    if (part_ != BundlePart::DOWN || at_once != 8 || neurons_ <= PI_GROUP || pi_across(down.type) < 0) return false;
    outputs_ahead(down, first_, p * PI_LANES, ahead);
    return true;
  }

 private:
  const std::shared_ptr<const Bundles> bundles_;
  const BundlePart part_;
  const int64_t first_, neurons_;
};

}  // namespace

Matrix bundle_matrix(std::shared_ptr<const Bundles> bundles, BundlePart part, int64_t first, int64_t neurons) {
  const Bundles& b = *bundles;
  const bool down = part == BundlePart::DOWN;
  const PiRows& rows = down ? b.down : part == BundlePart::GATE ? b.gate : b.up;
  check(!b.slots && b.complete() && (rows.stride > 0 || rows.lines), "these rows of bundles are not in memory");
  check(first >= 0 && neurons > 0 && first % PI_GROUP == 0 && neurons % PI_GROUP == 0 && neurons <= b.neurons - first,
        "a matrix is made of whole groups of the neurons that there are");
  const int type = repacked_type(rows.type);
  check(type >= 0, "rows of this type do not become panels");
  const int64_t n_rows = down ? rows.k : neurons, k = down ? neurons : rows.k;
  const int64_t panels = panels_at_once(part, pi_panel_bytes(type, k));
  auto source = std::make_shared<BundlePanels>(std::move(bundles), part, first, neurons, panels);
  return {type, n_rows, k, pi_round_up(n_rows, PI_LANES) / PI_LANES, nullptr, nullptr, nullptr, std::move(source)};
}
