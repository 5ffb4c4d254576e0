// The kernels of every level that runs here, against plain loops in double precision (checks.h says how).
#include "checks.h"
#include "ffn.h"

namespace {

const char* const KV_TYPES[PI_N_KV_TYPES] = {"f32", "f16", "q8_0"};

// Halves by their definition, not by the code under test.
double half_value(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double v = e == 0 ? ldexp(m, -24) : e == 31 ? (m ? NAN : INFINITY) : ldexp(1024 + m, e - 25);
  return h & 0x8000 ? -v : v;
}

// To the nearest half, ties to even, saturated.
double to_half(double x) {
  const double a = std::min(fabs(x), 65504.0);
  int e;
  frexp(a, &e);
  const double unit = ldexp(1, std::max(e, -13) - 11);
  return copysign(nearbyint(a / unit) * unit, x);
}

void test_forms(const PiKernels* kernels) {
  const PiKernels* scalar = find_level("scalar");
  Check q8(std::string(kernels->name) + " forms q8"), bf16(std::string(kernels->name) + " forms bf16"),
      same(std::string(kernels->name) + " forms as scalar");
  for (int64_t k : {1, 31, 32, 45, 64, 96, 577, 1536}) {
    Random r((uint64_t)k);
    std::vector<float> x = r.normals(k, 3);
    if (k >= 64)
      for (int i = 0; i < 32; i++) x[(size_t)i] = 0;  // a block of zeros
    if (k >= 96)
      for (int i = 32; i < 64; i++) x[(size_t)i] = (float)(i - 48) / 2;  // many ties
    const Acts a(kernels, PI_FORM_BF16, 1, k, x), b(scalar, PI_FORM_BF16, 1, k, x);
    for (int64_t i = 0; i < a.ldb; i++) {
      uint32_t u = 0;
      if (i < k) memcpy(&u, &x[(size_t)i], 4);
      const uint32_t down = u & 0xffff0000u, rest = u & 0xffff,
                     up = rest > 0x8000 || (rest == 0x8000 && (u >> 16 & 1)) ? 0x10000 : 0;
      bf16.yes(a.b[(size_t)i] == (down + up) >> 16, i);
      same.yes(a.b[(size_t)i] == b.b[(size_t)i], i);
    }
    if (k % 32) continue;
    const Acts c(kernels, PI_FORM_Q8, 1, k, x), e(scalar, PI_FORM_Q8, 1, k, x);
    same.yes(c.q == e.q && c.s == e.s && c.d == e.d && c.sd == e.sd, k);
    for (int64_t block = 0; block < k / 32; block++) {
      float most = 0;
      int sum[2] = {0, 0};
      for (int i = 0; i < 32; i++) {
        most = std::max(most, fabsf(x[(size_t)(32 * block + i)]));
        sum[i / 16] += c.q[(size_t)(32 * block + i)];
      }
      q8.same(c.d[(size_t)block], most / 127.0f, block);
      for (int h = 0; h < 2; h++) q8.yes(c.s[(size_t)(2 * block + h)] == sum[h], block);
      q8.same(c.sd[(size_t)block], c.d[(size_t)block] * (float)(sum[0] + sum[1]), block);
      // 127 / most and the product round once each: the value before rounding is off by 127 * 2 u.
      for (int i = 0; i < 32; i++)
        q8.near(c.q[(size_t)(32 * block + i)], most > 0 ? x[(size_t)(32 * block + i)] * 127.0 / most : 0,
                0.5 + 254 * gamma_of(2), 32 * block + i);
    }
  }
}

// ---- Matrix products ---------------------------------------------------------------------------------------------

// Operations on the longest path of a term to the sum. Quantised: each 32 k the sum is added to once, and once more for
// each minimum; before that come the factors of the block, at most 6 of them, and what the reference's own row was rounded
// by.
double chain(int type, int64_t k) {
  return is_quantised(type) ? (type == PI_Q2_K ? 3.0 : 2.0) * (double)(k / 32) + 12 : (double)k + 6;
}

// Rows whose values are |scale * code| + |minimum|: what the rounding of a type with minima is relative to.
std::vector<uint8_t> magnitudes(int type, std::vector<uint8_t> rows) {
  const PiTypeFacts& t = pi_facts(type);
  for (size_t at = 0; t.m >= 0 && at < rows.size(); at += (size_t)t.bytes) {
    rows[at + (size_t)t.d + 1] &= 0x7f;
    uint8_t& high = rows[at + (size_t)t.m + 1];
    high = (uint8_t)(t.block == 256 ? high | 0x80 : high & 0x7f);  // of K-quants it is subtracted
  }
  return rows;
}

void product(const PiKernels* kernels, int type, int64_t k, int64_t rows, int64_t most,
             const std::vector<int64_t>& counts) {
  const std::string name = std::string(kernels->name) + " linear " + PI_TYPES[type].name + " k=" + std::to_string(k) +
                           " rows=" + std::to_string(rows);
  Random r((uint64_t)(type * 1000003 + k * 131 + rows));
  const std::vector<uint8_t> stored = random_rows(r, type, rows, k), large = magnitudes(type, stored);
  const int64_t panels = (rows + 15) / 16, ldo = panels * 16, row_bytes = stored_row_bytes(type, k),
                panel_bytes = pi_panel_bytes(type, k);
  Exact<uint8_t> packed((size_t)(panels * panel_bytes)), scratch((size_t)pi_linear_scratch(k));
  pack_panels(type, stored.data(), rows, k, nullptr, 0, packed.data(), 0, panels);
  const Acts acts(kernels, pi_form(type), most, k, r.normals(most * k));
  std::vector<float> bias = r.normals(ldo), before = r.normals(most * ldo);

  const auto run = [&](std::vector<float>& out, int64_t first, int64_t tokens, int64_t p0, int64_t p1, bool with_bias,
                       bool add) {
    const PiActs a = acts.from(first);
    const PiLinear l{packed.data(), with_bias ? bias.data() : nullptr, out.data(), ldo, type, add};
    kernels->linear[l.type](&l, &a, p0, p1, tokens, scratch.data());
  };
  std::vector<float> plain((size_t)(most * ldo), NOT), full = before;
  run(plain, 0, most, 0, panels, false, false);
  run(full, 0, most, 0, panels, true, true);
  {
    Check values(name);
    std::vector<float> w((size_t)k), m((size_t)k);
    std::vector<double> a((size_t)(most * k));
    for (int64_t t = 0; t < most; t++)
      for (int64_t i = 0; i < k; i++) a[(size_t)(t * k + i)] = acts.value(type, t, i);
    const double g = gamma_of(chain(type, k)) * (type == PI_IQ1_S ? 9.0 / 7 : 1);  // a unit less an eighth, not more
    for (int64_t row = 0; row < ldo; row++) {
      if (row < rows) {
        unpack_row(type, stored.data() + row * row_bytes, k, w.data());
        unpack_row(type, large.data() + row * row_bytes, k, m.data());
      }
      for (int64_t t = 0; t < most; t++) {
        double sum = 0, size = 0;
        for (int64_t i = 0; row < rows && i < k; i++) {
          const double x = a[(size_t)(t * k + i)];
          sum += w[(size_t)i] * x;
          size += fabs(m[(size_t)i] * x);
        }
        const size_t at = (size_t)(t * ldo + row);
        values.near(plain[at], sum, g * size, (int64_t)at);  // rows beyond the last: exactly zero
        const double more = bias[(size_t)row], was = before[at];
        values.near(full[at], sum + more + was, g * (size + fabs(more) + fabs(was)), (int64_t)at);
      }
    }
  }
  Check bits(name + " bits for any number of tokens"), outside(name + " writes its part only");
  for (int64_t tokens : counts) {
    for (int64_t first : {(int64_t)0, (most - tokens) / 2}) {
      std::vector<float> out((size_t)(tokens * ldo), NOT);
      run(out, first, tokens, 0, panels, false, false);
      for (size_t i = 0; i < out.size(); i++) bits.same(out[i], plain[(size_t)(first * ldo) + i], (int64_t)i);
    }
    if (panels < 3) continue;
    std::vector<float> out((size_t)(tokens * ldo), NOT);
    run(out, 0, tokens, 1, panels - 1, false, false);
    for (size_t i = 0; i < out.size(); i++) {
      const int64_t p = (int64_t)i % ldo / 16;
      if (p == 0 || p == panels - 1) outside.yes(isnan(out[i]), (int64_t)i);
      else outside.same(out[i], plain[i], (int64_t)i);
    }
  }
  if (panels < 3) outside.yes(true, 0);
}

void test_linear(const PiKernels* kernels) {
  const std::vector<int64_t> counts = {1, 2, 3, 5, 8, 12, 13, 16, 17, 33};
  for (int type = 0; type < PI_N_TYPES; type++) {
    std::vector<int64_t> ks = {32, 64, 96, 160, 576, 1536};
    if (!is_quantised(type)) ks = {1, 17, 32, 33, 45, 96, 577, 1536};
    if (pi_block(type) == 256) ks = {256, 512, 768, 1536};
    for (int64_t k : ks)
      for (int64_t rows : {1, 16, 17, 40, 70}) {
        if (k <= 600 || rows == 1 || rows == 70) product(kernels, type, k, rows, 33, counts);
      }
    product(kernels, type, 16384, 20, 33, {1, 13, 32});  // activations beyond the cache: tokens in several rounds
  }
}

// Any bytes as weights, scales that are infinite or no number included, and activations that are no better: every
// output is written, a token's are the same whatever is beside it, and no operation is undefined.
void test_hostile(const PiKernels* kernels) {
  for (int type = 0; type < PI_N_TYPES; type++) {
    Check check(std::string(kernels->name) + " any bytes " + PI_TYPES[type].name);
    Random r((uint64_t)type + 99);
    const int64_t k = 256, rows = 40, panels = 3, ldo = 48, tokens = 17;
    std::vector<uint8_t> stored((size_t)(rows * stored_row_bytes(type, k)));
    for (uint8_t& b : stored) b = (uint8_t)r.next();
    std::vector<float> x = r.normals(tokens * k);
    const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-45f, 1e-38f, -0.0f};
    for (int i = 0; i < 8; i++) x[(size_t)(i * k + 40)] = odd[i];
    std::fill(x.begin() + 8 * k, x.begin() + 9 * k, 1e-45f);
    Exact<uint8_t> packed((size_t)(panels * pi_panel_bytes(type, k))), scratch((size_t)pi_linear_scratch(k));
    pack_panels(type, stored.data(), rows, k, nullptr, 0, packed.data(), 0, panels);
    const Acts acts(kernels, pi_form(type), tokens, k, x);
    std::vector<float> all((size_t)(tokens * ldo), 12345.0f), one((size_t)ldo);
    PiActs a = acts.from(0);
    PiLinear l{packed.data(), nullptr, all.data(), ldo, type, 0};
    kernels->linear[l.type](&l, &a, 0, panels, tokens, scratch.data());
    for (int64_t t = 0; t < tokens; t++) {
      std::fill(one.begin(), one.end(), 54321.0f);
      a = acts.from(t);
      l.out = one.data();
      kernels->linear[l.type](&l, &a, 0, panels, 1, scratch.data());
      for (int64_t i = 0; i < ldo; i++) {
        const float v = all[(size_t)(t * ldo + i)], w = one[(size_t)i];
        check.yes(v != 12345.0f && w != 54321.0f, t * ldo + i);
        check.near(isnan(w) || isinf(w) ? (isnan(w) ? isnan(v) : v == w) : v, isnan(w) || isinf(w) ? 1 : w, 0,
                   t * ldo + i);
      }
    }
  }
  Check check(std::string(kernels->name) + " numbers that are none");
  const int64_t n = 48;
  std::vector<float> x(n), w(n, 1.0f), out(n), up(n, 2.0f);
  for (float bad : {(float)NAN, (float)INFINITY, -(float)INFINITY, 3e38f}) {
    std::fill(x.begin(), x.end(), bad);
    kernels->rms_norm(x.data(), w.data(), n, 1e-5f, out.data());
    kernels->layer_norm(x.data(), w.data(), nullptr, n, 1e-5f, out.data());
    for (int act = 0; act < PI_N_ACTS; act++) kernels->activate(act, 0.5f, x.data(), up.data(), n);
    for (int type = 0; type < PI_N_KV_TYPES; type++) {
      Exact<uint8_t> cache((size_t)pi_kv_head_bytes(type, n));
      std::fill(x.begin(), x.end(), bad);
      kernels->store_kv(type, cache.data(), 0, x.data(), x.data(), (int)n);
      kernels->store_kv(type, cache.data(), 1, w.data(), x.data(), (int)n);
      const int32_t page = 0;
      Exact<float> scratch((size_t)pi_attention_scratch(n)), got((size_t)(2 * n), 12345.0f), q((size_t)(2 * n), bad);
      const PiAttention a{q.data(), got.data(), cache.data(), &page, n, n, 0, 0, 0, (int)n, (int)n, 1};
      kernels->attention[type](&a, 0, 0, 2, scratch.data());
      kernels->latent_attention[type](&a, 0, 0, 2, scratch.data());  // of the same bytes, whatever they mean then
      for (size_t i = 0; i < got.size(); i++) check.yes(got[i] != 12345.0f, (int64_t)i);
    }
  }
}

// A map of rows, with padding in between, as heads that are not whole lanes have it.
void test_row_map() {
  Check same("pack with a map of rows");
  for (int type = 0; type < PI_N_TYPES; type++) {
    Random r(7);
    const int64_t k = 256, rows = 23, mapped = 37, panels = 3, bytes = pi_panel_bytes(type, k),
                  row_bytes = stored_row_bytes(type, k);
    const std::vector<uint8_t> stored = random_rows(r, type, rows, k);
    std::vector<int32_t> map((size_t)mapped);
    std::vector<uint8_t> moved((size_t)(panels * 16 * row_bytes), 0);
    const size_t high = type == PI_IQ4_XS ? 2 : 104, some = type == PI_IQ4_XS ? 2 : type == PI_Q3_K ? 4 : 0;
    for (size_t at = 0; some && at < moved.size(); at += (size_t)row_bytes)
      memset(&moved[at + high], 0xaa, some);  // scales of zero: they are stored less 32
    for (int64_t i = 0; i < mapped; i++) {
      map[(size_t)i] = i % 5 == 4 ? -1 : (int32_t)(i * 7 % rows);
      if (map[(size_t)i] >= 0)
        memcpy(&moved[(size_t)(i * row_bytes)], &stored[(size_t)(map[(size_t)i] * row_bytes)], (size_t)row_bytes);
    }
    Exact<uint8_t> a((size_t)(panels * bytes)), b((size_t)(panels * bytes));
    pack_panels(type, stored.data(), rows, k, map.data(), mapped, a.data(), 0, 2);
    pack_panels(type, stored.data(), rows, k, map.data(), mapped, a.data(), 2, 3);
    pack_panels(type, moved.data(), panels * 16, k, nullptr, 0, b.data(), 0, panels);
    same.yes(a == b, type);
  }
}

// ---- The small kernels ---------------------------------------------------------------------------------------------

void test_rms_norm(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " rms_norm");
  for (int64_t n : {1, 15, 16, 17, 31, 32, 33, 64, 80, 576, 577, 2048}) {
    Random r((uint64_t)n);
    std::vector<float> x = r.normals(n, 2), w = r.normals(n), out((size_t)n, NOT);
    kernels->rms_norm(x.data(), w.data(), n, 1e-5f, out.data());
    double sum = 0;
    for (float v : x) sum += (double)v * v;
    const double by = 1 / sqrt(sum / (double)n + (double)1e-5f);
    // Squares are summed by 32 lanes, each adding n / 32 + 1 of them, and 6 more additions: all positive, so the
    // relative error is that number; the root halves it. Then root, reciprocal, mean, eps and two products.
    const double bound = gamma_of(((double)n / 32 + 9) / 2 + 6);
    for (int64_t i = 0; i < n; i++)
      check.near(out[(size_t)i], x[(size_t)i] * by * w[(size_t)i], bound * fabs(x[(size_t)i] * by * w[(size_t)i]), i);
    std::vector<float> place = x;
    kernels->rms_norm(place.data(), w.data(), n, 1e-5f, place.data());
    for (int64_t i = 0; i < n; i++) check.same(place[(size_t)i], out[(size_t)i], i);
  }
}

void test_layer_norm(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " layer_norm");
  for (int64_t n : {1, 15, 16, 17, 31, 32, 33, 64, 80, 576, 577, 2048}) {
    for (float shift : {0.0f, 30.0f}) {
      Random r((uint64_t)n);
      std::vector<float> x = r.normals(n, 2), w = r.normals(n), b = r.normals(n), out((size_t)n, NOT);
      for (float& v : x) v += shift;
      kernels->layer_norm(x.data(), w.data(), b.data(), n, 1e-5f, out.data());
      double sum = 0, size = 0, squares = 0;
      for (float v : x) sum += v, size += fabs(v);
      const double mean = sum / (double)n;
      for (float v : x) squares += (v - mean) * (v - mean);
      const double by = 1 / sqrt(squares / (double)n + (double)1e-5f);
      // A chain of a sum has n / 32 + 1 additions, and 6 more follow. The mean is off by that many u of the mean size
      // and one for the division; it moves every element alike, and the variance by its square. The rest is as in
      // rms_norm.
      const double chain = (double)n / 32 + 8, off = gamma_of(chain) * size / (double)n,
                   relative = gamma_of(chain / 2 + 8);
      for (int64_t i = 0; i < n; i++) {
        const double centred = x[(size_t)i] - mean, scaled = by * w[(size_t)i];
        const double bound = fabs(scaled) * (off + relative * fabs(centred)) +
                             off * off * by * by * fabs(centred * scaled) + U * fabs(b[(size_t)i] + centred * scaled);
        check.near(out[(size_t)i], centred * scaled + b[(size_t)i], 1.01 * bound, i);
      }
      std::vector<float> place = x, plain((size_t)n, NOT), zeros((size_t)n, 0.0f), same((size_t)n, NOT);
      kernels->layer_norm(place.data(), w.data(), b.data(), n, 1e-5f, place.data());
      kernels->layer_norm(x.data(), w.data(), nullptr, n, 1e-5f, plain.data());
      kernels->layer_norm(x.data(), w.data(), zeros.data(), n, 1e-5f, same.data());
      for (int64_t i = 0; i < n; i++) {
        check.same(place[(size_t)i], out[(size_t)i], i);
        check.yes(plain[(size_t)i] == same[(size_t)i], i);
      }
    }
  }
}

const char* const ACTIVATIONS[] = {"silu", "relu", "relu2", "fatrelu", "drelu", "gelu_tanh", "cats", "topk"};
static_assert(std::size(ACTIVATIONS) == PI_XIELU && PI_XIELU + 1 == PI_N_ACTS);  // it has a kernel of its own

// gelu_tanh(x) = x / 2 (1 + tanh(u)) = x / (1 + exp(-2 u)); this is 2 u.
double gelu_argument(double x) { return sqrt(8 / M_PI) * (x + 0.044715 * x * x * x); }

double activated(int act, double threshold, double x) {
  if (act == PI_SILU || act == PI_CATS || act == PI_TOPK) {  // which of a bank remain is found after it
    const double s = x / (1 + exp(-x));
    return act == PI_CATS && fabs(s) <= threshold ? 0 : s;
  }
  if (act == PI_GELU_TANH) return x / (1 + exp(-gelu_argument(x)));
  const double kept = x <= (act == PI_FATRELU ? threshold : 0) ? 0 : x;
  return act == PI_RELU2 ? kept * kept : kept;
}

// That of experts alone. Values beyond its limits are held there; NaN stays.
void test_swiglu_oai(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " activate swiglu_oai");
  Random r(3);
  std::vector<float> gate = r.normals(1536, 6), up = r.normals(1536, 6);
  const float edges[] = {0, -0.0f, 7, -7, 7.0000005f, 1e-30f, -88, 88, -3e38f, 3e38f};
  for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) gate[i] = edges[i], up[40 + i] = edges[i];
  gate[100] = NAN, up[200] = NAN, up[300] = INFINITY, gate[301] = INFINITY;
  std::vector<float> out = gate;
  kernels->activate(PI_SWIGLU_OAI, 0, out.data(), up.data(), 1536);
  for (size_t i = 0; i < 1536; i++) {
    if (i == 100 || i == 200) {
      check.yes(isnan(out[i]), (int64_t)i);
      continue;
    }
    const double g = std::min((double)gate[i], 7.0), u = std::max(std::min((double)up[i], 7.0), -7.0) + 1,
                 wanted = g / (1 + exp(-(double)1.702f * g)) * u;
    // as SILU, with two more roundings, and that of the argument as often as it is large
    const double n_u = gamma_of(10 + std::min(fabs(1.702 * g), 88.0)), held = 1.702 * g < -87 ? fabs(g * u) * 1e-37 : 0;
    check.near(out[i], wanted, n_u * fabs(wanted) + held + 1e-45, (int64_t)i);
  }
}

void test_activate(const PiKernels* kernels) {
  const float threshold = 0.01f;
  for (int act = 0; act < PI_XIELU; act++) {
    Check check(std::string(kernels->name) + " activate " + ACTIVATIONS[act]),
        none(std::string(kernels->name) + " activate propagates NaN: " + ACTIVATIONS[act]);
    for (int64_t n : {16, 48, 1536}) {
      Random r((uint64_t)n);
      std::vector<float> gate = r.normals(n, 8), up = r.normals(n);
      const float edges[] = {0,     -0.0f, 1e-30f, -87.9f, 87.9f,     -88,          88,
                             -1000, 1000,  -3e38f, 3e38f,  threshold, 0.010000001f, -1e-45f};
      const size_t some = sizeof edges / sizeof *edges;
      if (n > 16) std::copy(std::begin(edges), std::end(edges), gate.begin());
      if (n > 16 && act == PI_RELU2) gate[10] = 1e18f;  // its square is still a number
      for (size_t i = 0; i < some; i++) up[i] = 0.75f;
      std::vector<float> gated = gate, plain = gate;
      kernels->activate(act, threshold, gated.data(), up.data(), n);
      kernels->activate(act, threshold, plain.data(), nullptr, n);
      for (int64_t i = 0; i < n; i++) {
        const double g = gate[(size_t)i], u = act == PI_DRELU && up[(size_t)i] <= 0 ? 0 : up[(size_t)i],
                     a = activated(act, threshold, g);
        // e^x: the argument's last reduction and the polynomial, 4 u; then 1 +, /, *. The argument is held at 88, so
        // that far below zero the answer is g e^-88 at most. GELU's argument has rounded six times, constants included,
        // which counts as often as it is large. A square and the product round once each.
        const bool exponential = act == PI_SILU || act == PI_GELU_TANH || act == PI_CATS || act == PI_TOPK;
        const double argument = act == PI_GELU_TANH ? gelu_argument(g) : g,
                     skewed = act == PI_GELU_TANH ? 6 * std::min(std::max(-argument, 0.0), 88.0) : 0,
                     n_u = exponential ? gamma_of(8 + skewed) : gamma_of(act == PI_RELU2 ? 2 : 1),
                     held = exponential && argument < -87 ? fabs(g) * 1e-37 : 0;
        check.near(gated[(size_t)i], a * u, n_u * fabs(a * u) + held * fabs(u) + 1e-45, i);
        check.near(plain[(size_t)i], a, n_u * fabs(a) + held + 1e-45, i);
      }
    }
    for (float bad : {(float)NAN, (float)INFINITY}) {
      for (int64_t i = 0; i < 16; i++) {
        std::vector<float> gate(16, 0.5f), up(16, 0.5f);
        gate[(size_t)i] = bad;
        std::vector<float> plain = gate, other(16, 0.5f);
        kernels->activate(act, threshold, gate.data(), up.data(), 16);
        kernels->activate(act, threshold, plain.data(), nullptr, 16);
        up[(size_t)i] = bad;
        kernels->activate(act, threshold, other.data(), up.data(), 16);
        for (const std::vector<float>& out : {gate, plain, other}) {
          for (int64_t j = 0; j < 16; j++) {
            const float v = out[(size_t)j];
            none.yes(j != i ? isfinite(v) : isnan(bad) ? isnan(v) : isinf(v), i);
          }
        }
      }
    }
  }
}

// Near zero, where digits of e^x - 1 - x would cancel, between 0 and `least`, and where the exponential's reduction begins.
void test_xielu(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " xielu");
  for (const PiXielu by :
       {PiXielu{0.7f, 1.1f, 0.5f, -1e-6f}, PiXielu{0.2f, 3, 0.9f, -0.25f}, PiXielu{5, 0.4f, 0, 1e-7f}}) {
    Random r(4);
    std::vector<float> x = r.normals(1536, 4);
    const float edges[] = {0,       -0.0f, 1e-30f, -1e-30f, -1e-7f, -2e-6f, -1e-3f, -0.34657f, -0.3466f,
                           -0.125f, -0.3f, -1,     -87.9f,  -88.1f, -1000,  1000,   -1e38f,    -1e-45f};
    std::copy(std::begin(edges), std::end(edges), x.begin());
    x[100] = NAN, x[101] = INFINITY;
    std::vector<float> out = x;
    kernels->xielu(&by, out.data(), 1536);
    for (size_t i = 0; i < 1536; i++) {
      if (i == 100 || i == 101) {
        check.yes(i == 100 ? isnan(out[i]) : isinf(out[i]), (int64_t)i);
        continue;
      }
      const double v = x[i], m = std::min(v, (double)by.least), line = by.beta * v;
      // of small m the series, whose first term is exact to a digit; of others each part is rounded
      const double less = fabs(m) < 0.25
                              ? m * m / 2 * (1 + m / 3 * (1 + m / 4 * (1 + m / 5 * (1 + m / 6 * (1 + m / 7)))))
                              : expm1(m) - m;
      const double part = v > 0 ? by.above * v * v : by.below * (less + (m - v));
      const double size = v > 0 ? part : by.below * (fabs(m) < 0.34 ? less : 2 + fabs(m)) + by.below * fabs(m - v);
      check.near(out[i], part + line, gamma_of(8) * (size + fabs(line)) + 1e-45, (int64_t)i);
    }
  }
}

void test_rope_and_scale(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " rope"), scale(std::string(kernels->name) + " scale");
  for (int64_t half : {1, 8, 15, 16, 20, 24, 32, 40, 64}) {
    Random r((uint64_t)half);
    std::vector<float> x = r.normals(2 * half), c((size_t)half), s((size_t)half), y = x;
    for (int64_t i = 0; i < half; i++) {
      c[(size_t)i] = (float)cos(0.7 * (double)i);
      s[(size_t)i] = (float)sin(0.7 * (double)i);
    }
    kernels->rope(y.data(), c.data(), s.data(), half);
    for (int64_t i = 0; i < half; i++) {
      const double a = x[(size_t)i], b = x[(size_t)(half + i)], cc = c[(size_t)i], ss = s[(size_t)i];
      check.near(y[(size_t)i], a * cc - b * ss, gamma_of(2) * (fabs(a * cc) + fabs(b * ss)), i);
      check.near(y[(size_t)(half + i)], a * ss + b * cc, gamma_of(2) * (fabs(a * ss) + fabs(b * cc)), half + i);
    }
    y = x;
    kernels->scale(y.data(), 0.3f, 2 * half);
    for (int64_t i = 0; i < 2 * half; i++) scale.same(y[(size_t)i], x[(size_t)i] * 0.3f, i);
  }
}

// Where tanh is nearly its argument, where it is 1, and where the kernel changes from a polynomial to e^x.
void test_cap(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " cap");
  std::vector<float> x = {0.0f,   -0.0f,  1e-30f, -1e-30f, 1e-4f, 0.1f,  -0.3f, 0.6f,
                          0.625f, 0.626f, -0.7f,  1.0f,    3.0f,  -9.0f, 30.0f, -1e30f};
  Random r(3);
  for (const float v : r.normals(240)) x.push_back(v);
  for (const float limit : {1.0f, 30.0f}) {
    std::vector<float> y = x;
    for (float& v : y) v *= limit;
    const std::vector<float> before = y;
    kernels->cap(y.data(), limit, (int64_t)y.size());
    for (size_t i = 0; i < y.size(); i++) {
      const double want = limit * tanh((double)before[i] / limit);
      check.near(y[i], want, gamma_of(6) * fabs(want) + 1e-36, (int64_t)i);
    }
  }
  std::vector<float> odd(16, 1.0f);
  odd[3] = NAN;
  odd[5] = INFINITY;
  odd[6] = -INFINITY;
  kernels->cap(odd.data(), 2.0f, 16);
  check.yes(isnan(odd[3]), 3);
  check.near(odd[5], 2.0, 1e-6, 5);
  check.near(odd[6], -2.0, 1e-6, 6);
}

// ---- Cache and attention --------------------------------------------------------------------------------------------

// What the cache keeps of a vector of n: in blocks of 32 (the last may be 16) for Q8_0.
std::vector<double> kept(int type, const float* x, int64_t n) {
  std::vector<double> out(x, x + n);
  if (type == PI_KV_F16)
    for (double& v : out) v = to_half(v);
  for (int64_t b = 0; type == PI_KV_Q8_0 && b < n; b += 32) {
    const int64_t end = std::min(b + 32, n);
    float most = 0;
    for (int64_t i = b; i < end; i++) most = std::max(most, fabsf(x[i]));
    const float d = (float)to_half(most * (1.0f / 127.0f)), by = d > 0 ? 1.0f / d : 0.0f;
    for (int64_t i = b; i < end; i++)
      out[(size_t)i] = (double)d * std::max(-128.0, std::min(127.0, (double)nearbyintf(x[i] * by)));
  }
  return out;
}

// latents: the values are that many numbers of each key, its first; 0: they are stored beside keys.
void attention_case(const PiKernels* kernels, int type, int dim, int group, int window, int64_t position, int64_t count,
                    int latents = 0) {
  const int wide = latents ? latents : dim;  // of a value
  const auto& attention = latents ? kernels->latent_attention : kernels->attention;
  const int pad = (int)pi_round_up(dim, 16), kv_heads = 2, heads = kv_heads * group;
  const int64_t all = position + count, pages = (all + PI_PAGE - 1) / PI_PAGE, total = 7;
  const std::string name = std::string(kernels->name) + " attention " + KV_TYPES[type] + " dim=" + std::to_string(dim) +
                           " group=" + std::to_string(group) + " window=" + std::to_string(window) +
                           " position=" + std::to_string(position) + " count=" + std::to_string(count) +
                           " latents=" + std::to_string(latents);
  Random r((uint64_t)(type + 10 * dim + 1000 * group + 10000 * window + position));
  const int64_t head_bytes = pi_kv_head_bytes(type, pad, latents > 0), page_bytes = head_bytes * kv_heads;
  Exact<uint8_t> cache((size_t)(total * page_bytes), 0xff);  // NaN everywhere: what a page held before must not matter
  std::vector<int32_t> table((size_t)pages);
  for (int64_t p = 0; p < pages; p++) table[(size_t)p] = (int32_t)((p * 3 + 2) % total);
  std::vector<std::vector<double>> keys, values;  // [position * kv_heads + g]
  for (int64_t p = 0; p < all; p++) {
    for (int g = 0; g < kv_heads; g++) {
      std::vector<float> k = r.normals(pad, 2), v = r.normals(pad);
      std::fill(k.begin() + dim, k.end(), 0.0f);
      std::fill(v.begin() + dim, v.end(), 0.0f);
      if (p == 0) v[0] = 1e6f;  // beyond a half
      if (p == 1) std::fill(k.begin(), k.end(), 0.0f);
      uint8_t* head = cache.data() + table[(size_t)(p / PI_PAGE)] * page_bytes + g * head_bytes;
      if (latents) {
        kernels->store_latent(type, head, (int)(p % PI_PAGE), k.data(), pad);
      } else if (p % 2) {
        kernels->store_kv(type, head, (int)(p % PI_PAGE), k.data(), v.data(), pad);
      } else {
        kernels->store_kv(type, head, (int)(p % PI_PAGE), k.data(), nullptr, pad);
        kernels->store_kv(type, head, (int)(p % PI_PAGE), nullptr, v.data(), pad);
      }
      keys.push_back(kept(type, k.data(), pad));
      values.push_back(latents ? keys.back() : kept(type, v.data(), pad));
    }
  }
  const int64_t q_stride = (int64_t)heads * pad + 3, out_stride = (int64_t)heads * wide;
  std::vector<float> q = r.normals(count * q_stride, 1 / sqrtf((float)dim)), out((size_t)(count * out_stride), NOT);
  Exact<float> scratch((size_t)pi_attention_scratch(pad), NOT);
  const PiAttention a{q.data(),   out.data(), cache.data(), table.data(), q_stride, out_stride, page_bytes,
                      head_bytes, position,   wide,         pad,          group,    {0, window}};
  const int64_t rows = count * group;
  for (int g = 0; g < kv_heads; g++) {
    for (int64_t r0 = 0; r0 < rows; r0 += PI_ATTENTION_ROWS)
      attention[type](&a, g, r0, std::min<int64_t>(r0 + PI_ATTENTION_ROWS, rows), scratch.data());
  }
  {
    Check check(name);
    for (int64_t t = 0; t < count; t++) {
      for (int h = 0; h < heads; h++) {
        const float* x = &q[(size_t)(t * q_stride + h * pad)];
        const int64_t last = position + t, first = window && last >= window ? last - window + 1 : 0;
        std::vector<double> s;
        double most = -INFINITY, least = INFINITY, size = 0;
        for (int64_t p = first; p <= last; p++) {
          double dot = 0, absolute = 0;
          const std::vector<double>& key = keys[(size_t)(p * kv_heads + h / group)];
          for (int i = 0; i < dim; i++) {
            dot += x[i] * key[(size_t)i];
            absolute += fabs(x[i] * key[(size_t)i]);
          }
          s.push_back(dot);
          most = std::max(most, dot);
          least = std::min(least, dot);
          size = std::max(size, absolute);
        }
        // A score is off by pad + 2 roundings of its terms, so a weight and the greatest score each by e to that; the
        // difference rounds once; e^x 4 u; shrinking 6 u a page for sum and total; summing one u a position in both.
        const double n = (double)s.size(), relative = 2 * size * gamma_of(pad + 2) + gamma_of(most - least) +
                                                      gamma_of(8 + 12 * (double)pages + 2 * n + 2);
        double weights = 0;
        std::vector<double> sum((size_t)wide), absolute((size_t)wide);
        for (int64_t p = first; p <= last; p++) {
          const double w = exp(s[(size_t)(p - first)] - most);
          weights += w;
          for (int i = 0; i < wide; i++) {
            const double v = w * values[(size_t)(p * kv_heads + h / group)][(size_t)i];
            sum[(size_t)i] += v;
            absolute[(size_t)i] += fabs(v);
          }
        }
        for (int i = 0; i < wide; i++) {
          const int64_t at = t * out_stride + (int64_t)h * wide + i;
          check.near(out[(size_t)at], sum[(size_t)i] / weights, 2 * relative * absolute[(size_t)i] / weights, at);
        }
      }
    }
  }
  Check bits(name + " bits of each row alone");
  std::vector<float> alone((size_t)(count * out_stride), NOT);
  PiAttention b = a;
  b.out = alone.data();
  for (int g = 0; g < kv_heads; g++)
    for (int64_t row = 0; row < rows; row++) attention[type](&b, g, row, row + 1, scratch.data());
  for (size_t i = 0; i < out.size(); i++) bits.same(alone[i], out[i], (int64_t)i);
}

void test_attention(const PiKernels* kernels) {
  for (int type = 0; type < PI_N_KV_TYPES; type++) {
    for (int dim : {16, 20, 64, 80, 128}) {
      for (int group : {1, 3}) {
        attention_case(kernels, type, dim, group, 0, 0, 1);
        attention_case(kernels, type, dim, group, 0, 0, 40);
        attention_case(kernels, type, dim, group, 0, 93, 9);
        attention_case(kernels, type, dim, group, 20, 93, 9);
      }
    }
    for (int dim : {20, 48, 80, 576}) {
      const int latents = dim == 576 ? 512 : dim - 12;
      attention_case(kernels, type, dim, 5, 0, 0, 1, latents);
      attention_case(kernels, type, dim, 3, 0, 93, 9, latents);
      attention_case(kernels, type, dim, 16, 20, 31, 3, latents);
    }
    attention_case(kernels, type, 64, 4, 1, 62, 5);
    attention_case(kernels, type, 64, 8, 32, 95, 3);
    attention_case(kernels, type, 64, 2, 33, 0, 70);
  }
}

// ---- Threads ------------------------------------------------------------------------------------------------------

// Every part once, in whole units, after a barrier again.
void test_deal() {
  enum { TIMES = 3 };
  for (const int threads : {1, 2, 5}) {
    Pool pool(threads);
    for (const int64_t n : {1, 3, 16, 97, 1000, 100000}) {
      for (const int64_t unit : {1, 4}) {
        Check check("pieces of a phase that takes long");
        std::vector<std::atomic<int>> times((size_t)n);
        std::atomic<int> broken{0};
        pool.run([&](int) {
          for (int i = 0; i < TIMES; i++) {
            const auto work = [&](int64_t begin, int64_t end) {
              broken += begin % unit != 0 || begin >= end || (end % unit != 0 && end != n);
              for (int64_t j = begin; j < end; j++) times[(size_t)j]++;
            };
            pool.phase(n, unit, work, true);
          }
        });
        check.yes(broken == 0, n);
        for (int64_t j = 0; j < n; j++) check.yes(times[(size_t)j] == TIMES, j);
      }
    }
  }
}

// ---- A whole program ------------------------------------------------------------------------------------------------

// Gated FFNs and RMS norms, in one layer also of all heads together and of what is added; or a wider embedding, learned
// positions, LayerNorm and plain FFNs, of which one runs beside its attention and one has its norms behind. The layers
// have different heads.
struct Model {
  static constexpr int64_t D = 96, FF = 160, VOCAB = 70, LAYERS = 2, TOKENS = 60, LDO = 80, EMBED = 192;
  static constexpr int64_t HEADS[LAYERS] = {6, 8}, KV[LAYERS] = {2, 1}, DIM[LAYERS] = {16, 32};
  std::vector<uint8_t> table_bytes, position_bytes;
  std::shared_ptr<Program> program;

  Model(const PiKernels* kernels, bool plain, int threads, int type, int other, int kv_type) {
    Random r(3);
    auto pool = std::make_shared<Pool>(threads);
    auto arena = std::make_shared<Arena>();
    std::vector<std::pair<int64_t, int64_t>> heads;
    for (int layer = 0; layer < LAYERS; layer++) heads.push_back({KV[layer], DIM[layer]});
    auto cache = std::make_shared<Cache>(kv_type, heads, 8);
    program = std::make_shared<Program>(std::make_shared<Workspace>(pool, kernels), cache,
                                        Sizes{TOKENS, D, FF, {HEADS, HEADS + LAYERS}, plain ? EMBED : D});
    for (int layer = 0; layer < LAYERS; layer++) {
      Vector frequencies;
      const float dim = (float)DIM[layer];
      for (int i = 0; i < DIM[layer] / 2; i++) frequencies.push_back(powf(1e4f, -2.0f * (float)i / dim));
      program->add_rope(frequencies, layer ? 1.5f : 1.0f);
    }
    const auto matrix = [&](int t, int64_t rows, int64_t k) {
      const std::vector<uint8_t> stored = random_rows(r, t, rows, k);
      auto m = std::make_shared<Matrix>(Matrix{t, rows, k, (rows + 15) / 16, nullptr, arena});
      uint8_t* data = arena->allocate(m->bytes());
      pack_panels(t, stored.data(), rows, k, nullptr, 0, data, 0, m->panels);
      m->data = data;
      return m;
    };
    const auto table = [&](std::vector<uint8_t>& bytes, int64_t rows, int64_t k) {
      bytes = random_rows(r, type, rows, k);
      return std::make_shared<Table>(Table{type, rows, k, bytes.data()});
    };
    const auto norm = [&](int64_t n) {
      return plain && n == D ? Norm{r.normals(n), r.normals(n), 1e-5f, true} : Norm{r.normals(n), {}, 1e-5f, false};
    };
    const auto ffn = [&](Norm n, Norm out) {
      const Activation activation{plain ? PI_RELU2 : PI_GELU_TANH, 0};
      const auto gate = plain ? nullptr : matrix(type, FF, D), up = matrix(other, FF, D), down = matrix(type, D, FF);
      const NeuronSpec spec{activation, plain ? Vector() : r.normals(FF), {}, {}, {}};
      program->ffn({std::move(n), std::move(out), r.normals(D)}, std::make_shared<DenseNeurons>(spec, gate, up, down));
    };
    if (plain)
      program->embed({table(table_bytes, VOCAB, EMBED), table(position_bytes, 43, D), 2, matrix(other, D, EMBED), 1});
    else program->embed({table(table_bytes, VOCAB, D), nullptr, 0, nullptr, 3});
    for (int layer = 0; layer < LAYERS; layer++) {
      const bool beside = plain && layer == 0, behind = plain && layer == 1, both = !plain && layer == 1;
      const int64_t dim = DIM[layer], q = HEADS[layer] * dim, kv = KV[layer] * dim;
      AttentionInput in;
      in.layer = layer;
      if (!behind) in.norm = norm(D);
      in.q_bias = r.normals(q);
      in.q_norm = norm(both ? q : dim);
      in.k_norm = norm(both ? kv : dim);
      in.rope = beside ? -1 : layer;
      if (both) in.settings.scale = 0.1f;
      in.q = matrix(type, q, D);
      in.k = matrix(other, kv, D);
      in.v = matrix(type, kv, D);
      program->attention_input(std::move(in));
      program->attention(layer, {0, layer ? 20 : 0});
      if (beside) ffn(norm(D), {});
      program->project(layer, matrix(other, D, q), r.normals(D), both ? norm(D) : Norm());
      if (behind) program->normalise(norm(D));
      if (!beside) ffn(behind ? Norm() : norm(D), both ? norm(D) : Norm());
      if (behind) program->normalise(norm(D));
    }
    if (plain) program->head({}, matrix(other, EMBED, D), matrix(type, VOCAB, EMBED));
    else program->head(norm(D), nullptr, matrix(type, VOCAB, D));
  }

  // Logits of every token of two sequences, which are cut into steps of at most `chunk` tokens of each.
  std::vector<float> logits(int64_t chunk) {
    const int64_t lengths[2] = {41, 13};
    const int32_t pages[2][2] = {{5, 2}, {0, 7}};
    std::vector<float> out((size_t)((lengths[0] + lengths[1]) * LDO), NOT);
    for (int64_t from = 0; from < lengths[0]; from += chunk) {
      std::vector<int32_t> token, position, rows;
      std::vector<int64_t> to;
      Step step;
      for (int s = 0; s < 2; s++) {
        const int64_t count = std::min(chunk, lengths[s] - from);
        if (count <= 0) continue;
        step.runs.push_back({(int64_t)token.size(), count, from, pages[s]});
        for (int64_t i = from; i < from + count; i++) {
          rows.push_back((int32_t)token.size());
          to.push_back(s * lengths[0] + i);
          token.push_back((int32_t)((i * 31 + s * 17 + 5) % VOCAB));
          position.push_back((int32_t)i);
        }
      }
      std::vector<float> got(token.size() * LDO, NOT);
      step.tokens = step.logit_rows = (int64_t)token.size();
      step.logit_stride = LDO;
      step.token = token.data();
      step.position = position.data();
      step.logit_row = rows.data();
      step.logits = got.data();
      program->run(step, 0, program->size());
      for (size_t i = 0; i < to.size(); i++) memcpy(&out[(size_t)(to[i] * LDO)], &got[i * LDO], LDO * 4);
    }
    return out;
  }
};

void test_program(const PiKernels* kernels) {
  const int types[][3] = {{PI_Q4_0, PI_F16, PI_KV_F16}, {PI_Q8_0, PI_Q5_1, PI_KV_Q8_0}, {PI_BF16, PI_F32, PI_KV_F32}};
  for (const auto& t : types) {
    for (bool plain : {false, true}) {
      const std::string name = std::string(kernels->name) + (plain ? " plain" : "") + " program " +
                               PI_TYPES[t[0]].name + " " + PI_TYPES[t[1]].name + " " + KV_TYPES[t[2]];
      const std::vector<float> wanted = Model(kernels, plain, 1, t[0], t[1], t[2]).logits(41);
      Check finite(name + " finite and not all the same"), same(name + " bits for any threads and chunks");
      for (size_t i = 0; i < wanted.size(); i++)
        finite.yes((int64_t)i % Model::LDO < Model::VOCAB
                       ? isfinite(wanted[i]) && (i == 0 || wanted[i] != wanted[i - 1])
                       : wanted[i] == 0,
                   (int64_t)i);
      for (int threads : {1, 2, 3}) {
        Model model(kernels, plain, threads, t[0], t[1], t[2]);
        for (int64_t chunk : {(int64_t)41, (int64_t)16, (int64_t)1}) {
          const std::vector<float> got = model.logits(chunk);
          for (size_t i = 0; i < wanted.size(); i++) same.same(got[i], wanted[i], (int64_t)i);
        }
      }
    }
  }
}

}  // namespace

int main() {
  watch_fences();
  for (int h = 0; h < 65536; h++) {  // the reference's own halves
    const double v = half_value((uint16_t)h);
    if (isfinite(v) && to_half(v) != v) {
      result(false, "to_half");
      break;
    }
  }
  {
    Check check("unpack_row of halves");
    for (int h = 0; h < 65536; h++) {
      const uint8_t bytes[2] = {(uint8_t)h, (uint8_t)(h >> 8)};
      float f;
      unpack_row(PI_F16, bytes, 1, &f);
      check.yes(isnan(half_value((uint16_t)h)) ? isnan(f)
                                               : (double)f == half_value((uint16_t)h) && signbit(f) == (h >= 32768),
                h);
    }
  }
  test_row_map();
  test_deal();
  for (const PiKernels* kernels : supported_levels()) {
    const int before = passed, wrong = failed;
    test_forms(kernels);
    test_linear(kernels);
    test_hostile(kernels);
    test_rms_norm(kernels);
    test_layer_norm(kernels);
    test_activate(kernels);
    test_xielu(kernels);
    test_swiglu_oai(kernels);
    test_rope_and_scale(kernels);
    test_cap(kernels);
    test_attention(kernels);
    test_program(kernels);
    printf("%-12s %d passed, %d failed\n", kernels->name, passed - before, failed - wrong);
    fflush(stdout);
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
