#include "src/engine/train/activation_budget.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/cgroup.h"
#include "src/lora/lora_linear.h"
#include "src/loss/distill_head.h"
#include "src/ops/blocked_attention.h"
#include "src/ops/gated_delta.h"
#include "src/ops/tree_attention.h"

namespace weft::engine {
namespace {

// Bytes of host memory that packing and losses take for each target.
constexpr int64_t kEntryBytes = 128;
// Bytes of an id of a support in the head (src/loss/head_support.cc): three
// indices, and up to seven numbers of f64.
constexpr int64_t kSupportIdBytes = 80;
// The numbers of projections that may have LoRA: q, k, v, o in attention; qkv,
// z, b, a and out with a gated delta rule; and gate, up, down in the MLP.
constexpr int64_t kAttentionProjections = 4;
constexpr int64_t kDeltaProjections = 5;
constexpr int64_t kMlpProjections = 3;
// Flash attention's backward pass pads each node of a prefix tree by up to this
// many f32 rows.
constexpr int64_t kFlashPadRows = 128;

// Returns the bytes that programs can take without swapping; -1 if unknown.
int64_t MemAvailable() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word && word != "MemAvailable:") {
  }
  int64_t kib = 0;
  return file >> kib ? kib * 1024 : -1;
}

// What the first part of a layer needs: attention, or a gated delta rule.
struct FirstPart {
  int64_t kept = 0;      // Bytes kept for the backward pass.
  int64_t backward = 0;  // Bytes that exist only during the backward pass.
};

// Returns the bytes that attention's backward pass needs in addition to the
// residual stream and to ScoreBytes. Activations are in bf16 only on CUDA. In
// bf16, LibTorch's variable-length flash kernels need gradients of the output,
// q, k and v for all rows, and q's gradient again in f32. If query heads share
// k and v, the kernels also need gradients of k and v for each query head. For
// a prefix tree, the backward pass also copies q, the output and the output's
// gradient of rows that attend to an ancestor node, and k and v of the ancestor
// nodes.
int64_t AttentionBackwardBytes(const model_config::ModelConfig& config,
                               int64_t element_bytes, bool is_cpu,
                               const BatchRows& batch) {
  const model_config::ModelShape shape = config.shape();
  // A gate has a gradient, and the output before and after it has one.
  const int64_t gated = 3 * batch.rows * element_bytes * shape.gate_width;
  if (element_bytes >= kFloatBytes) {
    const int64_t gradients =
        batch.rows * element_bytes * (shape.q_width + 2 * shape.kv_width) +
        gated;
    if (!is_cpu) return gradients;
    return gradients +
           ops::BlockedBackwardBytes(batch.rows, shape.kv_width, element_bytes);
  }
  const int64_t sums_row = (shape.q_width + config.num_heads) * kFloatBytes;
  return batch.rows * element_bytes * (8 * shape.q_width + 6 * shape.kv_width) +
         gated + (batch.rows + kFlashPadRows * batch.nodes) * sums_row;
}

// Returns the most bytes that any layer's attention scores take at a time.
// Returns 0 on a CPU: attention needs ops::BlockedBackwardBytes there, which
// AttentionBackwardBytes counts.
int64_t ScoreBytes(const model_config::ModelConfig& config,
                   int64_t element_bytes, bool is_cpu, int64_t num_rows) {
  int64_t bytes = 0;
  if (is_cpu) return bytes;
  for (const model_config::LayerAttention& layer : config.attention) {
    bytes =
        std::max(bytes, ops::ScoreBytes(layer.rule, element_bytes, num_rows,
                                        config.num_heads, config.num_kv_heads,
                                        config.head_dim));
  }
  return bytes;
}

FirstPart AttentionPart(const model_config::ModelConfig& config,
                        int64_t element_bytes, bool is_cpu, int max_rank,
                        const BatchRows& batch) {
  const model_config::ModelShape shape = config.shape();
  int64_t kept = 2 * shape.q_width + shape.gate_width + 2 * shape.kv_width +
                 kAttentionProjections * max_rank;
  if (config.qk_norm != model_config::QkNorm::kNone) {
    kept += shape.q_width + shape.gate_width + shape.kv_width;
  }
  return {
      .kept =
          batch.rows * (kept * element_bytes + config.num_heads * kFloatBytes),
      .backward = AttentionBackwardBytes(config, element_bytes, is_cpu, batch)};
}

// Returns the bytes that the kernels for CUDA take in the backward pass of a
// gated delta rule: in f32 the gradients of q, k, beta and g as parts of each
// value head and each 64 value features, that of v, and a sum of the parts of q
// or k; in bf16 the chunks' scores, and the gradients of u and of the states.
int64_t DeltaPartialBytes(const model_config::DeltaShape& delta,
                          int64_t num_rows, int64_t state_bytes) {
  constexpr int64_t kBf16Bytes = 2;
  const int64_t slices = delta.value_features / 64;
  const int64_t parts =
      slices * delta.value_heads * (2 * delta.key_features + 2);
  const int64_t scores = 3 * ops::kDeltaChunkRows * delta.value_heads;
  return num_rows *
             ((parts + delta.value_width() + delta.key_width()) * kFloatBytes +
              (scores + delta.value_width()) * kBf16Bytes) +
         state_bytes * kBf16Bytes / kFloatBytes;
}

// Returns the bytes of a gated delta rule: the input projections, the output
// before its norm and ops::DeltaTape, of which gates and states are in f32. The
// backward pass needs the gradients of all these except u, in f32 those of the
// tape, and those of the normed output. Activations in bf16 are on CUDA. Zeros
// if the model has no such layers.
FirstPart DeltaPart(const model_config::ModelConfig& config,
                    int64_t element_bytes, int max_rank,
                    const BatchRows& batch) {
  if (!config.has_delta()) return {};
  const model_config::DeltaShape& delta = config.delta;
  const int64_t gates = 2 * delta.value_heads;
  const int64_t inputs = delta.conv_width() + delta.value_width() + gates;
  const int64_t kept =
      inputs + delta.value_width() + kDeltaProjections * max_rank;
  const int64_t state = delta.value_width() * delta.key_features * kFloatBytes;
  // A node ends a chunk, and its children start with its state.
  const int64_t states = batch.rows / ops::kDeltaChunkRows + 2 * batch.nodes;
  const int64_t gates_and_states =
      batch.rows * gates * kFloatBytes + states * state;
  const int64_t partial =
      element_bytes < kFloatBytes
          ? DeltaPartialBytes(delta, batch.rows, states * state)
          : 0;
  return {.kept = batch.rows *
                      (kept + delta.conv_width() + delta.value_width()) *
                      element_bytes +
                  gates_and_states,
          .backward =
              batch.rows * ((inputs + 2 * delta.value_width()) * element_bytes +
                            delta.conv_width() * kFloatBytes) +
              gates_and_states + partial};
}

// Elements per token that a layer needs for its MLP, or for its experts if they
// need more. `kept` elements are saved for the backward pass. `passing`
// elements exist only while the layer runs.
struct MlpWidths {
  int64_t kept = 0;
  int64_t passing = 0;
};

// Returns the widths for this rank. Assumes that as many of a token's experts
// as possible are on this rank. Each such expert has a row with a copy of the
// token's input and output.
MlpWidths WidthsOfMlp(const model_config::ModelShape& shape, int max_rank) {
  const model_config::ExpertShape& experts = shape.experts;
  if (experts.count == 0) {
    return {.kept = 2 * shape.ffn + kMlpProjections * max_rank,
            .passing = 3 * shape.ffn};
  }
  const int64_t chosen = std::min(experts.per_token, experts.num_own());
  const int64_t features = chosen * experts.ffn + experts.shared_ffn;
  const int64_t rows = chosen + (experts.shared_ffn > 0 ? 1 : 0);
  return {.kept = std::max(2 * features + kMlpProjections * rows * max_rank +
                               2 * experts.count,
                           2 * shape.ffn + kMlpProjections * max_rank),
          .passing =
              std::max(3 * features, 3 * shape.ffn) + 3 * rows * shape.hidden};
}

// Returns the largest number of bytes that the bf16 kernels on CUDA need for
// the partial sums of a LoRA gradient. The kernels compute all experts at once,
// with a row for each expert of each token, but the shared expert alone.
int64_t PartialSumBytes(const model_config::ModelShape& shape, int max_rank,
                        int64_t num_rows) {
  const int64_t bytes = lora::GradientWorkspaceBytes(num_rows, shape, max_rank);
  const model_config::ExpertShape& experts = shape.experts;
  if (experts.count == 0) return bytes;
  const int64_t chosen = std::min(experts.per_token, experts.num_own());
  return std::max(
      {bytes,
       lora::GradientWorkspaceBytes(num_rows * chosen,
                                    shape.OfExpert(/*expert=*/0), max_rank),
       lora::GradientWorkspaceBytes(num_rows, shape.OfExpert(experts.count),
                                    max_rank)});
}

// Returns the bytes that the head needs besides for rows with a teacher: the
// teacher's logits, the temporaries of a block, and the teacher's hidden rows
// with what LoRA keeps of them.
int64_t DistillBytes(const model_config::ModelConfig& config,
                     int64_t element_bytes, bool is_cpu,
                     const BatchRows& batch) {
  if (batch.compared == 0) return 0;
  return std::min(batch.compared, batch.chunk) * config.vocab * kFloatBytes +
         loss::DistillBlockBytes(config.vocab, is_cpu) +
         batch.compared * (config.hidden * (element_bytes + kFloatBytes) +
                           batch.head_rank * kFloatBytes);
}

}  // namespace

ActivationBytes ActivationsOf(const model_config::ModelConfig& config,
                              int64_t element_bytes, bool is_cpu, int max_rank,
                              const BatchRows& batch) {
  const model_config::ModelShape shape = config.shape();
  const MlpWidths mlp = WidthsOfMlp(shape, max_rank);
  const FirstPart attention =
      AttentionPart(config, element_bytes, is_cpu, max_rank, batch);
  const FirstPart delta = DeltaPart(config, element_bytes, max_rank, batch);
  int64_t kept = 2 * shape.hidden + mlp.kept;
  if (config.has_output_norms()) kept += 2 * shape.hidden;
  const int64_t scores = ScoreBytes(config, element_bytes, is_cpu, batch.rows);
  // The products and gradients that exist while the backward pass runs the
  // larger half of a layer: the MLP or attention. The forward pass has no more
  // than the former.
  const int64_t residual = 4 * batch.rows * shape.hidden * element_bytes;
  const int64_t passing_mlp = batch.rows * mlp.passing * element_bytes;
  const int64_t passing =
      residual + std::max({passing_mlp, attention.backward, delta.backward});
  // In bf16 the head's backward product needs a bf16 copy of the softmax.
  const int64_t narrow_bytes = element_bytes < kFloatBytes ? element_bytes : 0;
  const int64_t head =
      std::min(batch.scored, batch.chunk) * config.vocab *
          (kFloatBytes + narrow_bytes) +
      4 * batch.scored * shape.hidden * kFloatBytes +
      (2 * batch.scored + config.vocab) * batch.head_rank * kFloatBytes +
      batch.entries * kEntryBytes + batch.support_ids * kSupportIdBytes +
      DistillBytes(config, element_bytes, is_cpu, batch);
  const int64_t lora =
      narrow_bytes > 0 ? PartialSumBytes(shape, max_rank, batch.rows) : 0;
  const int64_t kept_layer =
      batch.rows * kept * element_bytes + std::max(attention.kept, delta.kept);
  return {
      .kept_layer = kept_layer,
      .recomputed_layer = batch.rows * shape.hidden * element_bytes,
      .working = std::max(head, kept_layer + passing + scores + lora),
      .forward = std::max(head, kept_layer + residual + passing_mlp + scores)};
}

absl::StatusOr<int> ChooseRecomputed(GradientCheckpointing policy,
                                     const ActivationBytes& bytes,
                                     int num_layers, int64_t budget) {
  if (budget == 0) budget = std::numeric_limits<int64_t>::max();
  const int least = policy == GradientCheckpointing::kAll ? num_layers : 0;
  const int most = policy == GradientCheckpointing::kOff ? 0 : num_layers;
  for (int recomputed = least; recomputed <= most; ++recomputed) {
    if (bytes.Total(num_layers, recomputed) <= budget) return recomputed;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("the micro-batch needs ", bytes.Total(num_layers, most),
                   " bytes for its activations, there are ", budget,
                   " (--memory-budget); send shorter sequences",
                   policy == GradientCheckpointing::kOff
                       ? " or allow --gradient-checkpointing=auto"
                       : ""));
}

HostBudget DefaultHostBudget() {
  int64_t left = MemAvailable();
  if (left < 0) return {};
  std::string source = "MemAvailable";
  const CgroupLimits limits = ReadCgroupLimits();
  if (limits.memory_left && *limits.memory_left < left) {
    left = *limits.memory_left;
    source = limits.memory_group;
  }
  return {.bytes = std::max<int64_t>(left / 2, 1), .source = std::move(source)};
}

}  // namespace weft::engine
