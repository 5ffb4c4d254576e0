// Records, while a program runs densely, which neurons of its FFNs fire: those whose product is not zero.
#pragma once
#include <vector>

#include "activation.h"
#include "weights.h"

// By `gate`: a neuron fires when its activation (of the gate; plain: of up), before it is multiplied with up, exceeds
// `threshold` in magnitude. Its records are kept until cleared, which must happen before each FFN.
class Watch {
 public:
  Watch(const PiKernels* kernels, int64_t d_ff, int64_t max_tokens, int threads);
  void clear();
  bool suits(int64_t d_ff, int64_t max_tokens, int threads) const;

  bool gate = false;
  bool silence = false;  // leave neurons that do not fire out of the sum
  bool measure = false;  // count magnitudes of activations
  float threshold = 0;
  const int64_t d_ff, max_tokens, words;  // words of 16 bits for a token
  std::vector<int64_t> counts;            // [words * 16] tokens that a neuron fired for
  std::vector<uint16_t> bits;             // [max_tokens][words]
  std::vector<int64_t> magnitudes;        // [threads][BINS]
  std::vector<char> damaged;              // [threads] an input of the activation was NaN or infinite
  // Bins of equal width within an octave: those from 2^LOW on, the outermost take what lies beyond.
  static constexpr int PER_OCTAVE = 16, LOW = -30, BINS = 48 * PER_OCTAVE;

  // Each thread records its own columns of token i, `lanes` from c0 on: whole words, of which `n` are neurons.
  struct Look {
    int thread;
    int64_t c0, n, lanes;
  };
  // Before the activation: the first product, and up where there is a gate. limits: as `Activation` has them.
  void before(const Look& look, int64_t i, const Activation& activation, const float* limits, const float* first,
              const float* up);
  // After it.
  void after(const Look& look, int64_t i, float* h);
  // Counts the neurons that fired, of all tokens.
  void count(const Look& look, int64_t tokens);

 private:
  uint16_t* bits_of(const Look& look, int64_t i) { return bits.data() + i * words + look.c0 / PI_LANES; }

  const PiKernels* const kernels_;
  std::vector<Vector> activated_;  // [threads] by `gate`: the activations of a token
};
