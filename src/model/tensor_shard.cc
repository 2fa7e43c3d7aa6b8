#include "model/tensor_shard.h"

#include <cstdlib>
#include <numeric>
#include <vector>

namespace tessera::model {
namespace {

struct CutWidth {
  const char* key;
  int64_t value;
};

// What must fall into as many parts as there are processes.
std::vector<CutWidth> cut_widths(const ModelConfig& c) {
  std::vector<CutWidth> widths;
  int64_t mla = 0, dense = 0;
  for (int64_t l = 0; l < c.layers; ++l) {
    mla += c.is_mla(l);
    dense += !c.is_moe(l);
  }
  if (mla < c.layers) widths.push_back({"kda.heads", c.kda.heads});
  if (mla > 0) widths.push_back({"mla.heads", c.mla.heads});
  if (dense > 0) widths.push_back({"ffn.dense_hidden", c.ffn.dense_hidden});
  if (dense < c.layers && c.moe.shared > 0) widths.push_back({"moe.shared * moe.hidden", c.moe.shared * c.moe.hidden});
  return widths;
}

}  // namespace

void check_tensor(const ModelConfig& c, int64_t processes, const std::string& where, const std::string& file) {
  const std::vector<CutWidth> widths = cut_widths(c);
  int64_t common = 0;
  for (const CutWidth& w : widths) common = std::gcd(common, w.value);
  int64_t nearest = 1;
  for (int64_t n = 1; n <= common; ++n) {
    if (common % n == 0 && std::abs(n - processes) < std::abs(nearest - processes)) nearest = n;
  }
  for (const CutWidth& w : widths) {
    if (w.value % processes == 0) continue;
    fail_user(
        "{}: parallel.tensor = {} does not divide {} = {} of {}; the nearest that divides every width it cuts is {}",
        where, processes, w.key, w.value, file, nearest);
  }
}

ModelConfig share_of(ModelConfig c, int64_t processes) {
  c.kda.heads /= processes;
  c.mla.heads /= processes;
  return c;
}

void sum_terms(const LayerContext& lc, const View& term) {
  if (!is_cut(lc)) return;
  Arena::Label label(lc.ctx.arena, "tensor exchange");
  lc.mesh->tensor.all_reduce(lc.ctx, term);
}

}  // namespace tessera::model
