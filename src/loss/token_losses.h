// The losses of proto/weft/v1/training.proto as functions of log-probabilities.
// The host computes them without tensors, because a few operations for each
// scored token are little work compared to one layer.
#ifndef WEFT_SRC_LOSS_TOKEN_LOSSES_H_
#define WEFT_SRC_LOSS_TOKEN_LOSSES_H_

#include <map>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "src/request/train.h"

namespace weft::loss {

// The metrics of a request, summed over its data. Call Add() and AddMean() for
// the data in order, then Metrics().
class MetricSums {
 public:
  void Add(const std::string& name, double value);
  // Adds `value` and `count` to a mean. The mean is the sum of the values
  // divided by the sum of the counts.
  void AddMean(const std::string& name, double value, double count);
  // Returns `name:sum` for each name of Add and `name:mean` for each name of
  // AddMean. `loss:sum` is always included. A mean with count 0 is left out.
  std::map<std::string, double> Metrics() const;

 private:
  std::map<std::string, double> sums_{{"loss", 0.0}};
  std::map<std::string, std::pair<double, double>> means_;
};

// Computes the loss of every target of one datum, the derivative
// dLoss/dlogprob, and the datum's part of the metrics. A scored token is a
// target whose weight w is not 0. lp is its log-probability, q its
// log-probability when it was sampled, and A its advantage. Every loss function
// gives loss:sum and tokens:sum over the scored tokens. All except
// cross_entropy also give
//
//   kl_sample_train_v1:mean  mean of q - lp;
//   ratio:mean               mean of r = exp(lp - q);
//   clip_fraction:mean       share of tokens whose ratio (gspo: s) lies outside
//                            [clip_low, clip_high]; ppo, cispo, gspo, and for
//                            stable_reinforce the share with s > clip_high;
//   bounded_tokens:sum       number of tokens whose log ratio (gspo,
//                            stable_reinforce: its mean) lies outside
//                            [-20, 20]; not for dro;
//   stable_reinforce_of_weft:mean  1: the formula is Weft's; only for
//                            stable_reinforce.
//
// Derivatives of four losses, with c(r) = clip(r, clip_low, clip_high):
//   ppo    -w r A if r A <= c(r) A, else 0. A tie takes the unclipped branch.
//   cispo  -w c(r) A; c(r) is a constant.
//   gspo   -w_t s A_t if s A_t <= c(s) A_t, else 0, for token t. The
//          sequence's ratio is s = exp(mean of lp - q over scored tokens), and
//          the token's ratio s_t = s exp(lp_t - stopgrad(lp_t)). So s_t
//          equals s, and its derivative by lp_t is s. As in GSPO-token, the
//          gradient treats the mean as a constant.
//   stable_reinforce  -w (min(s, clip_high) A - beta (lp - q)), with gspo's s.
//          An unbiased gradient on samples of an older policy would have the
//          product of all ratios in place of s. Its variance grows with the
//          length exponentially. Their geometric mean s does not grow, and its
//          truncation (Ionides 2008) bounds every weight. While lp = q for all
//          tokens, this is REINFORCE. The second term is the derivative of an
//          estimate of the KL divergence from the policy that sampled.
//
// Before an exp, lp - q or its mean is clamped to [-20, 20]. Where the clamp
// binds, the ratio is a constant: importance_sampling, ppo and gspo have
// derivative 0 there, and cispo's is -w c(r) A with the clamped r. A NaN in lp,
// q or A of a scored token reaches the loss.
// Shapes:  logprobs, losses and gradients are flat, like the datum's targets.
// Targets of weight 0 have loss 0 and gradient 0 and count in no metric,
// whatever their logprob is.
// Threads: any.
// Source:  formulas in training.proto; PPO: Schulman et al. 2017; GSPO: Zheng
// et al. 2025, section on GSPO-token.
void ComputeTokenLosses(const LossConfig& config, const Datum& datum,
                        absl::Span<const float> logprobs,
                        absl::Span<float> losses, absl::Span<float> gradients,
                        MetricSums* metrics);

// Does the same for a loss with a teacher: the loss of a token is w times its
// divergence from the teacher, and the derivative by the divergence is w. The
// metrics are loss:sum, tokens:sum, and kl:mean, the mean divergence of the
// scored tokens.
void ComputeTeacherLosses(const Datum& datum,
                          absl::Span<const float> divergences,
                          absl::Span<float> losses, absl::Span<float> gradients,
                          MetricSums* metrics);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_TOKEN_LOSSES_H_
