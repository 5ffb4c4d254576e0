#include "weights.h"

#include <stdexcept>

std::vector<Matrix> cut(const Matrix& all, int64_t n, int64_t rows) {
  std::vector<Matrix> each;
  const int64_t panels = all.panels / n, bytes = panels * pi_panel_bytes(all.type, all.k);
  for (int64_t i = 0; i < n; i++) each.push_back({all.type, rows, all.k, panels, all.data + i * bytes, all.arena});
  return each;
}

Vector padded(Vector v) {
  v.resize((size_t)pi_round_up((int64_t)v.size(), PI_LANES), 0.0f);
  return v;
}

void Norm::apply(const PiKernels* kernels, const float* x, float* out) const {
  const int64_t k = (int64_t)w.size();
  if (!order.empty()) {
    thread_local Vector moved;  // x and out may be the same
    moved.resize((size_t)k);
    for (int64_t i = 0; i < k; i++) moved[(size_t)i] = x[order[(size_t)i]];
    x = moved.data();
  }
  if (plain)
    for (int64_t i = 0; i < k; i++) out[i] = x[i] * w[(size_t)i];
  else if (layer) kernels->layer_norm(x, w.data(), b.empty() ? nullptr : b.data(), k, eps, out);
  else kernels->rms_norm(x, w.data(), k, eps, out);
}

void check(bool good, const std::string& what) {
  if (!good) throw std::invalid_argument(what);
}

void check_norm(const Norm& norm, int64_t n, const std::string& what) {
  check(!norm || (int64_t)norm.w.size() == n, what + " has another length than its rows");
}

void check_bias(const Vector& bias, int64_t n, const std::string& of) {
  check(bias.empty() || (int64_t)bias.size() == n, "the bias of " + of + " has a wrong length");
}
