// The op on the GPU: sort, gather, products, activation, combine; in the order of the CPU's blocks, but all experts at
// once. The host never learns how many rows an expert has.
#include "core/cuda/kernel.h"
#include "ops/experts/cuda/order.h"
#include "ops/experts/cuda/products.h"

namespace tessera::ops::experts::cuda {

static Groups groups_of(const Dims& d, const Saved& saved) {
  return {d.experts, saved.slots.dim(0), saved.offsets, saved.counts, saved.blocks};
}

void multiply(GpuStream stream, const Groups& groups, Form form, Terms terms) {
  bool fast = true;
  for (const Term& term : terms) fast = fast && sm90::takes(term);
  (fast ? sm90::multiply : portable::multiply)(stream, groups, form, terms);
}

namespace {

// Forward's products: x to gate and up, h to y by row, which lies over x.
void multiply_in(GpuStream stream, const Groups& groups, const Inputs& in, const Saved& saved,
                 const ForwardWorkspace& w) {
  multiply(stream, groups, Form::transposed, {{w.x, in.w1, saved.gate}, {w.x, in.w3, saved.up}});
}
void multiply_out(GpuStream stream, const Groups& groups, const Inputs& in, const ForwardWorkspace& w) {
  multiply(stream, groups, Form::transposed, {{w.h, in.w2, w.x}});
}

// Backward's, before and behind the activation. Gradients of the weights come before dx, which lies over dy.
void multiply_back_out(GpuStream stream, const Groups& groups, const Inputs& in, const BackwardWorkspace& w) {
  multiply(stream, groups, Form::plain, {{w.dy, in.w2, w.t}});
}
void multiply_back_in(GpuStream stream, const Groups& groups, const Inputs& in, const Grads& grads,
                      const BackwardWorkspace& w) {
  const View &dgate = w.t, &dx = w.dy;
  multiply(stream, groups, Form::gradient, {{w.dy, w.h, grads.w2}});
  multiply(stream, groups, Form::gradient, {{dgate, w.x, grads.w1}, {w.dup, w.x, grads.w3}});
  multiply(stream, groups, Form::plain_sum, {{dgate, in.w1, dx}, {w.dup, in.w3, dx}});
}

void gather_backward(GpuStream stream, const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout,
                     const BackwardWorkspace& w) {
  gather_rows(stream, d, saved, in.x, w.x);
  gather_rows(stream, d, saved, dout.y, w.dy);
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, const Saved& saved,
             const ForwardWorkspace& w) {
  if (d.tokens == 0) return;
  const Groups groups = groups_of(d, saved);
  order_by_expert(stream, d, in.indices, saved, w.chunks);
  gather_rows(stream, d, saved, in.x, w.x);
  multiply_in(stream, groups, in, saved, w);
  activate(stream, d, saved, w.h);
  multiply_out(stream, groups, in, w);
  if (out.squares.present()) add_squares(stream, d, saved, w.x, w.squares, out.squares);
  combine_rows(stream, d, saved, w.x, in.weights, out.y);
}

void backward(GpuStream stream, const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout,
              const Grads& grads, const BackwardWorkspace& w) {
  if (d.tokens == 0) return;
  const Groups groups = groups_of(d, saved);
  gather_backward(stream, d, in, saved, dout, w);
  multiply_back_out(stream, groups, in, w);
  derive(stream, d, saved, in.weights, w.t, w.dup, w.h, grads.weights);
  multiply_back_in(stream, groups, in, grads, w);
  combine_rows(stream, d, saved, w.dy, {}, grads.x);
}

void repeat_forward_products(GpuStream stream, const Dims& d, const Inputs& in, const Saved& saved,
                             const ForwardWorkspace& w, int times) {
  const Groups groups = groups_of(d, saved);
  order_by_expert(stream, d, in.indices, saved, w.chunks);
  gather_rows(stream, d, saved, in.x, w.x);
  for (int i = 0; i < times; ++i) {
    multiply_in(stream, groups, in, saved, w);
    if (i == 0) activate(stream, d, saved, w.h);
    multiply_out(stream, groups, in, w);
  }
}

void repeat_backward_products(GpuStream stream, const Dims& d, const Inputs& in, const Saved& saved,
                              const OutputGrads& dout, const Grads& grads, const BackwardWorkspace& w, int times) {
  const Groups groups = groups_of(d, saved);
  gather_backward(stream, d, in, saved, dout, w);
  for (int i = 0; i < times; ++i) {
    multiply_back_out(stream, groups, in, w);
    if (i == 0) derive(stream, d, saved, in.weights, w.t, w.dup, w.h, grads.weights);
    multiply_back_in(stream, groups, in, grads, w);
  }
}

}  // namespace tessera::ops::experts::cuda
