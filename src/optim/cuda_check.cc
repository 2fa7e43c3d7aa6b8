#include "optim/cuda_check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "optim/qk_clip.h"
#include "optim/test_slots.h"

namespace tessera::optim {
namespace {

using check::Result;

constexpr double kRate = 0.01;
constexpr int64_t kSteps = 3;

// Sums of the same numbers in float64 in another order.
constexpr double kNormLimit = 1e-12;
// The same float32 formulas; divisions, roots and fused multiply-adds may differ in the last place.
constexpr double kMomentLimit = 1e-6;
// Of the movement: values near 1 move by 0.01 a step, and rounding a value is 3e-6 of that.
constexpr double kAdamLimit = 3e-5;
// Of the movement: with X, A and B rounded to bf16 five iterations end 1.1e-2 to 2.5e-2 away, the most for the smallest
// matrices (simulated on a CPU for 1 x 1 to 300 x 310); a wrong index, factor or order of a product is off by far more.
constexpr double kMuonLimit = 3e-2;

Result row(const std::string& op, const std::string& what, double error, double limit) {
  Result r = check::within(op, what, error, limit);
  r.device = "cuda";
  return r;
}

struct Spec {
  std::string name;
  tessera::Shape shape;
  Rule rule;
  int64_t blocks = 1;
  double weight_decay = 0.1;
  bool copy = true;
  bool idle = false;  // the first block gets no gradient
  bool decay_idle = true;
};

// Heads, experts, both orientations, blocks and rows that cannot be read eight elements at a time, more slots than one
// launch takes, and nothing at all.
std::vector<Spec> specs() {
  std::vector<Spec> all{{"heads", {4 * 48, 104}, Rule::muon, 4},
                        {"experts", {5, 40, 24}, Rule::muon, 5, 0.1, true, true},
                        {"spared", {2, 40, 24}, Rule::muon, 2, 0.1, true, true, false},
                        {"odd", {3 * 9, 7}, Rule::muon, 3},
                        {"tall", {131, 65}, Rule::muon},
                        {"large", {520, 512}, Rule::muon},
                        {"none", {0, 40, 24}, Rule::muon},
                        {"number", {1, 1}, Rule::muon, 1, 0},
                        {"embedding", {1000, 33}, Rule::adamw},
                        {"router", {6, 50}, Rule::adamw, 6, 0.1, false},
                        {"gain", {50}, Rule::adamw, 1, 0, false}};
  for (int i = 0; i < 60; ++i) {
    all.push_back({"small." + std::to_string(i), {1 + i % 3, 16, 24}, Rule::muon, 1 + i % 3});
    all.push_back({"vector." + std::to_string(i), {17}, Rule::adamw, 1, 0, i % 2 == 0});
  }
  return all;
}

constexpr size_t kExperts = 1;

Values gradient_of(const Spec& spec, size_t slot, int64_t step) {
  Values g = random_values(1000 * uint64_t(step + 1) + slot, spec.shape.elements(), 0.1);
  if (spec.idle) std::fill_n(g.begin(), spec.shape.elements() / spec.blocks, 0.0);
  return g;
}

void upload(const Values& values, const View& to) {
  std::vector<float> host(values.begin(), values.end());
  copy(View(host.data(), DType::f32, to.shape()), to);
}

Values download(const View& view) {
  if (view.dtype() == DType::bf16) {
    std::vector<bf16> host(static_cast<size_t>(view.elements()));
    copy(view, View(host.data(), DType::bf16, view.shape()));
    Values values;
    for (const bf16 x : host) values.push_back(float(x));
    return values;
  }
  std::vector<float> host(static_cast<size_t>(view.elements()));
  copy(view, View(host.data(), DType::f32, view.shape()));
  return {host.begin(), host.end()};
}

double larger(double worst, double error) { return error <= worst ? worst : error; }  // NaN is the worst

// Differences in bits, as a count.
double different(const Values& a, const Values& b) {
  double count = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    count += std::bit_cast<uint64_t>(a[i]) != std::bit_cast<uint64_t>(b[i]);
  }
  return count;
}

Values rounded(Values values) {
  for (double& v : values) v = float(bf16(float(v)));
  return values;
}

// The optimiser on one device, with its parameters. Dry: the memory alone.
struct Side {
  Side(Device device, Arena& arena)
      : context{device, arena, nullptr, Product::bf16, Device::cuda}, optimizer(make_slots(arena), {}) {
    optimizer.allocate_state(context);
    if (context.dry()) return;
    for (size_t i = 0; i < all.size(); ++i) {
      upload(random_values(i, all[i].shape.elements()), optimizer.slots()[i].value);
    }
  }

  std::vector<Slot> make_slots(Arena& arena) const {
    std::vector<Slot> slots;
    for (const Spec& s : all) {
      slots.push_back({.name = s.name,
                       .value = arena.allocate(DType::f32, s.shape),
                       .gradient = arena.allocate(DType::f32, s.shape),
                       .rule = s.rule,
                       .blocks = s.blocks,
                       .weight_decay = s.weight_decay,
                       .decay_idle = s.decay_idle});
      // A CPU keeps no copies, but their place, so that dry and real arenas can be compared.
      const View place = s.copy ? arena.allocate(DType::bf16, s.shape) : View();
      if (context.back_end() == Device::cuda) slots.back().copy = place;
    }
    return slots;
  }

  StepReport step(int64_t number) {
    for (size_t i = 0; i < all.size() && !context.dry(); ++i) {
      upload(gradient_of(all[i], i, number), optimizer.slots()[i].gradient);
    }
    return optimizer.step(context, kRate, number);
  }

  Values everything() const {
    Values values;
    const auto append = [&](const View& view) {
      for (const double v : download(view)) values.push_back(v);
    };
    for (const Slot& s : optimizer.slots()) {
      append(s.value);
      if (s.copy.present()) append(s.copy);
    }
    for (const auto& tensor : optimizer.state()) append(tensor.view);
    return values;
  }

  std::vector<Spec> all = specs();
  Context context;
  Optimizer optimizer;
};

// What a value moved by since its random beginning, of the GPU against the CPU: values themselves are much larger.
double movement_error(const Side& gpu, const Side& cpu, size_t slot) {
  Values now = download(gpu.optimizer.slots()[slot].value), wanted = download(cpu.optimizer.slots()[slot].value);
  const Values before = random_values(slot, gpu.all[slot].shape.elements());
  for (size_t e = 0; e < now.size(); ++e) {
    now[e] -= double(float(before[e]));
    wanted[e] -= double(float(before[e]));
  }
  return relative_error(now, wanted);
}

// Of the slots of one rule: a small one that is wrong must not hide behind a large one.
double worst_movement(const Side& gpu, const Side& cpu, Rule rule) {
  double worst = 0;
  for (size_t i = 0; i < gpu.all.size(); ++i) {
    if (gpu.all[i].rule == rule) worst = larger(worst, movement_error(gpu, cpu, i));
  }
  return worst;
}

std::vector<Result> compare(const Side& gpu, const Side& cpu) {
  std::vector<Result> rows;
  const auto add = [&](const std::string& what, double error, double limit) {
    rows.push_back(row("optimizer", what, error, limit));
  };
  const auto states = gpu.optimizer.state(), wanted = cpu.optimizer.state();
  double worst = 0, copies = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    worst = larger(worst, relative_error(download(states[i].view), download(wanted[i].view)));
  }
  for (const Slot& s : gpu.optimizer.slots()) {
    if (s.copy.present()) copies += different(download(s.copy), rounded(download(s.value)));
  }
  add("momenta and moments against the CPU, worst parameter", worst, kMomentLimit);
  add("movement by AdamW against the CPU, worst parameter", worst_movement(gpu, cpu, Rule::adamw), kAdamLimit);
  add("movement by Muon against the CPU, worst parameter", worst_movement(gpu, cpu, Rule::muon), kMuonLimit);
  add("working copies are the rounded values", copies, 0);
  double idle = 0;
  for (size_t i = 0; i < gpu.all.size(); ++i) {
    if (!gpu.all[i].idle) continue;
    idle += different(download(gpu.optimizer.slots()[i].value.at(0)), download(cpu.optimizer.slots()[i].value.at(0)));
  }
  add("blocks without gradient only decay, or stay, to the CPU's bits", idle, 0);
  return rows;
}

// A gradient that is not finite, wherever it lies, changes nothing.
Result check_not_finite(Side& gpu) {
  const Values before = gpu.everything();
  double wrong = 0;
  for (const size_t slot : {size_t{0}, gpu.all.size() - 1}) {
    const View& gradient = gpu.optimizer.slots()[slot].gradient;
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      Values g = download(gradient);
      g.back() = bad;
      upload(g, gradient);
      wrong += gpu.optimizer.step(gpu.context, kRate, kSteps).finite;
      g.back() = 0;
      upload(g, gradient);
    }
  }
  return row("optimizer", "a gradient that is not finite changes nothing", wrong + different(gpu.everything(), before),
             0);
}

Result check_reset(Side& gpu) {
  constexpr int64_t kBlock = 3;
  const View momentum = gpu.optimizer.state()[kExperts].view;
  gpu.optimizer.reset_block(gpu.all[kExperts].name, kBlock);
  double wrong = 0;
  for (int64_t b = 1; b < gpu.all[kExperts].blocks; ++b) {
    const Values values = download(momentum.at(b));
    wrong += std::ranges::all_of(values, [](double v) { return v == 0; }) != (b == kBlock);
  }
  return row("optimizer", "reset of a block clears that block alone", wrong, 0);
}

std::vector<Result> check_optimizer() {
  Arena plan = Arena::dry();
  Side dry(Device::dry, plan);
  dry.step(0);
  Arena host(plan.peak() + (int64_t{1} << 30)), one(plan.peak(), Memory::gpu), two(plan.peak(), Memory::gpu);
  for (Arena* arena : {&host, &one, &two}) arena->set_poison(true);
  Side cpu(Device::cpu, host), gpu(Device::cuda, one), again(Device::cuda, two);
  double norm_error = 0;
  for (int64_t s = 0; s < kSteps; ++s) {
    const double wanted = cpu.step(s).gradient_norm;
    norm_error = larger(norm_error, std::abs(gpu.step(s).gradient_norm - wanted) / wanted);
    again.step(s);
  }
  std::vector<Result> rows = compare(gpu, cpu);
  rows.push_back(row("optimizer", "gradient norm against the CPU", norm_error, kNormLimit));
  rows.push_back(row("optimizer", "twice gives the same bits", different(gpu.everything(), again.everything()), 0));
  rows.push_back(row("optimizer", "dry run takes the memory of the real run",
                     std::abs(double(one.peak()) - double(plan.peak())), 0));
  rows.push_back(check_not_finite(gpu));
  rows.push_back(check_reset(gpu));
  return rows;
}

// Two layers' projections; rows of kv_b lie further apart than they are long.
struct Projections {
  static constexpr QkClip kDims{.heads = 5, .nope_dim = 6, .rope_dim = 2, .value_dim = 4, .threshold = 100};
  static constexpr int64_t kInputs = 300, kLatent = 70;

  Projections(Device device, Arena& arena) : context{device, arena, nullptr, Product::bf16, Device::cuda} {
    for (uint64_t l = 0; l < 2; ++l) {
      const int64_t query = kDims.heads * (kDims.nope_dim + kDims.rope_dim);
      const int64_t key = kDims.heads * (kDims.nope_dim + kDims.value_dim);
      QkClipLayer layer{.max_logit = arena.allocate(DType::f32, {kDims.heads}),
                        .q_proj = arena.allocate(DType::f32, {query, kInputs}),
                        .kv_b = arena.allocate(DType::f32, {key, kLatent + 2}).column_range(1, kLatent)};
      if (device == Device::cuda) {
        layer.q_copy = arena.allocate(DType::bf16, {query, kInputs});
        layer.kv_copy = arena.allocate(DType::bf16, {key, kLatent});
        round_into(random_values(10 + l, query * kInputs), layer.q_copy);
        round_into(random_values(20 + l, key * kLatent), layer.kv_copy);
      }
      upload(random_values(10 + l, query * kInputs), layer.q_proj);
      upload(random_values(20 + l, key * kLatent), layer.kv_b);
      layers.push_back(layer);
    }
  }
  static void round_into(const Values& values, const View& to) {
    std::vector<bf16> host;
    for (const double v : values) host.push_back(bf16(float(v)));
    copy(View(host.data(), DType::bf16, to.shape()), to);
  }
  int64_t clip(const Values& first, const Values& second) {
    upload(first, layers[0].max_logit);
    upload(second, layers[1].max_logit);
    return qk_clip(context, kDims, layers);
  }
  Values masters() const {
    Values all;
    for (const QkClipLayer& l : layers) {
      for (const View& view : {l.q_proj, l.kv_b}) {
        for (const double v : download(view)) all.push_back(v);
      }
    }
    return all;
  }

  Context context;
  std::vector<QkClipLayer> layers;
};

std::vector<Result> check_qk_clip() {
  Arena host(int64_t{1} << 24), memory(int64_t{1} << 24, Memory::gpu);
  Projections cpu(Device::cpu, host), gpu(Device::cuda, memory);
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<Result> rows;
  const auto add = [&](const std::string& what, double error) { rows.push_back(row("qk_clip", what, error, 0)); };
  const Values first{-infinity, 99.5, 100, 137.25, 1e30}, second{1, 2, 300, 4, 5};
  add("heads clipped, against the CPU", std::abs(double(gpu.clip(first, second) - cpu.clip(first, second))));
  add("projections have the CPU's bits", different(gpu.masters(), cpu.masters()));
  double copies = 0;
  for (const QkClipLayer& l : gpu.layers) {
    copies += different(download(l.q_copy), rounded(download(l.q_proj)));
    copies += different(download(l.kv_copy), rounded(download(l.kv_b)));
  }
  add("working copies are the rounded projections", copies);
  const Values before = gpu.masters();
  for (const double bad : {infinity, std::nan("")}) {
    double refused = 0;
    try {
      gpu.clip({1, 200, bad, 1, 1}, {1, 1, 1, 1, 1});
    } catch (const Error&) {
      refused = 1;
    }
    add(fmt::format("a largest logit of {} is refused, and its layer left alone", bad),
        1 - refused + different(gpu.masters(), before));
  }
  return rows;
}

}  // namespace

std::vector<Result> check_cuda() {
  gpu::require();
  std::vector<Result> rows;
  for (const auto part : {check_optimizer, check_qk_clip}) {
    try {
      for (const Result& r : part()) rows.push_back(r);
    } catch (const Error& e) {  // what cannot launch must not hide what else works
      rows.push_back(row("optimizer", e.what(), std::nan(""), 0));
    }
  }
  return rows;
}

}  // namespace tessera::optim
