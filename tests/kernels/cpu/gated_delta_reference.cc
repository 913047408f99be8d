#include "tests/kernels/cpu/gated_delta_reference.h"

#include <cmath>
#include <cstddef>

namespace weft::kernels::cpu::reference {
namespace {

double Silu(double x) { return x / (1 + std::exp(-x)); }

// Returns S^T x for S [K, V].
std::vector<double> Read(const std::vector<double>& state, const double* x,
                         int64_t keys, int64_t values) {
  std::vector<double> y(values, 0.0);
  for (int64_t k = 0; k < keys; ++k) {
    for (int64_t v = 0; v < values; ++v) y[v] += state[k * values + v] * x[k];
  }
  return y;
}

// Adds scale x y^T to S [K, V].
void AddOuter(const double* x, const double* y, double scale, int64_t keys,
              int64_t values, std::vector<double>* state) {
  for (int64_t k = 0; k < keys; ++k) {
    for (int64_t v = 0; v < values; ++v) {
      (*state)[k * values + v] += scale * x[k] * y[v];
    }
  }
}

// Adds scale S y to x [K].
void AddProduct(const std::vector<double>& state, const double* y, double scale,
                int64_t keys, int64_t values, double* x) {
  for (int64_t k = 0; k < keys; ++k) {
    for (int64_t v = 0; v < values; ++v) {
      x[k] += scale * state[k * values + v] * y[v];
    }
  }
}

double Dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// The states before all rows, and the outputs.
struct Trace {
  std::vector<std::vector<double>> before;
  DeltaOutput output;
};

Trace TraceDelta(const DeltaHead& h) {
  const int64_t keys = h.key_features, values = h.value_features;
  Trace trace;
  std::vector<double> state = h.start;
  for (int64_t t = 0; t < h.num_rows; ++t) {
    trace.before.push_back(state);
    const double* k = &h.k[t * keys];
    const double decay = std::exp(h.g[t]);
    for (double& s : state) s *= decay;
    std::vector<double> u = Read(state, k, keys, values);
    for (int64_t v = 0; v < values; ++v) {
      u[v] = h.beta[t] * (h.v[t * values + v] - u[v]);
    }
    AddOuter(k, u.data(), 1, keys, values, &state);
    const std::vector<double> out = Read(state, &h.q[t * keys], keys, values);
    trace.output.u.insert(trace.output.u.end(), u.begin(), u.end());
    trace.output.out.insert(trace.output.out.end(), out.begin(), out.end());
  }
  trace.output.stop = state;
  return trace;
}

}  // namespace

DeltaOutput RunDelta(const DeltaHead& head) { return TraceDelta(head).output; }

DeltaHead RunDeltaBackward(const DeltaHead& h, const std::vector<double>& dout,
                           const std::vector<double>& dstop) {
  const int64_t keys = h.key_features, values = h.value_features;
  const Trace trace = TraceDelta(h);
  DeltaHead d = h;
  for (auto* x : {&d.q, &d.k, &d.v, &d.beta, &d.g}) x->assign(x->size(), 0.0);
  std::vector<double>& ds = d.start;
  ds = dstop;
  for (int64_t t = h.num_rows - 1; t >= 0; --t) {
    const std::vector<double>& before = trace.before[t];
    const std::vector<double>& after =
        t + 1 < h.num_rows ? trace.before[t + 1] : trace.output.stop;
    const double* k = &h.k[t * keys];
    const double decay = std::exp(h.g[t]);
    AddProduct(after, &dout[t * values], 1, keys, values, &d.q[t * keys]);
    AddOuter(&h.q[t * keys], &dout[t * values], 1, keys, values, &ds);
    const std::vector<double> du = Read(ds, k, keys, values);
    AddProduct(ds, &trace.output.u[t * values], 1, keys, values,
               &d.k[t * keys]);
    const std::vector<double> read = Read(before, k, keys, values);
    std::vector<double> dread(values);
    for (int64_t v = 0; v < values; ++v) {
      d.v[t * values + v] = h.beta[t] * du[v];
      d.beta[t] += du[v] * (h.v[t * values + v] - decay * read[v]);
      dread[v] = -h.beta[t] * du[v];
    }
    AddProduct(before, dread.data(), decay, keys, values, &d.k[t * keys]);
    d.g[t] = decay * (Dot(ds, before) + Dot(dread, read));
    for (double& s : ds) s *= decay;
    AddOuter(k, dread.data(), decay, keys, values, &ds);
  }
  return d;
}

std::vector<double> MixRow(const std::vector<double>& conv, int64_t num_heads,
                           int64_t key_features, double eps,
                           double query_scale) {
  std::vector<double> y = conv;
  for (double& x : y) x = Silu(x);
  for (int64_t head = 0; head < num_heads; ++head) {
    double squares = 0;
    double* x = &y[head * key_features];
    for (int64_t i = 0; i < key_features; ++i) squares += x[i] * x[i];
    const double scale = head < num_heads / 2 ? query_scale : 1;
    for (int64_t i = 0; i < key_features; ++i) {
      x[i] *= scale / std::sqrt(squares + eps);
    }
  }
  return y;
}

std::vector<double> GatedNormRow(const std::vector<double>& x,
                                 const std::vector<double>& z,
                                 const std::vector<float>& weight, double eps) {
  const double mean = Dot(x, x) / static_cast<double>(x.size());
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = weight[i] * x[i] / std::sqrt(mean + eps) * Silu(z[i]);
  }
  return y;
}

std::vector<double> Differences(
    const std::function<std::vector<double>(const std::vector<double>&)>&
        function,
    const std::vector<double>& x, const std::vector<float>& d) {
  constexpr double kStep = 1e-5;
  std::vector<double> gradient(x.size(), 0.0);
  for (size_t i = 0; i < x.size(); ++i) {
    std::vector<double> above = x, below = x;
    above[i] += kStep;
    below[i] -= kStep;
    const std::vector<double> a = function(above), b = function(below);
    for (size_t n = 0; n < a.size(); ++n) {
      gradient[i] += d[n] * (a[n] - b[n]) / (2 * kStep);
    }
  }
  return gradient;
}

}  // namespace weft::kernels::cpu::reference
