#include "train/guard_signals.h"

#include <algorithm>
#include <cmath>

#include "core/host_copy.h"
#include "core/parallel.h"

namespace tessera::train {

namespace {

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::nth_element(v.begin(), v.begin() + int64_t(v.size() / 2), v.end());
  return v[v.size() / 2];
}

double over(double value, double unit) { return unit > 0 ? value / unit : 0; }

double dot(const float* a, const float* b, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += double(a[i]) * double(b[i]);
  return sum;
}

}  // namespace

Signals signals_of(const std::vector<ExpertSums>& window) {
  Signals s;
  std::vector<double> with_tokens;
  double load = 0, weight = 0, entropy = 0;
  for (const ExpertSums& e : window) {
    load += e.load;
    weight += e.weight;
    s.gn.push_back(std::sqrt(e.gradient));
    s.on.push_back(std::sqrt(over(e.output, e.load)));
    if (e.load > 0) with_tokens.push_back(s.on.back());
  }
  const double n = double(window.size()), usual_gradient = median(s.gn), usual_output = median(with_tokens);
  for (size_t e = 0; e < window.size(); ++e) {
    const ExpertSums& expert = window[e];
    s.u.push_back(over(expert.load, load) * n);
    s.omega.push_back(over(expert.weight, weight) * n);
    s.rho.push_back(over(expert.by_bias, expert.load));
    s.gn[e] = over(s.gn[e], usual_gradient);
    s.on[e] = over(s.on[e], usual_output);
    if (expert.load > 0) entropy -= expert.load / load * std::log(expert.load / load);
  }
  s.entropy = n > 1 ? entropy / std::log(n) : 1;
  return s;
}

std::vector<double> router_cosines(const View& rows) {
  const int64_t experts = rows.dim(0), width = rows.dim(1);
  const HostCopy values(rows);
  const auto row = [&](int64_t e) { return values.as<float>() + e * width; };
  std::vector<double> norm, most(static_cast<size_t>(experts), experts > 1 ? -1.0 : 0.0);
  for (int64_t e = 0; e < experts; ++e) norm.push_back(std::sqrt(dot(row(e), row(e), width)));
  parallel_items(experts, [&](int64_t e) {
    double& of_e = most[static_cast<size_t>(e)];
    for (int64_t r = 0; r < experts; ++r) {
      if (r == e) continue;
      of_e = std::max(of_e, over(dot(row(e), row(r), width), norm[size_t(e)] * norm[size_t(r)]));
    }
  });
  return most;
}

}  // namespace tessera::train
