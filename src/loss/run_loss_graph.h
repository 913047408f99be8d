// Runs the graph of a custom loss (src/request/loss_graph.h) on one datum.
#ifndef WEFT_SRC_LOSS_RUN_LOSS_GRAPH_H_
#define WEFT_SRC_LOSS_RUN_LOSS_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "src/loss/token_losses.h"
#include "src/request/loss_graph.h"
#include "src/request/train.h"

namespace weft::loss {

// Computes the loss of a datum, dLoss/dlogprob if `backward`, and adds the
// datum's part of the metrics: loss:sum, tokens:sum and the graph's own. The
// whole loss stands in losses[0], so that the sum is the datum's loss. ATen's
// functions and autograd compute in the dtypes that PyTorch has: f32 unless the
// graph converts. They run on this thread alone, so that sums have an order.
// Shapes:  logprobs, losses and gradients are flat, like the datum's targets;
// the graph gets logprobs as [N] or [N, K], by the rank of its first input.
// Without limits, a graph runs that an earlier process has run.
// Errors:  INVALID_ARGUMENT, which names the node, if an operation fails or
// exceeds a limit, if a tensor has more than four dimensions, or if the loss is
// no scalar; and if the loss or the gradient is not finite, or no gradient
// reaches the log-probabilities. Nothing has been added to `metrics` then.
// Threads: engine thread only. REQUIRES: the datum has a target, and fits the
// inputs of the loss.
absl::Status RunLossGraph(const LossGraph& graph, const CustomLoss& custom,
                          const Datum& datum,
                          const std::optional<GraphLimits>& limits,
                          absl::Span<const float> logprobs, bool backward,
                          absl::Span<float> losses, absl::Span<float> gradients,
                          MetricSums* metrics);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_RUN_LOSS_GRAPH_H_
