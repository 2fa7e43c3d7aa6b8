#include "core/documents.h"

namespace tessera {

Documents place_documents(Context& ctx, std::span<const int64_t> offsets) {
  Documents documents{offsets};
  if (ctx.back_end() != Device::cuda) return documents;
  const Shape shape{static_cast<int64_t>(offsets.size())};
  const View on_gpu = ctx.arena.allocate(DType::i64, shape);
  if (ctx.dry()) return documents;
  copy(View(const_cast<int64_t*>(offsets.data()), DType::i64, shape), on_gpu);
  documents.gpu_offsets = on_gpu.gpu<int64_t>();
  return documents;
}

}  // namespace tessera
