#include "tests/kernels/cpu/reference.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace weft::kernels::cpu::reference {
namespace {

// The constants of GELU's tanh form,
// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
const double kGeluScale = std::sqrt(2 / std::numbers::pi);
constexpr double kGeluCubic = 0.044715;

double InverseRms(const std::vector<float>& x, double eps) {
  double sum = 0;
  for (double v : x) sum += v * v;
  return 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + eps);
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

}  // namespace

std::vector<double> RmsNormRow(const std::vector<float>& x,
                               const std::vector<float>& weight, double eps) {
  const double inverse = InverseRms(x, eps);
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * inverse * weight[i];
  return y;
}

std::vector<double> RmsNormBackwardRow(const std::vector<float>& dy,
                                       const std::vector<float>& x,
                                       const std::vector<float>& weight,
                                       double eps) {
  const double inverse = InverseRms(x, eps);
  double dot = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    dot += static_cast<double>(dy[i]) * weight[i] * x[i] * inverse;
  }
  const double mean = dot / static_cast<double>(x.size());
  std::vector<double> dx(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double d = static_cast<double>(dy[i]) * weight[i];
    dx[i] = (d - x[i] * inverse * mean) * inverse;
  }
  return dx;
}

std::vector<double> RotaryHead(const std::vector<float>& x,
                               const std::vector<float>& cos,
                               const std::vector<float>& sin, bool inverse) {
  const size_t half = x.size() / 2;
  std::vector<double> y(x.size());
  for (size_t c = 0; c < half; ++c) {
    const double a = x[c], b = x[c + half];
    const double s = inverse ? -sin[c] : sin[c];
    y[c] = a * cos[c] - b * s;
    y[c + half] = b * cos[c] + a * s;
  }
  return y;
}

std::vector<double> SwiGluRow(const std::vector<float>& gate,
                              const std::vector<float>& up) {
  std::vector<double> out(gate.size());
  for (size_t i = 0; i < gate.size(); ++i) {
    out[i] = gate[i] * Sigmoid(gate[i]) * up[i];
  }
  return out;
}

std::vector<double> RowProduct(const std::vector<float>& x,
                               const std::vector<float>& weight,
                               const std::vector<float>& bias, size_t num_rows,
                               size_t num_outputs) {
  const size_t inputs = x.size() / num_rows;
  std::vector<double> y(num_rows * num_outputs);
  for (size_t b = 0; b < num_rows; ++b) {
    for (size_t o = 0; o < num_outputs; ++o) {
      double sum = bias.empty() ? 0 : bias[o];
      for (size_t i = 0; i < inputs; ++i) {
        sum += static_cast<double>(x[b * inputs + i]) * weight[o * inputs + i];
      }
      y[b * num_outputs + o] = sum;
    }
  }
  return y;
}

std::vector<double> Product(const std::vector<float>& left,
                            const std::vector<float>& right, size_t num_rows,
                            size_t num_columns) {
  const size_t terms = left.size() / num_rows;
  std::vector<double> result(num_rows * num_columns);
  for (size_t m = 0; m < num_rows; ++m) {
    for (size_t k = 0; k < terms; ++k) {
      for (size_t n = 0; n < num_columns; ++n) {
        result[m * num_columns + n] +=
            static_cast<double>(left[m * terms + k]) *
            right[k * num_columns + n];
      }
    }
  }
  return result;
}

GatedGradient SwiGluBackwardRow(const std::vector<float>& dout,
                                const std::vector<float>& gate,
                                const std::vector<float>& up) {
  GatedGradient d{std::vector<double>(gate.size()),
                  std::vector<double>(gate.size())};
  for (size_t i = 0; i < gate.size(); ++i) {
    const double s = Sigmoid(gate[i]);
    d.gate[i] =
        static_cast<double>(dout[i]) * up[i] * s * (1 + gate[i] * (1 - s));
    d.up[i] = dout[i] * gate[i] * s;
  }
  return d;
}

std::vector<double> GeGluRow(const std::vector<float>& gate,
                             const std::vector<float>& up) {
  std::vector<double> out(gate.size());
  for (size_t i = 0; i < gate.size(); ++i) {
    const double x = gate[i];
    const double tanh = std::tanh(kGeluScale * (x + kGeluCubic * x * x * x));
    out[i] = 0.5 * x * (1 + tanh) * up[i];
  }
  return out;
}

GatedGradient GeGluBackwardRow(const std::vector<float>& dout,
                               const std::vector<float>& gate,
                               const std::vector<float>& up) {
  GatedGradient d{std::vector<double>(gate.size()),
                  std::vector<double>(gate.size())};
  for (size_t i = 0; i < gate.size(); ++i) {
    const double x = gate[i];
    const double tanh = std::tanh(kGeluScale * (x + kGeluCubic * x * x * x));
    const double dtanh =
        (1 - tanh * tanh) * kGeluScale * (1 + 3 * kGeluCubic * x * x);
    d.gate[i] =
        static_cast<double>(dout[i]) * up[i] * 0.5 * (1 + tanh + x * dtanh);
    d.up[i] = dout[i] * 0.5 * x * (1 + tanh);
  }
  return d;
}

std::vector<double> ClampedSwiGluRow(const std::vector<float>& gate,
                                     const std::vector<float>& up) {
  std::vector<double> out(gate.size());
  for (size_t i = 0; i < gate.size(); ++i) {
    const double x = std::min<double>(gate[i], 7);
    out[i] = x * Sigmoid(1.702 * x) * (std::clamp<double>(up[i], -7, 7) + 1);
  }
  return out;
}

GatedGradient ClampedSwiGluBackwardRow(const std::vector<float>& dout,
                                       const std::vector<float>& gate,
                                       const std::vector<float>& up) {
  GatedGradient d{std::vector<double>(gate.size()),
                  std::vector<double>(gate.size())};
  for (size_t i = 0; i < gate.size(); ++i) {
    const double x = std::min<double>(gate[i], 7);
    const double s = Sigmoid(1.702 * x);
    if (gate[i] <= 7) {
      d.gate[i] = dout[i] * (std::clamp<double>(up[i], -7, 7) + 1) * s *
                  (1 + 1.702 * x * (1 - s));
    }
    if (std::abs(up[i]) <= 7) d.up[i] = dout[i] * x * s;
  }
  return d;
}

VocabRow ScoreVocabRow(const std::vector<float>& logits, double softcap,
                       double temperature) {
  const size_t vocab = logits.size();
  std::vector<double> z(vocab), slope(vocab, 1.0);
  for (size_t v = 0; v < vocab; ++v) {
    z[v] = logits[v];
    if (softcap > 0) {
      const double tanh = std::tanh(logits[v] / softcap);
      z[v] = softcap * tanh;
      slope[v] = 1 - tanh * tanh;
    }
    z[v] /= temperature;
  }
  const double max = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (double v : z) sum += std::exp(v - max);
  const double log_sum_exp = max + std::log(sum);
  VocabRow row{std::vector<double>(vocab), std::vector<double>(vocab), 0};
  for (size_t v = 0; v < vocab; ++v) {
    row.logprobs[v] = z[v] - log_sum_exp;
    const double p = std::exp(row.logprobs[v]);
    row.softmax[v] = p * slope[v];
    if (p > 0) row.entropy -= p * row.logprobs[v];
  }
  return row;
}

AdamWState AdamW(const AdamWScalars& scalars, const AdamWState& before,
                 const std::vector<float>& gradient) {
  AdamWState after = before;
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double g = static_cast<double>(gradient[i]) * scalars.gradient_scale;
    double& m = after.moment1[i];
    double& v = after.moment2[i];
    m = scalars.beta1 * m + scalars.one_minus_beta1 * g;
    v = scalars.beta2 * v + scalars.one_minus_beta2 * g * g;
    after.weights[i] =
        before.weights[i] * scalars.weight_scale -
        scalars.step_size * m /
            (std::sqrt(v) * scalars.inverse_sqrt_bias2 + scalars.eps);
  }
  return after;
}

SoftmaxRow SoftmaxOfRow(const std::vector<float>& scores,
                        const std::vector<float>& dweights,
                        const SoftmaxKeys& keys, double softcap, double delta) {
  SoftmaxRow row{std::vector<double>(scores.size()),
                 std::vector<double>(scores.size())};
  const auto capped = [&](int64_t i) {
    return softcap > 0 ? softcap * std::tanh(scores[i] / softcap)
                       : static_cast<double>(scores[i]);
  };
  double max = -HUGE_VAL, sum = 0;
  for (int64_t i = keys.begin; i < keys.end; ++i) {
    max = std::max(max, capped(i));
  }
  for (int64_t i = keys.begin; i < keys.end; ++i) {
    sum += std::exp(capped(i) - max);
  }
  row.lse = max + std::log(sum);
  for (int64_t i = keys.begin; i < keys.end; ++i) {
    const double slope =
        softcap > 0 ? 1 - std::pow(std::tanh(scores[i] / softcap), 2) : 1;
    row.weights[i] = std::exp(capped(i) - row.lse);
    row.dscores[i] = row.weights[i] * (dweights[i] - delta) * slope;
  }
  return row;
}

}  // namespace weft::kernels::cpu::reference
