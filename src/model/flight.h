// What a micro-batch leaves between its passes, for model.cc and training.cc alone.
#pragma once

#include <algorithm>

#include "model/model.h"

namespace tessera::model {

inline bool is_mixer(int64_t s) { return s % 2 == 0; }
inline int64_t layer_of(int64_t s) { return s / 2; }

inline ops::rms_norm::Dims norm_dims(const LayerContext& lc) {
  return {lc.tokens, lc.config.width, lc.config.norm_eps};
}

// What the backward of a sublayer needs beside the residual stream: first its layer's dear part, from `cheap` on what
// can be made again from that.
struct Model::SublayerSaved {
  int64_t cheap = 0;  // mark of the arena
  View h;             // (T, D) mixed input; absent where the sublayer reads P itself
  ops::attn_res::Saved mix;
  ops::rms_norm::Saved norm;
  View x;                // (T, D) normalised input
  kda_layer::Saved kda;  // one of these four
  mla_layer::Saved mla;
  mlp::Saved dense;
  latent_moe::Saved moe;
};

// By sublayers of the whole model; absent where this process has nothing to do with them.
class Model::Flight {
 public:
  Batch batch;
  Residuals streams;
  Residuals
      gradients;  // of those that more than one pass adds to: they came from another chunk, or a later one has them
  std::vector<SublayerSaved> saved;
};

template <class F>
void Model::for_blocks(const LayerContext& lc, F&& of_block) const {
  for (int64_t begin = 0; begin < lc.tokens; begin += options_.ffn_block_tokens) {
    Arena::Scope scope(lc.ctx.arena);
    LayerContext block = lc;
    block.tokens = std::min(options_.ffn_block_tokens, lc.tokens - begin);
    of_block(block, begin);
  }
}

inline std::vector<View> rows_of(const std::vector<View>& streams, int64_t begin, int64_t count) {
  std::vector<View> rows;
  for (const View& stream : streams) rows.push_back(stream.present() ? stream.row_range(begin, count) : View());
  return rows;
}

}  // namespace tessera::model
