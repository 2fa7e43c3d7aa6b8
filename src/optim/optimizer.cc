#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "optim/adamw.h"
#include "optim/gradient_norm.h"
#include "optim/muon.h"

namespace tessera::optim {
namespace {

void check_options(const Options& o) {
  if (!(o.momentum >= 0 && o.momentum < 1)) {
    fail_user("Muon momentum is {}; wanted at least 0 and below 1; the usual value is 0.95", o.momentum);
  }
  if (o.newton_schulz_steps < 1) {
    fail_user("Newton-Schulz steps are {}; wanted 1 or more; the usual number is 5", o.newton_schulz_steps);
  }
  if (!(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1)) {
    fail_user("Adam betas are {} and {}; wanted at least 0 and below 1; the usual values are 0.9 and 0.95", o.beta1,
              o.beta2);
  }
  if (!(o.epsilon > 0)) fail_user("Adam epsilon is {}; wanted above 0; the usual value is 1e-8", o.epsilon);
  if (!(o.clip_norm >= 0)) {
    fail_user("gradient clip norm is {}; wanted 0 (off) or more; the usual value is 1", o.clip_norm);
  }
}

void check_slot(const Slot& s, DType dtype) {
  const char* name = s.name.c_str();
  TESSERA_CHECK(dtype == DType::f32 || dtype == DType::f64, "{}: values of type {}, wanted f32 or f64", name,
                name_of(dtype));
  check_view(s.value, dtype, s.value.shape(), name);
  check_view(s.gradient, dtype, s.value.shape(), name);
  if (s.value.memory() == Memory::gpu) check_view(s.value, DType::f32, s.value.shape(), name);
  if (s.copy.present()) {
    check_view(s.copy, DType::bf16, s.value.shape(), name);
    TESSERA_CHECK(s.value.memory() == Memory::gpu || s.value.data() == nullptr, "{}: a working copy on a CPU", name);
  }
  TESSERA_CHECK(std::isfinite(s.weight_decay) && s.weight_decay >= 0, "{}: weight decay {}", name, s.weight_decay);
  TESSERA_CHECK(s.blocks >= 1 && s.value.elements() % s.blocks == 0, "{}: {} does not fall into {} blocks", name,
                s.value.shape().to_string(), s.blocks);
  TESSERA_CHECK(s.decay_idle || s.rule == Rule::muon, "{}: decay of idle blocks can be left out for Muon only", name);
  if (s.rule != Rule::muon) return;
  TESSERA_CHECK(s.value.rank() >= 2, "{}: Muon wants matrices, found {}", name, s.value.shape().to_string());
  int64_t stacked = 1;
  for (int i = 0; i + 2 < s.value.rank(); ++i) stacked *= s.value.dim(i);
  const int64_t rows = s.value.dim(s.value.rank() - 2);
  TESSERA_CHECK(stacked == 0 || (s.blocks % stacked == 0 && rows % (s.blocks / stacked) == 0),
                "{}: {} blocks of {} would span stacked matrices or split a row", name, s.blocks,
                s.value.shape().to_string());
}

}  // namespace

Optimizer::Optimizer(std::vector<Slot> slots, Options options) : slots_(std::move(slots)), options_(options) {
  check_options(options_);
  std::set<std::pair<std::string_view, int64_t>> names;
  for (const Slot& slot : slots_) {
    check_slot(slot, slots_.front().value.dtype());
    TESSERA_CHECK(names.insert({slot.name, slot.first_row}).second, "two slots are named {}", slot.name);
  }
}

void Optimizer::allocate_state(Context& ctx) {
  TESSERA_CHECK(moments_.empty(), "optimizer state allocated twice");
  Arena::Label label(ctx.arena, "optimizer momenta");
  for (const Slot& slot : slots_) {
    Moments moments{ctx.arena.allocate_zeroed(slot.value.dtype(), slot.value.shape()), {}};
    if (slot.rule == Rule::adamw) {
      moments.second = ctx.arena.allocate_zeroed(slot.value.dtype(), slot.value.shape());
    }
    moments_.push_back(moments);
  }
}

double Optimizer::gradient_norm(Context& ctx) const { return optim::gradient_norm(ctx, slots_); }

StepReport Optimizer::step(Context& ctx, double learning_rate, int64_t step, double gradient_norm) {
  TESSERA_CHECK(moments_.size() == slots_.size(), "optimizer step before its state was allocated");
  TESSERA_CHECK(std::isfinite(learning_rate) && step >= 0, "learning rate {} at step {}", learning_rate, step);
  StepReport report{.gradient_norm = gradient_norm, .clip_scale = 1, .finite = true};
  report.finite = std::isfinite(report.gradient_norm);
  if (!report.finite) return report;
  if (options_.clip_norm > 0 && report.gradient_norm > options_.clip_norm) {
    report.clip_scale = options_.clip_norm / report.gradient_norm;
  }
  muon::step(ctx, slots_, moments_, options_, learning_rate, report.clip_scale);
  adamw::step(ctx, slots_, moments_, options_, learning_rate, report.clip_scale, step);
  return report;
}

std::vector<Optimizer::StateTensor> Optimizer::state() const {
  TESSERA_CHECK(moments_.size() == slots_.size(), "optimizer state asked for before it was allocated");
  std::vector<StateTensor> tensors;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const auto add = [&](const char* what, const View& view) {
      tensors.push_back({what + slot.name, slot.name, view, slot.first_row});
    };
    if (slot.rule == Rule::muon) {
      add("muon.momentum.", moments_[i].first);
    } else {
      add("adam.m.", moments_[i].first);
      add("adam.v.", moments_[i].second);
    }
  }
  return tensors;
}

void Optimizer::reset_block(std::string_view name, int64_t block) {
  TESSERA_CHECK(moments_.size() == slots_.size(), "optimizer state reset before it was allocated");
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const int64_t rows = slot.value.rows() / slot.blocks, begin = block * rows - slot.first_row;
    if (slot.name != name || begin < 0 || begin >= slot.value.rows()) continue;
    for (const View& view : {moments_[i].first, moments_[i].second}) {
      if (view.present()) view.row_range(begin, rows).zero();
    }
  }
}

Costs Optimizer::costs(std::span<const Slot> slots, const Options& options, Device back_end) {
  Costs sum;
  int64_t workspace = 0;
  for (const Costs& part :
       {gradient_norm_costs(slots, back_end), muon::costs(slots, options, back_end), adamw::costs(slots)}) {
    sum += part;
    workspace = std::max(workspace, part.workspace_bytes);
  }
  sum.workspace_bytes = workspace;
  return sum;
}

}  // namespace tessera::optim
