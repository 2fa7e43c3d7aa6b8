// What the KDA mixer exchanges along the context axis (attention.md 8.2): the last inputs of its convolutions, and the
// affine maps of states. Neither grows with the length of the sequence. All of it is nothing where no document crosses.
#pragma once

#include "model/context_shard.h"
#include "model/layer.h"
#include "ops/kda/op.h"

namespace tessera::model::kda_layer {

bool crosses(const LayerContext&);

// Inputs of the convolution before this process's tokens, (N, W-1, G): those of the first document's earlier tokens.
View window_from_left(const LayerContext&, const View& x, int64_t width);
// Adds the gradient of such windows, (N, W-1, G), to the inputs' gradients dx (T, G) of the processes that have them.
void window_gradient_to_left(const LayerContext&, const View& dwindow, const View& dx);

// The state that the first document begins from, (1, H, V, K); absent where it begins here. `transition` (H, K, K) gets
// the map of a document that crosses this whole process: the backward pass wants it.
View entering_state(const LayerContext&, const ops::kda::Dims&, const ops::kda::Inputs&, const View& transition);
// The gradient of the state that the last document leaves, (1, H, V, K); absent where it ends here.
View leaving_gradient(const LayerContext&, const ops::kda::Dims&, const ops::kda::Inputs&, const ops::kda::Saved&,
                      const View& d_o, const View& transition);

}  // namespace tessera::model::kda_layer
