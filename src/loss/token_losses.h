// The losses of proto/weft/v1/training.proto as functions of log-probabilities.
// It uses plain floats, because one number per scored token is little work
// compared to one layer.
#ifndef WEFT_SRC_LOSS_TOKEN_LOSSES_H_
#define WEFT_SRC_LOSS_TOKEN_LOSSES_H_

#include <map>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "src/request/train.h"

namespace weft::loss {

// Sums over the data of one request; turned into `name:reduction` metrics.
// Add() in the order of the data, then Metrics() once.
class MetricSums {
 public:
  void Add(const std::string& name, double value);
  // Adds to a mean: value summed, count counted.
  void AddMean(const std::string& name, double value, double count);
  // `name:sum` and `name:mean`; `loss:sum` is always there. A mean without
  // values is left out.
  [[nodiscard]] std::map<std::string, double> Metrics() const;

 private:
  std::map<std::string, double> sums_{{"loss", 0.0}};
  std::map<std::string, std::pair<double, double>> means_;
};

// Computes one datum's elementwise losses, dLoss/dlogprob, and its share of the
// metrics, all over the scored tokens (weight not 0). Every loss gives loss:sum
// and tokens:sum; the policy losses (all but cross_entropy) also
//   kl_sample_train_v1:mean  mean of q - lp;
//   ratio:mean               mean of r = exp(lp - q);
//   clip_fraction:mean       share of tokens whose ratio (gspo: s) lies outside
//                            [clip_low, clip_high]; ppo, cispo, gspo only.
//
// Derivatives, with c(r) = clip(r, clip_low, clip_high):
//   ppo    -w r A while r A <= c(r) A, else 0: on a tie the unclipped branch.
//   cispo  -w c(r) A; c(r) is a constant.
//   gspo   the sequence's ratio is s = exp(mean of lp - q over scored tokens);
//          token t has s_t = s exp(lp_t - stopgrad(lp_t)), whose value is s and
//          whose derivative by its own lp_t, and by no other, is s. So token t
//          has loss -w_t min(s A_t, c(s) A_t) and derivative -w_t s A_t while
//          s A_t <= c(s) A_t, else 0: the coupling of the tokens through the
//          mean is left out of the gradient, as GSPO-token defines it.
// lp - q is cut to [-60, 60] before exp, in every loss: the ratio, and with
// finite A and w the loss, stays finite, and so does the derivative, which
// keeps its form with r at the bound. NaN is not hidden: it reaches loss and
// derivative.
// Shapes:  logprobs, losses, gradients as the datum's targets, flat. Targets of
//          weight 0 give loss 0 and gradient 0 and are in no metric, whatever
//          their logprob holds.
// Threads: any.
// Source:  formulas in training.proto; PPO: Schulman et al. 2017; GSPO: Zheng
//          et al. 2025, section on GSPO-token.
void ComputeTokenLosses(const LossConfig& config, const Datum& datum,
                        absl::Span<const float> logprobs,
                        absl::Span<float> losses, absl::Span<float> gradients,
                        MetricSums* metrics);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_TOKEN_LOSSES_H_
