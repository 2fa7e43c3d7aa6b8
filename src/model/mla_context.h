// What the MLA mixer exchanges along the context axis: the latents and shared keys of the earlier tokens of a document
// that comes from the left, and their gradients on the way back. Queries stay where they are.
#pragma once

#include "model/layer.h"

namespace tessera::model::mla_layer {

// Key rows of this process: all positions of its documents up to its last token. Tk = T where none comes from the left.
int64_t key_rows(const LayerContext&);
Documents key_documents(const LayerContext&);  // on the GPU too, from the arena

// keys (Tk, W): the rows of this process, `own` (T, W), after those of the processes before it.
void gather_keys(const LayerContext&, const View& own, const View& keys);
// d_own (T, W) = the sum of what everyone has for this process's rows; d_keys (Tk, W).
void return_key_gradients(const LayerContext&, const View& d_keys, const View& d_own);

}  // namespace tessera::model::mla_layer
