// What the KDA mixer exchanges along the context axis (attention.md 8.2): the last inputs of its convolutions, and the
// affine maps of states. Neither grows with the length of the sequence. Only for micro-batches where a document
// crosses.
#pragma once

#include "model/context_shard.h"
#include "model/layer.h"
#include "ops/kda/op.h"

namespace tessera::model::kda_layer {

bool crosses(const LayerContext&);

// Of the first document: (1, W-1, G); without a document (0, W-1, G).
View allocate_window(const LayerContext&, int64_t channels, int64_t width);
// The convolution's inputs x (T, G) of the first document's earlier tokens, from the processes that have them.
void window_from_left(const LayerContext&, const View& x, const View& window);
// Adds the gradient of such a window to the inputs' gradients dx (T, G) of the processes that have them.
void window_gradient_to_left(const LayerContext&, const View& dwindow, const View& dx);

// (1, H, V, K); absent where the first document begins here.
View allocate_entering_state(const LayerContext&, const ops::kda::Dims&);
// The state that the first document begins from. `transition` (H, K, K) gets the map of a document that crosses this
// whole process: the backward pass wants it.
void entering_state(const LayerContext&, const ops::kda::Dims&, const ops::kda::Inputs&, const View& transition,
                    const View& state);
// The gradient of the state that the last document leaves, (1, H, V, K); absent where it ends here.
View leaving_gradient(const LayerContext&, const ops::kda::Dims&, const ops::kda::Inputs&, const ops::kda::Saved&,
                      const View& d_o, const View& transition);

}  // namespace tessera::model::kda_layer
