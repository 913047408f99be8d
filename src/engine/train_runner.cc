#include "src/engine/train_runner.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"
#include "src/engine/activation_budget.h"

namespace weft::engine {
namespace {

// Head outputs on the host, read in the order of the score entries and rows.
struct HostScores {
  at::Tensor logprobs_E;
  at::Tensor entropies_R;  // Undefined unless asked for.
};

// Fills the result of one datum from the flat scores and writes dLoss/dlogprob
// of its entries to `gradients_E`.
DatumResult ScatterDatum(const PackedDatum& packed, const HostScores& scores,
                         float* gradients_E, loss::MetricSums* metrics) {
  const Datum& datum = *packed.datum;
  const LossConfig& config = packed.request->loss;
  const size_t size = datum.targets.size();
  DatumResult result;
  result.logprobs.assign(size, 0.0f);
  result.losses.assign(size, 0.0f);
  if (config.return_entropy) result.entropies.assign(datum.tokens.size(), 0.0f);

  const float* logprobs = scores.logprobs_E.const_data_ptr<float>();
  std::vector<size_t> scored;  // Index into the targets of each entry.
  scored.reserve(size);
  size_t row = 0;
  for (int64_t i = 0; i < datum.num_tokens(); ++i) {
    const size_t before = scored.size();
    const TargetSpan own = datum.targets_of(i);
    for (int64_t t = own.begin; t < own.end; ++t) {
      if (!IsScored(datum, t)) continue;
      result.logprobs[t] = logprobs[packed.entries[scored.size()]];
      scored.push_back(t);
    }
    if (scored.size() == before) continue;
    if (config.return_entropy) {
      result.entropies[i] =
          scores.entropies_R.const_data_ptr<float>()[packed.rows[row]];
    }
    ++row;
  }

  std::vector<float> gradients(size, 0.0f);
  loss::ComputeTokenLosses(config, datum, result.logprobs,
                           absl::MakeSpan(result.losses),
                           absl::MakeSpan(gradients), metrics);
  for (size_t entry = 0; entry < scored.size(); ++entry) {
    gradients_E[packed.entries[entry]] = gradients[scored[entry]];
  }
  return result;
}

bool WantsEntropy(const std::vector<TrainPiece>& pieces) {
  for (const TrainPiece& piece : pieces) {
    if (piece.request->loss.return_entropy) return true;
  }
  return false;
}

// dLoss/dx of all rows, from that of the normed rows that are scored. In
// slices: they may be many, and their gathered copies would outweigh a chunk of
// logits.
at::Tensor NormBackward(const model::Decoder& decoder, const at::Tensor& dy_RH,
                        const at::Tensor& x_TH, const at::Tensor& index_R) {
  constexpr int64_t kSlice = 1024;
  at::Tensor d_TH = at::zeros_like(x_TH);
  for (int64_t begin = 0; begin < dy_RH.size(0); begin += kSlice) {
    const int64_t count = std::min(kSlice, dy_RH.size(0) - begin);
    const at::Tensor index = index_R.narrow(0, begin, count);
    d_TH.index_add_(0, index,
                    decoder.FinalNormBackward(dy_RH.narrow(0, begin, count),
                                              x_TH.index_select(0, index)));
  }
  return d_TH;
}

}  // namespace

absl::StatusOr<int> TrainRunner::NumRecomputed(
    const std::vector<TrainPiece>& pieces, const PackedTrain& packed) const {
  const model::ModelConfig& config = decoder_.config();
  int max_rank = 0;
  int64_t head_rank = 0;
  for (const TrainPiece& piece : pieces) {
    if (piece.version == nullptr) continue;
    const lora::AdapterLayout& layout = *piece.version->layout;
    max_rank = std::max(max_rank, layout.max_rank());
    head_rank = std::max<int64_t>(
        head_rank,
        layout.group(config.num_layers, lora::ProjectionGroup::kLmHead)
            .total_rank);
  }
  const auto scored = static_cast<int64_t>(packed.rows.temperatures.size());
  const ActivationBytes bytes = ActivationsOf(
      config, static_cast<int64_t>(at::elementSize(decoder_.dtype())), max_rank,
      {.rows = packed.batch.tokens_T.size(0),
       .scored = scored,
       .entries = static_cast<int64_t>(packed.rows.targets.size()),
       .chunk = loss::HeadChunkRows(options_.head, scored, config.vocab,
                                    decoder_.device().is_cpu()),
       .head_rank = head_rank});
  return ChooseRecomputed(options_.checkpointing, bytes, config.num_layers,
                          options_.memory_budget_bytes);
}

absl::StatusOr<TrainOutcome> TrainRunner::Run(
    const std::vector<TrainPiece>& pieces, bool backward,
    const std::vector<loss::MetricSums*>& metrics) {
  const at::InferenceMode no_autograd;
  const PackedTrain packed =
      PackTrain(pieces, options_.share_prompts, decoder_.device());
  const bool wants_entropy = WantsEntropy(pieces);
  int num_recomputed = 0;
  if (backward) {
    WEFT_ASSIGN_OR_RETURN(num_recomputed, NumRecomputed(pieces, packed));
  }
  model::Tape tape;
  const at::Tensor x_TH = decoder_.ForwardLayers(
      backward ? model::Mode::kTrain : model::Mode::kEval, packed.batch,
      backward ? &tape : nullptr, num_recomputed, /*kv=*/nullptr);

  at::Tensor normed_RH =
      decoder_.FinalNorm(x_TH.index_select(0, packed.score_index_R));
  const at::Tensor& head_VH = decoder_.weights().head_VH;
  loss::HeadResult scores =
      loss::ScoreHead(normed_RH, head_VH, packed.rows, options_.head,
                      /*want_gradient=*/backward, wants_entropy);

  const HostScores host{.logprobs_E = scores.logprobs_E.to(at::kCPU),
                        .entropies_R = wants_entropy
                                           ? scores.entropies_R.to(at::kCPU)
                                           : at::Tensor()};
  const at::Tensor gradients_E = at::zeros_like(host.logprobs_E);
  TrainOutcome outcome;
  size_t next = 0;
  for (size_t p = 0; p < pieces.size(); ++p) {
    for (int64_t d = 0; d < pieces[p].num_data; ++d) {
      outcome.data.push_back(ScatterDatum(packed.data[next++], host,
                                          gradients_E.mutable_data_ptr<float>(),
                                          metrics[p]));
    }
  }
  if (!backward) return outcome;

  at::Tensor d_TH = NormBackward(
      decoder_,
      loss::HeadBackward(std::move(scores), normed_RH, head_VH, packed.rows,
                         options_.head, gradients_E.to(decoder_.device())),
      x_TH, packed.score_index_R);
  // The layers' backward pass is where memory is short.
  normed_RH.reset();
  decoder_.BackwardLayers(packed.batch, tape, std::move(d_TH));
  return outcome;
}

}  // namespace weft::engine
