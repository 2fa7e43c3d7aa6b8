// Attention Residuals on the CPU. A token's sources (S x D) are read from memory once: the second use, mixing or the
// gradient, finds them in the cache. With q = gain o query, r_i = 1 / rms(v_i), G = dh:
//
//   a_i = r_i <q, v_i>;   da_i = alpha_i sum_j alpha_j (<G, v_i> - <G, v_j>);   c_i = da_i r_i
//   dv_i += alpha_i G + c_i (q - (a_i r_i / D) v_i);   dq = sum over tokens and i of c_i v_i
//   dquery += gain o dq;   dgain += query o dq
//
// da_i is <G, v_i> - <G, h> written out: where one source has nearly all the weight, h is nearly v_i, and the
// difference of the two products would keep no digit.
#include "ops/attn_res/cpu.h"

#include <algorithm>
#include <cmath>

#include "core/fast_math.h"
#include "core/parallel.h"

namespace tessera::ops::attn_res::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // below this a thread costs more than it saves

int64_t grain(const Dims& d) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(d.width * d.sources, 1));
}

template <class Real>
std::vector<Real*> pointers(const std::vector<View>& views) {
  std::vector<Real*> out;
  for (const View& v : views) out.push_back(v.as<Real>());
  return out;
}

template <class Real>
void fold(const Dims& d, const Inputs& in, Real* q) {
  const Real *query = in.query.as<Real>(), *gain = in.gain.as<Real>();
  for (int64_t i = 0; i < d.width; ++i) q[i] = gain[i] * query[i];
}

template <class Real>
Real dot(const Real* a, const Real* b, int64_t n) {
  Real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

template <class Real>
struct Score {
  Real score, rrms;  // a_i, r_i
};

template <class Real>
Score<Real> score_of(const Dims& d, const Real* q, const Real* v) {
  Real square = 0, product = 0;
#pragma omp simd reduction(+ : square, product)
  for (int64_t i = 0; i < d.width; ++i) {
    square += v[i] * v[i];
    product += q[i] * v[i];
  }
  const Real rrms = 1 / std::sqrt(square / Real(d.width) + Real(d.eps));
  return {product * rrms, rrms};
}

template <class Real>
void softmax_in_place(Real* a, int64_t n) {
  Real top = a[0], sum = 0;
  for (int64_t i = 1; i < n; ++i) top = std::max(top, a[i]);
  for (int64_t i = 0; i < n; ++i) sum += a[i] = fast::exp(a[i] - top);
  for (int64_t i = 0; i < n; ++i) a[i] /= sum;
}

// h = sum of the sources by weight; two at a time, since h goes through the load and store ports once each.
template <class Real>
void mix(const Dims& d, const Real* alpha, const std::vector<Real*>& sources, int64_t token, Real* h) {
  const Real* first = sources[0] + token * d.width;
  const Real weight = alpha[0];
#pragma omp simd
  for (int64_t i = 0; i < d.width; ++i) h[i] = weight * first[i];
  int64_t s = 1;
  for (; s + 1 < d.sources; s += 2) {
    const Real *v = sources[size_t(s)] + token * d.width, *w = sources[size_t(s) + 1] + token * d.width;
    const Real weight_v = alpha[s], weight_w = alpha[s + 1];
#pragma omp simd
    for (int64_t i = 0; i < d.width; ++i) h[i] += weight_v * v[i] + weight_w * w[i];
  }
  if (s < d.sources) {
    const Real* v = sources[size_t(s)] + token * d.width;
    const Real weight_v = alpha[s];
#pragma omp simd
    for (int64_t i = 0; i < d.width; ++i) h[i] += weight_v * v[i];
  }
}

template <class Real>
void forward_tokens(const Dims& d, const Inputs& in, const Outputs& out, Saved* saved, Real* q) {
  fold(d, in, q);
  const std::vector<Real*> sources = pointers<Real>(in.sources);
  parallel_ranges(d.tokens, grain(d), [&](int64_t begin, int64_t end) {
    std::vector<Real> alpha(sources.size());
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t s = 0; s < d.sources; ++s) {
        const Score<Real> of = score_of(d, q, sources[size_t(s)] + t * d.width);
        alpha[size_t(s)] = of.score;
        if (saved == nullptr) continue;
        saved->score.as<Real>()[t * d.sources + s] = of.score;
        saved->rrms.as<Real>()[t * d.sources + s] = of.rrms;
      }
      softmax_in_place(alpha.data(), d.sources);
      if (saved != nullptr) std::copy(alpha.begin(), alpha.end(), saved->alpha.as<Real>() + t * d.sources);
      mix(d, alpha.data(), sources, t, out.h.as<Real>() + t * d.width);
    }
  });
}

// da_s
template <class Real>
Real score_gradient(const Real* products, const Real* alpha, int64_t sources, int64_t s) {
  Real sum = 0;
  for (int64_t j = 0; j < sources; ++j) sum += alpha[j] * (products[s] - products[j]);
  return alpha[s] * sum;
}

// One source of one token: dv += alpha G + c q - pull v,   dq += c v.
template <class Real>
void add_source_gradient(int64_t width, Real alpha, Real c, Real pull, const Real* g, const Real* q, const Real* v,
                         Real* dv, Real* dq) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    dv[i] += alpha * g[i] + c * q[i] - pull * v[i];
    dq[i] += c * v[i];
  }
}

template <class Real>
void backward_tokens(const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout, const Grads& grads,
                     Real* q, Real* partials) {
  fold(d, in, q);
  const std::vector<Real*> sources = pointers<Real>(in.sources), dsources = pointers<Real>(grads.sources);
  const Real *alpha = saved.alpha.as<Real>(), *rrms = saved.rrms.as<Real>(), *score = saved.score.as<Real>();
  parallel_items(kPartials, [&](int64_t p) {
    Real* dq = partials + p * d.width;
    std::fill_n(dq, d.width, Real(0));
    std::vector<Real> products(sources.size());  // <G, v_i> of a token
    for (int64_t t = d.tokens * p / kPartials; t < d.tokens * (p + 1) / kPartials; ++t) {
      const Real* g = dout.h.as<Real>() + t * d.width;
      for (size_t s = 0; s < sources.size(); ++s) products[s] = dot(g, sources[s] + t * d.width, d.width);
      for (int64_t s = 0; s < d.sources; ++s) {
        const int64_t ts = t * d.sources + s;
        const Real* v = sources[size_t(s)] + t * d.width;
        const Real c = score_gradient(products.data(), alpha + t * d.sources, d.sources, s) * rrms[ts];
        add_source_gradient(d.width, alpha[ts], c, c * score[ts] * rrms[ts] / Real(d.width), g, q, v,
                            dsources[size_t(s)] + t * d.width, dq);
      }
    }
  });
  const Real *query = in.query.as<Real>(), *gain = in.gain.as<Real>();
  Real *dquery = grads.query.as<Real>(), *dgain = grads.gain.as<Real>();
  for (int64_t i = 0; i < d.width; ++i) {
    Real dq = 0;
    for (int64_t p = 0; p < kPartials; ++p) dq += partials[p * d.width + i];
    dquery[i] += gain[i] * dq;
    dgain[i] += query[i] * dq;
  }
}

}  // namespace

void forward(const Dims& d, const Inputs& in, const Outputs& out, Saved* saved, const View& folded) {
  dispatch_real(in.query.dtype(), [&](auto real) {
    using Real = decltype(real);
    forward_tokens<Real>(d, in, out, saved, folded.as<Real>());
  });
}

void backward(const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout, const Grads& grads,
              const View& folded, const View& partials) {
  dispatch_real(in.query.dtype(), [&](auto real) {
    using Real = decltype(real);
    backward_tokens<Real>(d, in, saved, dout, grads, folded.as<Real>(), partials.as<Real>());
  });
}

}  // namespace tessera::ops::attn_res::cpu
