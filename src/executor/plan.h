// Plans: passes through the model. Rank 0 makes a plan. The ranks of one
// replica run the plan together, each on its part of the model. The tensors of
// plans are on the host.
//
// Legend: T batch rows, R score rows, E score entries, D rows that are compared
// with a teacher's.
#ifndef WEFT_SRC_EXECUTOR_PLAN_H_
#define WEFT_SRC_EXECUTOR_PLAN_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "src/loss/distill_head.h"
#include "src/loss/fused_head.h"
#include "src/model/packed_batch.h"
#include "src/sampling/draw_rows.h"
#include "src/sampling/logit_edits.h"

namespace weft::executor {

// The part of a TrainPlan whose losses have a teacher. The teachers' sequences
// pass through the layers first, without a gradient.
struct DistillPlan {
  model::PackedBatch batch;    // Of the teachers.
  at::Tensor teacher_index_D;  // [D] i64: rows of `batch`.
  at::Tensor student_index_D;  // [D] i64: rows of TrainPlan::batch.
  loss::DistillRows rows;

  bool empty() const { return rows.divergences.empty(); }
};

// A plan that trains on a micro-batch or only scores it. The plan may cover
// just one replica's share of the micro-batch.
struct TrainPlan {
  model::PackedBatch batch;
  at::Tensor score_index_R;  // [R] i64: the batch row of each score row.
  loss::ScoreRows rows;
  DistillPlan distill;
  bool backward = false;
  bool wants_entropy = false;
  bool wants_routing = false;
  int num_recomputed = 0;  // Number of leading layers that Backward recomputes.
};

// The results of a TrainPlan, on the host. Scores are f32. Rows and entries
// with a teacher follow the others: logprobs are [E + D] and entropies [R + D].
// The gradients for a backward pass are [E + D], too; the last D are
// dLoss/ddivergence. Only the first rank of a replica sets the last two fields.
// In their shapes, L is the number of layers with experts, K the experts per
// token, and E the experts of a layer (not score entries).
struct TrainScores {
  at::Tensor logprobs_E;
  at::Tensor entropies_R;    // Undefined if no entropies were requested.
  at::Tensor divergences_D;  // Undefined if no row has a teacher.
  // The experts [T, L K], i32, of every batch row, layer by layer. Undefined if
  // no routing was requested, or if no layer has experts.
  at::Tensor experts_TE;
  // The number of rows [L, E], i64, of each expert. Undefined if no layer has
  // experts.
  at::Tensor expert_rows_LE;
};

using DrawRules = std::vector<sampling::DrawRule>;
// One draw for each rule. A draw is none if its logits are not a distribution.
using Draws = std::vector<std::optional<sampling::DrawResult>>;

// One pass over the key/value cache: a prefill or a decode iteration.
struct CachePlan {
  model::PackedBatch batch;
  model::KvAccess kv;  // Each rank keeps its own part of the cache.
  // Distinct batch rows whose logits are needed, and the adapters that the head
  // applies to these rows.
  std::vector<int64_t> logit_rows;
  lora::LoraRouting logit_routing;
  // The rules for drawing tokens. Each rule names a row of the logits.
  DrawRules draws;
  // Changes of these logits before the draws. Other ranks do not get them,
  // because rank 0 draws.
  std::vector<sampling::RowEdits> edits;
  // Distinct batch rows whose next tokens are scored.
  std::vector<int64_t> score_rows;
  loss::ScoreRows scores;
};

// The result of a CachePlan, on the host, in f32. Only the first rank of the
// replica has it.
struct CacheOutput {
  at::Tensor logprobs_E;  // Undefined if nothing is scored.
  Draws drawn;            // One for each rule in plan.draws.
  bool by_graph = false;  // The plan ran as a graph.
};

// The number of decode graphs and the device memory that they take.
struct DecodeGraphStats {
  int64_t graphs = 0;
  int64_t bytes = 0;
};

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_PLAN_H_
