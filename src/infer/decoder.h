// Decoding with carried state: one sequence, prompt at once, then token by token.
//
// A step costs the same at any position in KDA layers (constant state) and one read of the latent cache in MLA layers.
// Log-probabilities equal those of the training forward up to rounding; a test holds it to 1e-4.
#pragma once

#include <span>
#include <vector>

#include "model/model.h"

namespace tessera::infer {

class Decoder {
 public:
  // `capacity`: prompt and generated tokens together; latent caches are sized for it.
  // `device`: where the weights lie.
  Decoder(const model::Model& model, const model::Weights& weights, int64_t capacity, Product product,
          Device device = Device::cpu);

  // Appends tokens and returns the logits (vocabulary) that predict the one after the last. The first call may bring
  // any number of tokens, the later ones one each. Token ids outside the vocabulary: UserError.
  std::span<const float> append(std::span<const int32_t> ids);

  int64_t length() const { return length_; }
  int64_t capacity() const { return capacity_; }
  int64_t cache_bytes() const { return cache_bytes_; }  // recurrent states, windows and latents

 private:
  static int64_t plan_bytes(const model::Model&, DType, int64_t capacity, Product, Device);
  const model::Model& model_;
  const model::Weights& weights_;
  int64_t capacity_;
  Product product_;
  Device device_;
  Arena arena_;
  model::Caches caches_;
  std::vector<float> logits_;
  int64_t length_ = 0;
  int64_t cache_bytes_ = 0;
};

}  // namespace tessera::infer
