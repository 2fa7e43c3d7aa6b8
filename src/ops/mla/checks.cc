// Checks that are attention's own: documents and prefixes do not feel what lies around them (bit for bit), the absorbed
// decode agrees with the expanded form, and extreme logits stay finite.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "ops/gemm/gemm.h"
#include "ops/mla/cases.h"
#include "ops/mla/op.h"
#include "ops/mla/reference.h"

namespace tessera::ops::mla {
namespace {

using check::Result;
using check::Tensor;
using check::within;

// The tensors of T tokens: inputs and the gradient of o.
template <class Real>
struct Data {
  std::vector<Real> q, kv, k_shared, d_o;
};
template <class Real>
struct Outcome {
  std::vector<Real> o, lse, dq, dkv, dk_shared;
};

template <class Real>
std::vector<Real> values_of(const Tensor& t) {
  std::vector<Real> v(t.values.size());
  std::transform(t.values.begin(), t.values.end(), v.begin(), [](double x) { return Real(x); });
  return v;
}

template <class Real>
Data<Real> random_data(const Dims& d, double scale = 1.0) {
  return {values_of<Real>(check::random_tensor("q", {d.tokens, d.heads, d.nope_dim + d.rope_dim}, scale)),
          values_of<Real>(check::random_tensor("kv", {d.tokens, d.heads, d.nope_dim + d.value_dim})),
          values_of<Real>(check::random_tensor("k_shared", {d.tokens, d.rope_dim})),
          values_of<Real>(check::random_tensor("d_o", {d.tokens, d.heads, d.value_dim}))};
}

// Elements of tokens [begin, end) of a tensor over `tokens` tokens.
template <class Real>
std::vector<Real> tokens_of(const std::vector<Real>& v, int64_t tokens, int64_t begin, int64_t end) {
  const int64_t width = static_cast<int64_t>(v.size()) / tokens;
  return {v.begin() + begin * width, v.begin() + end * width};
}

template <class Real>
Data<Real> tokens_of(const Data<Real>& data, int64_t tokens, int64_t begin, int64_t end) {
  return {tokens_of(data.q, tokens, begin, end), tokens_of(data.kv, tokens, begin, end),
          tokens_of(data.k_shared, tokens, begin, end), tokens_of(data.d_o, tokens, begin, end)};
}

template <class Real>
Outcome<Real> tokens_of(const Outcome<Real>& r, int64_t tokens, int64_t begin, int64_t end) {
  return {tokens_of(r.o, tokens, begin, end), tokens_of(r.lse, tokens, begin, end), tokens_of(r.dq, tokens, begin, end),
          tokens_of(r.dkv, tokens, begin, end), tokens_of(r.dk_shared, tokens, begin, end)};
}

template <class Real>
Outcome<Real> run(Dims d, const std::vector<int64_t>& offsets, Data<Real> data) {
  constexpr DType kType = dtype_of<Real>;
  d.tokens = offsets.back();
  Arena arena(int64_t{1} << 30);
  arena.set_poison(true);
  Context ctx{Device::cpu, arena};
  const auto view = [&](std::vector<Real>& v, Shape shape) { return View(v.data(), kType, shape); };
  Outcome<Real> r{std::vector<Real>(data.d_o.size()),
                  {},
                  std::vector<Real>(data.q.size()),
                  std::vector<Real>(data.kv.size()),
                  std::vector<Real>(data.k_shared.size())};
  const Shape q{d.tokens, d.heads, d.nope_dim + d.rope_dim}, kv{d.tokens, d.heads, d.nope_dim + d.value_dim};
  const Shape o{d.tokens, d.heads, d.value_dim}, shared{d.tokens, d.rope_dim};
  const Inputs in{view(data.q, q), view(data.kv, kv), view(data.k_shared, shared), {offsets}};
  const Outputs out{view(r.o, o), {}};
  Saved saved = allocate_saved(ctx, d, kType);
  forward(ctx, d, in, out, &saved);
  backward(ctx, d, in, out, saved, {view(data.d_o, o)}, {view(r.dq, q), view(r.dkv, kv), view(r.dk_shared, shared)});
  r.lse.assign(saved.lse.as<Real>(), saved.lse.as<Real>() + saved.lse.elements());
  return r;
}

// Elements that differ; a NaN differs from everything.
template <class Real>
double different(const std::vector<Real>& a, const std::vector<Real>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += !(a[i] == b[i]);
  return static_cast<double>(count);
}

template <class Real>
double different(const Outcome<Real>& a, const Outcome<Real>& b) {
  return different(a.o, b.o) + different(a.lse, b.lse) + different(a.dq, b.dq) + different(a.dkv, b.dkv) +
         different(a.dk_shared, b.dk_shared);
}

const Dims kDims{0, 2, 32, 16, 32};

std::vector<Result> packed_equals_separate() {
  const std::vector<int64_t> offsets{0, 0, 1, 18, 18, 83, 340, 341, 1500, 1500};
  Dims d = kDims;
  d.tokens = offsets.back();
  const Data<float> data = random_data<float>(d);
  const Outcome<float> packed = run(d, offsets, data);
  double separate = 0, poisoned = 0, leaked = 0;
  for (size_t n = 0; n + 1 < offsets.size(); ++n) {
    const int64_t begin = offsets[n], end = offsets[n + 1];
    if (begin == end) continue;
    const Outcome<float> own = tokens_of(packed, d.tokens, begin, end);
    separate += different(run(d, {0, end - begin}, tokens_of(data, d.tokens, begin, end)), own);

    Data<float> isolated = data;  // every other document NaN
    for (std::vector<float>* v : {&isolated.q, &isolated.kv, &isolated.k_shared, &isolated.d_o}) {
      const int64_t width = static_cast<int64_t>(v->size()) / d.tokens;
      std::fill(v->begin(), v->begin() + begin * width, std::numeric_limits<float>::quiet_NaN());
      std::fill(v->begin() + end * width, v->end(), std::numeric_limits<float>::quiet_NaN());
    }
    poisoned += different(tokens_of(run(d, offsets, isolated), d.tokens, begin, end), own);

    Data<float> silent = data;  // a loss on every other document: no gradient here
    const int64_t width = d.heads * d.value_dim;
    std::fill(silent.d_o.begin() + begin * width, silent.d_o.begin() + end * width, 0.0f);
    const Outcome<float> quiet = tokens_of(run(d, offsets, silent), d.tokens, begin, end);
    for (const std::vector<float>* v : {&quiet.dq, &quiet.dkv, &quiet.dk_shared}) {
      leaked += static_cast<double>(std::count_if(v->begin(), v->end(), [](float g) { return !(g == 0.0f); }));
    }
  }
  return {within("mla", "packed equals separate documents, bit for bit", separate, 0),
          within("mla", "a document does not feel NaN in its neighbours", poisoned, 0),
          within("mla", "gradients do not cross a document boundary", leaked, 0)};
}

// A document cut at t: outputs before t, and gradients of a loss on the tokens before t, keep their bits.
Result prefix_causality() {
  constexpr int64_t kTokens = 700;
  Dims d = kDims;
  d.tokens = kTokens;
  Data<float> data = random_data<float>(d);
  double changed = 0;
  for (int64_t t : {699, 513, 512, 300, 257, 129, 128, 65, 17, 1}) {
    std::fill(data.d_o.begin() + t * d.heads * d.value_dim, data.d_o.end(), 0.0f);
    const Outcome<float> whole = tokens_of(run(d, {0, kTokens}, data), kTokens, 0, t);
    changed += different(run(d, {0, t}, tokens_of(data, kTokens, 0, t)), whole);
  }
  return within("mla", "a prefix does not feel what follows, bit for bit", changed, 0);
}

Result threads_agree() {
  const std::vector<int64_t> offsets{0, 600, 601, 700, 700, 1900};
  Dims d = kDims;
  d.tokens = offsets.back();
  const Data<float> data = random_data<float>(d);
  const int before = thread_count();
  set_thread_count(1);
  const Outcome<float> one = run(d, offsets, data);
  double changed = 0;
  for (int threads : {2, 3}) {
    set_thread_count(threads);
    changed += different(run(d, offsets, data), one);
  }
  set_thread_count(before);
  return within("mla", "1, 2 and 3 threads agree, bit for bit", changed, 0);
}

// The query of a document's last token over the latent cache, against the expanded forward.
template <class Real>
double decode_error(const std::vector<int64_t>& lengths) {
  constexpr DType kType = dtype_of<Real>;
  constexpr int64_t kRank = 24;
  const auto n = static_cast<int64_t>(lengths.size());
  Dims d = kDims;
  std::vector<int64_t> offsets{0};
  for (int64_t length : lengths) offsets.push_back(offsets.back() + length);
  d.tokens = offsets.back();
  auto latent = values_of<Real>(check::random_tensor("latent", {d.tokens, kRank + d.rope_dim}));
  auto kv_b = values_of<Real>(check::random_tensor("kv_b", {d.heads * (d.nope_dim + d.value_dim), kRank}, 0.2));
  Data<Real> data = random_data<Real>(d);
  gemm<Real>(Trans::no, Trans::yes, d.tokens, d.heads * (d.nope_dim + d.value_dim), kRank, Real(1), latent.data(),
             kRank + d.rope_dim, kv_b.data(), kRank, Real(0), data.kv.data(), d.heads * (d.nope_dim + d.value_dim));
  for (int64_t t = 0; t < d.tokens; ++t) {
    std::copy_n(latent.data() + t * (kRank + d.rope_dim) + kRank, d.rope_dim, data.k_shared.data() + t * d.rope_dim);
  }
  const Outcome<Real> expanded = run(d, offsets, data);

  Arena arena(int64_t{1} << 28);
  arena.set_poison(true);
  Context ctx{Device::cpu, arena};
  const int64_t q_width = d.heads * (d.nope_dim + d.rope_dim), o_width = d.heads * d.value_dim;
  const View q = arena.allocate(kType, {n, d.heads, d.nope_dim + d.rope_dim});
  const View o = arena.allocate(kType, {n, d.heads, d.value_dim});
  const View cache(latent.data(), kType, {d.tokens, kRank + d.rope_dim});
  DecodeInputs in{q, View(kv_b.data(), kType, {d.heads * (d.nope_dim + d.value_dim), kRank}), {}};
  std::vector<double> want;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = offsets[size_t(i)], last = offsets[size_t(i) + 1] - 1;
    std::copy_n(data.q.data() + last * q_width, q_width, q.as<Real>() + i * q_width);
    in.latent.push_back(cache.row_range(begin, last + 1 - begin));
    want.insert(want.end(), expanded.o.begin() + last * o_width, expanded.o.begin() + (last + 1) * o_width);
  }
  d.tokens = n;
  decode(ctx, d, in, o);
  return check::relative_error(std::vector<double>(o.as<Real>(), o.as<Real>() + o.elements()), want);
}

// Logits of about +-1e4: one key takes all the weight. Float32 keeps three digits of a logit's difference there, so
// that near ties may turn out otherwise; nothing may be NaN, and gradients stay finite.
std::vector<Result> extreme_logits() {
  Dims d = kDims;
  d.tokens = 200;
  d.scale = 1;
  const std::vector<int64_t> offsets{0, 1, 200};
  const Data<float> data = random_data<float>(d, 1e4 / std::sqrt(double(d.nope_dim + d.rope_dim)));
  const Outcome<float> r = run(d, offsets, data);
  double bad = 0;
  for (const std::vector<float>* v : {&r.o, &r.lse, &r.dq, &r.dkv, &r.dk_shared}) {
    bad += static_cast<double>(std::count_if(v->begin(), v->end(), [](float x) { return !std::isfinite(x); }));
  }
  const reference::Problem p{d.tokens, d.heads, d.nope_dim, d.rope_dim, d.value_dim, d.scale, offsets};
  const auto wide = [](const std::vector<float>& v) { return std::vector<double>(v.begin(), v.end()); };
  const reference::Result want = reference::forward(p, wide(data.q), wide(data.kv), wide(data.k_shared),
                                                    std::vector<double>(size_t(d.heads), 0.0));
  return {
      within("mla", "logits of +-1e4: finite outputs and gradients", bad, 0),
      within("mla", "logits of +-1e4: float32 against the definition", check::relative_error(wide(r.o), want.o), 1e-2)};
}

}  // namespace

std::vector<Result> more_checks() {
  std::vector<Result> all = packed_equals_separate();
  all.push_back(prefix_causality());
  all.push_back(threads_agree());
  const std::vector<std::vector<int64_t>> packs{{1}, {5, 1, 64}, {1300}, {511, 512, 513}};
  double f32 = 0, f64 = 0;
  for (const auto& lengths : packs) {
    f32 = std::max(f32, decode_error<float>(lengths));
    f64 = std::max(f64, decode_error<double>(lengths));
  }
  all.push_back(within("mla", "absorbed decode equals the expanded form, float32", f32, 1e-5));
  all.push_back(within("mla", "absorbed decode equals the expanded form, float64", f64, 1e-12));
  for (const Result& r : extreme_logits()) all.push_back(r);
  return all;
}

}  // namespace tessera::ops::mla
