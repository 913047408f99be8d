#include "src/executor/model_runner.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <utility>

#include "absl/types/span.h"
#include "src/base/huge_pages.h"
#include "src/base/observe/profile.h"
#include "src/loss/fused_head.h"
#include "src/ops/host_copy.h"

namespace weft::executor {
namespace {

// Adds dLoss/dx of rows to d_TH, from the gradient of the normed rows.
// The head computes its logits in chunks. Copies of all score rows could be
// larger than a chunk, so this function works on slices to limit memory.
void NormBackward(const model::Decoder& decoder, const at::Tensor& dy_RH,
                  const at::Tensor& x_TH, const at::Tensor& index_R,
                  at::Tensor& d_TH) {
  constexpr int64_t kSlice = 1024;
  for (int64_t begin = 0; begin < dy_RH.size(0); begin += kSlice) {
    const int64_t count = std::min(kSlice, dy_RH.size(0) - begin);
    const at::Tensor index = index_R.narrow(0, begin, count);
    d_TH.index_add_(0, index,
                    decoder.FinalNormBackward(dy_RH.narrow(0, begin, count),
                                              x_TH.index_select(0, index)));
  }
}

void MoveTo(at::Device device, std::initializer_list<at::Tensor*> tensors) {
  for (at::Tensor* tensor : tensors) {
    if (tensor->defined()) *tensor = ops::ToDevice(*tensor, device);
  }
}

// Returns the scores of rows without and with a teacher, if there are any.
at::Tensor Joined(const at::Tensor& plain, const at::Tensor& distilled) {
  return distilled.defined() ? at::cat({plain, distilled}) : plain;
}

// Selects the batch rows that the head reads after the layers.
class RowIndex {
 public:
  RowIndex(const std::vector<int64_t>& rows, int64_t num_rows,
           at::Device device)
      : all_(static_cast<int64_t>(rows.size()) == num_rows &&
             std::ranges::is_sorted(rows)) {
    if (!all_ && !rows.empty()) index_R_ = ops::ToDevice(rows, device);
  }
  at::Tensor Of(const at::Tensor& x_TH) const {
    return all_ ? x_TH : x_TH.index_select(0, index_R_);
  }

 private:
  const bool all_;
  at::Tensor index_R_;
};

// Sets the expert fields of `scores`. `experts` has a tensor [T, K] for each
// layer with experts, for T rows and K experts per token. Does nothing if
// `experts` is empty.
void AddExperts(const std::vector<at::Tensor>& experts, int num_experts,
                bool wants_routing, TrainScores& scores) {
  if (experts.empty()) return;
  const at::Tensor flat_LN = at::stack(experts).flatten(1);
  scores.expert_rows_LE =
      at::zeros({flat_LN.size(0), num_experts}, flat_LN.options())
          .scatter_add_(1, flat_LN, at::ones_like(flat_LN));
  if (wants_routing) scores.experts_TE = at::cat(experts, 1).to(at::kInt);
}

// The state sums over all tokens, so it is f32 although activations are bf16.
at::ScalarType StateType(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

int64_t NumLinear(const model_config::ModelConfig& config) {
  return std::ranges::count(config.delta.layers, true);
}

// Changes the logits as the plan says, and draws from them.
Draws Draw(const at::Tensor& logits_RV, const CachePlan& plan) {
  if (!plan.edits.empty()) sampling::EditRows(logits_RV, plan.edits);
  return sampling::DrawRows(logits_RV, plan.draws);
}

// Returns the weights of a dense f32 model of attention layers on a CPU in the
// order in which a decode step reads them. Returns an empty vector for other
// models, which use no thread team: ATen computes a part of their layers, and
// within a team ATen has only one thread (ops/thread_team.h). Models whose
// layers are too small for a second thread use no team either.
std::vector<ops::SharedRows> WeightsInOrder(const model::Decoder& decoder) {
  if (!decoder.device().is_cpu() || decoder.dtype() != at::kFloat ||
      decoder.config().moe.shape.count > 0 || decoder.config().has_delta()) {
    return {};
  }
  std::vector<ops::SharedRows> order;
  const auto add = [&order](const at::Tensor& weight_OI) {
    order.push_back(
        ops::RowsOf(weight_OI, weight_OI.size(0), weight_OI.stride(0)));
  };
  const model::DecoderWeights& weights = decoder.weights();
  for (const model::LayerWeights& layer : weights.layers) {
    add(layer.qkv.weight_OI);
    add(layer.o.weight_OI);
    add(layer.gate_up.weight_OI);
    add(layer.down.weight_OI);
  }
  const auto is_small = [](const ops::SharedRows& rows) {
    return rows.num_groups <= rows.grain;
  };
  if (std::ranges::all_of(order, is_small)) return {};
  add(weights.head_VH);
  return order;
}

void CopyInto(const PageCopy& copy, model::KvStore* store) {
  for (const at::Tensor& part : store->pages) {
    const auto rows_of = [&](PageId page) {
      return part.select(1, page).narrow(1, 0, copy.num_rows);
    };
    rows_of(copy.to).copy_(rows_of(copy.from));
  }
}

void CopyInto(const StateCopy& copy, model::KvStore* store) {
  for (const at::Tensor& part : store->states) {
    const at::Tensor to = part.select(1, copy.to);
    if (copy.from.has_value()) {
      to.copy_(part.select(1, *copy.from));
    } else {
      to.zero_();
    }
  }
}

// Allocates a part of the cache for all layers of the decoder that have the
// gated delta rule (`delta`) or for all that do not, each of these sizes, and
// gives the layers their views. Appends the memory to `whole`, unless no layer
// has the part.
void AllocatePart(const model::Decoder& decoder, bool delta,
                  at::IntArrayRef sizes, at::ScalarType dtype,
                  std::vector<at::Tensor>& layers,
                  std::vector<at::Tensor>& whole) {
  const model_config::ModelConfig& config = decoder.local_config();
  layers.resize(config.num_layers);
  std::vector<size_t> own;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    if (config.delta.InLayer(layer) == delta) own.push_back(layer);
  }
  if (own.empty()) return;
  std::vector<int64_t> all_sizes = {static_cast<int64_t>(own.size())};
  all_sizes.insert(all_sizes.end(), sizes.begin(), sizes.end());
  const at::Tensor part = whole.emplace_back(at::empty(
      all_sizes, at::TensorOptions().dtype(dtype).device(decoder.device())));
  if (part.is_cpu()) {
    PreferHugePages(absl::MakeSpan(
        static_cast<std::byte*>(part.mutable_data_ptr()), part.nbytes()));
  }
  for (size_t i = 0; i < own.size(); ++i) {
    layers[own[i]] = part.select(0, static_cast<int64_t>(i));
  }
}

}  // namespace

ModelRunner::ModelRunner(const model::Decoder& decoder,
                         const loss::HeadOptions& head)
    : decoder_(decoder),
      head_(head),
      weights_in_order_(WeightsInOrder(decoder)) {}

at::Tensor ModelRunner::RunTeachers(DistillPlan& plan) const {
  const profile::Span span("teachers", "rows", plan.batch.tokens_T.size(0));
  MoveTo(decoder_.device(), {&plan.batch.tokens_T, &plan.batch.positions_T,
                             &plan.teacher_index_D, &plan.student_index_D});
  const at::Tensor x_TH = decoder_.ForwardLayers(
      model::Mode::kEval, plan.batch, /*tape=*/nullptr, /*num_recomputed=*/0,
      /*kv=*/nullptr);
  return decoder_.FinalNorm(x_TH.index_select(0, plan.teacher_index_D));
}

TrainScores ModelRunner::Forward(TrainPlan own) {
  Pending pending{.plan = std::move(own)};
  TrainPlan& plan = pending.plan;
  const profile::Span span("forward pass", "rows", plan.batch.tokens_T.size(0));
  MoveTo(decoder_.device(), {&plan.batch.tokens_T, &plan.batch.positions_T,
                             &plan.batch.experts_TE, &plan.score_index_R});
  if (!plan.distill.empty()) pending.teacher_DH = RunTeachers(plan.distill);
  std::vector<at::Tensor> experts;
  pending.x_TH = decoder_.ForwardLayers(
      plan.backward ? model::Mode::kTrain : model::Mode::kEval, plan.batch,
      plan.backward ? &pending.tape : nullptr, plan.num_recomputed,
      /*kv=*/nullptr, IsFirst() ? &experts : nullptr);
  const profile::Span head("head", "rows", plan.score_index_R.size(0));
  pending.normed_RH =
      decoder_.FinalNorm(pending.x_TH.index_select(0, plan.score_index_R));
  pending.scores = loss::ScoreHead(
      pending.normed_RH, decoder_.weights().head_VH, plan.rows, head_,
      /*want_gradient=*/plan.backward, plan.wants_entropy);
  TrainScores scores;
  if (!plan.distill.empty()) {
    pending.student_DH = decoder_.FinalNorm(
        pending.x_TH.index_select(0, plan.distill.student_index_D));
    pending.distilled = loss::ScoreDistillation(
        pending.student_DH, pending.teacher_DH, decoder_.weights().head_VH,
        plan.distill.rows, head_, /*want_gradient=*/plan.backward,
        plan.wants_entropy);
    scores.divergences_D = pending.distilled.divergences_R;
  }
  AddExperts(experts, decoder_.config().moe.shape.count, plan.wants_routing,
             scores);
  ops::ToHost({&pending.scores.logprobs_E, &pending.scores.entropies_R,
               &pending.scores.target_slope_E, &pending.distilled.logprobs_R,
               &pending.distilled.entropies_R, &scores.divergences_D,
               &scores.experts_TE, &scores.expert_rows_LE});
  scores.logprobs_E =
      Joined(pending.scores.logprobs_E, pending.distilled.logprobs_R);
  scores.entropies_R =
      Joined(pending.scores.entropies_R, pending.distilled.entropies_R);
  if (plan.backward) pending_ = std::move(pending);
  return scores;
}

void ModelRunner::Backward(const at::Tensor& gradients_E,
                           const lora::LoraGradients& gradients) {
  Pending pending = *std::exchange(pending_, std::nullopt);
  const TrainPlan& plan = pending.plan;
  const profile::Span span("backward pass", "rows", pending.x_TH.size(0));
  std::optional<profile::Span> head(std::in_place, "head backward", "rows",
                                    plan.score_index_R.size(0));
  const auto num_entries = static_cast<int64_t>(plan.rows.targets.size());
  const at::Tensor& head_VH = decoder_.weights().head_VH;
  at::Tensor d_TH = at::zeros_like(pending.x_TH);
  NormBackward(
      decoder_,
      loss::HeadBackward(std::move(pending.scores), pending.normed_RH, head_VH,
                         plan.rows, head_,
                         gradients_E.narrow(0, 0, num_entries), gradients),
      pending.x_TH, plan.score_index_R, d_TH);
  if (!plan.distill.empty()) {
    NormBackward(decoder_,
                 loss::DistillBackward(
                     std::move(pending.distilled), pending.student_DH,
                     pending.teacher_DH, head_VH, plan.distill.rows, head_,
                     gradients_E.narrow(0, num_entries,
                                        gradients_E.numel() - num_entries),
                     gradients),
                 pending.x_TH, plan.distill.student_index_D, d_TH);
  }
  head.reset();
  // Frees the head's rows before the layers' backward pass, which needs the
  // most memory.
  pending.normed_RH.reset();
  pending.student_DH.reset();
  pending.teacher_DH.reset();
  decoder_.BackwardLayers(plan.batch, pending.tape, std::move(d_TH), gradients);
}

CacheOutput ModelRunner::Run(CachePlan plan, model::KvStore* store,
                             DecodeGraphs* graphs) const {
  const profile::Span span("pass over pages", "rows",
                           plan.batch.tokens_T.size(0));
  CacheOutput output;
  if (graphs != nullptr) {
    if (std::optional<at::Tensor> logits_RV = graphs->Run(plan)) {
      output.drawn = Draw(*std::move(logits_RV), plan);
      output.by_graph = true;
      return output;
    }
  }
  model::KvAccess& kv = plan.kv;
  kv.store = store;
  MoveTo(decoder_.device(),
         {&plan.batch.tokens_T, &plan.batch.positions_T, &plan.batch.experts_TE,
          &kv.slots_T, &kv.key_slots_S, &kv.page_table_TL, &kv.lengths_T,
          &kv.state_slots_Q});
  const int64_t num_rows = plan.batch.tokens_T.size(0);
  const RowIndex scored(plan.score_rows, num_rows, decoder_.device());
  const RowIndex drawn(plan.logit_rows, num_rows, decoder_.device());
  const at::Tensor x_TH = RunLayers(plan);
  const at::Tensor& head_VH = decoder_.weights().head_VH;
  const profile::Span head("head and draws", "rows",
                           static_cast<int64_t>(plan.logit_rows.size()));
  at::Tensor logprobs_E, logits_RV;
  if (!plan.score_rows.empty()) {
    logprobs_E = loss::ScoreHead(decoder_.FinalNorm(scored.Of(x_TH)), head_VH,
                                 plan.scores, head_, /*want_gradient=*/false,
                                 /*want_entropy=*/false)
                     .logprobs_E;
  }
  if (!plan.logit_rows.empty()) {
    logits_RV =
        loss::HeadLogits(decoder_.FinalNorm(drawn.Of(x_TH)), head_VH,
                         plan.logit_routing, head_.softcap, head_.shard);
  }
  if (!IsFirst()) return {};
  if (!plan.draws.empty()) {
    output.drawn = Draw(std::exchange(logits_RV, {}), plan);
  }
  ops::ToHost({&logprobs_E});
  output.logprobs_E = std::move(logprobs_E);
  return output;
}

at::Tensor ModelRunner::RunLayers(CachePlan& plan) const {
  at::Tensor x_TH;
  const auto run = [&] {
    x_TH =
        decoder_.ForwardLayers(model::Mode::kEval, plan.batch, /*tape=*/nullptr,
                               /*num_recomputed=*/0, &plan.kv);
  };
  const bool takes_team = plan.kv.decode && !weights_in_order_.empty() &&
                          plan.batch.tokens_T.size(0) <= ops::kMaxTeamRows;
  if (takes_team) {
    ops::WithThreadTeam(weights_in_order_, run);
  } else {
    run();
  }
  return x_TH;
}

model::KvStore AllocateCache(const model::Decoder& decoder, int64_t num_pages,
                             int64_t page_tokens, int64_t num_states) {
  const model_config::ModelConfig& config = decoder.local_config();
  const model_config::DeltaShape& delta = config.delta;
  const at::ScalarType dtype = decoder.dtype();
  model::KvStore store{.page_tokens = page_tokens};
  for (std::vector<at::Tensor>* layers :
       {&store.k_pages_PSKC, &store.v_pages_PSKC}) {
    AllocatePart(decoder, /*delta=*/false,
                 {num_pages, page_tokens, config.num_kv_heads, config.head_dim},
                 dtype, *layers, store.pages);
  }
  AllocatePart(decoder, /*delta=*/true,
               {num_states, delta.conv_kernel - 1, delta.conv_width()}, dtype,
               store.conv_NRW, store.states);
  AllocatePart(
      decoder, /*delta=*/true,
      {num_states, delta.value_heads, delta.key_features, delta.value_features},
      StateType(dtype), store.delta_NHKV, store.states);
  if (config.moe.shape.count > 0) {
    store.experts_PSE =
        at::empty({num_pages, page_tokens, config.moe.shape.routing_width()},
                  at::TensorOptions(at::kShort).device(decoder.device()));
    store.pages.push_back(store.experts_PSE.unsqueeze(0));
  }
  return store;
}

at::Tensor ReadExperts(const model::KvStore& store,
                       const std::vector<int64_t>& slots) {
  const at::Tensor& experts_PSE = store.experts_PSE;
  at::Tensor experts_NE = experts_PSE.flatten(0, 1).index_select(
      0, ops::ToDevice(slots, experts_PSE.device()));
  ops::ToHost({&experts_NE});
  return experts_NE;
}

int64_t PageBytes(const model_config::ModelConfig& largest,
                  int64_t element_bytes, int64_t page_tokens) {
  const int64_t experts =
      largest.moe.shape.routing_width() * static_cast<int64_t>(sizeof(int16_t));
  return page_tokens *
         (2 * (largest.num_layers - NumLinear(largest)) * largest.num_kv_heads *
              largest.head_dim * element_bytes +
          experts);
}

int64_t StateBytes(const model_config::ModelConfig& largest,
                   int64_t element_bytes) {
  const model_config::DeltaShape& delta = largest.delta;
  const int64_t conv = (delta.conv_kernel - 1) * delta.conv_width();
  const int64_t heads =
      int64_t{delta.value_heads} * delta.key_features * delta.value_features;
  return NumLinear(largest) *
         (conv * element_bytes +
          heads * std::max<int64_t>(element_bytes, sizeof(float)));
}

void Copy(const CacheCopy& copy, model::KvStore* store) {
  std::visit([store](const auto& kind) { CopyInto(kind, store); }, copy);
}

}  // namespace weft::executor
