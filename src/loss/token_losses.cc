#include "src/loss/token_losses.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace weft::loss {
namespace {

// Ratios are bounded to [e^-20, e^20]. AdamW keeps the square of a gradient in
// f32, which ends at e^88. So a ratio without a bound that comes from a stale
// sampler would make second moments infinite, and the adapter would never learn
// again.
constexpr double kMaxLogRatio = 20.0;

// The inputs of a token's loss. They are f64, so only the result is rounded.
struct Token {
  double logprob = 0;
  double sample_logprob = 0;  // q, the logprob that the sampler gave; 0 for
                              // cross_entropy.
  double advantage = 0;
  double weight = 1;
  // The token's own ratio, or with gspo and stable_reinforce the sequence's.
  double ratio = 1;
  bool is_bounded = false;  // kMaxLogRatio changed `ratio`.
};

struct LossAndSlope {
  double loss = 0;
  double slope = 0;  // dLoss/dlogprob.
};

bool IsBounded(double log_ratio) { return std::abs(log_ratio) > kMaxLogRatio; }

double Ratio(double log_ratio) {
  // std::clamp returns NaN for NaN, because comparisons with NaN are false.
  return std::exp(std::clamp(log_ratio, -kMaxLogRatio, kMaxLogRatio));
}

// stable_reinforce has no lower bound: small weights do not make a gradient
// large.
double Clip(const LossConfig& config, double ratio) {
  if (config.function == LossFunction::kStableReinforce) {
    return std::min(ratio, config.clip_high);
  }
  return std::clamp(ratio, config.clip_low, config.clip_high);
}

// Returns the loss -w (factor lp A - beta / 2 (lp - q)^2).
LossAndSlope Penalized(const LossConfig& config, const Token& token,
                       double factor) {
  const double log_ratio = token.logprob - token.sample_logprob;
  const double gain = factor * token.advantage;
  return {-token.weight *
              (gain * token.logprob - config.beta / 2 * log_ratio * log_ratio),
          -token.weight * (gain - config.beta * log_ratio)};
}

// Returns the negative of r A, times the weight. A bounded ratio is a constant,
// so its slope is 0.
LossAndSlope Surrogate(const Token& token) {
  const double loss = -token.weight * token.ratio * token.advantage;
  return {loss, token.is_bounded ? 0 : loss};
}

// Returns the negative of PPO's clipped objective, times the weight. On a tie,
// the slope is that of the unclipped branch.
LossAndSlope ClippedSurrogate(const LossConfig& config, const Token& token) {
  const double unclipped = token.ratio * token.advantage;
  const double clipped = Clip(config, token.ratio) * token.advantage;
  if (clipped < unclipped) return {-token.weight * clipped, 0};
  return Surrogate(token);
}

LossAndSlope TokenLoss(const LossConfig& config, const Token& token) {
  const double w = token.weight;
  switch (config.function) {
    case LossFunction::kCrossEntropy:
      return {-w * token.logprob, -w};
    case LossFunction::kImportanceSampling:
      return Surrogate(token);
    case LossFunction::kPpo:
    case LossFunction::kGspo:
      return ClippedSurrogate(config, token);
    case LossFunction::kCispo: {
      const double slope = -w * Clip(config, token.ratio) * token.advantage;
      return {slope * token.logprob, slope};
    }
    case LossFunction::kDro:
      return Penalized(config, token, 1);
    case LossFunction::kStableReinforce:
      return Penalized(config, token, Clip(config, token.ratio));
    // RunLossGraph and ComputeTeacherLosses compute these.
    case LossFunction::kCustom:
    case LossFunction::kForwardKl:
    case LossFunction::kReverseKl:
    case LossFunction::kJs:
      break;
  }
  return {};
}

// dro has no exp: its slope grows only linearly with lp - q.
bool HasRatio(LossFunction function) {
  return function != LossFunction::kCrossEntropy &&
         function != LossFunction::kDro;
}

bool HasSequenceRatio(LossFunction function) {
  return function == LossFunction::kGspo ||
         function == LossFunction::kStableReinforce;
}

bool HasClip(LossFunction function) {
  return function == LossFunction::kPpo || function == LossFunction::kCispo ||
         HasSequenceRatio(function);
}

// Sums over the scored tokens of one datum, for its metrics.
struct DatumSums {
  double loss = 0;
  double tokens = 0;
  double kl = 0;
  double ratio = 0;
  double clipped = 0;
  double bounded = 0;
};

void AddMetrics(const LossConfig& config, const DatumSums& sums,
                MetricSums* metrics) {
  metrics->Add("loss", sums.loss);
  metrics->Add("tokens", sums.tokens);
  if (!HasPolicy(config.function)) return;
  metrics->AddMean("kl_sample_train_v1", sums.kl, sums.tokens);
  metrics->AddMean("ratio", sums.ratio, sums.tokens);
  if (HasRatio(config.function)) metrics->Add("bounded_tokens", sums.bounded);
  if (HasClip(config.function)) {
    metrics->AddMean("clip_fraction", sums.clipped, sums.tokens);
  }
  if (config.function == LossFunction::kStableReinforce) {
    metrics->AddMean("stable_reinforce_of_weft", sums.tokens, sums.tokens);
  }
}

double Weight(const Datum& datum, size_t entry) {
  return datum.weights.empty() ? 1.0 : datum.weights[entry];
}

// Returns the mean of lp - q over the scored tokens of a datum, or 0 if the
// datum has none.
double SequenceLogRatio(const Datum& datum, absl::Span<const float> logprobs) {
  double sum = 0;
  double count = 0;
  for (size_t i = 0; i < logprobs.size(); ++i) {
    if (Weight(datum, i) == 0) continue;
    sum += static_cast<double>(logprobs[i]) - datum.logprobs[i];
    count += 1;
  }
  return count == 0 ? 0.0 : sum / count;
}

}  // namespace

void MetricSums::Add(const std::string& name, double value) {
  sums_[name] += value;
}

void MetricSums::AddMean(const std::string& name, double value, double count) {
  std::pair<double, double>& mean = means_[name];
  mean.first += value;
  mean.second += count;
}

std::map<std::string, double> MetricSums::Metrics() const {
  std::map<std::string, double> metrics;
  for (const auto& [name, sum] : sums_) metrics[name + ":sum"] = sum;
  for (const auto& [name, mean] : means_) {
    if (mean.second > 0) metrics[name + ":mean"] = mean.first / mean.second;
  }
  return metrics;
}

void ComputeTokenLosses(const LossConfig& config, const Datum& datum,
                        absl::Span<const float> logprobs,
                        absl::Span<float> losses, absl::Span<float> gradients,
                        MetricSums* metrics) {
  const bool is_policy = HasPolicy(config.function);
  const bool by_sequence = HasSequenceRatio(config.function);
  const double sequence_log_ratio =
      by_sequence ? SequenceLogRatio(datum, logprobs) : 0.0;
  DatumSums sums;
  for (size_t i = 0; i < logprobs.size(); ++i) {
    Token token{.logprob = logprobs[i], .weight = Weight(datum, i)};
    if (token.weight == 0) {
      losses[i] = 0;
      gradients[i] = 0;
      continue;
    }
    if (is_policy) {
      token.sample_logprob = datum.logprobs[i];
      token.advantage = datum.advantages[i];
      const double log_ratio = token.logprob - token.sample_logprob;
      const double used = by_sequence ? sequence_log_ratio : log_ratio;
      token.ratio = Ratio(used);
      token.is_bounded = IsBounded(used);
      sums.kl -= log_ratio;
      sums.ratio += Ratio(log_ratio);
      sums.bounded += token.is_bounded ? 1 : 0;
      sums.clipped += token.ratio != Clip(config, token.ratio) ? 1 : 0;
    }
    const LossAndSlope result = TokenLoss(config, token);
    losses[i] = static_cast<float>(result.loss);
    gradients[i] = static_cast<float>(result.slope);
    sums.loss += result.loss;
    sums.tokens += 1;
  }
  AddMetrics(config, sums, metrics);
}

void ComputeTeacherLosses(const Datum& datum,
                          absl::Span<const float> divergences,
                          absl::Span<float> losses, absl::Span<float> gradients,
                          MetricSums* metrics) {
  DatumSums sums;
  for (size_t i = 0; i < divergences.size(); ++i) {
    const double weight = Weight(datum, i);
    const double loss = weight == 0 ? 0 : weight * divergences[i];
    losses[i] = static_cast<float>(loss);
    gradients[i] = static_cast<float>(weight);
    if (weight == 0) continue;
    sums.loss += loss;
    sums.kl += divergences[i];
    sums.tokens += 1;
  }
  metrics->Add("loss", sums.loss);
  metrics->Add("tokens", sums.tokens);
  metrics->AddMean("kl", sums.kl, sums.tokens);
}

}  // namespace weft::loss
